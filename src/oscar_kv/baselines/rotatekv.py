"""RotateKV (arXiv 2501.16383): keys before RoPE, rotated over several heads and reordered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oscar_kv.baselines.base import Apart, Codec, GroupedMethod, LayerShape, TokenGroups
from oscar_kv.baselines.capture import capture
from oscar_kv.baselines.groups import Groups
from oscar_kv.baselines.rope import Rope
from oscar_kv.rotate import rotate

_HEADS = 4  # KV heads that share a rotation


@dataclass(frozen=True, kw_only=True)
class RotateKV(GroupedMethod):
    """RotateKV (arXiv 2501.16383): per token, over groups of reordered channels of all heads.

    Keys before RoPE: ``u = (H k)[order]``, with a Hadamard matrix H over four KV heads together, and the order of all
    channels sorted by their sums over a calibration text; values ``H v`` per head. Then an integer zero point,
    ``x^ = s (code - z)``, ``s = c (max - min) / (2**b - 1)``, ``z = round(-c min / s)``, with c = 0.8.
    ``b + 32 / group`` bits per number. Keys pass through RoPE again each time they are read.

    Differs from the release: the 20 slots for attention sinks are the first tokens, where the release looks for the
    tokens with the largest hidden states, which no cache sees; a prompt attends to itself exactly; weights stay as
    they are. Where the number of KV heads is no multiple of four, two heads share a rotation, or none; where 128 does
    not divide the channels, groups are the largest power of two that does. The release takes the order from the text
    that it is tested on; here it comes from another one, and without :meth:`calibrated` channels stay in their order.

    Args:
        clip: c; the release has 0.8 for 2 bits and 1 for more.
        order: By layer, int64 (KV heads * key_dim,) order of the channels; from :meth:`calibrated`.
    """

    num_sinks: int = 20
    group: int | None = 128
    clip: float = 0.8
    order: Mapping[int, Tensor] | None = field(default=None, compare=False, repr=False)

    def check(self, config: PreTrainedConfig) -> None:
        for layer in range(config.num_hidden_layers):
            Rope(config, layer)

    def groups(self, dim: int) -> Groups:
        return replace(super().groups(dim), clip=self.clip, integer_zero=True)

    def codec(self, shape: LayerShape) -> Codec:
        return Apart(_Keys(self, shape), _Values(self.groups(shape.value_dim)))

    def calibrated(self, model: PreTrainedModel, ids: Tensor) -> Self:
        """This method with the order of channels that a text (1, n) gives."""
        config = model.config.get_text_config(decoder=True)
        found: dict[int, Tensor] = {}

        def visit(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
            found[layer] = _merge_heads(Rope(config, layer).undo(key.float(), 0)).sum((0, 1, 2)).argsort().cpu()

        capture(model, ids, visit)
        return replace(self, order=found)


class _Keys(TokenGroups):
    def __init__(self, method: RotateKV, shape: LayerShape) -> None:
        channels = shape.heads * shape.key_dim
        super().__init__(method.groups(channels))
        self.rope, self.heads = Rope(shape.config, shape.index), shape.heads
        order = torch.arange(channels) if method.order is None else method.order[shape.index]
        self.order = order.to(shape.device)

    def forward(self, x: Tensor, start: int) -> Tensor:
        return _merge_heads(self.rope.undo(x, start))[..., self.order]

    def inverse(self, x: Tensor, start: int) -> Tensor:
        together = gcd(self.heads, _HEADS)
        x = x[..., self.order.argsort()].squeeze(1).unflatten(-1, (self.heads // together, -1))
        x = rotate(x).flatten(-2).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.rope.apply(x, start)


class _Values(TokenGroups):
    def forward(self, x: Tensor, start: int) -> Tensor:
        return rotate(x)

    def inverse(self, x: Tensor, start: int) -> Tensor:
        return rotate(x)


def _merge_heads(x: Tensor) -> Tensor:
    """Rotate keys over several heads: (batch, heads, tokens, dim) -> (batch, 1, tokens, heads * dim)."""
    together = gcd(x.shape[1], _HEADS)
    x = x.transpose(1, 2).flatten(2).unflatten(-1, (x.shape[1] // together, -1))
    return rotate(x).flatten(-2).unsqueeze(1)
