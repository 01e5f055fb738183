"""Pictures of the rows of studies. matplotlib is an extra."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oscar_kv.config import OscarConfig
from oscar_kv.evaluate.ablations import ABLATIONS
from oscar_kv.evaluate.compare import REFERENCE
from oscar_kv.evaluate.methods import BY_LAYER
from oscar_kv.evaluate.methods import OURS as _PRESETS
from oscar_kv.evaluate.sensitivity import Sensitivity
from oscar_kv.extras import import_extra

OURS = {*_PRESETS, *BY_LAYER, *ABLATIONS}
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
            error = [[max(0.0, value - low)], [max(0.0, high - value)]]
            axes.errorbar(value, y, xerr=error, fmt="o", color=color_of(preset), markersize=4)
        axes.set_yticks(range(len(panel.points)), [preset for preset, *_ in panel.points])
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(panel.title, fontsize="medium")
    return save_png(figure)


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


def color_of(preset: str) -> str:
    """Our settings have a color of their own."""
    return _BLUE if preset in OURS else _GREY


def save_png(figure: Any) -> bytes:
    """A picture of a figure."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def allocation_png(found: Sensitivity, config: OscarConfig) -> bytes:
    """What each layer's keys and values cost in 2 bits, and the bits that they get."""
    layers = sorted({layer for _, layer in found.kl})
    figure = import_extra("matplotlib.figure", "plot").Figure(figsize=(2 + 0.3 * len(layers), 5), layout="constrained")
    for axes, side in zip(figure.subplots(2, 1, sharex=True, sharey=True), ("key", "value"), strict=True):
        kl = [found.kl[side, layer] for layer in layers]
        axes.bar(range(len(layers)), kl, color=_BLUE)
        for x, layer in enumerate(layers):
            bits = getattr(config.for_layer(layer), f"{side}_bits")
            bold = "bold" if bits != getattr(config, f"{side}_bits") else "normal"
            axes.annotate(str(bits), (x, kl[x]), ha="center", va="bottom", fontsize="small", fontweight=bold)
        axes.set_ylabel(f"KL, {side}s in 2 bits")
        axes.margins(y=0.15)
    axes.set_xticks(range(len(layers)), [str(layer) for layer in layers], fontsize="small")
    axes.set_xlabel("layer; above the bars: bits that it gets")
    return save_png(figure)
