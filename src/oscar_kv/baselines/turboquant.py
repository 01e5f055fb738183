"""TurboQuant (arXiv 2504.19874): a random rotation, one norm per vector, and a Lloyd-Max codebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from oscar_kv.baselines.base import Apart, Codec, LayerShape, Method, Side
from oscar_kv.baselines.bits import pack_bits, unpack_bits
from oscar_kv.baselines.codebook import gaussian, haar_rotation, lloyd_max
from oscar_kv.baselines.groups import Packed

_SEEDS = {"rotation": 0, "outliers": 2}  # a sketch has the next one


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Method):
    """TurboQuant (arXiv 2504.19874, algorithms 1 and 2), keys (after RoPE) and values alike.

    "mse": ``x^ = |x| P' c``, with ``c`` the nearest entries of a Lloyd-Max codebook to ``P x / |x|``, and P a random
    rotation. "prod": one bit less for that, and the signs of a Gaussian sketch S of what remains, the residual r of
    ``x / |x|``: ``x^ = |x| (P' c + |r| sqrt(pi / 2) / D  S' sign(S r))``, whose inner products with any y are unbiased.
    ``b + 16 / D`` bits per number, or ``b + 32 / D`` for "prod", with norms in 16 bit.

    With ``outlier_bits`` the channels of largest mean magnitude in the prompt (per KV head) are a vector of their own,
    with its own rotation, norm and bits: the paper's "2.5 bit" setting is a quarter of the channels in 3 bits and the
    others in 2, which is 2.25 bits and two norms. Without sketch it is what the OScaR paper calls TurboQuant+.

    No code is released. Open points: the codebook is that of the vector's dimension, not of the normal limit; which
    channels are outliers is decided by the first tokens that are packed, where the paper says nothing; all layers and
    heads share the rotations.

    Args:
        bits: b, of the regular channels.
        variant: "mse" or "prod".
        outlier_bits: b of the outlier channels; None: there are none.
        outliers: Share of the channels that are outliers, rounded to whole channels.
        budget: Bits per number, norms included; decides how many channels are outliers in place of ``outliers``.

    Raises:
        ValueError: Too few bits, or no share of the channels.
    """

    bits: int = 2
    variant: Literal["mse", "prod"] = "mse"
    outlier_bits: int | None = None
    outliers: float = 0.25
    budget: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in ("mse", "prod") or not 0.0 < self.outliers < 1.0:
            raise ValueError(f"variant is mse or prod, and outliers a share between 0 and 1: {self}")
        if self.outlier_bits is not None and self.outlier_bits <= self.bits:
            raise ValueError(f"outlier channels need more bits than the others: {self}")
        if any(
            b is not None and not (1 if self.variant == "mse" else 2) <= b <= 4 for b in (self.bits, self.outlier_bits)
        ):
            raise ValueError(f"bits must be 1 (for prod 2) to 4: {self}")

    def codec(self, shape: LayerShape) -> Codec:
        return Apart(self._side(shape.key_dim, shape.device), self._side(shape.value_dim, shape.device))

    def _side(self, dim: int, device: torch.device) -> Side:
        if self.outlier_bits is None:
            return VectorQuantizer(dim, self.bits, self.variant, _SEEDS["rotation"], device)
        share = self.outliers
        if self.budget is not None:
            norms = 16 * (2 if self.variant == "mse" else 4)  # bits per vector
            share = (self.budget - norms / dim - self.bits) / (self.outlier_bits - self.bits)
        count = min(dim - 1, max(1, round(share * dim)))
        return _Split(
            count,
            VectorQuantizer(count, self.outlier_bits, self.variant, _SEEDS["outliers"], device),
            VectorQuantizer(dim - count, self.bits, self.variant, _SEEDS["rotation"], device),
        )


class VectorQuantizer(Side):
    """One vector per token and head, of one dimension and number of bits; the seed is of its rotation."""

    def __init__(self, dim: int, bits: int, variant: str, seed: int, device: torch.device) -> None:
        super().__init__()
        self.dim, self.bits = dim, bits if variant == "mse" else bits - 1
        self.rotation = haar_rotation(dim, seed).to(device)
        self.codebook = lloyd_max(self.bits, dim).to(device) / dim**0.5
        self.sketch = gaussian(dim, seed + 1).to(device) if variant == "prod" else None

    def encode(self, x: Tensor, start: int) -> Packed:
        norm = x.norm(dim=-1, keepdim=True)
        unit = x / torch.where(norm > 0, norm, 1.0)
        edges = (self.codebook[1:] + self.codebook[:-1]) / 2
        codes = torch.bucketize(unit @ self.rotation.T, edges)
        packed = {"codes": pack_bits(codes.to(torch.uint8), self.bits), "norm": norm.half()}
        if self.sketch is not None:
            residual = unit - self.codebook[codes] @ self.rotation
            signs = (residual @ self.sketch.T >= 0).to(torch.uint8)
            packed |= {"signs": pack_bits(signs, 1), "residual_norm": residual.norm(dim=-1, keepdim=True).half()}
        return packed

    def decode(self, packed: Packed, start: int) -> Tensor:
        codes = unpack_bits(packed["codes"], self.bits, self.dim)
        unit = self.codebook[codes.int()] @ self.rotation
        if self.sketch is not None:
            signs = 2.0 * unpack_bits(packed["signs"], 1, self.dim).float() - 1.0
            gain = packed["residual_norm"].float() * ((torch.pi / 2) ** 0.5 / self.dim)
            unit = unit + gain * (signs @ self.sketch)
        return packed["norm"].float() * unit


class _Split(Side):
    """Outlier channels and the others, as two vectors."""

    def __init__(self, count: int, outliers: VectorQuantizer, regular: VectorQuantizer) -> None:
        super().__init__()
        self.count, self.parts = count, {"outlier": outliers, "regular": regular}

    def encode(self, x: Tensor, start: int) -> Packed:
        if not self.state:
            order = x.abs().mean(2).argsort(dim=-1, descending=True, stable=True)  # (batch, heads, dim)
            self.state = {"channels": order.to(torch.int16)}  # outliers first
        order = self.state["channels"].long().unsqueeze(2)
        pieces = x.gather(-1, order.expand_as(x)).tensor_split((self.count,), dim=-1)
        packed = [part.encode(piece, start) for part, piece in zip(self.parts.values(), pieces, strict=True)]
        return {
            f"{name}_{key}": y for name, tensors in zip(self.parts, packed, strict=True) for key, y in tensors.items()
        }

    def decode(self, packed: Packed, start: int) -> Tensor:
        pieces = []
        for name, part in self.parts.items():
            own = {key.removeprefix(f"{name}_"): y for key, y in packed.items() if key.startswith(f"{name}_")}
            pieces.append(part.decode(own, start))
        x = torch.cat(pieces, dim=-1)
        order = self.state["channels"].long().unsqueeze(2).expand_as(x)
        return torch.empty_like(x).scatter_(-1, order, x)
