"""KIVI (arXiv 2402.02750): keys per channel, values per token; a setting of our own cache."""

from __future__ import annotations

from typing import Literal

from oscar_kv.config import BLOCK_TOKENS, OscarConfig


def kivi(
    bits: Literal[2, 4] = 2, *, group: Literal[32, 64, 128] = 32, zero_point: Literal["float", "int"] = "float"
) -> OscarConfig:
    """KIVI as a configuration of :class:`~oscar_kv.OscarCache`.

    Keys (after RoPE): ``x^ = s round((x - min x) / s) + min x`` over groups of consecutive tokens of one channel;
    values: the same over groups of channels of one token. ``bits + 32 / group`` bits per number.

    Differs from the release: values are packed with the keys, 128 at a time, where the release keeps exactly the
    newest 128 in 16 bit and packs one per step; the center of the grid is stored instead of its minimum. The zero
    point "float" is the release's; "int" is what the OScaR code calls KIVI.

    Args:
        bits: Bits per code.
        group: Tokens of a key group, and channels of a value group where the head dimension is a multiple of it.
        zero_point: Whether 0 must lie on the grid.
    """
    return OscarConfig(
        key_bits=bits,
        value_bits=bits,
        key_group=group,
        value_group=32 if group == 32 else None,
        rotate_keys=False,
        rotate_values=False,
        token_norm=None,
        equalize=0.0,
        metadata="float16",
        zero_point=zero_point,
        value_fit="minmax",
        key_shrink=1.0,
        value_shrink=1.0,
        num_sinks=0,
        residual_length=BLOCK_TOKENS,
    )
