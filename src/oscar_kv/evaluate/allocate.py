"""Bits for single layers: more where they are worth most."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from oscar_kv.cache import packed_layers
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.evaluate.sensitivity import PLAIN, Place, Progress, Sensitivity, sensitivity
from oscar_kv.pack import RecordLayout
from oscar_kv.support import head_dims, kv_heads

_LEVELS: dict[str, list[tuple[dict[str, Any], float]]] = {  # of a side: fields, and error against that of plain 2 bits
    "key": [
        ({"key_bits": 2, "key_shrink": 0.9, "key_group": 64}, 1.4),
        (PLAIN["key"], 1.0),
        ({"key_bits": 3, "key_shrink": 1.0, "key_group": 32}, 1 / 4),
        ({"key_bits": 4, "key_shrink": 1.0, "key_group": 32}, 1 / 16),
    ],
    "value": [
        (PLAIN["value"], 1.0),
        ({"value_bits": 3, "value_gain": 1.0}, 1 / 4),
        ({"value_bits": 4, "value_gain": 1.0}, 1 / 16),
    ],
}
_UNSEEN = 0.1  # of the mean sensitivity, which any layer may have on what the probe does not show
_WORTH = 10.0  # so many times more must a step be worth than one that is taken back for it, for the same reason

Levels = dict[Place, int]


def allocate_bits(
    model: PreTrainedModel,
    config: OscarConfig | None = None,
    *,
    max_bits: float,
    measured: Sensitivity | None = None,
    progress: Progress | None = None,
) -> OscarConfig:
    """Give the keys and values of single layers 2, 3 or 4 bits, more where they are worth most.

    One bit more makes the error of a side of a layer a quarter. While ``max_bits`` allows, the side whose error then
    falls the most gets one. After that bits move, where they are worth ten times as much as where they come from; keys
    of 2 bits may have groups of 64 for it.

    Args:
        model: A decoder model.
        config: What all layers start from; the default is ``OscarConfig.quality()``.
        max_bits: Bits per packed number that are not exceeded, codes, scales, zeros and norms included.
        measured: From :func:`sensitivity`; None measures it.
        progress: As for :func:`sensitivity`.

    Returns:
        The configuration, with ``layers``.

    Raises:
        ValueError: The configuration takes more than ``max_bits``, has settings for layers, or other widths; or
            ``measured`` is of another model.

    Example:
        >>> from oscar_kv.evaluate import allocate_bits
        >>> config = allocate_bits(model, max_bits=3.05)  # doctest: +SKIP
        >>> oscar_kv.enable(model, config)  # doctest: +SKIP
    """
    config = OscarConfig.quality() if config is None else config
    check_start(config, model.config, max_bits)
    start = {"key": config.key_bits - 1, "value": config.value_bits - 2}
    bits = _Bits(model.config)
    levels = {(side, layer): start[side] for side in PLAIN for layer in bits.shapes}
    if measured is not None and set(measured.kl) != set(levels):
        raise ValueError("what was measured is of a model with other layers")
    found = sensitivity(model, progress=progress) if measured is None else measured
    while step := _step(found.kl, levels, lambda after: bits(_with(config, after, start)) <= max_bits):
        levels |= step
    return _with(config, levels, start)


def check_start(config: OscarConfig, model: PreTrainedConfig, max_bits: float) -> None:
    """Refuse what bits cannot be allocated from, before anything is measured.

    Raises:
        ValueError: As for :func:`allocate_bits`.
    """
    if config.layers or not {config.key_bits, config.value_bits} <= {2, 3, 4}:
        raise ValueError(f"bits are allocated from 2, 3 or 4 in all layers alike, not from {config}")
    if (least := _Bits(model)(config)) > max_bits:
        raise ValueError(f"the configuration takes {least:.3f} bits, more than max_bits={max_bits:g}")


def _step(kl: Mapping[Place, float], levels: Levels, fits: Callable[[Levels], bool]) -> Levels:
    """The next change of levels: one step up, or one up and one down; empty where none is worth it."""
    unseen = _UNSEEN * sum(kl.values()) / len(kl)

    def worth(place: Place, level: int) -> float:  # of the step from this level up
        known = _LEVELS[place[0]]
        return (kl[place] + unseen) * (known[level][1] - known[level + 1][1])

    up = {p: worth(p, level) for p, level in levels.items() if level + 1 < len(_LEVELS[p[0]])}
    down = {p: worth(p, level - 1) for p, level in levels.items() if level > 0}
    ups = sorted(up, key=lambda p: up[p], reverse=True)
    for place in ups:
        if fits(levels | (step := {place: levels[place] + 1})):
            return step
    for place in ups:
        for other in sorted(down, key=lambda p: down[p]):
            if up[place] <= _WORTH * down[other]:
                break
            if other != place and fits(levels | (step := {place: levels[place] + 1, other: levels[other] - 1})):
                return step
    return {}


def _with(config: OscarConfig, levels: Levels, start: Mapping[str, int]) -> OscarConfig:
    """A configuration with these levels, which names the layers that have others than at the start."""
    layers: dict[int, dict[str, Any]] = {}
    for (side, layer), level in levels.items():
        if level != start[side]:
            layers.setdefault(layer, {}).update(_LEVELS[side][level][0])
    return replace(config, layers=layers)


class _Bits:
    """Bits per packed number of a model's cache, by the configurations alone."""

    def __init__(self, model: PreTrainedConfig) -> None:
        decoder = model.get_text_config(decoder=True)
        self.shapes = {  # heads, and head dimensions of keys and values
            i: (kv_heads(decoder, i), *head_dims(decoder, i)) for i in packed_layers(model)
        }
        self.elements = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in self.shapes.values())

    def __call__(self, config: OscarConfig) -> float:
        return sum(_bits_of_token(config.for_layer(i), *shape) for i, shape in self.shapes.items()) / self.elements


@cache
def _bits_of_token(config: OscarConfig, heads: int, key_dim: int, value_dim: int) -> float:
    layout = RecordLayout(config, key_dim, value_dim, torch.bfloat16)
    return 8 * heads * layout.record_bytes / BLOCK_TOKENS + 16 * layout.norm_heads(heads)
