"""One layer: all of its statistics, as plain numbers, from its queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oscar_kv.codec import transform_keys
from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.diagnose.capture import LayerStates
from oscar_kv.diagnose.effects import bound_numbers, step_numbers
from oscar_kv.diagnose.errors import Attention, group_errors, relative_error
from oscar_kv.diagnose.interventions import interventions
from oscar_kv.diagnose.statistics import head_statistics, imbalance, in_groups, spread
from oscar_kv.diagnose.steps import BOTH, NONE, roundtrip, steps
from oscar_kv.diagnose.theory import group_bounds
from oscar_kv.diagnose.tokens import attention_share, modality_gaps, token_classes

_GROUP = 32  # tokens per group of the statistics
_PICTURE_TOKENS = 128


@dataclass(frozen=True)
class LayerDiagnosis:
    """What is known about one layer.

    Args:
        index: The layer.
        numbers: Plain numbers, see docs/tni.md.
        groups: float64 (KV heads * groups,) by name: "error", relative error of plain 2-bit groups; "gap", "spread",
            the imbalance and the directional spread of the group; "bound", the paper's bound over the mean squared
            norm, which is what "error" is relative to.
        norms: float32 (heads, n) token norms of "query", "key" and "value".
        before: float32 (128, key_dim) first keys of the head with the largest imbalance.
        after: The same rotated and scaled, as the published method quantizes them.
    """

    index: int
    numbers: dict[str, Any]
    groups: dict[str, Tensor]
    norms: dict[str, Tensor]
    before: Tensor
    after: Tensor


def diagnose_layer(states: LayerStates, modality: Mapping[str, Tensor]) -> LayerDiagnosis:
    """All statistics of a layer.

    Args:
        states: Its states.
        modality: bool (n,) by name, of the same tokens.

    Raises:
        ValueError: The states hold numbers that are not finite.
    """
    states = _whole_blocks(states)
    keys, values = states.key, states.value  # float32 (1, heads, n, D)
    modality = {name: own[: keys.shape[2]].to(keys.device) for name, own in modality.items()}
    modality = {name: own for name, own in modality.items() if own.any()}
    attention = Attention(states)
    share = attention_share(attention.weights, attention.positions)
    classes = token_classes(keys[0], share, _GROUP)
    configs = steps(values.shape[-1])
    packed = {name: roundtrip(keys, values, config, states.query) for name, config in configs.items()}
    gap = imbalance(keys[0], _GROUP)[1]
    heads = keys.shape[1]
    queries = states.query[0].unflatten(0, (heads, -1))
    numbers = {
        "layer": states.index,
        "kv_heads": heads,
        "key_dim": keys.shape[-1],
        "value_dim": values.shape[-1],
        "heads": [head_statistics(queries[h], keys[0, h], values[0, h], _GROUP) for h in range(heads)],
        "tokens": _tokens(keys[0], share, classes),
        "modalities": modality_gaps(keys[0], values[0], modality),
        "steps": {
            name: step_numbers(states, attention, packed[name], config, classes, modality, _GROUP)
            for name, config in configs.items()
        },
        "interventions": {
            name: {
                "key_error": relative_error(keys, k),
                "extra_bits": bits,
                **attention.compare(k[0], values[0]).numbers(),
            }
            for name, (k, bits) in interventions(keys, classes["sink"] | classes["low_norm"]).items()
        },
        "theory": {name: bound_numbers(keys, packed[name][0], configs[name]) for name in (NONE, BOTH)},
    }
    mean_square = in_groups(keys[0], _GROUP).square().sum(-1).mean(-1).double().clamp(min=1e-300)
    groups = {
        "error": group_errors(keys[0], packed[NONE][0][0], _GROUP),
        "gap": gap,
        "spread": spread(keys[0], _GROUP),
        "bound": group_bounds(in_groups(keys[0], _GROUP), configs[NONE].key_bits)["gap"] / mean_square,
    }
    worst = int(gap.mean(-1).argmax())
    first = keys[:, :, :_PICTURE_TOKENS]
    return LayerDiagnosis(
        index=states.index,
        numbers=numbers,
        groups={name: x.flatten().double().cpu() for name, x in groups.items()},
        norms={
            name: x[0].norm(dim=-1).cpu() for name, x in (("query", states.query), ("key", keys), ("value", values))
        },
        before=first[0, worst].cpu(),
        after=transform_keys(first, configs[BOTH], None)[0][0, worst].cpu(),
    )


def _whole_blocks(states: LayerStates) -> LayerStates:
    """Float32, without the tokens after the last whole block."""
    n = states.key.shape[2] // BLOCK_TOKENS * BLOCK_TOKENS
    cut = {name: getattr(states, name)[:, :, :n].float() for name in ("query", "key", "value")}
    for name, x in cut.items():
        if not x.isfinite().all():
            raise ValueError(f"layer {states.index} has a {name} that is not finite")
    mask = None if states.mask is None else states.mask[:, :, :n, :n]
    return replace(states, mask=mask, **cut)


def _tokens(keys: Tensor, share: Tensor, classes: Mapping[str, Tensor]) -> dict[str, Any]:
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
