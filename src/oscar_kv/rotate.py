"""Step 1, Canalized Rotation: an orthonormal Hadamard matrix along head_dim (paper section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard_block(dim: int) -> int:
    """Size of the Hadamard blocks at this dimension: the largest power of two that divides it."""
    if dim < 1:
        raise ValueError(f"dimension must be positive, not {dim}")
    return dim & -dim


def rotate(x: Tensor) -> Tensor:
    """Multiply the last dimension by the orthonormal Hadamard matrix.

    Where the dimension is no power of two the matrix is block-diagonal (dimension 96: three blocks of 32). The
    matrix is symmetric and orthonormal, so ``rotate(rotate(x)) == x`` up to rounding, and inner products are kept.

    Butterflies instead of a matrix product: each output is the same sum in the same order whatever the other rows
    of the batch are, which keeps the codes of a row independent of its batch.

    Args:
        x: Float tensor (..., D), at least float32 in precision for exact use.

    Returns:
        A tensor of the same shape and dtype.
    """
    dim = x.shape[-1]
    block = hadamard_block(dim)
    y = x.reshape(-1, block)
    step = 1
    while step < block:
        pair = y.view(-1, block // (2 * step), 2, step)
        low, high = pair[:, :, 0], pair[:, :, 1]
        y = torch.stack((low + high, low - high), dim=2)
        step *= 2
    rotated: Tensor = y.reshape(x.shape) * block**-0.5
    return rotated
