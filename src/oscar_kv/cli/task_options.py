"""Options that ``oscar-kv eval tasks`` and ``eval media`` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oscar_kv.cli.task_rows import ITEMS

CacheOption = Annotated[
    list[str] | None, typer.Option(help="16-bit, default, quality, four-bit, paper or unquantized; may be repeated.")
]
LimitOption = Annotated[int | None, typer.Option(min=1, help="Only the first items of each task.")]
CsvOption = Annotated[
    Path | None, typer.Option(help=f"Append the rows to this file, and the items to one beside it ({ITEMS}).")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Run again what that file has.")]
FolderOption = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, help="A folder with task files of your own.")
]
