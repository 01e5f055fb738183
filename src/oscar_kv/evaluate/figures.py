"""Pictures of the rows of studies. matplotlib is an extra."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oscar_kv.evaluate.ablations import ABLATIONS
from oscar_kv.evaluate.compare import REFERENCE
from oscar_kv.evaluate.methods import OURS as _PRESETS
from oscar_kv.extras import import_extra

OURS = {*_PRESETS, *ABLATIONS}
_AXES = {"packed_bits": "bits per packed number", "bits": "bits per cached number, tail and sinks included"}
_NOISE = "unquantized"  # drawn as a line
_SMALLEST = 1e-5  # nats; what is drawn of a KL of 0
_WIDTH, _LINE = 0.8, 1.12  # of a label: in bits, and as a factor of KL
_BLUE, _GREY = "#08519c", "#6e6e6e"

Point = tuple[str, float, float, float]  # preset, value, and the ends of its interval


@dataclass(frozen=True)
class Panel:
    """Values of several methods with their intervals, one below the other.

    Args:
        title: What is measured.
        points: One per method.
        band: What the values are to be compared with, (low, high).
        log: Whether the axis is logarithmic.
    """

    title: str
    points: Sequence[Point]
    band: tuple[float, float] | None = None
    log: bool = False


def forest_png(panels: Sequence[Panel]) -> bytes:
    """Panels side by side."""
    tallest = max(len(panel.points) for panel in panels)
    size = (2 + 3 * len(panels), 1.2 + 0.3 * tallest)
    figure = import_extra("matplotlib.figure", "plot").Figure(figsize=size, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        if panel.log:
            ticker = import_extra("matplotlib.ticker", "plot")
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
            axes.xaxis.set_minor_formatter(ticker.NullFormatter())
            axes.tick_params(axis="x", labelsize="small", rotation=45)
        if panel.band is not None:
            axes.axvspan(*panel.band, color="#8c8c8c", alpha=0.3, linewidth=1)
        for y, (preset, value, low, high) in enumerate(panel.points):
            color = _BLUE if preset in OURS else _GREY
            error = [[max(0.0, value - low)], [max(0.0, high - value)]]
            axes.errorbar(value, y, xerr=error, fmt="o", color=color, markersize=4)
        axes.set_yticks(range(len(panel.points)), [preset for preset, *_ in panel.points])
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(panel.title, fontsize="medium")
    return _png(figure)


def estimate(row: Mapping[str, str], value: str, prefix: str = "") -> Point:
    """A row's value in a column, and its interval in ``prefix`` + "low" and "high"."""
    return row["preset"], float(row[value]), float(row[f"{prefix}low"]), float(row[f"{prefix}high"])


def ratio_png(rows: Sequence[Mapping[str, str]]) -> bytes | None:
    """KL of each method over that of the method ``against``, or None where nothing was divided."""
    shown = [row for row in rows if row["kl_ratio"] and row["preset"] not in (REFERENCE, row["against"])]
    panels = []
    for rival in dict.fromkeys(row["against"] for row in shown):
        points = [estimate(row, "kl_ratio", "kl_ratio_") for row in shown if row["against"] == rival]
        panels.append(Panel(f"KL / KL of {rival}", sorted(points, key=lambda point: point[1]), (1.0, 1.0), log=True))
    return forest_png(panels) if panels else None


def pareto_png(rows: Sequence[Mapping[str, str]]) -> bytes:
    """KL against bits with its intervals, for packed tokens alone and for everything held, and the front of each."""
    figure = import_extra("matplotlib.figure", "plot").Figure(figsize=(16, 7), layout="constrained")
    shown = [row for row in rows if row["preset"] not in (REFERENCE, _NOISE)]
    noise = [float(row["kl"]) for row in rows if row["preset"] == _NOISE]
    for axes, (column, label) in zip(figure.subplots(1, len(_AXES), sharey=True), _AXES.items(), strict=True):
        axes.set_yscale("log")
        _draw(axes, [(row["preset"], float(row[column]), *_kl(row)) for row in shown])
        for kl in noise:
            axes.axhline(max(_SMALLEST, kl), color="#8c8c8c", linestyle=":", label="our cache with 16-bit numbers")
        axes.set_xlabel(label)
        axes.set_ylabel("KL(16-bit || method), nats")
        axes.margins(x=0.15)
        axes.legend(loc="upper right", fontsize="small")
    return _png(figure)


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def _kl(row: Mapping[str, str]) -> tuple[float, float, float]:
    """Mean, low and high, so that they can be drawn on a logarithmic axis."""
    kl, low, high = (max(_SMALLEST, float(row[name])) for name in ("kl", "kl_low", "kl_high"))
    return kl, low, high


def _draw(axes: Any, points: Sequence[tuple[str, float, float, float, float]]) -> None:
    """Points: preset, bits, and KL with its interval."""
    front = pareto_front([(x, kl) for _, x, kl, *_ in points])
    axes.step(
        [x for x, _ in front],
        [kl for _, kl in front],
        where="post",
        color="#d62728",
        linewidth=1,
        label="nothing is better in both",
    )
    labels: list[tuple[float, float]] = []
    for preset, x, kl, low, high in sorted(points, key=lambda point: -point[2]):
        color = _BLUE if preset in OURS else _GREY
        axes.errorbar(x, kl, yerr=[[max(0.0, kl - low)], [max(0.0, high - kl)]], fmt="o", color=color, markersize=4)
        y = min([kl, *(other / _LINE for at, other in labels if abs(at - x) < _WIDTH)])  # below the other labels
        labels.append((x, y))
        place = {"xytext": (5, y), "textcoords": ("offset points", "data"), "va": "center"}
        axes.annotate(preset, (x, kl), **place, fontsize="x-small", color=color).set_in_layout(False)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (bits, KL) that no other beats in both, by bits."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front
