"""``oscar-kv demo``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import oscar_kv
from oscar_kv import demo as demonstration
from oscar_kv import results
from oscar_kv.cli.shared import ModelOption, Preset, PresetOption, TextOption, errors_in_one_line, progress_bar, text_of
from oscar_kv.evaluate import PRESETS
from oscar_kv.extras import import_extra
from oscar_kv.loading import DEMO_MODEL, first_tokens, load
from oscar_kv.plots import demo_picture


def demo(
    model: ModelOption = DEMO_MODEL,
    preset: PresetOption = Preset.DEFAULT,
    tokens: Annotated[int, typer.Option(min=300, help="Length of the prompt.")] = 2000,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 48,
    text_file: TextOption = None,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo-output/demo.png"),
) -> None:
    """Run one prompt with the 16-bit and the packed cache side by side: text, KL divergence, bytes, a picture."""
    with errors_in_one_line():
        import_extra("matplotlib", "demo")
        console, begin = Console(), time.perf_counter()
        with console.status(f"loading {model} (the demo model is downloaded once: about 90 MB)"):
            lm, tokenizer = load(model)
        ids = first_tokens(tokenizer, text_of(text_file), tokens).to(lm.device)
        config = PRESETS[preset]
        with oscar_kv.enable(lm, config) as enabled, progress_bar(console) as progress:
            found = demonstration.run(enabled, ids, new_tokens, progress)
        demonstration.show(found, tokenizer, console)
        name, result = list(found.text.items())[-1]
        title = f"{name} ({preset}): KL along the prompt, mean {result.kl:.3f} nats"
        demo_picture(out, result.kl_per_token, tokens - len(result.kl_per_token) - 1, found.footprints, title)
        console.print(
            f"Picture: {out}. Took {time.perf_counter() - begin:.0f} s on {results.hardware()}.", soft_wrap=True
        )
