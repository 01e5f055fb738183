"""The command line: ``oscar-kv demo``, ``generate``, ``eval fidelity`` and ``env``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub.utils import logging as hub_logging
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table
from transformers import BatchEncoding, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging

import oscar_kv
from oscar_kv import demo as demonstration
from oscar_kv import kernels, results
from oscar_kv.cache import ATTENTION_NAME, OscarCache
from oscar_kv.evaluate import METHODS, PRESETS, Fidelity, compare
from oscar_kv.integrations.transformers import CACHE_ARGUMENT
from oscar_kv.loading import DEMO_MODEL, DEMO_TITLE, first_tokens, import_extra, load, prose
from oscar_kv.plots import demo_picture

app = typer.Typer(
    help="INT2 KV caches for transformers (OScaR, arXiv 2605.19660).", no_args_is_help=True, add_completion=False
)
evaluations = typer.Typer(help="Measure what a packed cache costs in accuracy.", no_args_is_help=True)
app.add_typer(evaluations, name="eval")


class Preset(StrEnum):
    """The names in PRESETS."""

    DEFAULT = "default"
    QUALITY = "quality"
    FOUR_BIT = "four-bit"
    PAPER = "paper"


ModelOption = Annotated[str, typer.Option(help=f'Hub id or folder; "{DEMO_MODEL}" is {DEMO_TITLE}.')]
PresetOption = Annotated[Preset, typer.Option(help="What to quantize and how.")]
TextOption = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="UTF-8 text instead of Python's language reference."),
]


@app.callback()
def _quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """What the user can mend is said in one line, without a traceback; exit code 1."""
    try:
        yield
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        typer.echo(f"oscar-kv: {message}", err=True)
        raise typer.Exit(1) from None


def _progress(console: Console) -> Progress:
    return Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console)


def _text(path: Path | None) -> str:
    return prose() if path is None else path.read_text(encoding="utf-8")


@app.command()
def demo(
    model: ModelOption = DEMO_MODEL,
    preset: PresetOption = Preset.DEFAULT,
    tokens: Annotated[int, typer.Option(min=300, help="Length of the prompt.")] = 2000,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 48,
    text_file: TextOption = None,
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo-output/demo.png"),
) -> None:
    """Run one prompt with the 16-bit and the packed cache side by side: text, KL divergence, bytes, a picture."""
    with _errors_in_one_line():
        import_extra("matplotlib", "demo")
        console, begin = Console(), time.perf_counter()
        with console.status(f"loading {model} (the demo model is downloaded once: about 90 MB)"):
            lm, tokenizer = load(model)
        ids = first_tokens(tokenizer, _text(text_file), tokens).to(lm.device)
        config = PRESETS[preset]
        with oscar_kv.enable(lm, config) as enabled, _progress(console) as progress:
            found = demonstration.run(enabled, ids, new_tokens, progress)
        demonstration.show(found, tokenizer, console)
        name, result = list(found.text.items())[-1]
        title = f"{name} ({preset}): KL along the prompt, mean {result.kl:.3f} nats"
        demo_picture(out, result.kl_per_token, tokens - len(result.kl_per_token) - 1, found.footprints, title)
        console.print(
            f"Picture: {out}. Took {time.perf_counter() - begin:.0f} s on {results.hardware()}.", soft_wrap=True
        )


@app.command()
def generate(
    model: ModelOption,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A UTF-8 file with it.")] = None,
    preset: PresetOption = Preset.DEFAULT,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the model's chat template (default: if it has one).")
    ] = None,
    attention: Annotated[
        str, typer.Option(help="oscar reads the packed bytes; sdpa, eager, ... a dequantized copy.")
    ] = ATTENTION_NAME,
) -> None:
    """Generate greedily from a prompt with a packed cache, and say how much memory the cache takes."""
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give either --prompt or --prompt-file")
    with _errors_in_one_line():
        text = prompt if prompt_file is None else prompt_file.read_text(encoding="utf-8")
        console = Console()
        with console.status(f"loading {model}"):
            lm, tokenizer = load(model)
        inputs = _encode(tokenizer, text or "", chat).to(lm.device)
        with oscar_kv.enable(lm, PRESETS[preset], attention=attention) as enabled:
            cache = OscarCache(lm.config, PRESETS[preset])
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            options = {CACHE_ARGUMENT: cache, "max_new_tokens": max_new_tokens, "streamer": streamer}
            enabled.generate(**inputs, do_sample=False, **options)
        bits, total = cache.bits_per_element(), cache.memory_bytes()["total"]
        console.print(
            f"[KV cache: {cache.get_seq_length():,} tokens in {total:,} bytes, {bits:.2f} bits per element, "
            f"compression {16 / bits:.2f} x{'' if bits < 16 else ': so short a text stays in the 16-bit tail'}]",
            style="dim", markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str, chat: bool | None) -> BatchEncoding:
    """Token ids and mask (1, n) of a prompt, in the chat template if asked for or if there is one."""
    template = getattr(tokenizer, "chat_template", None) is not None
    if chat and not template:
        raise ValueError("--chat: this model has no chat template")
    if not (template if chat is None else chat):
        return tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    turns = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert isinstance(encoded, BatchEncoding)  # return_dict
    return encoded


@evaluations.command()
def fidelity(
    model: Annotated[str, typer.Argument(help=f'Hub id or folder; "{DEMO_MODEL}" is {DEMO_TITLE}.')],
    text_file: TextOption = None,
    preset: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(METHODS)}; may be repeated (default: all).")
    ] = None,
    tokens: Annotated[int, typer.Option(min=300, help="Length of the text.")] = 2048,
    dtype: Annotated[
        str, typer.Option(help="The model's dtype: auto (its own), bfloat16, float16 or float32.")
    ] = "auto",
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
) -> None:
    """KL divergence, perplexity and top-1 agreement against the 16-bit cache, by teacher forcing along a text."""
    chosen = list(METHODS) if preset is None else preset
    if unknown := [name for name in chosen if name not in METHODS]:
        raise typer.BadParameter(f"no preset {', '.join(unknown)}: choose from {', '.join(METHODS)}")
    with _errors_in_one_line():
        console = Console()
        lm, tokenizer = load(model, dtype)
        ids = first_tokens(tokenizer, _text(text_file), tokens).to(lm.device)
        with oscar_kv.enable(lm), _progress(console) as progress:
            caches = {name: partial(OscarCache, lm.config, METHODS[name], max_length=tokens) for name in chosen}
            task = progress.add_task(f"{len(caches)} methods, tokens", total=tokens)
            found = compare(lm, ids, caches, progress=lambda count: progress.advance(task, count))
        source = "Python's language reference" if text_file is None else text_file.name
        console.print(_fidelity_table(found, f"{model}, {lm.dtype}, {tokens} tokens of {source}"))
        if csv is not None:
            setting = {"model": model, "dtype": str(lm.dtype).removeprefix("torch."), "context": tokens, "text": source}
            made = results.provenance()
            results.append_rows(csv, [{"method": name, **setting, **_numbers(f), **made} for name, f in found.items()])


def _numbers(found: Fidelity) -> dict[str, str]:
    return {
        "packed_bits": f"{found.packed_bits:.3f}",
        "bits": f"{found.bits_per_element:.3f}",
        "kl": f"{found.kl:.5f}",
        "kl_p99": f"{found.kl_p99:.4f}",
        "ppl": f"{found.perplexity:.4f}",
        "ppl_change": f"{found.perplexity_change:.2f}",
        "top1": f"{found.top1:.4f}",
    }


def _fidelity_table(found: dict[str, Fidelity], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for column in ("packed bits", "bits in all", "mean KL", "p99 KL", "perplexity", "change %", "top-1"):
        table.add_column(column, justify="right")
    for name, result in found.items():
        table.add_row(name, *_numbers(result).values())
    return table


@app.command()
def env() -> None:
    """Versions, GPUs, and which attention over packed keys runs here."""
    table = Table(show_header=False)
    for name, found in results.versions().items():
        table.add_row(name, found)
    table.add_row("GPUs", ", ".join(results.gpus()) or "none")
    reason = kernels.missing(torch.device("cuda", 0) if results.gpus() else torch.device("cpu"))
    table.add_row("attention", "CUDA kernels" if reason is None else f"PyTorch reference ({reason})")
    Console().print(table)
