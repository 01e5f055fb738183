"""The picture of KL against bits, and which methods are on its front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from oscar_kv.evaluate.compare import REFERENCE
from oscar_kv.evaluate.figures import color_of, save_png
from oscar_kv.evaluate.labels import Box, place
from oscar_kv.extras import import_extra

_AXES = {"packed_bits": "bits per packed number", "bits": "bits per cached number, tail and sinks included"}
_NOISE = "unquantized"  # drawn as a line
_SMALLEST = 1e-5  # nats; what is drawn of a KL of 0
_MARKER, _FONT = 4.0, 7.0  # points
_LETTER, _LINE = 0.57, 1.3  # mean width of a letter, and height of a line, in sizes of the font

_Mean = tuple[str, float, float, float, float]  # preset, bits, and KL with the ends of its interval


def pareto_png(rows: Sequence[Mapping[str, str]]) -> bytes:
    """KL against bits with its intervals, for packed tokens alone and for everything held, and the front of each."""
    figure = import_extra("matplotlib.figure", "plot").Figure(figsize=(16, 7), layout="constrained")
    noise = [float(row["kl"]) for row in rows if row["preset"] == _NOISE]
    panels = []
    for axes, (column, label) in zip(figure.subplots(1, len(_AXES), sharey=True), _AXES.items(), strict=True):
        points = [_mean(row, column) for row in rows if row["preset"] not in (REFERENCE, _NOISE)]
        axes.set_yscale("log")
        _draw(axes, points)
        for kl in noise:
            axes.axhline(max(_SMALLEST, kl), color="#8c8c8c", linestyle=":", label="our cache with 16-bit numbers")
        axes.set_xlabel(label)
        axes.set_ylabel("KL(16-bit || method), nats")
        axes.margins(x=0.12)
        axes.legend(loc="upper right", fontsize="small")
        panels.append((axes, points))
    figure.draw_without_rendering()  # so that the axes are where they will be
    for axes, points in panels:
        _name(axes, points)
    return save_png(figure)


def _mean(row: Mapping[str, str], column: str) -> _Mean:
    """A row's bits and KL, such that they can be drawn on a logarithmic axis."""
    kl, low, high = (max(_SMALLEST, float(row[name])) for name in ("kl", "kl_low", "kl_high"))
    return row["preset"], float(row[column]), kl, low, high


def _draw(axes: Any, points: Sequence[_Mean]) -> None:
    front = pareto_front([(x, kl) for _, x, kl, *_ in points])
    axes.step(
        [x for x, _ in front],
        [kl for _, kl in front],
        where="post",
        color="#d62728",
        linewidth=1,
        label="nothing is better in both",
    )
    for preset, x, kl, low, high in points:
        error = [[max(0.0, kl - low)], [max(0.0, high - kl)]]
        axes.errorbar(x, kl, yerr=error, fmt="o", color=color_of(preset), markersize=_MARKER)


def _name(axes: Any, points: Sequence[_Mean]) -> None:
    """Write each method's name beside its point, with a line between them."""
    scale = 72 / axes.figure.dpi  # typographic points per pixel

    def at(x: float, y: float) -> tuple[float, float]:
        right, up = (scale * axes.transData.transform((x, y))).tolist()
        return right, up

    boxes = [_box([at(x, y) for y in interval], _MARKER / 2) for _, x, *interval in points]
    sizes = [(_LETTER * _FONT * len(preset), _LINE * _FONT) for preset, *_ in points]
    steps = [
        _box([at(*ends[0]), at(*ends[1])], 0.5)
        for a, b in pairwise(pareto_front([(x, kl) for _, x, kl, *_ in points]))
        for ends in ((a, (b[0], a[1])), ((b[0], a[1]), b))
    ]
    names = place(boxes, sizes, tuple(scale * axes.bbox.extents), steps)
    for (preset, x, kl, *_), (left, bottom, right, top) in zip(points, names, strict=True):
        here, color = at(x, kl), color_of(preset)
        edge, side = (left, "left") if left > here[0] else (right, "right")
        axes.annotate(
            preset,
            (x, kl),
            xytext=(edge - here[0], (bottom + top) / 2 - here[1]),
            textcoords="offset points",
            ha=side,
            va="center",
            fontsize=_FONT,
            color=color,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0},
        )


def _box(corners: Sequence[tuple[float, float]], margin: float) -> Box:
    """The smallest box around some points with a margin."""
    xs, ys = zip(*corners, strict=True)
    return min(xs) - margin, min(ys) - margin, max(xs) + margin, max(ys) + margin


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (bits, KL) that no other beats in both, by bits."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front
