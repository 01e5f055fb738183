"""Step 3: asymmetric groups. Code q stands for ``center + (q - levels / 2) * scale`` with ``levels = 2**bits - 1``."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kv.config import Fit

_LSTSQ_STEPS = 3
METADATA_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
}
_METADATA_TOP = {  # largest stored magnitude, as a power of two: all of fp8's range, 1 for the 16-bit types
    torch.float16: 0,
    torch.bfloat16: 0,
    torch.float8_e4m3fn: 8,
}


def fit_group(
    x: Tensor, keep: Tensor, bits: int, *, fit: Fit, shrink: float, integer_zero: bool
) -> tuple[Tensor, Tensor]:
    """Scale and center of each group.

    Args:
        x: (..., group) float32; a group is the last dimension.
        keep: bool, broadcastable to x: False leaves an element out of the statistics.
        bits: Code width.
        fit: "minmax", or "lstsq": alternating least squares that starts from the shrunk min/max range.
        shrink: Factor on the min/max range.
        integer_zero: Round the offset so that 0 lies on the (extended) grid, as the released OScaR code does.

    Returns:
        (scale, center), each (...) float32. A group without elements has scale and center 0; a constant group has
        scale 0. NaN inside ``keep`` gives NaN.
    """
    levels = 2**bits - 1
    low = torch.where(keep, x, torch.inf).amin(-1)
    high = torch.where(keep, x, -torch.inf).amax(-1)
    empty = low > high
    low, high = torch.where(empty, 0.0, low), torch.where(empty, 0.0, high)
    scale = (high - low) * (shrink / levels)
    center = low + (high - low) * 0.5
    if integer_zero:
        zero = torch.round(-(center - 0.5 * levels * scale) / torch.where(scale > 0, scale, 1.0))
        center = torch.where(scale > 0, (0.5 * levels - zero) * scale, center)
    if fit == "lstsq":
        for _ in range(_LSTSQ_STEPS):
            scale, center = _refit(x, keep, quantize(x, scale, center, bits), scale, center, levels)
    return scale, center


def _refit(x: Tensor, keep: Tensor, codes: Tensor, scale: Tensor, center: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Least-squares scale and center for fixed codes."""
    weight = keep.expand_as(x).float()
    count = weight.sum(-1).clamp(min=1.0)
    u = codes.float() - 0.5 * levels
    x = torch.where(keep, x, 0.0)
    mean_u, mean_x = (u * weight).sum(-1) / count, x.sum(-1) / count
    du = (u - mean_u.unsqueeze(-1)) * weight
    variance = du.square().sum(-1)
    slope = (du * (x - mean_x.unsqueeze(-1))).sum(-1) / variance
    usable = variance > 0  # one code for the whole group: nothing to refit
    return torch.where(usable, slope, scale), torch.where(usable, mean_x - slope * mean_u, center)


def round_metadata(scale: Tensor, center: Tensor, dtype: torch.dtype, dims: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Scale and center in their storage dtype, and the power of two that they are stored relative to.

    The unit is one number per record (KV head and block), so that values of any magnitude fit: no fp16 overflow
    beyond 65504, and fp8's narrow range is always centred on the data.

    Args:
        scale: float32.
        center: float32, same shape.
        dtype: Storage dtype.
        dims: Dimensions that share a unit.

    Returns:
        (stored scale, stored center, unit): real scale = stored scale * unit, NaN where it is not finite; unit is
        float32 with ``dims`` kept.
    """
    largest = torch.maximum(scale.abs(), center.abs()).nan_to_num(0.0, 0.0, 0.0).amax(dims, keepdim=True)
    _, exponent = torch.frexp(largest)  # largest < 2 ** exponent
    exponent = torch.where(largest > 0, exponent - _METADATA_TOP[dtype], 0).clamp(-100, 127)
    unit = torch.ldexp(torch.ones_like(largest), exponent)
    # casts to fp8 differ in what they make of infinity
    stored = (torch.where(x.isfinite(), x / unit, torch.nan).to(dtype) for x in (scale, center))
    return *stored, unit


def quantize(x: Tensor, scale: Tensor, center: Tensor, bits: int) -> Tensor:
    """Nearest code of each element on the grid of its group.

    Args:
        x: (..., group) float32.
        scale: (...) float32; where it is 0 every code is the middle of the grid.
        center: (...) float32.
        bits: Code width.

    Returns:
        uint8 (..., group). NaN gets code 0.
    """
    levels = 2**bits - 1
    step = torch.where(scale > 0, scale, torch.inf).unsqueeze(-1)
    codes = torch.round((x - center.unsqueeze(-1)) / step + 0.5 * levels)
    return codes.nan_to_num(0.0).clamp(0, levels).to(torch.uint8)


def dequantize(codes: Tensor, scale: Tensor, center: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`quantize`: float32 (..., group)."""
    levels = 2**bits - 1
    return (codes.float() - 0.5 * levels) * scale.unsqueeze(-1) + center.unsqueeze(-1)
