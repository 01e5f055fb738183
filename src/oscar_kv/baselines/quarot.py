"""QuaRot (arXiv 2404.00456): a Hadamard rotation per head, then round to nearest per token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from oscar_kv.baselines.base import Apart, Codec, LayerShape, TokenGroups
from oscar_kv.baselines.rtn import RTN
from oscar_kv.rotate import rotate


@dataclass(frozen=True, kw_only=True)
class QuaRot(RTN):
    """QuaRot's KV cache (arXiv 2404.00456): keys after RoPE and values are rotated, then rounded per token and head.

    ``x^ = H RTN(H x)`` with the orthonormal Hadamard matrix H of each head. The release has one group per token and
    head (``group=None``); 32 is the setting of the OScaR paper.

    Differs from the release: weights and activations stay as they are; values are rotated when they are packed
    instead of by the weights, which is the same numbers; ranges are not clipped; no range is widened to hold 0. Like
    its CUDA cache, and unlike its simulation, the minimum is stored as it is, and a prompt attends to itself exactly.
    """

    def codec(self, shape: LayerShape) -> Codec:
        return Apart(_Rotated(self.groups(shape.key_dim)), _Rotated(self.groups(shape.value_dim)))


class _Rotated(TokenGroups):
    def forward(self, x: Tensor, start: int) -> Tensor:
        return rotate(x)

    def inverse(self, x: Tensor, start: int) -> Tensor:
        return rotate(x)
