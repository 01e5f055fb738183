"""``oscar-kv eval``: what a packed cache costs in accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import oscar_kv
from oscar_kv import results
from oscar_kv.cli.shared import (
    DtypeOption,
    ModelArgument,
    TextOption,
    errors_in_one_line,
    known_methods,
    progress_bar,
    remaining,
    text_of,
)
from oscar_kv.evaluate import DEFAULT_METHODS, METHODS, Study
from oscar_kv.evaluate.report import write_report
from oscar_kv.loading import CALIBRATION_TOKENS, calibration_text, first_tokens, load, prose

app = typer.Typer(help="Measure what a packed cache costs in accuracy.", no_args_is_help=True)


@app.command()
def fidelity(
    model: ModelArgument,
    text_file: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="UTF-8 text; may be repeated (default: Python's reference)."),
    ] = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            "--method",
            help=f"{', '.join(METHODS)}; may be repeated (default: {', '.join(DEFAULT_METHODS)}).",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=300, help="Length of each text.")] = 2048,
    dtype: DtypeOption = "auto",
    against: Annotated[str | None, typer.Option(help="Also give each KL as a ratio to this method's.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Append the rows to this file; those it has are not done again.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Do again what the file has.")] = False,
) -> None:
    """KL divergence, perplexity and top-1 agreement against the 16-bit cache, by teacher forcing along texts."""
    chosen = known_methods(preset or DEFAULT_METHODS)
    known_methods([against] if against else [])
    with errors_in_one_line():
        console = Console()
        sources = {path.name: text_of(path) for path in text_file or ()} or {"Python's language reference": prose()}
        if len(sources) < len(text_file or ()):
            raise ValueError("two texts have the same file name")
        lm, tokenizer = load(model, dtype)
        texts = {name: first_tokens(tokenizer, text, tokens).to(lm.device) for name, text in sources.items()}
        calibration = first_tokens(tokenizer, calibration_text(), CALIBRATION_TOKENS).to(lm.device)
        study = Study(lm, model, texts, calibration, against)
        done = set() if force else study.done(csv)
        todo = remaining(chosen, done, csv, console)
        if not todo:
            return
        rows: list[dict[str, str]] = []
        made = results.provenance()
        with oscar_kv.enable(lm), progress_bar(console) as progress:
            task = progress.add_task(f"{len(todo)} methods, tokens", total=tokens * len(texts) * study.rounds(todo))
            for found in study.run(todo, lambda count: progress.advance(task, count)):
                found = [row for row in found if row["preset"] not in done]
                rows += found
                if csv is not None and found:
                    results.append_rows(csv, [{**row, **made} for row in found])
        console.print(_fidelity_table(rows, f"{model}, {lm.dtype}, {tokens} tokens of {', '.join(texts)}"))


def _fidelity_table(rows: list[dict[str, str]], title: str) -> Table:
    against = rows[0]["against"]
    columns = ("bits packed", "in all", "KL", "95 %", *([f"KL / {against}"] if against else []), "ppl %", "top-1")
    table = Table(title=title, title_justify="left")
    table.add_column("method", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        interval = f"{float(row['kl_low']):.4f} to {float(row['kl_high']):.4f}"
        ratio = [f"{row['kl_ratio']} ({row['kl_ratio_low']} to {row['kl_ratio_high']})"] if against else []
        numbers = (row["packed_bits"], row["bits"], row["kl"], interval, *ratio, row["ppl_change"], row["top1"])
        table.add_row(row["preset"], *numbers)
    return table


@app.command()
def attention(
    model: ModelArgument,
    preset: Annotated[list[str], typer.Option("--preset", "--method", help="As in eval fidelity; may be repeated.")],
    text_file: TextOption = None,
    tokens: Annotated[int, typer.Option(min=300, help="Length of the text.")] = 1024,
    dtype: Annotated[str, typer.Option(help="The model's dtype.")] = "auto",
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
) -> None:
    """Relative error of each layer's attention output, for the queries, keys and values of the 16-bit run."""
    chosen = known_methods(preset)
    with errors_in_one_line():
        lm, tokenizer = load(model, dtype)
        name = "Python's language reference" if text_file is None else text_file.name
        texts = {name: first_tokens(tokenizer, text_of(text_file), tokens).to(lm.device)}
        calibration = first_tokens(tokenizer, calibration_text(), CALIBRATION_TOKENS).to(lm.device)
        study = Study(lm, model, texts, calibration)
        errors = {name: study.attention_errors(name) for name in chosen}
        table = Table(title=f"{model}, {lm.dtype}, {tokens} tokens of {name}", title_justify="left")
        for column in ("layer", *errors):
            table.add_column(column, justify="right")
        for layer in next(iter(errors.values())):
            table.add_row(str(layer), *(f"{found[layer]:.5f}" for found in errors.values()))
        Console().print(table)
        if csv is not None:
            rows = [
                {"preset": name, **study.setting, "layer": layer, "error": f"{error:.6f}", **results.provenance()}
                for name, found in errors.items()
                for layer, error in found.items()
            ]
            results.append_rows(csv, rows)


@app.command()
def report(
    csv: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Rows of eval fidelity, generation or recall.")
    ],
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("fidelity.html"),
    pictures: Annotated[bool, typer.Option("--pictures", help="Also save each picture beside the page.")] = False,
) -> None:
    """A page with pictures (of fidelity, KL against bytes) and the table, from a CSV file."""
    with errors_in_one_line():
        write_report(csv, out, pictures=pictures)
        Console().print(f"Report: {out}", soft_wrap=True)
