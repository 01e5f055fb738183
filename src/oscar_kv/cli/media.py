"""``oscar-kv eval media``: benchmark tasks with images or sound, by lmms-eval, with a packed cache beside the 16-bit
one."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from oscar_kv.cache_layer import ATTENTION_NAME
from oscar_kv.cli.shared import AttentionOption, DtypeOption, errors_in_one_line
from oscar_kv.cli.task_options import CacheOption, CsvOption, FolderOption, ForceOption, LimitOption
from oscar_kv.cli.task_rows import ITEMS, check_file, report
from oscar_kv.extras import import_extra
from oscar_kv.multimodal import load_multimodal
from oscar_kv.tasks.caches import chosen
from oscar_kv.tasks.compare import compare
from oscar_kv.tasks.presets import MEDIA_TASKS
from oscar_kv.tasks.records import Records, Setting


def media(
    model: Annotated[str, typer.Argument(help="Hub id or folder of a model that sees or hears.")],
    task: Annotated[
        list[str],
        typer.Option(help=f"{', '.join(MEDIA_TASKS)}, or a task, group or tag of lmms-eval; may be repeated."),
    ],
    cache: CacheOption = None,
    limit: LimitOption = None,
    csv: CsvOption = None,
    force: ForceOption = False,
    include_path: FolderOption = None,
    dtype: DtypeOption = "auto",
    attention: AttentionOption = ATTENTION_NAME,
) -> None:
    """Score tasks with images or sound with each cache, and the difference from the 16-bit cache on the same items.

    What the file of --csv has already is not run again.
    """
    with errors_in_one_line():
        for module in ("lmms_eval.evaluator", "filelock._api", "soundfile"):
            import_extra(module, "media")
        from oscar_kv.tasks.media import OscarLMM
        from oscar_kv.tasks.media_runs import media_runner
        from oscar_kv.tasks.media_tasks import MediaTasks

        caches = chosen(cache)
        records = Records(None if csv is None else csv.with_name(csv.name + ITEMS))
        tasks = MediaTasks(include_path)
        sets = {name: tasks.named(name) for name in task}
        lm, processor = load_multimodal(model, dtype)
        setting = Setting(model, str(lm.dtype).removeprefix("torch."), limit, attention=attention, chat=True)
        check_file(csv, setting, "lmms_eval")
        make = partial(OscarLMM, lm, processor, attention=attention)
        run, console = media_runner(tasks, make, setting), Console()
        for name, members in sets.items():
            ran = compare(name, members, caches, run, setting, records, force, partial(console.print, sep=", "))
            report(ran, name, setting, "lmms_eval", csv, console)
