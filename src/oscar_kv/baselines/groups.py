"""Asymmetric groups as the rivals store them: a scale and a center per group, both 16 or 32 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from oscar_kv.baselines.bits import pack_bits, unpack_bits
from oscar_kv.quantize import dequantize, quantize

MetadataType = Literal["float16", "float32"]
Packed = dict[str, Tensor]  # what is stored, by name; the names' last words are in base.COMPONENTS


def largest_group(dim: int, most: int | None) -> int:
    """The largest power of two that divides a dimension, at most ``most``; with None the dimension itself."""
    return dim if most is None else min(dim & -dim, most)


@dataclass(frozen=True)
class Groups:
    """Round to nearest over consecutive numbers of the last dimension.

    ``s = (c max - c min) / (2**b - 1)``, ``code = round((x - c min) / s)``, ``x^ = code s + c min``; what is stored
    for the offset is the center of the grid, ``c min + s (2**b - 1) / 2``.

    Args:
        bits: b.
        size: Numbers in a group.
        clip: c, the factor on minimum and maximum.
        integer_zero: Round ``-c min / s`` to a whole number, so that 0 lies on the (extended) grid.
        metadata: Storage of scale and center.
    """

    bits: int
    size: int
    clip: float = 1.0
    integer_zero: bool = False
    metadata: MetadataType = "float16"

    def encode(self, x: Tensor) -> Packed:
        """float32 (..., n), n a multiple of the group -> codes (..., bytes), scale and center (..., groups)."""
        x = x.unflatten(-1, (-1, self.size))
        low, high = self.clip * x.amin(-1), self.clip * x.amax(-1)
        half, dtype = 0.5 * (2**self.bits - 1), getattr(torch, self.metadata)
        scale = ((high - low) / (2 * half)).to(dtype).float()
        if self.integer_zero:
            low = torch.where(scale > 0, scale * (low / scale).round(), low)
        center = (low + half * scale).to(dtype)
        codes = quantize(x, scale, center.float(), self.bits).flatten(-2)
        return {"codes": pack_bits(codes, self.bits), "scale": scale.to(dtype), "center": center}

    def decode(self, packed: Packed) -> Tensor:
        """Inverse of :meth:`encode`: float32 (..., n)."""
        scale, center = packed["scale"].float(), packed["center"].float()
        codes = unpack_bits(packed["codes"], self.bits, scale.shape[-1] * self.size)
        return dequantize(codes.unflatten(-1, (-1, self.size)), scale, center, self.bits).flatten(-2)
