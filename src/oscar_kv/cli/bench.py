"""``oscar-kv bench``: what the kernels take beside 16 bit."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from oscar_kv import results
from oscar_kv.bench import kernels as benchmark
from oscar_kv.bench.measurement import Measurement, append, read_runs, speedup
from oscar_kv.bench.plot import picture
from oscar_kv.bench.timing import ROUNDS
from oscar_kv.cli.shared import errors_in_one_line, progress_bar
from oscar_kv.extras import import_extra

app = typer.Typer(help="Measure what the kernels take, beside 16 bit in the same run.", no_args_is_help=True)

_EVERY = "may be repeated (default: all)"


class Op(StrEnum):
    """What can be measured."""

    ALL = "all"
    DECODE = "decode"
    APPEND = "append"
    ENCODE = "encode"


@app.command()
def kernels(
    op: Annotated[Op, typer.Option(help="Decode attention, appending a token, packing a prompt, or all.")] = Op.ALL,
    preset: Annotated[list[str] | None, typer.Option(help=f"{', '.join(benchmark.PRESETS)}; {_EVERY}.")] = None,
    impl: Annotated[list[str] | None, typer.Option(help=f"{', '.join(benchmark.ALL_IMPLS)}; {_EVERY}.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows; may be repeated.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens of each row; may be repeated.")] = None,
    heads: Annotated[list[str] | None, typer.Option(help="Query and KV heads, as 32/8; may be repeated.")] = None,
    head_dim: Annotated[int, typer.Option(help="Of queries, keys and values.")] = 128,
    rounds: Annotated[int, typer.Option(min=2, help="Times that each implementation is measured.")] = ROUNDS,
    csv: Annotated[Path | None, typer.Option(help="Append the rows to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speed-up and memory limit over the context.")] = None,
) -> None:
    """Time decode attention and packing against bf16 and copies, side by side (needs a CUDA GPU).

    With any of --batch, --context and --heads, every combination is measured instead of the usual shapes.
    """
    with errors_in_one_line():
        if plot is not None:
            import_extra("matplotlib", "plot")
        ops = tuple(benchmark.IMPLS) if op is Op.ALL else (op.value,)
        todo = benchmark.problems(ops, batch or (), context or (), [_pair(text) for text in heads or ()], head_dim)
        measuring = benchmark.measure(todo, preset or tuple(benchmark.PRESETS), impl or (), rounds)
        console, run = Console(), []
        with progress_bar(console) as progress:
            for found in progress.track(measuring, total=len(todo), description="measuring"):
                run += found
                if csv is not None and found:
                    append(csv, found)
        for name in ops:
            if measured := [m for m in run if m.op == name]:
                console.print(_table(name, measured))
        if plot is not None:
            picture(plot, [run])


@app.command("plot")
def plot_rows(
    csv: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A table of bench kernels.")],
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("kernels.png"),
) -> None:
    """Draw speed-up and memory limit over the context from the rows of earlier runs."""
    with errors_in_one_line():
        picture(out, read_runs(csv))


def _pair(text: str) -> tuple[int, int]:
    try:
        q_heads, kv_heads = (int(part) for part in text.split("/"))
    except ValueError:
        raise ValueError(f"--heads {text}: give query heads and KV heads as 32/8") from None
    return q_heads, kv_heads


def _table(op: str, run: list[Measurement]) -> Table:
    title = f"{op} on {results.hardware()}, a copy moves {run[0].copy_gbps:.0f} GB/s"
    table = Table(title=title, title_justify="left")
    baseline = "a copy" if op == "encode" else "bf16"
    for column in ("batch x context", "implementation"):
        table.add_column(column)
    for column in ("median us", "p10 to p90", f"speed-up over {baseline}", "of memory limit"):
        table.add_column(column, justify="right")
    for shape in dict.fromkeys(m.shape for m in run):
        for m in (m for m in run if m.shape == shape):
            gain = speedup(m, run)
            table.add_row(
                str(shape), " ".join(filter(None, (m.impl, m.preset, m.form))), f"{m.median_us:.1f}",
                f"{m.p10_us:.1f} to {m.p90_us:.1f}", "" if gain is None else f"{gain:.2f}", f"{m.of_limit:.0%}",
            )  # fmt: skip
        table.add_section()
    return table
