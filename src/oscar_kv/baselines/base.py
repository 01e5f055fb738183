"""What a rival method is: its settings, and a codec for each layer that it packs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self, get_args

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oscar_kv.baselines.groups import Groups, MetadataType, Packed, largest_group

COMPONENTS = {  # of memory_bytes, by the last word of a packed tensor's name
    "codes": "codes",
    "signs": "codes",
    "scale": "scales_zeros",
    "center": "scales_zeros",
    "norm": "norms",
}


@dataclass(frozen=True)
class LayerShape:
    """The layer that a codec is for.

    Args:
        config: Configuration of the decoder.
        index: Number of the layer.
        heads: KV heads.
        key_dim: Head dimension of the keys.
        value_dim: Head dimension of the values.
        dtype: The model's dtype.
        device: Where the cache lives.
    """

    config: PreTrainedConfig
    index: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device


class Codec(ABC):
    """How one layer is packed. ``state`` are tensors that belong to the sequences in the cache, rows first."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def encode(self, keys: Tensor, values: Tensor, start: int) -> Packed:
        """Pack the tokens from column ``start`` on.

        Args:
            keys: float32 (batch, heads, tokens, key_dim), after RoPE.
            values: float32 (batch, heads, tokens, value_dim).
            start: Column of the first of these tokens; it moves on by ``tokens`` from call to call.

        Returns:
            Tensors (batch, heads or 1, tokens or groups of tokens, n) that the cache appends to those before.
        """

    @abstractmethod
    def decode(self, packed: Packed, start: int) -> tuple[Tensor, Tensor]:
        """All packed tokens, of which the first is at column ``start``: float32 keys and values."""


class Side(ABC):
    """How the keys, or the values, of a layer are packed: the "apart" form of a codec."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    @abstractmethod
    def encode(self, x: Tensor, start: int) -> Packed:
        """Pack float32 (batch, heads, tokens, dim), of which the first token is at column ``start``."""

    @abstractmethod
    def decode(self, packed: Packed, start: int) -> Tensor:
        """Inverse of :meth:`encode`."""


class TokenGroups(Side):
    """Round to nearest per token, in groups of channels; a subclass transforms the tokens before."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor, start: int) -> Tensor:
        """What is quantized: (batch, heads or 1, tokens, n)."""
        return x

    def inverse(self, x: Tensor, start: int) -> Tensor:
        """Inverse of :meth:`forward`."""
        return x

    def encode(self, x: Tensor, start: int) -> Packed:
        return self.groups.encode(self.forward(x, start))

    def decode(self, packed: Packed, start: int) -> Tensor:
        return self.inverse(self.groups.decode(packed), start)


class Apart(Codec):
    """A codec that packs keys and values apart."""

    def __init__(self, key: Side, value: Side) -> None:
        self.sides = {"key": key, "value": value}

    @property
    def state(self) -> dict[str, Tensor]:
        return {f"{name}_{key}": x for name, side in self.sides.items() for key, x in side.state.items()}

    @state.setter
    def state(self, state: dict[str, Tensor]) -> None:
        for name, side in self.sides.items():
            side.state = _of_side(name, state)

    def encode(self, keys: Tensor, values: Tensor, start: int) -> Packed:
        tokens = {"key": keys, "value": values}
        packed = {name: side.encode(tokens[name], start) for name, side in self.sides.items()}
        return {f"{name}_{key}": x for name, tensors in packed.items() for key, x in tensors.items()}

    def decode(self, packed: Packed, start: int) -> tuple[Tensor, Tensor]:
        keys, values = (side.decode(_of_side(name, packed), start) for name, side in self.sides.items())
        return keys, values


def _of_side(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}_"): x for key, x in tensors.items() if key.startswith(f"{name}_")}


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A rival and its settings.

    Args:
        num_sinks: Tokens at the start that stay in 16 bit.
        residual_length: The newest tokens stay in 16 bit.
        block: Tokens that are packed at a time, when so many are there beyond ``residual_length``; sinks count as part
            of the first block.

    Raises:
        ValueError: A number is negative, or the block is empty.
    """

    num_sinks: int = 0
    residual_length: int = 0
    block: int = 1

    def __post_init__(self) -> None:
        if self.num_sinks < 0 or self.residual_length < 0 or self.block < 1:
            raise ValueError(f"num_sinks and residual_length must be at least 0 and block at least 1: {self}")

    @abstractmethod
    def codec(self, shape: LayerShape) -> Codec:
        """The codec of a layer."""

    def check(self, config: PreTrainedConfig) -> None:  # noqa: B027 - most methods pack any
        """Refuse a decoder that this method cannot pack."""

    def calibrated(self, model: PreTrainedModel, ids: Tensor) -> Self:
        """This method with what it learns offline from a text (1, n); most learn nothing."""
        return self


@dataclass(frozen=True, kw_only=True)
class GroupedMethod(Method):
    """A method that rounds to nearest in groups, at ``bits + 32 / group`` bits per number with 16-bit metadata.

    Args:
        bits: Bits per code, 2, 3, 4 or 8.
        group: Numbers in a group, at most (a power of two that divides the dimension); None: the whole dimension.
        metadata: Storage of scale and offset.

    Raises:
        ValueError: A setting is not one of those.
    """

    bits: int = 2
    group: int | None = 32
    metadata: MetadataType = "float16"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (2, 3, 4, 8) or self.metadata not in get_args(MetadataType):
            raise ValueError(f"bits must be 2, 3, 4 or 8, and metadata {' or '.join(get_args(MetadataType))}: {self}")
        if self.group is not None and (self.group < 1 or self.group & (self.group - 1)):
            raise ValueError(f"group must be a power of two: {self}")

    def groups(self, dim: int) -> Groups:
        """The groups along a dimension of this size."""
        return Groups(self.bits, largest_group(dim, self.group), metadata=self.metadata)
