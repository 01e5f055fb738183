"""``oscar-kv eval tasks``: benchmark tasks of lm-eval with a packed cache beside the 16-bit one."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from oscar_kv.cache_layer import ATTENTION_NAME
from oscar_kv.cli.shared import AttentionOption, DtypeOption, ModelArgument, errors_in_one_line
from oscar_kv.cli.task_options import CacheOption, CsvOption, FolderOption, ForceOption, LimitOption
from oscar_kv.cli.task_rows import ITEMS, check_file, report
from oscar_kv.extras import import_extra
from oscar_kv.loading import DEMO_MODEL, demo_folder, load
from oscar_kv.tasks.caches import chosen
from oscar_kv.tasks.compare import compare
from oscar_kv.tasks.presets import TASK_SETS, task_set
from oscar_kv.tasks.records import Records, Setting


def tasks(
    model: ModelArgument,
    task: Annotated[
        list[str], typer.Option(help=f"{', '.join(TASK_SETS)}, or a task or group of lm-eval; may be repeated.")
    ],
    cache: CacheOption = None,
    limit: LimitOption = None,
    csv: CsvOption = None,
    force: ForceOption = False,
    include_path: FolderOption = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 1,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer together (default: the model's limit).")
    ] = None,
    seq_length: Annotated[
        list[int] | None, typer.Option(help="Length of RULER's prompts in tokens; may be repeated (default: 4096).")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put prompts into the model's chat template.")] = False,
    dtype: DtypeOption = "auto",
    attention: AttentionOption = ATTENTION_NAME,
) -> None:
    """Score benchmark tasks with each cache, and the difference from the 16-bit cache on the same items.

    What the file of --csv has already is not run again.
    """
    with errors_in_one_line():
        import_extra("lm_eval.models.huggingface", "eval")
        from lm_eval.tasks import TaskManager

        from oscar_kv.tasks.model import OscarLM
        from oscar_kv.tasks.runs import load_tasks, runner

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        caches = chosen(cache)
        records = Records(None if csv is None else csv.with_name(csv.name + ITEMS))
        lengths = {"max_seq_lengths": seq_length} if seq_length else {}
        path = str(demo_folder()) if model == DEMO_MODEL else model
        manager = TaskManager(include_path=include_path, metadata={"tokenizer": path, **lengths})
        sets = [task_set(name, manager.all_tasks) for name in task]
        lm, tokenizer = load(model, dtype)
        joined = ",".join(map(str, seq_length or ()))
        base = Setting(model, str(lm.dtype).removeprefix("torch."), limit, max_length, joined, "left", chat, attention)
        check_file(csv, base, "lm_eval")
        console = Console()
        for wanted in sets:
            setting = replace(base, truncate=wanted.truncate)
            make = partial(
                OscarLM, lm, attention=attention, truncate=wanted.truncate,
                tokenizer=tokenizer, batch_size=batch_size, max_length=max_length,
            )  # fmt: skip
            loaded = load_tasks(manager, wanted)
            ran = compare(
                wanted.name, list(loaded), caches, runner(loaded, make, setting), setting, records, force,
                partial(console.print, sep=", "),
            )  # fmt: skip
            report(ran, wanted.name, setting, "lm_eval", csv, console)
