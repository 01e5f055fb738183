"""Pictures of one layer. matplotlib is an extra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oscar_kv.diagnose.layer import LayerDiagnosis
from oscar_kv.extras import import_extra

BOX_TOKENS = 48
_SAMPLE = 4000  # points of a scatter or violin


def figure_of(width: float, height: float) -> Any:
    """An empty figure, sizes in inches."""
    return import_extra("matplotlib.figure", "plot").Figure(figsize=(width, height), layout="constrained")


def norms(layer: LayerDiagnosis) -> Any:
    """Box plots over the heads, by token position: one row each for queries, keys and values."""
    figure = figure_of(10, 6)
    for axes, (side, found) in zip(figure.subplots(len(layer.norms), sharex=True), layer.norms.items(), strict=True):
        axes.boxplot(found[:, :BOX_TOKENS].numpy(), flierprops={"markersize": 2})
        axes.set_ylabel(f"{side} norm")
    axes.set_xticks(range(1, BOX_TOKENS + 1, 4), [str(i) for i in range(0, BOX_TOKENS, 4)])
    axes.set_xlabel("token position")
    return figure


def heatmaps(layer: LayerDiagnosis) -> Any:
    """Token by channel, before and after."""
    figure = figure_of(10, 4)
    for axes, (title, x) in zip(figure.subplots(1, 2), _pair(layer), strict=True):
        image = axes.imshow(x.abs().numpy(), aspect="auto", cmap="viridis", interpolation="nearest")
        figure.colorbar(image, ax=axes)
        axes.set_title(title)
        axes.set_xlabel("channel")
        axes.set_ylabel("token")
    return figure


def surfaces(layer: LayerDiagnosis) -> Any:
    """The same in three dimensions."""
    figure = figure_of(10, 4.5)
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


def modality_violins(layer: LayerDiagnosis, modality: Mapping[str, Tensor]) -> Any:
    """Distribution of the norms of each modality's tokens, bool (n,) by name, over tokens and heads."""
    figure = figure_of(10, 3.5)
    for axes, (side, found) in zip(figure.subplots(1, len(layer.norms)), layer.norms.items(), strict=True):
        parts = [sample(found[:, own].flatten()).numpy() for own in modality.values()]
        axes.violinplot(parts, showmedians=True)
        axes.set_xticks(range(1, len(parts) + 1), list(modality))
        axes.set_ylabel(f"{side} norm per head")
    return figure


def sample(x: Tensor) -> Tensor:
    """At most about 4000 points, evenly spaced."""
    return x[:: max(1, len(x) // _SAMPLE)]
