"""Bits for single layers: more where they are worth most, by what a probe of random tokens shows. Needs no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oscar_kv.cache import OscarCache
from oscar_kv.cache_layer import ATTENTION_NAME, OscarLayer
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.evaluate.compare import compare
from oscar_kv.integrations.switch import replaced_attention
from oscar_kv.integrations.transformers import register
from oscar_kv.pack import RecordLayout
from oscar_kv.support import head_dims, kv_heads

_LENGTH = 2 * BLOCK_TOKENS  # random tokens, that come twice
_LEAD = 8  # of the second time, after which a model has found the first
_LAYERS_AT_ONCE = 8  # whose caches are held side by side
_SIDES, _WIDTHS = ("key", "value"), (2, 3, 4)
_SETTINGS: dict[tuple[str, int], dict[str, Any]] = {  # fields of a side by its bits
    ("key", 2): {"key_bits": 2, "key_shrink": 0.9},
    ("key", 3): {"key_bits": 3, "key_shrink": 1.0},
    ("key", 4): {"key_bits": 4, "key_shrink": 1.0},
    ("value", 2): {"value_bits": 2},
    ("value", 3): {"value_bits": 3, "value_gain": 1.0},
    ("value", 4): {"value_bits": 4, "value_gain": 1.0},
}
_WORTH = 4.0  # so many times more must a bit be worth where it goes than where it is taken from
_UNSEEN = 0.5  # of the mean sensitivity, which any layer may have on what the probe does not show

Place = tuple[str, int]  # side and layer
Bits = dict[Place, int]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sensitivity:
    """What each layer's keys and values cost when they alone are packed in 2 bits.

    Args:
        kl: By side ("key", "value") and layer, the mean KL divergence of the predictions, in nats.
    """

    kl: Mapping[Place, float]


def sensitivity(model: PreTrainedModel, *, seed: int = 0, progress: Progress | None = None) -> Sensitivity:
    """Measure where packing hurts a model's memory of what it has read, one layer and side at a time.

    The probe is 256 random tokens, twice. What a model predicts the second time it has from the first alone, which is
    packed by then: so the layers show that look things up in the text (Olsson et al., "In-context Learning and
    Induction Heads", arXiv 2209.11895), and no text has to be chosen.

    Args:
        model: A decoder model.
        seed: Of the random tokens.
        progress: Called with the layers done and the layers in all.
    """
    register()
    layers = _packed(model.config)
    exact = OscarConfig(key_bits=16, value_bits=16)
    ids = _probe(model.config, seed).to(model.device)
    found: dict[Place, float] = {}
    with replaced_attention(model, ATTENTION_NAME):
        for first in range(0, len(layers), _LAYERS_AT_ONCE):
            some = layers[first : first + _LAYERS_AT_ONCE]
            configs = {(side, i): replace(exact, layers={i: _SETTINGS[side, 2]}) for i in some for side in _SIDES}
            caches = {f"{side} {i}": partial(OscarCache, model.config, config) for (side, i), config in configs.items()}
            caches["exact"] = partial(OscarCache, model.config, exact)  # what the order of rounding alone changes
            kl = {name: x.kl for name, x in compare(model, ids, caches, start=_LENGTH + _LEAD).items()}
            found |= {(side, i): max(0.0, kl[f"{side} {i}"] - kl["exact"]) for side, i in configs}
            if progress is not None:
                progress(first + len(some), len(layers))
    return Sensitivity(found)


def allocate_bits(
    model: PreTrainedModel,
    config: OscarConfig | None = None,
    *,
    max_bits: float,
    measured: Sensitivity | None = None,
    progress: Progress | None = None,
) -> OscarConfig:
    """Give the keys and values of single layers more bits, those first that need them most.

    A bit more makes a layer's error a quarter. While ``max_bits`` allows, the side of a layer whose error then falls
    the most gets a bit, up to 4; after that, bits move from where they are hardly needed.

    Args:
        model: A decoder model.
        config: What all layers start from: 2, 3 or 4 bits, and no layers with settings of their own.
        max_bits: Bits per packed number that must not be exceeded, codes, scales, zeros and norms included.
        measured: From :func:`sensitivity`; None measures it.
        progress: As for :func:`sensitivity`.

    Returns:
        The configuration with ``layers``.

    Raises:
        ValueError: The configuration takes more than ``max_bits``, has settings for layers, or is of other widths.

    Example:
        >>> from oscar_kv.evaluate import allocate_bits
        >>> config = allocate_bits(model, OscarConfig.quality(), max_bits=3.05)  # doctest: +SKIP
        >>> oscar_kv.enable(model, config)  # doctest: +SKIP
    """
    config = OscarConfig() if config is None else config
    widths = dict(zip(_SIDES, (config.key_bits, config.value_bits), strict=True))
    if config.layers or not {*widths.values()} <= set(_WIDTHS):
        raise ValueError(f"bits are allocated from 2, 3 or 4 in all layers alike, not from {config}")
    size = _Size(config, model.config)
    if (least := size.bits(config)) > max_bits:
        raise ValueError(f"this configuration takes {least:.3f} bits, more than max_bits={max_bits:g}")
    found = sensitivity(model, progress=progress) if measured is None else measured
    bits: Bits = {(side, layer): widths[side] for side, layer in found.kl}
    while step := _step(found.kl, bits, lambda changed: size.bits(_with(config, changed)) <= max_bits):
        bits |= step
    return _with(config, bits)


def _step(kl: Mapping[Place, float], bits: Bits, fits: Callable[[Bits], bool]) -> Bits:
    """The next bit: added where it is worth most, or else moved there; empty where none is worth it."""
    unseen = _UNSEEN * sum(kl.values()) / len(kl)

    def worth(place: Place, width: int) -> float:  # of the bit beyond this width
        return 0.75 * (kl[place] + unseen) * 4.0 ** (_WIDTHS[0] - width)

    raised = sorted((p for p in bits if bits[p] < _WIDTHS[-1]), key=lambda p: worth(p, bits[p]), reverse=True)
    lowered = sorted((p for p in bits if bits[p] > _WIDTHS[0]), key=lambda p: worth(p, bits[p] - 1))
    for up in raised:
        if fits(bits | {up: bits[up] + 1}):
            return {up: bits[up] + 1}
    for up in raised:
        for down in lowered:
            if down == up or worth(up, bits[up]) <= _WORTH * worth(down, bits[down] - 1):
                break
            if fits(bits | (step := {up: bits[up] + 1, down: bits[down] - 1})):
                return step
    return {}


def _with(config: OscarConfig, bits: Bits) -> OscarConfig:
    """A configuration with these widths, which names the layers that differ from it."""
    layers: dict[int, dict[str, Any]] = {}
    for (side, layer), width in bits.items():
        if width != getattr(config, f"{side}_bits"):
            layers.setdefault(layer, {}).update(_SETTINGS[side, width])
    return replace(config, layers=layers)


class _Size:
    """Bits per packed number of a model's cache, by the configurations alone."""

    def __init__(self, config: OscarConfig, model: PreTrainedConfig) -> None:
        decoder = model.get_text_config(decoder=True)
        self.shapes = {  # heads, and head dimensions of keys and values
            i: (kv_heads(decoder, i), *head_dims(decoder, i)) for i in _packed(model)
        }
        self.elements = sum(heads * (key_dim + value_dim) for heads, key_dim, value_dim in self.shapes.values())

    def bits(self, config: OscarConfig) -> float:
        return sum(_bits_of_token(config.for_layer(i), *shape) for i, shape in self.shapes.items()) / self.elements


@cache
def _bits_of_token(config: OscarConfig, heads: int, key_dim: int, value_dim: int) -> float:
    layout = RecordLayout(config, key_dim, value_dim, torch.bfloat16)
    return 8 * heads * layout.record_bytes / BLOCK_TOKENS + 16 * layout.norm_heads(heads)


def _packed(config: PreTrainedConfig) -> list[int]:
    return [i for i, layer in enumerate(OscarCache(config).layers) if isinstance(layer, OscarLayer)]


def _probe(config: PreTrainedConfig, seed: int) -> Tensor:
    """The token that texts start with, if there is one, and random tokens twice: int64 (1, n)."""
    decoder = config.get_text_config(decoder=True)
    size = decoder.vocab_size  # tokens that mean something special are at its ends
    tokens = torch.randint(size // 100, size // 2, (1, _LENGTH), generator=torch.Generator().manual_seed(seed))
    start = decoder.bos_token_id
    first = torch.full((1, 0 if start is None else 1), 0 if start is None else start)
    return torch.cat((first, tokens, tokens), dim=1)
