"""The packed blocks of a layer, and what belongs to the first one of each row: sinks and equalization."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from oscar_kv import kernels
from oscar_kv.codec import encode
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.pack import RecordLayout
from oscar_kv.scale import channel_equalizer

_ENCODE_BLOCKS = 16  # blocks that are encoded at a time: bounds the workspace of a prefill
_GROWTH = 1.25
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class BlockStore:
    """Packed blocks of each row, the 16-bit copies of its first tokens, and its equalization vector.

    Args:
        config: The quantization.
        keys: (batch, heads, any, key_dim): shape, dtype and device of what will be stored.
        values: (batch, heads, any, value_dim).
        capacity: Blocks of each row to make room for.

    Raises:
        NotImplementedError: The head dimension or dtype is not supported.
        ValueError: ``value_group`` does not divide the head dimension.
    """

    def __init__(self, config: OscarConfig, keys: Tensor, values: Tensor, capacity: int) -> None:
        config.check_head_dim(keys.shape[-1], values.shape[-1])
        if keys.dtype not in _DTYPES or values.dtype != keys.dtype:
            raise NotImplementedError(
                f"keys in {keys.dtype} and values in {values.dtype}: only float32, bfloat16 and float16 are supported"
            )
        self.config = config
        self.layout = RecordLayout(config, keys.shape[-1], values.shape[-1], keys.dtype)
        batch, heads = keys.shape[:2]
        self.num_blocks = [0] * batch

        def zeros(*shape: int, dtype: torch.dtype = keys.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=keys.device)

        self.records = zeros(batch, capacity, heads, self.layout.record_bytes, dtype=torch.uint8)
        self.norms: Tensor | None = None
        if norm_heads := self.layout.norm_heads(heads):
            self.norms = zeros(batch, capacity, norm_heads, BLOCK_TOKENS, dtype=torch.bfloat16)
        self.equalizer: Tensor | None = None
        if config.equalize > 0 and config.key_bits != 16:
            self.equalizer = zeros(batch, heads, keys.shape[-1], dtype=torch.float32)
        self.query_power: Tensor | None = None  # of the tokens of first blocks
        if self.equalizer is not None and config.equalize_queries > 0:
            self.query_power = zeros(batch, heads, keys.shape[-1], dtype=torch.float64)
        self.sink_keys, self.sink_values = (zeros(batch, heads, config.num_sinks, x.shape[-1]) for x in (keys, values))

    @property
    def sinks(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values (batch, heads, num_sinks, head_dim) of each row's first tokens; None without sinks."""
        return (self.sink_keys, self.sink_values) if self.config.num_sinks else None

    @property
    def batch(self) -> int:
        return self.records.shape[0]

    @property
    def device(self) -> torch.device:
        return self.records.device

    def reserve(self, blocks: int) -> None:
        """Make room for this many blocks in each row."""
        capacity = self.records.shape[1]
        if blocks <= capacity:
            return
        grown = max(blocks, int(capacity * _GROWTH))
        self.records = grow(self.records, 1, grown)
        self.norms = None if self.norms is None else grow(self.norms, 1, grown)

    def encode_rows(self, keys: Tensor, values: Tensor, packed: list[int]) -> None:
        """Pack the first blocks of new tokens; there must be room, and the caller counts them.

        Args:
            keys: (batch, heads, n, key_dim): index i of row b is slot ``128 * num_blocks[b] + i``.
            values: (batch, heads, n, value_dim).
            packed: Blocks to pack of each row.
        """
        if kernels.usable(self.device):
            self._encode_on_device(keys, values, packed)
            return
        for start in range(0, max(packed), _ENCODE_BLOCKS):
            rows_of: dict[tuple[bool, int], list[int]] = defaultdict(list)
            for row, count in enumerate(packed):
                fresh = self.num_blocks[row] + start == 0  # this is the row's first block
                if count > start:
                    rows_of[fresh, min(count, start + _ENCODE_BLOCKS)].append(row)
            for (fresh, stop), rows in rows_of.items():
                tokens = slice(BLOCK_TOKENS * start, BLOCK_TOKENS * stop)
                some = keys[rows, :, tokens], values[rows, :, tokens]
                if fresh:
                    self._start_rows(rows, *some)
                equalizer = None if self.equalizer is None else self.equalizer[rows]
                sinks = self.config.num_sinks if fresh else 0
                blocks = encode(*some, self.config, equalizer=equalizer, num_sinks=sinks)
                for i, row in enumerate(rows):
                    place = slice(self.num_blocks[row] + start, self.num_blocks[row] + stop)
                    self.records[row, place] = blocks.records[i]
                    if self.norms is not None and blocks.norms is not None:
                        self.norms[row, place] = blocks.norms[i]

    def _encode_on_device(self, keys: Tensor, values: Tensor, packed: list[int]) -> None:
        from oscar_kv.kernels import encode as gpu

        plan = torch.tensor(([0] * self.batch, packed, self.num_blocks), dtype=torch.int32).to(self.device)
        gpu.start_rows(keys, values, self.layout, plan, self.sinks, self.equalizer, self.query_power)
        gpu.encode_blocks(
            keys, values, self.layout, self.equalizer, self.config.num_sinks, plan,
            self.records, self.norms,
        )  # fmt: skip

    def _start_rows(self, rows: list[int], keys: Tensor, values: Tensor) -> None:
        """Keep what belongs to the first block of a sequence: its sinks and its equalization vector."""
        config = self.config
        self.sink_keys[rows] = keys[:, :, : config.num_sinks]
        self.sink_values[rows] = values[:, :, : config.num_sinks]
        if self.equalizer is not None:
            first = keys[:, :, :BLOCK_TOKENS].float()
            power = None if self.query_power is None else self.query_power[rows]
            self.equalizer[rows] = channel_equalizer(
                first, config.equalize, config.key_group, config.num_sinks, power, config.equalize_queries
            )


def grow(x: Tensor, dim: int, size: int) -> Tensor:
    """x with this size in a dimension, zeros beyond what it has."""
    grown = x.new_zeros(*x.shape[:dim], size, *x.shape[dim + 1 :])
    grown.narrow(dim, 0, x.shape[dim]).copy_(x)
    return grown
