"""The five steps on one screen: ``encode`` turns blocks of keys and values into bytes, ``decode`` turns them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.pack import (
    RecordLayout,
    from_bytes,
    order_metadata,
    order_norms,
    pack_codes,
    to_bytes,
    unorder_metadata,
    unorder_norms,
    unpack_codes,
)
from oscar_kv.quantize import dequantize, fit_group, quantize, round_metadata
from oscar_kv.rotate import rotate
from oscar_kv.scale import divide_by_norm, token_norm


@dataclass
class PackedBlocks:
    """Packed blocks of 128 tokens; row b of the batch holds its tokens 128 * j to 128 * j + 127 in block j.

    Args:
        records: uint8 (batch, blocks, heads, record bytes), see :mod:`oscar_kv.pack`.
        norms: bfloat16 (batch, blocks, 1 or heads, 128) token norms in the order of :mod:`oscar_kv.pack`, or None
            without token scaling.
    """

    records: Tensor
    norms: Tensor | None

    @property
    def nbytes(self) -> int:
        return self.records.nbytes + (0 if self.norms is None else self.norms.nbytes)

    def part(self, rows: slice | Tensor, blocks: slice) -> PackedBlocks:
        """Some blocks of some rows."""
        return PackedBlocks(self.records[rows, blocks], None if self.norms is None else self.norms[rows, blocks])

    @classmethod
    def cat(cls, parts: Sequence[PackedBlocks]) -> PackedBlocks:
        """Parts that follow one another as one; a copy where they are several."""
        if len(parts) == 1:
            return parts[0]
        norms = [part.norms for part in parts if part.norms is not None]
        return cls(torch.cat([part.records for part in parts], dim=1), torch.cat(norms, dim=1) if norms else None)

    def fill(self, parts: Iterable[PackedBlocks], non_blocking: bool = False) -> None:
        """Copy the blocks of parts that follow one another, from block 0 on; maybe from or to another device."""
        start = 0
        for part in parts:
            stop = start + part.records.shape[1]
            self.records[:, start:stop].copy_(part.records, non_blocking=non_blocking)
            if self.norms is not None and part.norms is not None:
                self.norms[:, start:stop].copy_(part.norms, non_blocking=non_blocking)
            start = stop

    def token_norms(self) -> Tensor | None:
        """Token norms in natural order: float32 (batch, 1 or heads, 128 * blocks)."""
        return None if self.norms is None else unorder_norms(self.norms).float().transpose(1, 2).flatten(2)


def encode(
    keys: Tensor,
    values: Tensor,
    config: OscarConfig,
    *,
    equalizer: Tensor | None = None,
    num_sinks: int = 0,
) -> PackedBlocks:
    """Equalize, rotate, scale, quantize and pack whole blocks.

    Every number is worked out per block and row, so the same tokens give the same bytes in any batch and any chunk.

    Args:
        keys: (batch, heads, 128 * blocks, key_dim) after RoPE, any float dtype.
        values: (batch, heads, 128 * blocks, value_dim).
        config: The quantization.
        equalizer: float32 (batch, heads, key_dim) from :func:`~oscar_kv.scale.channel_equalizer`, or None.
        num_sinks: Tokens at the start of the first block that count for no statistic, and whose values are packed as 0
            (they are kept elsewhere).

    Returns:
        The packed blocks. A key token that is not finite gets norm NaN and spoils only itself. Without token scaling
        there is no norm to hold the NaN: its code is 0.

    Raises:
        ValueError: The number of tokens is no multiple of 128.
    """
    tokens = keys.shape[2]
    if tokens % BLOCK_TOKENS or values.shape[:3] != keys.shape[:3]:
        raise ValueError(
            f"encode takes whole blocks of {BLOCK_TOKENS} tokens, not {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    layout = RecordLayout(config, keys.shape[-1], values.shape[-1], keys.dtype)
    sections, norms, key_unit = _encode_keys(keys, layout, equalizer, num_sinks)
    value_sections, value_unit = _encode_values(values, layout, num_sinks)
    units = torch.stack((key_unit, value_unit, 0 * key_unit, 0 * key_unit), dim=-1)
    return PackedBlocks(layout.join(sections | value_sections | {"units": to_bytes(units)}), norms)


def _to_blocks(x: Tensor) -> Tensor:
    """(batch, heads, tokens, n) -> (batch, blocks, heads, 128, n)"""
    return x.unflatten(2, (-1, BLOCK_TOKENS)).transpose(1, 2)


def _raw_side(side: str, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Sections and unit of a side of 16 bits: its numbers as they are."""
    blocks = _to_blocks(x)
    empty = blocks.new_empty(*blocks.shape[:3], 0, dtype=torch.uint8)
    sections = {f"{side}_codes": to_bytes(blocks.flatten(3)), f"{side}_scale": empty, f"{side}_center": empty}
    return sections, blocks.new_ones(blocks.shape[:3], dtype=torch.float32)


