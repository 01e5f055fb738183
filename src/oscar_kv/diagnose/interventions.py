"""What each repair of the keys buys, at 2 bits in groups of 32: the test of "norm imbalance is the bottleneck"."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from oscar_kv.config import OscarConfig
from oscar_kv.diagnose.steps import NONE, ROTATION, SINKS, roundtrip, steps

PLAIN, ROTATED = "a: none (KIVI)", "c: rotation"
NORMS = ("b: norms equalized", "f: grouped by norm")  # what repairs norms and nothing else
WITHOUT_SINKS = "e: first tokens exact"
WITHOUT_ALL_SINKS = "h: all sinks exact"
NORMS_AND_SINKS = "i: norms equalized, all sinks exact"


def interventions(keys: Tensor, unusual: Tensor) -> dict[str, tuple[Tensor, float]]:
    """Keys after each intervention and the codec, and the bits per key element that it takes beyond plain groups.

    Only (a), (c) and (e) are methods as they stand; the others keep exact numbers on the side, or know the text, and so
    show the most that such a repair can do.

    Args:
        keys: float32 (1, heads, n, key_dim), n whole blocks.
        unusual: bool (n,), the sinks and the tokens of low norm, which (h) and (i) keep exact.
    """
    configs = steps(keys.shape[-1])
    plain, rotated = configs[NONE], configs[ROTATION]
    sinks = replace(plain, num_sinks=configs[SINKS].num_sinks)
    tokens, dim = keys.shape[2:]
    norms = keys.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    norm_bits, exact_bits = 32 / dim, 16 * float(unusual.double().mean())
    return {
        PLAIN: (_quantize(keys, plain), 0.0),
        NORMS[0]: (_quantize(keys / norms, plain) * norms, norm_bits),
        ROTATED: (_quantize(keys, rotated), 0.0),
        "d: norms equalized, rotation": (_quantize(keys / norms, rotated) * norms, norm_bits),
        WITHOUT_SINKS: (_quantize(keys, sinks), 16 * sinks.num_sinks / tokens),
        NORMS[1]: (_sorted_by_norm(keys, lambda x: _quantize(x, plain)), math.log2(tokens) / dim),
        "g: mean direction taken out": (_without_direction(keys, plain), 16 / plain.key_group + 32 / dim),
        WITHOUT_ALL_SINKS: (_without(keys, unusual, plain), exact_bits),
        NORMS_AND_SINKS: (_without(keys / norms, unusual, plain) * norms, norm_bits + exact_bits),
    }


def removed(rows: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """What each repair removes of the error of plain keys' attention output; negative where the error grows."""
    plain = max(rows[PLAIN]["output_error"], 1e-12)
    return {name: 1.0 - row["output_error"] / plain for name, row in rows.items() if name != PLAIN}


def _quantize(keys: Tensor, config: OscarConfig) -> Tensor:
    config = replace(config, value_bits=16, rotate_values=False)
    return roundtrip(keys, torch.zeros_like(keys[..., :16]), config)[0]


def _sorted_by_norm(keys: Tensor, quantize: Callable[[Tensor], Tensor]) -> Tensor:
    """Groups of tokens of similar norm: a permutation per head, undone afterwards."""
    order = keys.norm(dim=-1).argsort(-1)[..., None].expand_as(keys)
    return torch.empty_like(keys).scatter_(2, order, quantize(keys.gather(2, order)))


def _without(keys: Tensor, tokens: Tensor, config: OscarConfig) -> Tensor:
    """Some tokens, bool (n,), exact and out of their groups' statistics: the codec leaves out what is not finite."""
    tokens = tokens[:, None]
    return torch.where(tokens, keys, _quantize(torch.where(tokens, torch.nan, keys), config))


def _without_direction(keys: Tensor, config: OscarConfig) -> Tensor:
    """Each group's mean direction is projected out of its keys before quantization and put back exactly after it.

    To subtract the mean itself changes nothing: asymmetric groups per channel do not see a shift.
    """
    grouped = keys.unflatten(2, (-1, config.key_group))
    direction = F.normalize(F.normalize(grouped, dim=-1).mean(3, keepdim=True), dim=-1)
    along = ((grouped * direction).sum(-1, keepdim=True) * direction).flatten(2, 3)
    return _quantize(keys - along, config) + along
