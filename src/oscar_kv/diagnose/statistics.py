"""Token norms and what makes keys hard to quantize per channel: imbalance, directions, outlier channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

OUTLIER_CHANNEL = 4.0  # a channel is an outlier beyond this multiple of the median range
_QUANTILES = {"min": 0.0, "p05": 0.05, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


def quantiles(x: Tensor) -> dict[str, float]:
    """Minimum, 5 %, 25 %, median, 75 %, 95 % and maximum of all elements."""
    found = torch.quantile(_sample(x.flatten().float()), torch.tensor(list(_QUANTILES.values()), device=x.device))
    return dict(zip(_QUANTILES, found.tolist(), strict=True))


def _sample(x: Tensor) -> Tensor:
    """At most 2**24 elements, which is what torch.quantile takes."""
    return x[:: math.ceil(x.numel() / 2**24)]


def norm_statistics(norms: Tensor) -> dict[str, float]:
    """Quantiles of token norms, and the largest and smallest against the median."""
    found = quantiles(norms)
    middle = found["median"]
    ratios = {f"{name}_over_median": found[name] / middle if middle else math.nan for name in ("max", "min")}
    return {**found, **ratios}


def in_groups(x: Tensor, group: int) -> Tensor:
    """(..., n, D) -> (..., n / group, group, D)"""
    return x.unflatten(-2, (-1, group))


def imbalance(keys: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Token norm imbalance of each group of consecutive tokens.

    Args:
        keys: (..., n, D).
        group: Tokens per group.

    Returns:
        (ratio, gap), each (..., n / group): largest over smallest norm, and (largest - smallest)**2 over the mean
        squared norm. A smallest norm of 0 counts as 1e-6 of the largest.
    """
    norms = in_groups(keys, group).norm(dim=-1)
    low, high = norms.amin(-1), norms.amax(-1)
    ratio = torch.where(high > 0, high / torch.maximum(low, 1e-6 * high), 1.0)
    mean_square = norms.square().mean(-1)
    return ratio, torch.where(mean_square > 0, (high - low).square() / mean_square, 0.0)


def spread(keys: Tensor, group: int) -> Tensor:
    """Directional spread of each group, 1 minus the mean resultant length of its normalised keys: (..., n / group).

    0: all keys point the same way; 1: their directions cancel out.
    """
    directions = torch.nn.functional.normalize(in_groups(keys, group), dim=-1)
    return 1.0 - directions.mean(-2).norm(dim=-1)


def channel_ranges(keys: Tensor, group: int) -> Tensor:
    """Mean over the groups of max - min of each channel: (..., n, D) -> (..., D)."""
    grouped = in_groups(keys, group)
    return (grouped.amax(-2) - grouped.amin(-2)).mean(-2)


def key_statistics(keys: Tensor, group: int) -> dict[str, object]:
    """Imbalance and directional spread of the groups of one head, and its outlier channels.

    Args:
        keys: (n, key_dim).
        group: Tokens per key group.
    """
    ratio, gap = imbalance(keys, group)
    ranges = channel_ranges(keys, group)
    middle = ranges.median()
    return {
        "imbalance_ratio": quantiles(ratio),
        "imbalance_gap": quantiles(gap),
        "spread": quantiles(spread(keys, group)),
        "channels": {
            "max_over_median": float(ranges.max() / middle) if middle > 0 else math.nan,
            "outliers": torch.nonzero(ranges > OUTLIER_CHANNEL * middle).flatten().tolist(),
        },
    }


def head_statistics(queries: Tensor, keys: Tensor, values: Tensor, group: int) -> dict[str, object]:
    """Statistics of one KV head.

    Args:
        queries: (query heads of this KV head, n, key_dim).
        keys: (n, key_dim).
        values: (n, value_dim).
        group: Tokens per key group.
    """
    sides = {"query": queries, "key": keys, "value": values}
    return {
        "norms": {name: norm_statistics(x.norm(dim=-1)) for name, x in sides.items()},
        **key_statistics(keys, group),
        "mean_resultant_length": float(torch.nn.functional.normalize(keys, dim=-1).mean(0).norm()),
    }
