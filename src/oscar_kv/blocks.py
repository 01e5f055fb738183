"""The packed blocks of a layer, and what belongs to the first one of each row: sinks and equalization."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from oscar_kv import kernels
from oscar_kv.codec import PackedBlocks, encode
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.pack import RecordLayout
from oscar_kv.scale import channel_equalizer
from oscar_kv.shared import SharedBlocks, blocks_between

_ENCODE_BLOCKS = 16  # blocks that are encoded at a time: bounds the workspace of a prefill
_GROWTH = 1.25
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class BlockStore:
    """Packed blocks of each row, the 16-bit copies of its first tokens, and its equalization vector.

    The first blocks may be ``shared`` with other stores; ``records`` and ``norms`` hold those from ``first`` on.

    Args:
        config: The quantization.
        keys: (batch, heads, any, key_dim): shape, dtype and device of what will be stored.
        values: (batch, heads, any, value_dim).
        capacity: Blocks of each row to make room for.
        on_host: Keep the packed blocks in host memory, page-locked where the device is a GPU.

    Raises:
        NotImplementedError: The head dimension or dtype is not supported.
        ValueError: ``value_group`` does not divide the head dimension.
    """

    def __init__(self, config: OscarConfig, keys: Tensor, values: Tensor, capacity: int, on_host: bool = False) -> None:
        config.check_head_dim(keys.shape[-1], values.shape[-1])
        if keys.dtype not in _DTYPES or values.dtype != keys.dtype:
            raise NotImplementedError(
                f"keys in {keys.dtype} and values in {values.dtype}: only float32, bfloat16 and float16 are supported"
            )
        self.config = config
        self.layout = RecordLayout(config, keys.shape[-1], values.shape[-1], keys.dtype)
        batch, heads = keys.shape[:2]
        self.num_blocks = [0] * batch
        self.shared = SharedBlocks()
        self.version = 0  # grows when packed blocks change
        self._capacity, self._on_host = capacity, on_host

        def zeros(*shape: int, dtype: torch.dtype = keys.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=keys.device)

        self.equalizer: Tensor | None = None
        if config.equalize > 0 and config.key_bits != 16:
            self.equalizer = zeros(batch, heads, keys.shape[-1], dtype=torch.float32)
        self.query_power: Tensor | None = None  # of the tokens of first blocks
        if self.equalizer is not None and config.equalize_queries > 0:
            self.query_power = zeros(batch, heads, keys.shape[-1], dtype=torch.float64)
        self.sink_keys, self.sink_values = (zeros(batch, heads, config.num_sinks, x.shape[-1]) for x in (keys, values))
        self.records, self.norms = self.room(capacity, on_host)

    def room(self, blocks: int, on_host: bool) -> tuple[Tensor, Tensor | None]:
        """Zeros: records and norms of this many blocks of each row."""
        batch, heads = self.sink_keys.shape[:2]
        gpu = self.device.type == "cuda"
        home: dict[str, Any] = {"device": "cpu", "pin_memory": gpu} if on_host else {"device": self.device}
        records = torch.zeros(batch, blocks, heads, self.layout.record_bytes, dtype=torch.uint8, **home)
        norm_heads = self.layout.norm_heads(heads)
        if not norm_heads:
            return records, None
        return records, torch.zeros(batch, blocks, norm_heads, BLOCK_TOKENS, dtype=torch.bfloat16, **home)

    @property
    def sinks(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values (batch, heads, num_sinks, head_dim) of each row's first tokens; None without sinks."""
        return (self.sink_keys, self.sink_values) if self.config.num_sinks else None

    @property
    def batch(self) -> int:
        return self.sink_keys.shape[0]

    @property
    def device(self) -> torch.device:
        """Where new tokens come from; packed blocks may be on the host."""
        return self.sink_keys.device

    @property
    def first(self) -> int:
        """Blocks of each row that are shared, and so not in ``records``."""
        return self.shared.count

    def reserve(self, blocks: int) -> None:
        """Make room for this many blocks in each row."""
        own, capacity = blocks - self.first, self.records.shape[1]
        if own > capacity:
            self._own_from(self.first, self.first + max(own, int(capacity * _GROWTH)))

    def packed(self, start: int, stop: int) -> list[PackedBlocks]:
        """Blocks ``start`` to ``stop`` of all rows, in parts that follow one another; a row may have fewer."""
        parts = (*self.shared.expanded(self.batch), PackedBlocks(self.records, self.norms))
        return blocks_between(parts, start, stop)

    def share(self) -> None:
        """Make the blocks that every row has a piece that others can hold too, and that never changes again."""
        count = min(self.num_blocks)
        if count == self.first:
            return
        piece, own = PackedBlocks(self.records, self.norms), self.packed(self.first, count)
        if count - self.first < self.records.shape[1]:  # leave the room beside it
            piece = PackedBlocks(*self.room(count - self.first, self._on_host))
            piece.fill(own)
        self._own_from(count)
        self.shared = self.shared.followed_by(piece)

    def unshare(self) -> None:
        """After rows have lost blocks: own again what not every row has any more, since it will be written."""
        count = min(self.num_blocks)
        if count < self.first:
            self._own_from(count)
            self.shared = self.shared.first(count)

    def _own_from(self, start: int, stop: int = 0) -> None:
        """Hold the blocks from ``start`` on in ``records`` and ``norms``, with room for those before ``stop``."""
        parts = self.packed(start, max(self.num_blocks))
        self.records, self.norms = self.room(max(stop, *self.num_blocks, self._capacity) - start, self._on_host)
        PackedBlocks(self.records, self.norms).fill(parts)

    def encode_rows(self, keys: Tensor, values: Tensor, packed: list[int]) -> None:
        """Pack the first blocks of new tokens; there must be room, and the caller counts them.

        Args:
            keys: (batch, heads, n, key_dim): index i of row b is slot ``128 * num_blocks[b] + i``.
            values: (batch, heads, n, value_dim).
            packed: Blocks to pack of each row.
        """
        self.version += 1
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
                    self._store(row, start, stop, blocks.part(slice(i, i + 1), slice(None)))

    def _store(self, row: int, start: int, stop: int, blocks: PackedBlocks) -> None:
        """Write the row's new blocks ``start`` to ``stop``."""
        place = slice(self.num_blocks[row] + start - self.first, self.num_blocks[row] + stop - self.first)
        PackedBlocks(self.records, self.norms).part(slice(row, row + 1), place).fill([blocks])

    def _encode_on_device(self, keys: Tensor, values: Tensor, packed: list[int]) -> None:
        from oscar_kv.kernels import encode as gpu

        plan = torch.tensor(([0] * self.batch, packed, self.num_blocks), dtype=torch.int32).to(self.device)
        gpu.start_rows(keys, values, self.layout, plan, self.sinks, self.equalizer, self.query_power)
        first, target = self.first, PackedBlocks(self.records, self.norms)
        if self._on_host:  # the kernel writes here, and the blocks are moved
            first = min(n for n, count in zip(self.num_blocks, packed, strict=True) if count)
            most = max(n + count for n, count in zip(self.num_blocks, packed, strict=True) if count)
            target = PackedBlocks(*self.room(most - first, on_host=False))
        gpu.encode_blocks(
            keys, values, self.layout, self.equalizer, self.config.num_sinks, plan, target.records, target.norms, first
        )
        for row, count in enumerate(packed):
            if self._on_host and count:
                at = self.num_blocks[row] - first
                self._store(row, 0, count, target.part(slice(row, row + 1), slice(at, at + count)))

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
