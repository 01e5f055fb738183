"""The steps of the method, one at a time, as configurations of the codec."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from oscar_kv.baselines import kivi
from oscar_kv.codec import decode, encode
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.evaluate import PRESETS
from oscar_kv.observe import add_query_power
from oscar_kv.pack import RecordLayout
from oscar_kv.scale import channel_equalizer

NONE, ROTATION, SCALING, BOTH, SINKS = "none", "rotation", "scaling", "rotation+scaling", "rotation+scaling+sinks"
RECOMMENDABLE = ("default", "quality", "four-bit")  # from the fewest bits to the most
_NUM_SINKS = 4


def steps(value_dim: int) -> dict[str, OscarConfig]:
    """From plain groups (KIVI) to the published method with sinks, then our presets.

    All but the presets take the same bytes, norms and sinks apart: 2 bits, groups of 32, fp16 scales and zeros.

    Args:
        value_dim: Head dimension of the values, which decides the size of their groups.
    """
    plain = replace(kivi(), value_group=None if value_dim % 32 else 32)
    rotation = replace(plain, rotate_keys=True, rotate_values=True)
    both = replace(rotation, token_norm="l2")
    return {
        NONE: plain,
        ROTATION: rotation,
        SCALING: replace(plain, token_norm="l2"),
        BOTH: both,
        SINKS: replace(both, num_sinks=_NUM_SINKS),
        **{name: replace(PRESETS[name], value_group=_fitting(PRESETS[name], value_dim)) for name in RECOMMENDABLE},
    }


def _fitting(config: OscarConfig, value_dim: int) -> int | None:
    group = config.value_group
    return group if group is not None and value_dim % group == 0 else None


def equalizer_of(keys: Tensor, config: OscarConfig, queries: Tensor | None = None) -> Tensor | None:
    """What the cache divides out of these keys (1, heads, n, key_dim), n whole blocks: (1, heads, key_dim) or None."""
    if config.equalize == 0 or config.key_bits == 16:
        return None
    power = torch.zeros(1, keys.shape[1], keys.shape[-1], dtype=torch.float64, device=keys.device)
    if queries is not None:
        add_query_power(power, queries, [0], [queries.shape[2]], None, config.num_sinks)
    first = keys[:, :, :BLOCK_TOKENS].float()
    return channel_equalizer(first, config.equalize, config.key_group, config.num_sinks, power, config.equalize_queries)


def roundtrip(
    keys: Tensor, values: Tensor, config: OscarConfig, queries: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values as the cache gives them back once they are packed; sinks as they are.

    Args:
        keys: float32 (1, heads, n, key_dim), n a multiple of 128.
        values: float32 (1, heads, n, value_dim).
        config: What to quantize and how.
        queries: (1, query heads, n, key_dim) that equalization looks at; None where there are none.
    """
    equalizer = equalizer_of(keys, config, queries)
    blocks = encode(keys, values, config, equalizer=equalizer, num_sinks=config.num_sinks)
    layout = RecordLayout(config, keys.shape[-1], values.shape[-1], keys.dtype)
    packed = decode(blocks, layout, equalizer=equalizer)
    for out, exact in zip(packed, (keys, values), strict=True):
        out[:, :, : config.num_sinks] = exact[:, :, : config.num_sinks]
    return packed


def packed_bits(config: OscarConfig, heads: int, key_dim: int, value_dim: int) -> float:
    """Bits per packed number, metadata and norms included, tail and sinks not."""
    layout = RecordLayout(config, key_dim, value_dim, torch.bfloat16)
    norms = 16 * BLOCK_TOKENS * layout.norm_heads(heads) / heads
    return (8 * layout.record_bytes + norms) / (BLOCK_TOKENS * (key_dim + value_dim))
