"""Figures. matplotlib is an extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from oscar_kv.extras import import_extra

_COLORS = {  # by component of memory_bytes
    "tokens": "#8c8c8c",
    "codes": "#1f77b4",
    "scales_zeros": "#6baed6",
    "norms": "#c6dbef",
    "tail": "#ff7f0e",
    "sinks": "#d62728",
    "equalizer": "#9467bd",
    "reserved": "#e7e7e7",
    "index": "#2ca02c",
    "other_layers": "#bcbd22",
}
LABELS = {"tokens": "16-bit tokens", "scales_zeros": "scales, zeros", "other_layers": "other layers"}
_WINDOW = 64  # tokens of the rolling mean


def demo_picture(
    path: Path, kl: Tensor, start: int, footprints: Mapping[str, Mapping[str, Mapping[str, int]]], title: str
) -> None:
    """Save the demo's picture: KL along the text, and bytes by component.

    Args:
        path: Where to save; the suffix decides the format.
        kl: (n,) KL in nats of the tokens from ``start`` on.
        start: Position of the first of them.
        footprints: By length ("now"), by cache ("16-bit"): bytes by component.
        title: Title of the left side.
    """
    figure = import_extra("matplotlib.figure", "demo").Figure(figsize=(13, 4.5), layout="constrained")
    left, *right = figure.subplots(1, 1 + len(footprints), width_ratios=[3, *[1] * len(footprints)])
    _draw_kl(left, kl, start)
    left.set_title(title)
    for axes, (length, caches) in zip(right, footprints.items(), strict=True):
        _draw_bytes(axes, caches)
        axes.set_title(length)
    handles = {label: handle for axes in right for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _draw_kl(axes: Any, kl: Tensor, start: int) -> None:
    window = min(_WINDOW, len(kl))
    mean = F.avg_pool1d(kl.view(1, 1, -1), window, stride=1).flatten()
    axes.plot(range(start, start + len(kl)), kl.clamp(min=1e-6), ".", markersize=2, color="#9ecae1", label="token")
    axes.plot(
        range(start + window - 1, start + len(kl)), mean, color="#08519c", label=f"mean of the last {window} tokens"
    )
    axes.set_yscale("log")
    axes.set_ylim(bottom=1e-5)
    axes.set_xlabel("position in the text (tokens)")
    axes.set_ylabel("KL(16-bit || packed), nats")
    axes.legend(loc="lower right", fontsize="small")


def _draw_bytes(axes: Any, caches: Mapping[str, Mapping[str, int]]) -> None:
    bottoms = dict.fromkeys(caches, 0.0)
    for component, color in _COLORS.items():
        sizes = {name: parts.get(component, 0) / 2**20 for name, parts in caches.items()}
        if any(sizes.values()):
            label = LABELS.get(component, component)
            axes.bar(list(sizes), list(sizes.values()), bottom=list(bottoms.values()), color=color, label=label)
            bottoms = {name: bottoms[name] + sizes[name] for name in bottoms}
    for name, height in bottoms.items():
        axes.annotate(f"{height:.3g}", (name, height), ha="center", va="bottom", fontsize="small")
    axes.set_ylabel("MiB")
    axes.set_ylim(top=1.08 * max(bottoms.values()))
