"""The picture of ``bench kernels``: speed-up over bf16, and how near the memory limit is. matplotlib is an extra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oscar_kv.bench.measurement import Measurement, Shape, speedup
from oscar_kv.extras import import_extra

Points = dict[tuple[str, Shape], tuple[float, float]]  # by preset and shape: speed-up, and fraction of the limit


def points(runs: list[list[Measurement]]) -> Points:
    """Decode attention over packed blocks against the fastest bf16 of its own run; a later run replaces an earlier."""
    found: Points = {}
    for run in runs:
        for m in run:
            gain = speedup(m, run)
            if m.op == "decode" and m.impl == "oscar" and gain is not None:
                found[m.preset, m.shape] = gain, m.of_limit
    return found


def picture(path: Path, runs: list[list[Measurement]]) -> None:
    """Save :func:`draw`.

    Args:
        path: Where; the suffix decides the format.
        runs: The measurements of each run, the oldest first.

    Raises:
        ValueError: No run has decode attention beside bf16.
        ImportError: The extra "plot" is not installed.
    """
    figure = draw(points(runs))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw(found: Points) -> Any:
    """A matplotlib figure, one column per preset: speed-up above, fraction of the limit below, over the context."""
    if not found:
        raise ValueError("nothing to plot: no run measured decode attention beside bf16")
    presets = list(dict.fromkeys(preset for preset, _ in found))
    lines = sorted({_line(shape) for _, shape in found})
    figure = import_extra("matplotlib.figure", "plot").Figure(figsize=(1 + 3.5 * len(presets), 7), layout="constrained")
    grid = figure.subplots(2, len(presets), sharex=True, sharey="row", squeeze=False)
    for column, preset in enumerate(presets):
        grid[0][column].set_title(preset)
        grid[1][column].set_xlabel("context (tokens)")
        for row in (0, 1):
            grid[row][column].axhline(1.0, color="black", linestyle="--", linewidth=1)  # no faster than bf16; the limit
            grid[row][column].grid(alpha=0.3)
        for color, line in enumerate(lines):
            own = sorted((s.context, *pair) for (name, s), pair in found.items() if (name, _line(s)) == (preset, line))
            contexts, *curves = zip(*own, strict=True) if own else ((), (), ())
            for row, curve in enumerate(curves):
                label = f"batch {line[0]}, heads {line[1]}/{line[2]} of {line[3]}"
                grid[row][column].plot(contexts, curve, marker="o", markersize=4, color=f"C{color}", label=label)
    grid[0][0].set_xscale("log", base=2)
    for axes, label in zip(grid[:, 0], ("speed-up over the fastest bf16", "fraction of the memory limit"), strict=True):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)  # last: it ends the automatic scaling of the row
    figure.legend(handles=[x for x in grid[0][0].get_lines() if not x.get_label().startswith("_")],
                  loc="outside lower center", ncols=3, fontsize="small")  # fmt: skip
    return figure


def _line(shape: Shape) -> tuple[int, int, int, int]:
    """What the points of one line have in common."""
    return shape.batch, shape.q_heads, shape.kv_heads, shape.head_dim
