"""The picture of ``bench kernels``: speed-up over bf16, and how near the memory limit is. matplotlib is an extra."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from oscar_kv.bench.measurement import Measurement, Shape, speedup
from oscar_kv.loading import import_extra

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
    """Draw one column per preset: speed-up above, fraction of the memory limit below, over the context.

    Args:
        path: Where to save; the suffix decides the format.
        runs: The measurements of each run, the oldest first.

    Raises:
        ValueError: No run has decode attention beside bf16.
        ImportError: The extra "plot" is not installed.
    """
    found = points(runs)
    if not found:
        raise ValueError("nothing to plot: no run measured decode attention beside bf16")
    presets = list(dict.fromkeys(preset for preset, _ in found))
    figure = import_extra("matplotlib.figure", "plot").Figure(figsize=(4 + 3 * len(presets), 7), layout="constrained")
    grid = figure.subplots(2, len(presets), sharex=True, sharey="row", squeeze=False)
    for column, preset in enumerate(presets):
        above, below = grid[0][column], grid[1][column]
        above.set_title(preset)
        above.axhline(1.0, color="black", linestyle="--", linewidth=1)  # no faster than bf16
        below.axhline(1.0, color="black", linestyle="--", linewidth=1)
        _draw(above, below, {shape: pair for (name, shape), pair in found.items() if name == preset})
    grid[0][0].set_ylabel("speed-up over the fastest bf16")
    grid[1][0].set_ylabel("fraction of the memory limit")
    handles = {label: line for axes in grid[0] for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw(above: Any, below: Any, found: dict[Shape, tuple[float, float]]) -> None:
    """One line per batch, heads and head_dim."""
    lines: dict[tuple[int, int, int, int], list[tuple[int, float, float]]] = defaultdict(list)
    for shape, pair in found.items():
        lines[shape.batch, shape.q_heads, shape.kv_heads, shape.head_dim].append((shape.context, *pair))
    for place, ((batch, q_heads, kv_heads, dim), values) in enumerate(sorted(lines.items())):
        contexts, gains, fractions = zip(*sorted(values), strict=True)
        style = {"marker": "o", "markersize": 4, "color": f"C{place}"}
        above.plot(contexts, gains, label=f"batch {batch}, heads {q_heads}/{kv_heads} of {dim}", **style)
        below.plot(contexts, fractions, **style)
    above.set_xscale("log", base=2)
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    below.set_xlabel("context (tokens)")
