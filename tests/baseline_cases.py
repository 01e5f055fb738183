"""What the tests of the rival methods share: the caches that they fill, and round to nearest in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from oscar_kv.baselines import BaselineCache, Method

HEADS, DIM = 2, 64
EXACT: dict[str, Any] = {"metadata": "float32"}  # scales without rounding, so that codes can be compared one by one


def config(**overrides: Any) -> LlamaConfig:
    """A decoder of three layers with GQA; no weights are needed to fill a cache."""
    given = {
        "num_hidden_layers": 3, "num_attention_heads": 2 * HEADS, "num_key_value_heads": HEADS, "head_dim": DIM,
        "hidden_size": 2 * HEADS * DIM, "vocab_size": 11, **overrides,
    }  # fmt: skip
    return LlamaConfig(**given)


def states(tokens: int, *, heads: int = HEADS, dim: int = DIM, rows: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Keys with a few large channels and some small tokens, and plain values: (rows, heads, tokens, dim)."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, rows, heads, tokens, dim, generator=generator)
    keys[..., :3] = 6 * keys[..., :3] + 8
    keys[:, :, ::37] *= 0.1
    return keys, values


def fill(
    method: Method, keys: Tensor, values: Tensor, sizes: list[int], layer: int = 0, **overrides: Any
) -> tuple[BaselineCache, Tensor, Tensor]:
    """A cache that took the tokens in passes of these sizes, the last one repeated, and what it holds afterwards."""
    heads, dim = keys.shape[1], keys.shape[3]
    shape = {
        "num_key_value_heads": heads,
        "num_attention_heads": 2 * heads,
        "head_dim": dim,
        "hidden_size": 128 * heads,
    }
    cache = BaselineCache(config(**{**shape, **overrides}), method, attention_mask=torch.ones(keys.shape[0], 1))
    done, turn = 0, 0
    while done < keys.shape[2]:
        size = sizes[min(turn, len(sizes) - 1)]
        cache.update(keys[:, :, done : done + size], values[:, :, done : done + size], layer)
        done, turn = done + size, turn + 1
    return cache, cache.layers[layer].keys, cache.layers[layer].values


def round_to_nearest(x: Tensor, bits: int, group: int, *, clip: float = 1.0, integer_zero: bool = False) -> Tensor:
    """``s round((x - min) / s) + min`` over groups of the last dimension, written out in float64."""
    g = x.double().reshape(*x.shape[:-1], -1, group)
    low, high = clip * g.min(-1, keepdim=True).values, clip * g.max(-1, keepdim=True).values
    s = (high - low) / (2**bits - 1)
    if integer_zero:
        z = torch.round(-low / s)
        y = s * (torch.clip(torch.round(g / s) + z, 0, 2**bits - 1) - z)
    else:
        y = s * torch.clip(torch.round((g - low) / s), 0, 2**bits - 1) + low
    return y.reshape(x.shape)


def assert_same_codes(found: Tensor, expected: Tensor, steps: Tensor | float, allowed: float = 1e-3) -> None:
    """Equal up to float32 rounding, but for the few numbers that lie on the border between two codes.

    Those, at most the share ``allowed``, may differ by one step.
    """
    difference = (found.double() - expected).abs()
    same = difference <= 2e-4 * (1 + expected.abs())
    assert (~same).double().mean() <= allowed
    assert (difference[~same] <= 1.01 * torch.as_tensor(steps).double().expand_as(difference)[~same]).all()


def steps_of(x: Tensor, bits: int, group: int) -> Tensor:
    """The step of each number's group, in the shape of x."""
    g = x.double().reshape(*x.shape[:-1], -1, group)
    s = (g.max(-1, keepdim=True).values - g.min(-1, keepdim=True).values) / (2**bits - 1)
    return s.expand_as(g).reshape(x.shape)
