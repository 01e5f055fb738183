"""transformers' own quantized cache with its integer backends, through its public API, and what it takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedConfig, QuantizedCache

from oscar_kv.extras import import_extra

_MODULES = {"quanto": "optimum.quanto", "hqq": "hqq.core.quantize"}
_ROWS = {"quanto": 0, "hqq": 1}  # the axis that makes groups of consecutive numbers
_COLUMNS = {"quanto": -1}


@dataclass(frozen=True, kw_only=True)
class Peer:
    """``transformers.QuantizedCache``: keys and values in groups, the newest tokens in 16 bit.

    It packs the whole prompt at once, and packs what was packed before anew whenever the 16-bit tokens are as many as
    ``residual_length``. Groups are of consecutive numbers, so of one token and head where ``group`` divides the head
    dimension: the axes that transformers' documentation advises. Scales and zeros are in the model's dtype.

    Args:
        backend: "quanto" or "hqq"; each is a package of its own.
        bits: Bits per code.
        group: Numbers in a group.
        residual_length: Tokens in 16 bit.
        keys_per_channel: Groups of the keys are of consecutive tokens of one channel instead, as KIVI's. Only quanto
            can, and only as long as the tokens of all heads and rows that it packs are a multiple of ``group``.

    Raises:
        ValueError: Another backend or number of bits, or keys per channel with hqq.
    """

    backend: Literal["quanto", "hqq"]
    bits: Literal[2, 4] = 2
    group: int = 64
    residual_length: int = 128
    keys_per_channel: bool = False

    def __post_init__(self) -> None:
        if self.backend not in _MODULES or self.bits not in (2, 4):
            raise ValueError(f"backend must be {' or '.join(_MODULES)}, and bits 2 or 4: {self}")
        if self.keys_per_channel and self.backend not in _COLUMNS:
            raise ValueError(f"only {', '.join(_COLUMNS)} has keys per channel: {self}")

    def make_cache(self, config: PreTrainedConfig) -> MeasuredQuantizedCache:
        """An empty cache.

        Raises:
            ImportError: The backend is not installed.
            ValueError: The model has layers other than full attention.
        """
        import_extra(_MODULES[self.backend], "peers")
        return MeasuredQuantizedCache(
            self.backend,
            config,
            nbits=self.bits,
            axis_key=(_COLUMNS if self.keys_per_channel else _ROWS)[self.backend],
            axis_value=_ROWS[self.backend],
            q_group_size=self.group,
            residual_length=self.residual_length,
        )


class MeasuredQuantizedCache(QuantizedCache):
    """transformers' quantized cache, with the bytes that it holds."""

    def memory_bytes(self) -> dict[str, int]:
        """Bytes by component: "codes", "scales_zeros", the 16-bit "tail", and their "total"."""
        sizes: Counter[str] = Counter({"codes": 0, "scales_zeros": 0, "tail": 0})
        for layer in self._used():
            for stored in (layer._quantized_keys, layer._quantized_values):
                for x in _tensors(stored):
                    sizes["scales_zeros" if x.is_floating_point() else "codes"] += x.nbytes
            sizes["tail"] += sum(x.nbytes for x in (layer.keys, layer.values) if x is not None)
        return {**sizes, "total": sum(sizes.values())}

    def bits_per_element(self) -> float:
        """Bits per cached key and value number, everything included.

        Raises:
            ValueError: The cache is empty.
        """
        layers = self._used()
        if not layers:
            raise ValueError("the cache is empty")
        elements = sum(layer.get_seq_length() * self._numbers(layer) for layer in layers)
        return 8 * self.memory_bytes()["total"] / elements

    def packed_bits(self) -> float:
        """Bits per packed number: codes, scales and zeros; NaN while nothing is packed."""
        memory = self.memory_bytes()
        elements = sum(self.packed_length() * self._numbers(layer) for layer in self._used())
        return 8 * (memory["codes"] + memory["scales_zeros"]) / elements if elements else float("nan")

    def packed_length(self) -> int:
        """Tokens of each row that are packed; all layers pack at once."""
        layers = self._used()
        if not layers:
            return 0
        tail = layers[0].keys.shape[-2] if layers[0].keys.dim() == 4 else 0
        return int(layers[0].get_seq_length() - tail)

    def _used(self) -> list[Any]:
        return [layer for layer in self.layers if getattr(layer, "is_initialized", False)]

    @staticmethod
    def _numbers(layer: Any) -> int:
        """Key and value numbers of one token, all rows and heads."""
        shapes = [_shape(x) for x in (layer._quantized_keys, layer._quantized_values)]
        return sum(batch * heads * dim for batch, heads, _, dim in shapes)


def _shape(stored: Any) -> torch.Size:
    """Of what was packed: HQQ keeps codes and a dictionary, quanto a tensor."""
    shape: torch.Size = stored[1]["shape"] if isinstance(stored, tuple) else stored.shape
    return shape


def _tensors(stored: Any) -> list[Tensor]:
    """The plain tensors inside what a backend stores."""
    if isinstance(stored, tuple):
        codes, meta = stored
        return [codes, *(x for x in meta.values() if isinstance(x, Tensor))]
    if type(stored) is Tensor:
        return [stored]
    names, _ = stored.__tensor_flatten__()
    return [x for name in names for x in _tensors(getattr(stored, name))]
