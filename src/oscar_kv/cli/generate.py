"""``oscar-kv generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from transformers import BatchEncoding, PreTrainedTokenizerBase, TextStreamer

import oscar_kv
from oscar_kv.cache import OscarCache
from oscar_kv.cache_layer import ATTENTION_NAME
from oscar_kv.cli.shared import AttentionOption, ModelOption, Preset, PresetOption, errors_in_one_line
from oscar_kv.config import OscarConfig
from oscar_kv.evaluate import PRESETS
from oscar_kv.integrations.transformers import CACHE_ARGUMENT
from oscar_kv.loading import load


def generate(
    model: ModelOption,
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="A UTF-8 file with it.")] = None,
    preset: PresetOption = Preset.DEFAULT,
    report: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="What diagnose or allocate wrote, not a preset.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the model's chat template (default: if it has one).")
    ] = None,
    attention: AttentionOption = ATTENTION_NAME,
) -> None:
    """Generate greedily from a prompt with a packed cache, and say how much memory the cache takes."""
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give either --prompt or --prompt-file")
    with errors_in_one_line():
        text = prompt if prompt_file is None else prompt_file.read_text(encoding="utf-8")
        config = PRESETS[preset] if report is None else OscarConfig.from_report(report)
        console = Console()
        with console.status(f"loading {model}"):
            lm, tokenizer = load(model)
        inputs = _encode(tokenizer, text or "", chat).to(lm.device)
        with oscar_kv.enable(lm, config, attention=attention) as enabled:
            cache = OscarCache(lm.config, config)
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
