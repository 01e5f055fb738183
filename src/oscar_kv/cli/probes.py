"""``oscar-kv eval generation`` and ``oscar-kv eval recall``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

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
from oscar_kv.evaluate import METHODS, REFERENCE, GenerationStudy, RecallStudy
from oscar_kv.evaluate.paired import PairedStudy
from oscar_kv.evaluate.recall import ALL_DEPTHS
from oscar_kv.evaluate.windows import windows
from oscar_kv.loading import CALIBRATION_TOKENS, calibration_text, first_tokens, load

_DEFAULT = ("default", "quality")

MethodsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--preset", "--method", help=f"{', '.join(METHODS)}; may be repeated (default: {', '.join(_DEFAULT)})."
    ),
]
BatchOption = Annotated[int, typer.Option(min=1, help="Texts that are run together.")]
CsvOption = Annotated[Path | None, typer.Option(help="Append the rows to this file; those it has are not done again.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Do again what the file has.")]


def generation(
    model: ModelArgument,
    preset: MethodsOption = None,
    text_file: TextOption = None,
    prompts: Annotated[int, typer.Option(min=2, help="Windows of the text that are prompts.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=256, help="Length of each prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Where a generation is cut off.")] = 1024,
    request: Annotated[
        str | None,
        typer.Option(help="Make each window a user's turn in the model's chat template, after this request."),
    ] = None,
    batch_size: BatchOption = 8,
    dtype: DtypeOption = "auto",
    csv: CsvOption = None,
    force: ForceOption = False,
) -> None:
    """Generate greedily from windows of a text: length, repetition, agreement with the 16-bit cache's tokens."""
    chosen = known_methods(preset or _DEFAULT)
    with errors_in_one_line():
        lm, tokenizer = load(model, dtype)
        study = GenerationStudy(
            **_common(lm, tokenizer, model, text_file, batch_size),
            prompts=windows(tokenizer, text_of(text_file), prompts, prompt_tokens, request).to(lm.device),
            new_tokens=new_tokens,
            request=request or "",
        )
        rows = _run(study, chosen, prompts * new_tokens, csv, force)
        title = f"{model}, {lm.dtype}, {prompts} prompts of {prompt_tokens} tokens, at most {new_tokens} new ones"
        if rows:
            Console().print(_table(rows, study.labels, title))


def recall(
    model: ModelArgument,
    preset: MethodsOption = None,
    text_file: TextOption = None,
    probes: Annotated[int, typer.Option(min=2, help="Texts with facts, for each context and depth.")] = 16,
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens before the questions, whole chunks of 128; may be repeated (default: 2048)."),
    ] = None,
    depth: Annotated[
        list[float] | None,
        typer.Option(min=0, max=1, help="Where the facts are, 0 early, 1 late; may be repeated (default: 0, 0.5, 1)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the facts.")] = 0,
    batch_size: BatchOption = 8,
    dtype: DtypeOption = "auto",
    csv: CsvOption = None,
    force: ForceOption = False,
) -> None:
    """Ask for codes and a sentence that a text has, when they are packed: exact matches and log-likelihoods.

    The table has the mean over the depths, the file of --csv each of them as well.
    """
    chosen = known_methods(preset or _DEFAULT)
    with errors_in_one_line():
        lm, tokenizer = load(model, dtype)
        text, lengths, depths = text_of(text_file), sorted({*(context or (2048,))}), sorted({*(depth or (0, 0.5, 1))})
        study = RecallStudy(
            **_common(lm, tokenizer, model, text_file, batch_size),
            tokenizer=tokenizer,
            fillers=[windows(tokenizer, text, probes, length) for length in lengths],
            depths=depths,
            seed=seed,
        )
        rows = _run(study, chosen, probes * len(depths) * sum(lengths), csv, force)
        title = f"{model}, {lm.dtype}, {probes} texts at {len(depths)} depths"
        shown = [row for row in rows if row["depth"] == ALL_DEPTHS]
        if rows:
            Console().print(_table(shown, ("context", "kind", "metric"), title))


def _common(lm: Any, tokenizer: Any, model: str, text_file: Path | None, batch_size: int) -> dict[str, Any]:
    """Arguments of any study."""
    return {
        "model": lm,
        "name": model,
        "text": "Python's language reference" if text_file is None else text_file.name,
        "calibration": first_tokens(tokenizer, calibration_text(), CALIBRATION_TOKENS).to(lm.device),
        "batch_size": batch_size,
    }


def _run(
    study: PairedStudy[Any], presets: Sequence[str], tokens: int, csv: Path | None, force: bool
) -> list[dict[str, str]]:
    """The rows of a study, in which each cache takes so many tokens; they are in the file as soon as they are there."""
    made, rows, console = results.provenance(), [], Console()
    if csv is not None:  # before hours are spent
        results.check_columns(csv, [*study.columns, *made])
    done = set() if force else study.done(csv)
    todo = remaining(presets, done, csv, console)
    if not todo:
        return []
    with oscar_kv.enable(study.model), progress_bar(console) as progress:
        task = progress.add_task("tokens", total=tokens * (1 + len(todo)))
        for found in study.run(todo, lambda count: progress.advance(task, count)):
            found = [row for row in found if row["preset"] not in done]
            rows += found
            if csv is not None and found:
                results.append_rows(csv, [{**row, **made} for row in found])
    return rows


def _table(rows: list[dict[str, str]], labels: Sequence[str], title: str) -> Table:
    """The methods one below the other, for each combination of labels."""
    table = Table(title=title, title_justify="left")
    table.add_column(", ".join(labels), overflow="fold")
    table.add_column("method", no_wrap=True)
    for column in ("mean", "95 %", f"minus {REFERENCE}", "95 %"):
        table.add_column(column, justify="right", overflow="fold")
    groups: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(" ".join(row[label] for label in labels), []).append(row)
    for name, group in groups.items():
        for row in group:
            value, low, high = (f"{float(row[column]):.3g}" for column in ("value", "low", "high"))
            differs = [f"{float(row[column]):+.3g}" for column in ("diff", "diff_low", "diff_high")]
            cells = ["", ""] if row["preset"] == REFERENCE else [differs[0], f"{differs[1]} to {differs[2]}"]
            table.add_row(name if row is group[0] else "", row["preset"], value, f"{low} to {high}", *cells)
        table.add_section()
    return table
