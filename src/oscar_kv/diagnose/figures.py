"""Pictures of a diagnosis. matplotlib is an extra."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oscar_kv.diagnose.interventions import PLAIN
from oscar_kv.diagnose.layer import LayerDiagnosis
from oscar_kv.diagnose.report import Report
from oscar_kv.diagnose.steps import BOTH, NONE
from oscar_kv.extras import import_extra

_COLORS = {NONE: "#d62728", BOTH: "#6baed6", "default": "#08519c"}
_BOX_TOKENS = 48
_SAMPLE = 4000  # points of a scatter or violin


def figures(report: Report) -> dict[str, tuple[Any, str]]:
    """All pictures of a report: by file name without suffix, the matplotlib figure and its caption."""
    worst = max(report.layers, key=lambda layer: layer.numbers["steps"][NONE]["output_error"])
    found = {
        "layers": (_layers(report), "Error of each layer's attention output (relative squared error)."),
        "repairs": (_repairs(report), "What each repair of plain 2-bit keys removes of the attention output's error."),
        "norms": (
            _norms(worst),
            f"Token norms over the heads of layer {worst.index}, which suffers most from plain 2-bit groups.",
        ),
        "channels": (
            _heatmaps(worst),
            f"Keys of layer {worst.index}, head with the largest imbalance: token by channel, before and after "
            "rotation and scaling.",
        ),
        "surface": (_surfaces(worst), "The same as surfaces."),
        "bound": (
            _bound(report),
            "Left: error of each group with plain 2-bit keys against the paper's lower bound, both relative to the "
            "mean squared norm. Right: synthetic keys, by the spread of their norms.",
        ),
    }
    if len(report.modality) > 1:
        found["modalities"] = (_modalities(report, worst), f"Norms of layer {worst.index} by modality.")
    return found


def _figure(width: float, height: float) -> Any:
    return import_extra("matplotlib.figure", "plot").Figure(figsize=(width, height), layout="constrained")


def _layers(report: Report) -> Any:
    figure = _figure(10, 3.5)
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
    rows = report.numbers["summary"]["interventions"]
    figure = _figure(10, 3.5)
    axes = figure.subplots()
    removed = {name: 1 - row["output_error"] / max(rows[PLAIN]["output_error"], 1e-12) for name, row in rows.items()}
    removed.pop(PLAIN)
    names = list(reversed(removed))
    bars = axes.barh(names, [max(-1.0, removed[name]) for name in names], color="#08519c")
    axes.bar_label(bars, [f"{removed[name]:.0%}" for name in names], padding=3, fontsize="small")
    axes.axvline(0.5, color="black", linestyle="--", linewidth=1)
    axes.set_xlim(-1.15, 1.1)
    axes.set_xlabel("share of the error removed (negative: the error grows; cut off at -100 %)")
    return figure


def _norms(layer: LayerDiagnosis) -> Any:
    figure = _figure(10, 6)
    for axes, (side, norms) in zip(figure.subplots(len(layer.norms), sharex=True), layer.norms.items(), strict=True):
        axes.boxplot(norms[:, :_BOX_TOKENS].numpy(), flierprops={"markersize": 2})
        axes.set_ylabel(f"{side} norm")
    axes.set_xticks(range(1, _BOX_TOKENS + 1, 4), [str(i) for i in range(0, _BOX_TOKENS, 4)])
    axes.set_xlabel("token position")
    return figure


def _heatmaps(layer: LayerDiagnosis) -> Any:
    figure = _figure(10, 4)
    for axes, (title, x) in zip(figure.subplots(1, 2), _pair(layer), strict=True):
        image = axes.imshow(x.abs().numpy(), aspect="auto", cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=axes)
        axes.set_title(title)
        axes.set_xlabel("channel")
        axes.set_ylabel("token")
    return figure


def _surfaces(layer: LayerDiagnosis) -> Any:
    figure = _figure(10, 4.5)
    for i, (title, x) in enumerate(_pair(layer)):
        axes = figure.add_subplot(1, 2, i + 1, projection="3d")
        tokens, channels = torch.meshgrid(torch.arange(x.shape[0]), torch.arange(x.shape[1]), indexing="ij")
        axes.plot_surface(channels.numpy(), tokens.numpy(), x.abs().numpy(), cmap="viridis", rcount=48, ccount=48)
        axes.set_title(title)
        axes.set_xlabel("channel")
        axes.set_ylabel("token")
    return figure


def _pair(layer: LayerDiagnosis) -> list[tuple[str, Tensor]]:
    return [("|key|", layer.before), ("|key|, rotated and scaled", layer.after)]


def _bound(report: Report) -> Any:
    figure = _figure(10, 4)
    left, right = figure.subplots(1, 2)
    bound, error = (_sample(torch.cat([layer.groups[name] for layer in report.layers])) for name in ("bound", "error"))
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


def _sample(x: Tensor) -> Tensor:
    return x[:: max(1, len(x) // _SAMPLE)]


def _modalities(report: Report, layer: LayerDiagnosis) -> Any:
    figure = _figure(10, 3.5)
    for axes, (side, norms) in zip(figure.subplots(1, len(layer.norms)), layer.norms.items(), strict=True):
        parts = [_sample(norms[:, own].flatten()).numpy() for own in report.modality.values()]
        axes.violinplot(parts, showmedians=True)
        axes.set_xticks(range(1, len(parts) + 1), list(report.modality))
        axes.set_ylabel(f"{side} norm per head")
    return figure
