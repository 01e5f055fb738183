"""Which tokens are sinks, of unusual norm, or near such; and what sets one modality's tokens apart."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.diagnose.statistics import quantiles

LOW, HIGH = 0.5, 2.0  # a token is of low or high norm beyond these multiples of the median
SINK_SHARE = 0.02  # a token is an attention sink from this share of a far query's attention on
FAR_QUERIES = 16  # as many are needed to call a token a sink
_MODALITIES = ("image", "video", "audio")


def modalities(config: PreTrainedConfig, ids: Tensor) -> dict[str, Tensor]:
    """Which tokens are of which modality, by the placeholder ids of a model's configuration.

    Args:
        config: The whole model's; reads ``image_token_id``, ``video_token_id`` and ``audio_token_id``.
        ids: int64 (n,).

    Returns:
        bool (n,) by modality, "text" first; only those that occur.
    """
    found = {}
    for name in _MODALITIES:
        placeholder = getattr(config, f"{name}_token_id", None)
        if isinstance(placeholder, int):
            found[name] = ids == placeholder
    text = torch.ones_like(ids, dtype=torch.bool)
    for own in found.values():
        text &= ~own
    return {name: own for name, own in {"text": text, **found}.items() if own.any()}


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


def sinks(share: Tensor) -> Tensor:
    """Tokens, bool (n,), that get at least 2 % of the attention of far queries, by :func:`attention_share`."""
    return share >= SINK_SHARE


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
    sink = sinks(share)
    low = (norms < LOW * middle) & ~sink
    near = (sink | low).unflatten(0, (-1, group)).any(-1, keepdim=True).expand(-1, group).flatten() & ~sink & ~low
    high = (norms > HIGH * middle) & ~sink & ~near
    classes = {"sink": sink, "low_norm": low, "neighbour": near, "high_norm": high}
    return {**classes, "other": ~(sink | low | near | high)}


def unusual_tokens(keys: Tensor, share: Tensor, classes: Mapping[str, Tensor]) -> dict[str, Any]:
    """Sinks and tokens of unusual norm: where they are, and how many."""
    norms = keys.norm(dim=(0, -1))
    relative = norms / norms.median()

    def places(name: str) -> list[int]:
        return torch.nonzero(classes[name]).flatten().tolist()

    return {
        "sinks": [
            {"position": i, "attention": float(share[i]), "norm_over_median": float(relative[i])}
            for i in places("sink")
        ],
        "low_norm": places("low_norm"),
        "high_norm": places("high_norm"),
        "count": {name: int(own.sum()) for name, own in classes.items()},
    }


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
            numbers[f"{side}_over_text"] = over_text(norm, modality)[name]
        found[name] = numbers
    return found


def over_text(norms: Tensor, modality: Mapping[str, Tensor]) -> dict[str, float]:
    """Median norm (n,) of each modality's tokens against that of text; NaN without text."""
    text = norms[modality["text"]].median() if "text" in modality else math.nan
    return {name: float(norms[own].median() / text) for name, own in modality.items()}
