"""Pictures of a diagnosis. matplotlib is an extra."""

from __future__ import annotations

from typing import Any

import torch

from oscar_kv.diagnose.interventions import removed
from oscar_kv.diagnose.layer import LayerDiagnosis
from oscar_kv.diagnose.layer_figures import (
    BOX_TOKENS,
    figure_of,
    heatmaps,
    modality_violins,
    norms,
    sample,
    surfaces,
)
from oscar_kv.diagnose.report import Report
from oscar_kv.diagnose.steps import BOTH, NONE

_COLORS = {NONE: "#d62728", BOTH: "#6baed6", "default": "#08519c"}


def figures(report: Report, layer: int | None = None) -> dict[str, tuple[Any, str]]:
    """All pictures of a report.

    Args:
        report: The diagnosis.
        layer: The layer whose norms and keys are shown; None shows the one that suffers most from plain groups.

    Returns:
        By file name without suffix, the matplotlib figure and its caption.

    Raises:
        ValueError: The layer was not diagnosed.
    """
    shown = _layer(report, layer)
    found = {
        "layers": (_layers(report), "Error of each layer's attention output (relative squared error)."),
        "repairs": (_repairs(report), "What each repair of plain 2-bit keys removes of the attention output's error."),
        "norms": (
            norms(shown),
            f"Norms of the first {BOX_TOKENS} tokens over the heads of layer {shown.index}"
            + (", which suffers most from plain 2-bit groups." if layer is None else "."),
        ),
        "channels": (
            heatmaps(shown),
            f"Keys of layer {shown.index}, head with the largest imbalance: token by channel, before and after "
            "rotation and scaling.",
        ),
        "surface": (surfaces(shown), "The same as surfaces."),
        "bound": (
            _bound(report),
            "Left: error of each group with plain 2-bit keys against the paper's lower bound, both relative to the "
            "mean squared norm. Right: synthetic keys, by the spread of their norms.",
        ),
    }
    if len(report.modality) > 1:
        caption = f"Norms of layer {shown.index} by modality."
        found["modalities"] = (modality_violins(shown, report.modality), caption)
    return found


def _layer(report: Report, index: int | None) -> LayerDiagnosis:
    if index is None:
        return max(report.layers, key=lambda layer: layer.numbers["steps"][NONE]["output_error"])
    layers = {layer.index: layer for layer in report.layers}
    if index not in layers:
        raise ValueError(f"layer {index} was not diagnosed, only {', '.join(map(str, layers))}")
    return layers[index]


def _layers(report: Report) -> Any:
    figure = figure_of(10, 3.5)
    axes = figure.subplots()
    for i, (step, color) in enumerate(_COLORS.items()):
        errors = [layer.numbers["steps"][step]["output_error"] for layer in report.layers]
        places = [place + 0.27 * (i - 1) for place in range(len(errors))]
        axes.bar(places, errors, width=0.27, color=color, label=step)
    axes.set_xticks(range(len(report.layers)), [str(layer.index) for layer in report.layers], fontsize="small")
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("output error")
    axes.legend(fontsize="small")
    return figure


def _repairs(report: Report) -> Any:
    shares = removed(report.numbers["summary"]["interventions"])
    figure = figure_of(10, 3.5)
    axes = figure.subplots()
    names = list(reversed(shares))
    bars = axes.barh(names, [max(-1.0, shares[name]) for name in names], color="#08519c")
    axes.axvline(0.5, color="black", linestyle="--", linewidth=1)
    paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    axes.bar_label(bars, [f"{shares[name]:.0%}" for name in names], padding=4, fontsize="small", bbox=paper)
    axes.set_xlim(-1.15, 1.1)
    axes.set_xlabel("share of the error removed (negative: the error grows; cut off at -100 %)")
    return figure


def _bound(report: Report) -> Any:
    figure = figure_of(10, 4)
    left, right = figure.subplots(1, 2)
    bound, error = (sample(torch.cat([layer.groups[name] for layer in report.layers])) for name in ("bound", "error"))
    left.plot(bound, error, ".", markersize=2, color="#6baed6")
    ends = [float(bound[bound > 0].min()), float(error.max())]
    left.plot(ends, ends, color="black", linewidth=1, label="error = bound")
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_xlabel("lower bound by the norm gap")
    left.set_ylabel("measured error of the group")
    left.legend(fontsize="small")
    rows = report.numbers["theory"]["sweep"]
    for step in rows[0]["errors"]:
        right.plot([row["sigma"] for row in rows], [row["errors"][step] for row in rows], marker="o", label=step)
    right.set_xlabel("standard deviation of log norm (synthetic)")
    right.set_ylabel("mean error of a group")
    right.set_ylim(bottom=0)
    right.legend(fontsize="small")
    return figure
