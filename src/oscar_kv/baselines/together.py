"""OSCAR of Together AI (arXiv 2605.17757): rotations calibrated on attention's own statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oscar_kv.baselines.base import Apart, Codec, GroupedMethod, LayerShape, TokenGroups
from oscar_kv.baselines.capture import capture
from oscar_kv.baselines.groups import Groups
from oscar_kv.rotate import rotate


@dataclass(frozen=True)
class Rotations:
    """Rotations of the keys and values of each layer, shared by its heads.

    Args:
        keys: By layer, float32 (key_dim, key_dim); a key is packed as ``k @ R``.
        values: By layer, float32 (value_dim, value_dim).
    """

    keys: Mapping[int, Tensor]
    values: Mapping[int, Tensor]

    def save(self, path: Path) -> None:
        """Write them as safetensors."""
        sides = {"keys": self.keys, "values": self.values}
        save_file({f"{side}.{i}": x.contiguous() for side, found in sides.items() for i, x in found.items()}, path)

    @classmethod
    def load(cls, path: Path) -> Rotations:
        """Inverse of :meth:`save`."""
        sides: dict[str, dict[int, Tensor]] = {"keys": {}, "values": {}}
        for name, x in load_file(path).items():
            side, layer = name.split(".")
            sides[side][int(layer)] = x
        return cls(**sides)


def calibrate(model: PreTrainedModel, ids: Tensor) -> Rotations:
    """Rotations from a text, in one pass: ``R = U H``, U the eigenvectors of a second moment, H a Hadamard matrix.

    Keys: the mean over KV heads of ``C_h = E[q q']`` over the queries of the head's group. Values: the mean over KV
    heads of ``E[w_t v_t v_t']`` with ``w_t = k_t' C_h k_t`` divided by its mean over tokens. All after RoPE.

    Args:
        model: A decoder model.
        ids: int64 (1, n) tokens of a text on which nothing is tested.
    """
    keys: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}

    def visit(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        q, k, v = (x[0].double().cpu() for x in (query, key, value))
        q = q.unflatten(0, (k.shape[0], -1)).flatten(1, 2)  # (KV heads, queries of the group, dim)
        moment = q.mT @ q / q.shape[1]
        weight = ((k @ moment) * k).sum(-1, keepdim=True)  # (KV heads, n, 1)
        weight = weight / weight.mean(1, keepdim=True)
        keys[layer] = _basis(moment.mean(0))
        values[layer] = _basis(((weight * v).mT @ v / v.shape[1]).mean(0))

    capture(model, ids, visit)
    return Rotations(keys, values)


def _basis(moment: Tensor) -> Tensor:
    """U H: the rows of U in the eigenbasis of a symmetric matrix, spread by a Hadamard matrix."""
    _, vectors = torch.linalg.eigh(moment)
    return rotate(vectors).float()


@dataclass(frozen=True, kw_only=True)
class TogetherOSCAR(GroupedMethod):
    """OSCAR (arXiv 2605.17757), not to be confused with OScaR: a calibrated rotation, a clipped range, per token.

    ``x^ = RTN(clip(x R)) R'`` over groups of channels of a token and head; ``clip`` limits magnitudes to the order
    statistic with index ``int(0.96 D)`` for keys (after RoPE) and ``int(0.92 D)`` for values. The first 64 tokens and
    the newest 256 stay in 16 bit. ``b + 32 / group`` bits per number; its evaluation stored scales in 32 bits.

    Differs from the release: the permutation P of its ``R = U H P``, which changes nothing where a head is one group;
    values are rotated when they are packed instead of by the weights; tokens leave the window in blocks of
    ``block``. The release calibrates on the questions that it reports on.

    Args:
        key_clip: Share of the sorted magnitudes of a key that is not clipped.
        value_clip: The same for values.
        rotations: From :func:`calibrate`, or :meth:`calibrated`.
    """

    num_sinks: int = 64
    residual_length: int = 256
    group: int | None = 128
    key_clip: float = 0.96
    value_clip: float = 0.92
    rotations: Rotations | None = field(default=None, compare=False, repr=False)

    def check(self, config: PreTrainedConfig) -> None:
        if self.rotations is None:
            raise ValueError("TogetherOSCAR needs rotations: calibrated(model, ids) with a text that is not tested on")

    def codec(self, shape: LayerShape) -> Codec:
        if self.rotations is None:
            raise ValueError("TogetherOSCAR needs rotations")
        rotations = (self.rotations.keys[shape.index], self.rotations.values[shape.index])
        key, value = (x.to(shape.device) for x in rotations)
        return Apart(
            _Calibrated(self.groups(shape.key_dim), key, self.key_clip),
            _Calibrated(self.groups(shape.value_dim), value, self.value_clip),
        )

    def calibrated(self, model: PreTrainedModel, ids: Tensor) -> Self:
        """This method with the rotations that a text (1, n) gives, which nothing is tested on."""
        return replace(self, rotations=calibrate(model, ids))


class _Calibrated(TokenGroups):
    def __init__(self, groups: Groups, rotation: Tensor, clip: float) -> None:
        super().__init__(groups)
        self.rotation, self.clip = rotation, clip

    def forward(self, x: Tensor, start: int) -> Tensor:
        x = x @ self.rotation
        limit = x.abs().sort(dim=-1).values[..., int(self.clip * x.shape[-1]), None]
        return torch.minimum(torch.maximum(x, -limit), limit)

    def inverse(self, x: Tensor, start: int) -> Tensor:
        return x @ self.rotation.T
