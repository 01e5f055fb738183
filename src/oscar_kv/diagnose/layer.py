"""One layer: all of its statistics, as plain numbers, from its queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from oscar_kv.codec import transform_keys
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.diagnose.capture import LayerStates
from oscar_kv.diagnose.effects import bound_numbers, step_numbers
from oscar_kv.diagnose.errors import Attention, group_errors, relative_error
from oscar_kv.diagnose.interventions import interventions
from oscar_kv.diagnose.statistics import head_statistics, imbalance, in_groups, spread
from oscar_kv.diagnose.steps import BOTH, NONE, roundtrip, steps
from oscar_kv.diagnose.theory import group_bounds
from oscar_kv.diagnose.tokens import (
    attention_share,
    modality_gaps,
    over_text,
    sinks,
    token_classes,
    unusual_tokens,
)

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
    weights = attention.weights  # (query heads, m, n)
    share = attention_share(weights, attention.positions)
    classes = token_classes(keys[0], share, _GROUP)
    configs = steps(values.shape[-1])
    packed = {name: roundtrip(keys, values, config, states.query) for name, config in configs.items()}
    repaired = interventions(keys, classes["sink"] | classes["low_norm"])
    numbers = {
        "layer": states.index,
        "kv_heads": keys.shape[1],
        "key_dim": keys.shape[-1],
        "value_dim": values.shape[-1],
        "heads": _heads(states, weights, attention.positions, modality),
        "tokens": unusual_tokens(keys[0], share, classes),
        "modalities": modality_gaps(keys[0], values[0], modality),
        "steps": {
            name: step_numbers(states, attention, packed[name], config, classes, modality, _GROUP)
            for name, config in configs.items()
        },
        "interventions": {
            name: {"key_error": relative_error(keys, k), "extra_bits": bits}
            | attention.compare(k[0], values[0]).numbers()
            for name, (k, bits) in repaired.items()
        },
        "theory": {name: bound_numbers(keys, packed[name][0], configs[name]) for name in (NONE, BOTH)},
    }
    return LayerDiagnosis(states.index, numbers, **_drawn(states, packed[NONE][0], configs))


def _heads(
    states: LayerStates, weights: Tensor, positions: Tensor, modality: Mapping[str, Tensor]
) -> list[dict[str, Any]]:
    """Statistics of each KV head before any step."""
    keys, values = states.key[0], states.value[0]
    queries, weights = (x.unflatten(0, (len(keys), -1)) for x in (states.query[0], weights))
    return [
        {
            **head_statistics(queries[h], keys[h], values[h], _GROUP),
            "sinks": sinks(attention_share(weights[h], positions)).nonzero().flatten().tolist(),
            "key_over_text": over_text(keys[h].norm(dim=-1), modality),
        }
        for h in range(len(keys))
    ]


def _drawn(states: LayerStates, plain: Tensor, configs: Mapping[str, OscarConfig]) -> dict[str, Any]:
    """What the pictures need, from the keys and from the same in plain 2-bit groups."""
    keys = states.key[0]
    grouped = in_groups(keys, _GROUP)
    gap = imbalance(keys, _GROUP)[1]
    mean_square = grouped.square().sum(-1).mean(-1).double().clamp(min=1e-300)
    groups = {
        "error": group_errors(keys, plain[0], _GROUP),
        "gap": gap,
        "spread": spread(keys, _GROUP),
        "bound": group_bounds(grouped, configs[NONE].key_bits)["gap"] / mean_square,
    }
    sides = {"query": states.query, "key": states.key, "value": states.value}
    first, head = states.key[:, :, :_PICTURE_TOKENS], int(gap.mean(-1).argmax())
    return {
        "groups": {name: x.flatten().double().cpu() for name, x in groups.items()},
        "norms": {name: x[0].norm(dim=-1).cpu() for name, x in sides.items()},
        "before": first[0, head].cpu(),
        "after": transform_keys(first, configs[BOTH], None)[0][0, head].cpu(),
    }


def _whole_blocks(states: LayerStates) -> LayerStates:
    """Float32, without the tokens after the last whole block."""
    n = states.key.shape[2] // BLOCK_TOKENS * BLOCK_TOKENS
    cut = {name: getattr(states, name)[:, :, :n].float() for name in ("query", "key", "value")}
    for name, x in cut.items():
        if not x.isfinite().all():
            raise ValueError(f"layer {states.index} has a {name} that is not finite")
    mask = None if states.mask is None else states.mask[:, :, :n, :n]
    return replace(states, mask=mask, **cut)
