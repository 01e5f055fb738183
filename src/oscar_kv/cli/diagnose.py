"""``oscar-kv diagnose``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from oscar_kv.cli.shared import TextOption, errors_in_one_line, progress_bar, text_of
from oscar_kv.diagnose import Report
from oscar_kv.diagnose import diagnose as run
from oscar_kv.extras import import_extra
from oscar_kv.loading import DEMO_MODEL, DEMO_TITLE, first_tokens, load


def diagnose(
    model: Annotated[str, typer.Argument(help=f'Hub id or folder; "{DEMO_MODEL}" is {DEMO_TITLE}.')],
    text_file: TextOption = None,
    tokens: Annotated[int, typer.Option(min=256, help="Length of the text.")] = 1024,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json, report.html and the pictures (extra: plot).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON and nothing else.")] = False,
    predictions: Annotated[
        bool, typer.Option("--predictions", help="Also run the model with each step's cache: measured KL (slow).")
    ] = False,
    dtype: Annotated[str, typer.Option(help="auto (the model's own), bfloat16, float16 or float32.")] = "auto",
) -> None:
    """See, layer by layer, whether and why 2-bit quantization hurts a model, and what to do about it."""
    with errors_in_one_line():
        if out is not None:
            for module in ("matplotlib", "jinja2"):
                import_extra(module, "plot")
        console = Console(stderr=json)
        with console.status(f"loading {model}"):
            lm, tokenizer = load(model, dtype)
        text = text_of(text_file)
        ids = first_tokens(tokenizer, text, tokens)
        source = "Python's language reference" if text_file is None else text_file.name
        title = DEMO_TITLE if model == DEMO_MODEL else Path(model).name if Path(model).exists() else model
        with progress_bar(console) as progress:
            task = progress.add_task("layers" if not predictions else "layers and predictions", total=None)
            report = run(
                lm, {"input_ids": ids}, name=title, source=source, predictions=predictions,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )  # fmt: skip
        if out is not None:
            from oscar_kv.diagnose.html import write

            write(report, out)
        if json:
            typer.echo(report.to_json())
        else:
            show(report, console)
            if out is not None:
                console.print(f"Report: {out / 'report.html'}", soft_wrap=True)


def show(report: Report, console: Console) -> None:
    """Print steps, repairs, verdict and recommendation."""
    numbers = report.numbers
    console.print(_table("Errors, mean over layers", numbers["summary"]["steps"], numbers["model"]["packed_bits"]))
    console.print(_table("Repairs of plain 2-bit keys, values exact", numbers["summary"]["interventions"], {}))
    console.print(numbers["verdict"]["text"], style="bold")
    found = numbers["recommendation"]
    console.print(f"\nRecommended: {found['preset']}, num_sinks={found['config']['num_sinks']}", style="bold green")
    for reason in found["reasons"]:
        console.print(f"* {reason}", markup=False, highlight=False)
    for layer in found["layers"]:
        if layer["bits"] is not None:
            console.print(
                f"* Layer {layer['layer']} would need {layer['bits']} bits: output error {layer['output_error']}, "
                f"{'; '.join(layer['causes']) or 'no single cause'}.", markup=False, highlight=False,
            )  # fmt: skip
    for note in numbers["notes"]:
        console.print(note, style="dim")


def _table(title: str, rows: dict[str, dict[str, Any]], bits: dict[str, float]) -> Table:
    table = Table(title=title, title_justify="left")
    columns = ["output_error", "attention_kl", "key_error"]
    table.add_column("")
    for column in (["bits"] if bits else []) + columns:
        table.add_column(column.replace("_", " "), justify="right")
    for name, row in rows.items():
        table.add_row(name, *([f"{bits[name]:.2f}"] if bits else []), *[f"{row[column]:.4g}" for column in columns])
    return table