def _encode_keys(
    keys: Tensor, layout: RecordLayout, equalizer: Tensor | None, num_sinks: int
) -> tuple[dict[str, Tensor], Tensor | None, Tensor]:
    """Sections, norms and unit (batch, blocks, heads) of the keys: per channel, over groups of tokens."""
    config = layout.config
    if config.key_bits == 16:
        sections, unit = _raw_side("key", keys)
        return sections, None, unit
    k, norms, keep = transform_keys(keys, config, equalizer)
    keep[:, :, :num_sinks] = False
    k, keep = (  # (batch, blocks, heads, groups, key_dim or 1, group)
        _to_blocks(x).unflatten(3, (-1, config.key_group)).transpose(-1, -2) for x in (k, keep)
    )
    integer_zero = config.zero_point == "int"
    scale, center = fit_group(
        k, keep, config.key_bits, fit=config.key_fit, shrink=config.key_shrink, integer_zero=integer_zero
    )
    s, c, unit = round_metadata(scale, center, layout.metadata_dtype, (-2, -1))
    codes = quantize(k, s.float() * unit, c.float() * unit, config.key_bits)
    codes = codes.transpose(-1, -2).flatten(3, 4)  # (..., 128, key_dim)
    sections = {
        "key_codes": pack_codes(codes, config.key_bits, tokens_are_rows=True),
        "key_scale": to_bytes(order_metadata(s)),
        "key_center": to_bytes(order_metadata(c)),
    }
    if norms is not None:
        norms = order_norms(_to_blocks(norms.unsqueeze(-1)).squeeze(-1))
    return sections, norms, unit[..., 0, 0]


def _encode_values(values: Tensor, layout: RecordLayout, num_sinks: int) -> tuple[dict[str, Tensor], Tensor]:
    """Sections and unit (batch, blocks, heads) of the values: per token, over groups of channels."""
    config = layout.config
    if config.value_bits == 16:
        return _raw_side("value", values)
    v = rotate(values.float()) if config.rotate_values else values.float()
    # sinks are read elsewhere, and must not stretch the unit that all tokens share
    v = _to_blocks(torch.cat((torch.zeros_like(v[:, :, :num_sinks]), v[:, :, num_sinks:]), dim=2))
    v = v.unflatten(-1, (-1, layout.value_group))  # (batch, blocks, heads, 128, groups, group)
    keep = torch.ones((), dtype=torch.bool, device=v.device)
    integer_zero = config.zero_point == "int"
    scale, center = fit_group(
        v, keep, config.value_bits, fit=config.value_fit, shrink=config.value_shrink, integer_zero=integer_zero
    )
    s, c, unit = round_metadata(scale * config.value_gain, center, layout.metadata_dtype, (-2, -1))
    step = s.float() * unit * (1 / config.value_gain)
    codes = quantize(v, step, c.float() * unit, config.value_bits).flatten(-2)  # (..., 128, value_dim)
    sections = {
        "value_codes": pack_codes(codes, config.value_bits, tokens_are_rows=False),
        "value_scale": to_bytes(order_metadata(s.transpose(-1, -2))),
        "value_center": to_bytes(order_metadata(c.transpose(-1, -2))),
    }
    return sections, unit[..., 0, 0]


