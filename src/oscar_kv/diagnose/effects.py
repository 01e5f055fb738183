"""What one step of the method leaves of a layer's imbalance, and what it costs in accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from oscar_kv.codec import transform_keys
from oscar_kv.config import OscarConfig
from oscar_kv.diagnose.capture import LayerStates
from oscar_kv.diagnose.errors import Attention, class_errors, group_errors, relative_error
from oscar_kv.diagnose.statistics import key_statistics, norm_statistics, quantiles
from oscar_kv.diagnose.steps import equalizer_of
from oscar_kv.diagnose.theory import check_bounds
from oscar_kv.diagnose.tokens import over_text


def step_numbers(
    states: LayerStates,
    attention: Attention,
    packed: tuple[Tensor, Tensor],
    config: OscarConfig,
    classes: Mapping[str, Tensor],
    modality: Mapping[str, Tensor],
    group: int,
) -> dict[str, Any]:
    """Errors after a step; norms, directions and channels in the space in which that step quantizes.

    Args:
        states: A layer's states, whole blocks.
        attention: Its attention.
        packed: Keys and values as the step packs them.
        config: The step.
        classes: bool (n,) by class of token.
        modality: bool (n,) by modality.
        group: Tokens per group of the statistics.
    """
    (keys, values), (k, v) = (states.key[0], states.value[0]), (packed[0][0], packed[1][0])
    space = transform_keys(states.key, config, equalizer_of(states.key, config, states.query))[0][0]
    effect, errors = attention.compare(k, v), group_errors(keys, k, group)
    heads = [
        {
            "norms": norm_statistics(space[h].norm(dim=-1)),
            **key_statistics(space[h], group),
            "key_over_text": over_text(space[h].norm(dim=-1), modality),
            "group_error": quantiles(errors[h]),
            "key_error": relative_error(keys[h], k[h]),
            "value_error": relative_error(values[h], v[h]),
            **numbers,
        }
        for h, numbers in enumerate(effect.by_head())
    ]
    return {
        "key_error": relative_error(keys, k),
        "value_error": relative_error(values, v),
        **effect.numbers(),
        "classes": {"key": class_errors(keys, k, classes), "value": class_errors(values, v, classes)},
        "modalities": {"key": class_errors(keys, k, modality), "value": class_errors(values, v, modality)},
        "heads": heads,
    }


def bound_numbers(keys: Tensor, packed: Tensor, config: OscarConfig) -> dict[str, Any]:
    """The bound on every group, in the space in which the keys are quantized.

    Args:
        keys: float32 (1, heads, n, key_dim).
        packed: The same as packed.
        config: The step, without equalization.
    """
    exact, norms, _ = transform_keys(keys, config, None)
    x = transform_keys(packed, replace(config, token_norm=None), None)[0]
    if norms is not None:
        x = x / norms.float().unsqueeze(-1)
    return check_bounds(exact[0], x[0], config.key_bits, config.key_group)
