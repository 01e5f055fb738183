"""What the commands share: options, and how they say what goes on and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from oscar_kv.evaluate import METHODS
from oscar_kv.loading import DEMO_MODEL, DEMO_TITLE, prose


class Preset(StrEnum):
    """The names in PRESETS."""

    DEFAULT = "default"
    QUALITY = "quality"
    FOUR_BIT = "four-bit"
    PAPER = "paper"


_MODEL = f'Hub id or folder; "{DEMO_MODEL}" is {DEMO_TITLE}.'
ModelOption = Annotated[str, typer.Option(help=_MODEL)]
ModelArgument = Annotated[str, typer.Argument(help=_MODEL)]
DtypeOption = Annotated[str, typer.Option(help="The model's dtype: auto (its own), bfloat16, float16 or float32.")]
AttentionOption = Annotated[
    str, typer.Option(help="oscar reads the packed bytes; sdpa, eager, ... a dequantized copy.")
]
PresetOption = Annotated[Preset, typer.Option(help="What to quantize and how.")]
TextOption = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="UTF-8 text instead of Python's language reference."),
]


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """What the user can mend is said in one line, without a traceback; exit code 1."""
    try:
        yield
    except (ImportError, NotImplementedError, OSError, ValueError) as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        typer.echo(f"oscar-kv: {message}", err=True)
        raise typer.Exit(1) from None


def known_methods(names: Sequence[str]) -> list[str]:
    """Names in METHODS, each once.

    Raises:
        typer.BadParameter: One is not there.
    """
    if unknown := [name for name in names if name not in METHODS]:
        raise typer.BadParameter(f"no preset {', '.join(unknown)}: choose from {', '.join(METHODS)}")
    return list(dict.fromkeys(names))


def remaining(names: Sequence[str], done: set[str], csv: Path | None, console: Console) -> list[str]:
    """Names that a file has no rows for; says which it has."""
    if skipped := [name for name in names if name in done]:
        console.print(f"{csv} has rows for {', '.join(skipped)}: skipped, --force does them again", soft_wrap=True)
    return [name for name in names if name not in done]


def progress_bar(console: Console) -> Progress:
    return Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console)


def text_of(path: Path | None) -> str:
    return prose() if path is None else path.read_text(encoding="utf-8")
