"""What ``oscar-kv eval tasks`` and ``eval media`` write and print."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from oscar_kv import results
from oscar_kv.evaluate import REFERENCE
from oscar_kv.tasks.compare import Result
from oscar_kv.tasks.records import Setting
from oscar_kv.tasks.scores import Estimate

ITEMS = ".items.jsonl"


def check_file(csv: Path | None, setting: Setting, library: str) -> None:
    """Refuse a file that has other columns, before hours are spent."""
    if csv is not None:
        results.check_columns(csv, list(_row(setting, library, "", "", "", Estimate(0.0, 0.0, 0))))


def report(
    found: Iterable[Result], name: str, setting: Setting, library: str, csv: Path | None, console: Console
) -> None:
    """Append each result to the file when it is there, and print all of them as a table.

    Args:
        found: The results.
        name: Of the tasks.
        setting: What they depend on.
        library: Whose tasks they are, "lm_eval" or "lmms_eval".
        csv: The file, if any.
        console: Where to print.
    """
    kept = []
    for result in found:
        kept.append(result)
        if csv is not None and result.new and result.estimates:
            pairs = result.estimates.items()
            rows = [_row(setting, library, result.task, result.cache, metric, x) for metric, x in pairs]
            results.append_rows(csv, rows)
    console.print(_table(kept, name, setting.model))


def _row(setting: Setting, library: str, task: str, cache: str, metric: str, x: Estimate) -> dict[str, object]:
    conditions = {name: value for name, value in asdict(setting).items() if name != "model"}
    made = {library: version(library), **results.provenance()}
    return {
        "model": setting.model, "task": task, "metric": metric, "cache": cache,
        "value": f"{x.value:.6g}", "stderr": f"{x.stderr:.4g}", "diff": _number(x.diff),
        "diff_low": _number(x.low), "diff_high": _number(x.high), "n": x.n, **conditions, **made,
    }  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(found: list[Result], name: str, model: str) -> Table:
    table = Table(title=f"{name}, {model}", title_justify="left")
    for column in ("task", "metric", "cache"):
        table.add_column(column, overflow="fold")
    for column in ("value", f"minus {REFERENCE}", "95 % interval", "items"):
        table.add_column(column, justify="right")
    for task in dict.fromkeys(result.task for result in found):
        own = [result for result in found if result.task == task]
        for metric in own[0].estimates:
            for result in own:
                x = result.estimates[metric]
                differs = ("", "") if x.diff is None else (f"{x.diff:+.4f}", f"{x.low:+.4f} to {x.high:+.4f}")
                table.add_row(task, metric, result.cache, f"{x.value:.4f} ± {x.stderr:.4f}", *differs, str(x.n))
        table.add_section()
    return table
