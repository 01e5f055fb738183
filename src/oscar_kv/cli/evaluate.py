"""``oscar-kv eval``: what a packed cache costs in accuracy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import oscar_kv
from oscar_kv import results
from oscar_kv.cache import OscarCache
from oscar_kv.cli.shared import TextOption, errors_in_one_line, progress_bar, text_of
from oscar_kv.evaluate import METHODS, Fidelity, compare
from oscar_kv.loading import DEMO_MODEL, DEMO_TITLE, first_tokens, load

app = typer.Typer(help="Measure what a packed cache costs in accuracy.", no_args_is_help=True)


@app.command()
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
    with errors_in_one_line():
        console = Console()
        lm, tokenizer = load(model, dtype)
        ids = first_tokens(tokenizer, text_of(text_file), tokens).to(lm.device)
        with oscar_kv.enable(lm), progress_bar(console) as progress:
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
