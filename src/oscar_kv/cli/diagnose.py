"""``oscar-kv diagnose``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from oscar_kv.cache import packed_layers
from oscar_kv.cli.shared import ModelArgument, TextOption, errors_in_one_line, progress_bar, text_of
from oscar_kv.diagnose import Report
from oscar_kv.diagnose import diagnose as run
from oscar_kv.extras import import_extra
from oscar_kv.loading import DEMO_MODEL, DEMO_TITLE, first_tokens, load
from oscar_kv.multimodal import is_text_model, load_multimodal, message

_FILE = {"exists": True, "dir_okay": False}


def diagnose(
    model: ModelArgument,
    text_file: TextOption = None,
    image: Annotated[list[Path] | None, typer.Option(**_FILE, help="Image before the text; may be repeated.")] = None,
    audio: Annotated[list[Path] | None, typer.Option(**_FILE, help="Sound before the text; may be repeated.")] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Length of the text.")] = 1024,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.json, report.html and the pictures (extra: plot).")
    ] = None,
    layer: Annotated[
        int | None,
        typer.Option(help="Layer whose norms and keys are drawn; default: the one that suffers most."),
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
        console, media = Console(stderr=json), [*(image or []), *(audio or [])]
        if predictions and media:
            raise ValueError("--predictions can be measured on text alone, without --image and --audio")
        with console.status(f"loading {model}"):
            lm, inputs = _load(model, dtype, text_of(text_file), tokens, image or [], audio or [])
        if layer is not None and layer not in (packed := packed_layers(lm.config)):
            raise ValueError(f"--layer {layer}: the layers that are packed are {', '.join(map(str, packed))}")
        text = "Python's language reference" if text_file is None else text_file.name
        title = DEMO_TITLE if model == DEMO_MODEL else Path(model).name if Path(model).exists() else model
        with progress_bar(console) as progress:
            task = progress.add_task("layers" if not predictions else "layers and predictions", total=None)
            report = run(
                lm, inputs, name=title, source=", ".join([*(path.name for path in media), text]),
                predictions=predictions,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
            )  # fmt: skip
        if out is not None:
            from oscar_kv.diagnose.html import write

            write(report, out, layer)
        if json:
            typer.echo(report.to_json())
        else:
            show(report, console)
            if out is not None:
                console.print(f"Report: {out / 'report.html'}", soft_wrap=True)


def _load(
    name: str, dtype: str, text: str, tokens: int, images: list[Path], sounds: list[Path]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model and its input: a text, or a message with images and sounds before it."""
    if not images and not sounds and is_text_model(name):
        lm, tokenizer = load(name, dtype)
        return lm, {"input_ids": first_tokens(tokenizer, text, tokens)}
    lm, processor = load_multimodal(name, dtype)
    return lm, message(processor, lm.dtype, text, tokens, images, sounds)


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
                f"* {layer['bits']} bits for layer {layer['layer']}: output error {layer['output_error']}, "
                f"{'; '.join(layer['causes']) or 'no single cause'}.", markup=False, highlight=False,
            )  # fmt: skip
    for note in numbers["notes"]:
        console.print(note, style="dim")


def _table(title: str, rows: dict[str, dict[str, Any]], bits: dict[str, float]) -> Table:
    """Bits of each row, or what it keeps beside the codes."""
    table = Table(title=title, title_justify="left")
    columns = ["output_error", "attention_kl", "key_error"]
    table.add_column("")
    for column in ["bits" if bits else "extra_bits", *columns]:
        table.add_column(column.replace("_", " "), justify="right")
    for name, row in rows.items():
        size = bits[name] if bits else row["extra_bits"]
        table.add_row(name, f"{size:.2f}", *[f"{row[column]:.4g}" for column in columns])
    return table
