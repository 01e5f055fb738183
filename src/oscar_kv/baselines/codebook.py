"""TurboQuant's ingredients: Lloyd-Max codebooks of a sphere's coordinates, and random matrices."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_GRID = 2**18
_WIDEST = 8.0  # standard deviations beyond which a coordinate has no mass worth counting
_STEPS = 1000


@cache
def lloyd_max(bits: int, dim: int | None = None) -> Tensor:
    """The codebook with least squared error for a coordinate of a random unit vector, times ``sqrt(dim)``.

    A coordinate t has the density ``(1 - t**2) ** ((dim - 3) / 2)`` up to a factor (TurboQuant, lemma 1); scaled by
    ``sqrt(dim)`` its variance is 1, and for large dimensions it is normal.

    Args:
        bits: Bits per code.
        dim: Dimension of the vector; None: the normal distribution.

    Returns:
        float32 (2**bits,), ascending.
    """
    top = _WIDEST if dim is None else min(_WIDEST, dim**0.5)
    z = torch.linspace(-top, top, _GRID + 1, dtype=torch.float64)
    z = (z[1:] + z[:-1]) / 2
    density = torch.exp(-(z**2) / 2) if dim is None else (1 - z**2 / dim).clamp(min=0.0) ** ((dim - 3) / 2)
    mass, moment = (torch.cat((x.new_zeros(1), x.cumsum(0))) for x in (density, density * z))
    levels = 2**bits
    quantiles = (torch.arange(levels, dtype=torch.float64) + 0.5) / levels
    centers = z[torch.searchsorted(mass[1:] / mass[-1], quantiles)]
    for _ in range(_STEPS):
        edges = torch.searchsorted(z, (centers[1:] + centers[:-1]) / 2)
        edges = torch.cat((edges.new_zeros(1), edges, edges.new_full((1,), len(z))))
        moved = moment[edges].diff() / mass[edges].diff()
        if torch.equal(moved, centers):
            break
        centers = moved
    return centers.float()


@cache
def haar_rotation(dim: int, seed: int) -> Tensor:
    """A random rotation from the Haar measure: Q of a Gaussian matrix, signs fixed; float32 (dim, dim)."""
    q, r = torch.linalg.qr(gaussian(dim, seed).double())
    return (q * r.diagonal().sign()).float()


@cache
def gaussian(dim: int, seed: int) -> Tensor:
    """Independent standard normal numbers, float32 (dim, dim); the same on every device."""
    return torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed))
