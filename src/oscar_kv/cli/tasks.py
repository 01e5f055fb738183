"""``oscar-kv eval tasks``: benchmark tasks of lm-eval with a packed cache beside the 16-bit one."""

from __future__ import annotations

import logging
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from oscar_kv import results
from oscar_kv.cache_layer import ATTENTION_NAME
from oscar_kv.cli.shared import errors_in_one_line
from oscar_kv.evaluate import REFERENCE
from oscar_kv.extras import import_extra
from oscar_kv.loading import DEMO_MODEL, DEMO_TITLE, demo_folder, load
from oscar_kv.tasks.presets import TASK_SETS, task_set
from oscar_kv.tasks.records import Records, Setting
from oscar_kv.tasks.scores import Estimate

if TYPE_CHECKING:
    from oscar_kv.tasks.runs import Result

_ITEMS = ".items.jsonl"


def tasks(
    model: Annotated[str, typer.Argument(help=f'Hub id or folder; "{DEMO_MODEL}" is {DEMO_TITLE}.')],
    task: Annotated[
        list[str], typer.Option(help=f"{', '.join(TASK_SETS)}, or a task or group of lm-eval; may be repeated.")
    ],
    cache: Annotated[
        list[str] | None,
        typer.Option(help="16-bit, default, quality, four-bit, paper or unquantized; may be repeated."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first items of each task.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help=f"Append the rows to this file, and the items to one beside it ({_ITEMS}).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Run again what that file has.")] = False,
    include_path: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A folder with task files of your own.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer together (default: the model's limit).")
    ] = None,
    seq_length: Annotated[
        list[int] | None, typer.Option(help="Length of RULER's prompts in tokens; may be repeated (default: 4096).")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")] = False,
    dtype: Annotated[
        str, typer.Option(help="The model's dtype: auto (its own), bfloat16, float16 or float32.")
    ] = "auto",
    attention: Annotated[
        str, typer.Option(help="oscar reads the packed bytes; sdpa, eager, ... a dequantized copy.")
    ] = ATTENTION_NAME,
) -> None:
    """Score benchmark tasks with each cache, and the difference from the 16-bit cache on the same items.

    What the file of --csv has already is not run again.
    """
    with errors_in_one_line():
        import_extra("lm_eval.models.huggingface", "eval")
        from lm_eval.tasks import TaskManager

        from oscar_kv.tasks.model import CACHES, OscarLM
        from oscar_kv.tasks.runs import compare, load_tasks

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        chosen = sorted(dict.fromkeys(cache or (REFERENCE, "default")), key=lambda name: name != REFERENCE)
        if unknown := [name for name in chosen if name not in CACHES]:
            raise ValueError(f"no cache {', '.join(unknown)}: choose from {', '.join(CACHES)}")
        records = Records(None if csv is None else csv.with_name(csv.name + _ITEMS))
        lengths = {"max_seq_lengths": seq_length} if seq_length else {}
        path = str(demo_folder()) if model == DEMO_MODEL else model
        manager = TaskManager(include_path=include_path, metadata={"tokenizer": path, **lengths})
        sets = [task_set(name, manager.all_tasks) for name in task]
        lm, tokenizer = load(model, dtype)
        joined = ",".join(map(str, seq_length or ()))
        base = Setting(model, str(lm.dtype).removeprefix("torch."), limit, max_length, joined, "left", chat, attention)
        if csv is not None:  # before hours are spent
            results.check_columns(csv, list(_row(base, "", "", "", Estimate(0.0, 0.0, 0))))
        console = Console()

        def announce(task: str, cache: str) -> None:
            console.print(f"{task}, {cache}")

        for wanted in sets:
            setting = replace(base, truncate=wanted.truncate)
            make = partial(
                OscarLM, lm, attention=attention, truncate=wanted.truncate,
                tokenizer=tokenizer, batch_size=batch_size, max_length=max_length,
            )  # fmt: skip
            found = []
            loaded = load_tasks(manager, wanted)
            for result in compare(wanted.name, loaded, chosen, make, setting, records, force, announce):
                found.append(result)
                if csv is not None and result.new and result.estimates:
                    pairs = result.estimates.items()
                    rows = [_row(setting, result.task, result.cache, metric, x) for metric, x in pairs]
                    results.append_rows(csv, rows)
            console.print(_table(found, wanted.name, model))


def _row(setting: Setting, task: str, cache: str, metric: str, x: Estimate) -> dict[str, object]:
    conditions = {name: value for name, value in asdict(setting).items() if name != "model"}
    made = {"lm_eval": version("lm_eval"), **results.provenance()}
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