def transform_keys(keys: Tensor, config: OscarConfig, equalizer: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
    """Equalized, rotated and scaled keys: what is quantized.

    Args:
        keys: (batch, heads, tokens, key_dim), any float dtype.
        config: The steps to take.
        equalizer: float32 (batch, heads, key_dim) or None.

    Returns:
        The keys, float32 (batch, heads, tokens, key_dim), 0 where a token is not finite; their norms as they are
        stored, (batch, 1 or heads, tokens), or None without token scaling; and which tokens are finite,
        bool (batch, 1 or heads, tokens, 1).
    """
    k = keys.float()
    if equalizer is not None:
        k = k / equalizer.unsqueeze(2)
    if config.rotate_keys:
        k = rotate(k)
    if config.token_norm is None:
        finite = k.isfinite().all(-1, keepdim=True)
        return torch.where(finite, k, 0.0), None, finite
    norms = token_norm(k, config.token_norm, config.scale_scope)
    return divide_by_norm(k, norms), norms, norms.isfinite().unsqueeze(-1)


def dequantize_blocks(blocks: PackedBlocks, layout: RecordLayout) -> tuple[Tensor, Tensor]:
    """Keys and values in the space in which they were quantized, token norms left out.

    Returns:
        float32 (batch, heads, 128 * blocks, key_dim) and (batch, heads, 128 * blocks, value_dim).
    """
    config = layout.config
    sections = layout.split(
        blocks.records.transpose(1, 2)
    )  # (batch, heads, blocks, ...): blocks are one after the other
    units = from_bytes(sections["units"], torch.float32)

    def params(side: str, groups: int, unit: Tensor) -> tuple[Tensor, Tensor]:  # (..., groups, n) each
        names = (f"{side}_scale", f"{side}_center")
        stored = (unorder_metadata(from_bytes(sections[name], layout.metadata_dtype), groups) for name in names)
        scale, center = (x.float() * unit[..., None, None] for x in stored)
        return scale, center

    if config.key_bits == 16:
        keys = from_bytes(sections["key_codes"], layout.dtype).unflatten(-1, (BLOCK_TOKENS, -1)).float()
    else:
        groups = BLOCK_TOKENS // config.key_group
        scale, center = params("key", groups, units[..., 0])
        codes = unpack_codes(sections["key_codes"], config.key_bits, layout.key_dim, tokens_are_rows=True)
        codes = codes.unflatten(-2, (groups, config.key_group)).transpose(-1, -2)
        keys = dequantize(codes, scale, center, config.key_bits).transpose(-1, -2).flatten(-3, -2)

    if config.value_bits == 16:
        values = from_bytes(sections["value_codes"], layout.dtype).unflatten(-1, (BLOCK_TOKENS, -1)).float()
    else:
        groups = layout.value_dim // layout.value_group
        scale, center = (x.transpose(-1, -2) for x in params("value", groups, units[..., 1]))
        codes = unpack_codes(sections["value_codes"], config.value_bits, layout.value_dim, tokens_are_rows=False)
        values = dequantize(codes.unflatten(-1, (groups, -1)), scale, center, config.value_bits).flatten(-2)
    return keys.flatten(2, 3), values.flatten(2, 3)


def decode(blocks: PackedBlocks, layout: RecordLayout, *, equalizer: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The keys and values that the packed blocks stand for: ``decode(encode(k, v))`` approximates k and v.

    Args:
        blocks: From :func:`encode`.
        layout: The layout of its records.
        equalizer: The same as for :func:`encode`.

    Returns:
        (batch, heads, 128 * blocks, head_dim) keys and values in ``layout.dtype``.
    """
    keys, values = dequantize_blocks(blocks, layout)
    config = layout.config
    if config.key_bits != 16:
        norms = blocks.token_norms()
        if norms is not None:
            keys = keys * norms.unsqueeze(-1)
        if config.rotate_keys:
            keys = rotate(keys)
        if equalizer is not None:
            keys = keys * equalizer.unsqueeze(2)
    if config.value_bits != 16 and config.rotate_values:
        values = rotate(values)
    return keys.to(layout.dtype), values.to(layout.dtype)
