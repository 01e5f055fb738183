"""Codes of 1 to 8 bits in bytes, along the last dimension and in natural order: no kernel reads these."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}  # widths of the bit planes, low bits first


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Pack codes; each plane is filled up to whole bytes.

    Args:
        codes: uint8 (..., n), each below ``2 ** bits``.
        bits: 1, 2, 3, 4 or 8; 3-bit codes are a plane of 2 bits followed by one of 1 bit.

    Returns:
        uint8 (..., bytes).
    """
    planes, shift = [], 0
    for width in _PLANES[bits]:
        fields = (codes >> shift) & (2**width - 1)
        per_byte = 8 // width
        fields = F.pad(fields, (0, -codes.shape[-1] % per_byte)).unflatten(-1, (-1, per_byte))
        planes.append((fields << _shifts(width, codes.device)).sum(-1, dtype=torch.uint8))  # disjoint bits
        shift += width
    return torch.cat(planes, dim=-1)


def unpack_bits(packed: Tensor, bits: int, n: int) -> Tensor:
    """Inverse of :func:`pack_bits`: uint8 (..., n)."""
    codes = torch.zeros((), dtype=torch.uint8, device=packed.device)
    shift, start = 0, 0
    for width in _PLANES[bits]:
        size = -(-n * width // 8)
        plane = packed[..., start : start + size].unsqueeze(-1)
        fields = (plane >> _shifts(width, packed.device)) & (2**width - 1)
        codes = codes | (fields.flatten(-2)[..., :n] << shift)
        shift, start = shift + width, start + size
    return codes


def _shifts(width: int, device: torch.device) -> Tensor:
    return width * torch.arange(8 // width, dtype=torch.uint8, device=device)
