"""Token norms and what makes them hard to quantize: imbalance, directions, channels, sinks, modalities."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from oscar_kv.config import BLOCK_TOKENS

LOW, HIGH = 0.5, 2.0  # a token is of low or high norm beyond these multiples of the median
OUTLIER_CHANNEL = 4.0  # a channel is an outlier beyond this multiple of the median range
SINK_SHARE = 0.02  # a token is an attention sink from this share of a far query's attention on
FAR_QUERIES = 16  # as many are needed to call a token a sink
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


def head_statistics(queries: Tensor, keys: Tensor, values: Tensor, group: int) -> dict[str, object]:
    """Statistics of one KV head.

    Args:
        queries: (query heads of this KV head, n, key_dim).
        keys: (n, key_dim).
        values: (n, value_dim).
        group: Tokens per key group.
    """
    ratio, gap = imbalance(keys, group)
    ranges = channel_ranges(keys, group)
    middle = ranges.median()
    whole = torch.nn.functional.normalize(keys, dim=-1).mean(0).norm()
    return {
        "norms": {
            name: norm_statistics(x.norm(dim=-1)) for name, x in (("query", queries), ("key", keys), ("value", values))
        },
        "imbalance_ratio": quantiles(ratio),
        "imbalance_gap": quantiles(gap),
        "spread": quantiles(spread(keys, group)),
        "mean_resultant_length": float(whole),
        "channels": {
            "max_over_median": float(ranges.max() / middle) if middle > 0 else math.nan,
            "outliers": torch.nonzero(ranges > OUTLIER_CHANNEL * middle).flatten().tolist(),
        },
    }


def attention_share(weights: Tensor, queries: Tensor) -> Tensor:
    """Mean attention that each token gets from queries at least 128 tokens later; 0 with fewer than 16 of these.

    Args:
        weights: (heads, m, n) attention weights.
        queries: int64 (m,) positions of the queries.

    Returns:
        (n,)
    """
    positions = torch.arange(weights.shape[-1], device=weights.device)
    far = (queries[:, None] >= positions + BLOCK_TOKENS).float()  # (m, n)
    count = far.sum(0)
    return torch.where(count >= FAR_QUERIES, (weights.mean(0) * far).sum(0) / count.clamp(min=1.0), 0.0)


def token_classes(keys: Tensor, share: Tensor, group: int) -> dict[str, Tensor]:
    """Each token's class, by its norm over all KV heads and by the attention that it gets.

    Args:
        keys: (heads, n, D).
        share: (n,) from :func:`attention_share`.
        group: Tokens per key group.

    Returns:
        bool (n,) by name; every token is of one class. "sink": gets at least 2 % of the attention of far queries.
        "low_norm", "high_norm": below half, above twice the median norm. "neighbour": in a group with a sink or a
        token of low norm. "other": the rest.
    """
    norms = keys.norm(dim=(0, -1))
    middle = norms.median()
    sink = share >= SINK_SHARE
    low = (norms < LOW * middle) & ~sink
    near = (sink | low).unflatten(0, (-1, group)).any(-1, keepdim=True).expand(-1, group).flatten() & ~sink & ~low
    high = (norms > HIGH * middle) & ~sink & ~near
    classes = {"sink": sink, "low_norm": low, "neighbour": near, "high_norm": high}
    return {**classes, "other": ~(sink | low | near | high)}


def modality_gaps(keys: Tensor, values: Tensor, modality: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Norms over all heads of each modality's tokens, and their median against that of text.

    Args:
        keys: (heads, n, key_dim).
        values: (heads, n, value_dim).
        modality: bool (n,) by name.
    """
    found = {}
    norms = {"key": keys.norm(dim=(0, -1)), "value": values.norm(dim=(0, -1))}
    for name, own in modality.items():
        numbers: dict[str, float] = {"tokens": int(own.sum())}
        for side, norm in norms.items():
            numbers |= {f"{side}_{key}": x for key, x in quantiles(norm[own]).items()}
            text = norm[modality["text"]].median() if "text" in modality else torch.tensor(math.nan)
            numbers[f"{side}_over_text"] = float(norm[own].median() / text)
        found[name] = numbers
    return found
