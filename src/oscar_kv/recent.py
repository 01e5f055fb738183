"""The newest tokens of a layer in 16 bit: the tail of each row, and when a block of it is packed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv import kernels
from oscar_kv.blocks import BlockStore, grow
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.kernels import tail as device_tail
from oscar_kv.kernels.decode_launch import unsupported
from oscar_kv.kernels.records import layout_key
from oscar_kv.kernels.tail import Counters, TailLayer
from oscar_kv.observe import add_query_power
from oscar_kv.offload import Offload
from oscar_kv.timeline import Timeline

ROLLBACK_TOKENS = 128  # newest tokens that stay in 16 bit while a caller may roll them back
_TAIL_STEP = 32  # tokens by which the tail of a short sequence grows


@dataclass
class Recent:
    """The 16-bit tokens of one forward pass: the tail and the new ones.

    Args:
        keys: (batch, heads, n, key_dim); index i of row b is slot ``128 * num_blocks[b] + i``.
        values: (batch, heads, n, value_dim).
        lengths: Tokens of each row, at most n; what lies beyond is arbitrary.
        columns: Columns of the pass.
        on_device: Whether the new tokens are in the tail, where the device counts them.
    """

    keys: Tensor
    values: Tensor
    lengths: list[int]
    columns: int
    on_device: bool = False


class TailStore(BlockStore):
    """A :class:`~oscar_kv.blocks.BlockStore` and the tokens that are not packed yet, from a pass on until they are.

    Args and errors are those of :class:`oscar_kv.layer.LayerState`.
    """

    def __init__(
        self,
        config: OscarConfig,
        timeline: Timeline,
        keys: Tensor,
        values: Tensor,
        max_length: int | None = None,
        offload: Offload | None = None,
    ) -> None:
        capacity = 0 if max_length is None else max_length // BLOCK_TOKENS
        super().__init__(config, keys, values, capacity, on_host=offload is not None)
        self.timeline, self.max_length, self.offload = timeline, max_length, offload
        if offload is not None:
            offload.add(self)
        self.columns = 0  # columns that this layer has seen
        self.recording = False  # whether the caller may roll back the newest pass
        self.tail_lengths = [0] * self.batch
        rows = 0 if max_length is None else config.residual_length  # without max_length it grows with a short sequence
        self.tail_keys, self.tail_values = (x.new_zeros(*x.shape[:2], rows, x.shape[-1]) for x in (keys, values))
        self.counters = self._counters(self.batch, self.device)
        self.waiting: list[TailStore] | None = None  # see pack_together

    def _counters(self, batch: int, device: torch.device) -> Counters | None:
        """Device-side counts of the rows, where kernels pack and attend; the lists of this class mirror them."""
        if (
            self.offload is not None
            or not kernels.usable(device)
            or unsupported(self.layout, 1, batch, device) is not None
        ):
            return None
        return Counters.zeros(batch, device)

    def check(self, keys: Tensor, values: Tensor) -> None:
        """Refuse new tokens that do not belong to this cache, before anything is stored.

        Raises:
            ValueError: Another model's heads, head dimension, dtype, device or batch, or more than ``max_length``.
        """
        stored = (self.batch, self.records.shape[2], self.layout.key_dim, self.layout.value_dim, self.layout.dtype)
        new = (*keys.shape[:2], keys.shape[-1], values.shape[-1], keys.dtype)
        if new != stored or values.dtype != keys.dtype or keys.device != self.device:
            raise ValueError(
                "the cache holds (batch, KV heads, key dim, value dim, dtype) "
                f"{stored} on {self.device}, but was given {new} on {keys.device}: it belongs to another model or batch"
            )
        if self.max_length is not None and self.columns + keys.shape[2] > self.max_length:
            raise ValueError(
                f"{self.columns} cached and {keys.shape[2]} new columns exceed the cache's max_length {self.max_length}"
            )

    def append(self, keys: Tensor, values: Tensor, valid: Tensor | None) -> Recent:
        """Add the tokens of a pass. Follow with :meth:`commit` when the pass has read what it needs.

        Args:
            keys: (batch, heads, q, key_dim).
            values: (batch, heads, q, value_dim).
            valid: bool (batch, q), False for padding; None where there is none.
        """
        self.check(keys, values)
        if not self.recording and any(self._complete(self.tail_lengths, 0)):  # what recording held back
            self._pack(Recent(self.tail_keys, self.tail_values, self.tail_lengths, 0), 0)
        q_len = keys.shape[2]
        step = self.timeline.extend(self.columns, self.batch, q_len, valid)
        old = self.tail_lengths
        longest = max(old)
        lengths = [n + count for n, count in zip(old, step.counts, strict=True)]
        if self.counters is not None and step.order is None and max(lengths) <= self._tail_limit():
            self._reserve_tail(max(lengths))
            device_tail.append(keys, values, (self.tail_keys, self.tail_values), self.counters, self.layout)
            keys, values = (tail[:, :, : max(lengths)] for tail in (self.tail_keys, self.tail_values))
            return Recent(keys, values, lengths, q_len, on_device=True)
        fits = max(lengths) <= self.tail_keys.shape[2]
        index, order = None, self._here(step.order)
        if order is not None or min(old) != longest:
            index = self._row_index(old, lengths, longest, order, q_len)
        recent = []
        for tail, new in ((self.tail_keys, keys), (self.tail_values, values)):
            if index is None and fits:
                tail[:, :, longest : longest + q_len] = new
                tokens = tail[:, :, : longest + q_len]
            else:
                tokens = torch.cat((tail[:, :, :longest], new), dim=2)
                tokens = tokens if index is None else take_tokens(tokens, index)
            recent.append(tokens)
        return Recent(recent[0], recent[1], lengths, q_len)

    def _here(self, x: Tensor | None) -> Tensor | None:
        """What the layers share, on this layer's device: they may have several."""
        return None if x is None else x.to(self.device)

    def _row_index(self, old: list[int], lengths: list[int], longest: int, order: Tensor | None, q_len: int) -> Tensor:
        """For rows of unequal lengths: where in (tail, new) each row's tokens are, int64 (batch, max length)."""
        place = torch.arange(max(lengths), device=self.device).unsqueeze(0)
        first_new = torch.tensor(old, device=self.device).unsqueeze(1)
        new = (place - first_new).clamp(0, q_len - 1)
        new = new if order is None else order.gather(1, new)
        return torch.where(place < first_new, place, longest + new)

    def commit(self, recent: Recent, query: Tensor | None = None) -> None:
        """Pack the blocks that are complete and keep the rest as the tail.

        Args:
            recent: From :meth:`append`.
            query: (batch, query heads, q, key_dim) of the pass, which equalization looks at; None if not known.
        """
        if query is not None:
            self._observe(query, recent)
        self.columns += recent.columns
        hold = ROLLBACK_TOKENS if self.recording else 0
        if recent.on_device and self.counters is not None:
            self._count(recent.lengths, self._complete(recent.lengths, hold))
            self.reserve(max(self.num_blocks))
            if self.waiting is None or hold:
                _flush([self], hold)
            else:
                self.waiting.append(self)
        else:
            self._pack(recent, hold)

    def _observe(self, query: Tensor, recent: Recent) -> None:
        """Take note of the queries of tokens in first blocks."""
        if self.query_power is None or min(self.num_blocks) > 0:
            return
        step = self.timeline.last
        assert step is not None  # of this pass
        old = [n - count for n, count in zip(recent.lengths, step.counts, strict=True)]
        first = [n + BLOCK_TOKENS * blocks for n, blocks in zip(old, self.num_blocks, strict=True)]
        add_query_power(self.query_power, query, first, step.counts, self._here(step.order), self.config.num_sinks)

    def on_device(self) -> TailLayer:
        """Of this layer, what is packed and counted on the device."""
        assert self.counters is not None
        tail, store = (self.tail_keys, self.tail_values), (self.records, self.norms, self.equalizer, self.sinks)
        return TailLayer(tail, self.counters, *store, self.query_power, self.first)

    def advance(self, columns: int) -> None:
        """Count what the replay of a CUDA graph, captured from a pass of so many columns, has done on the device."""
        self.columns += columns
        lengths = [n + columns for n in self.tail_lengths]
        self._count(lengths, self._complete(lengths, 0))

    def _complete(self, lengths: list[int], hold: int) -> list[int]:
        """Blocks to pack of each row: all but the newest ``residual_length - 128 + hold`` tokens."""
        hold += self.config.residual_length - BLOCK_TOKENS
        return [max(0, length - hold) // BLOCK_TOKENS for length in lengths]

    def _count(self, lengths: list[int], packed: list[int]) -> None:
        """Set the counts after so many blocks of each row have been packed out of so many recent tokens."""
        self.num_blocks = [n + count for n, count in zip(self.num_blocks, packed, strict=True)]
        self.tail_lengths = [n - BLOCK_TOKENS * count for n, count in zip(lengths, packed, strict=True)]

    def _pack(self, recent: Recent, hold: int) -> None:
        """Pack the complete blocks of ``recent``, and make the rest the tail."""
        packed = self._complete(recent.lengths, hold)
        in_place = recent.keys.data_ptr() == self.tail_keys.data_ptr()
        rows_of: dict[int, list[int]] = defaultdict(list)  # number of complete blocks -> rows
        for row, count in enumerate(packed):
            rows_of[count].append(row)
        kept = {}  # taken out first, since ``recent`` may be the tail itself
        for count, rows in rows_of.items():
            start, stop = BLOCK_TOKENS * count, max(recent.lengths[row] for row in rows)
            if count or not in_place:
                kept[count] = recent.keys[rows, :, start:stop], recent.values[rows, :, start:stop]
        if max(packed):
            self.reserve(max(n + count for n, count in zip(self.num_blocks, packed, strict=True)))
            self.encode_rows(recent.keys, recent.values, packed)
        self._count(recent.lengths, packed)
        self._reserve_tail(max(self.tail_lengths))
        for count, (keys, values) in kept.items():
            self.tail_keys[rows_of[count], :, : keys.shape[2]] = keys
            self.tail_values[rows_of[count], :, : keys.shape[2]] = values
        self._upload_counts()

    def _upload_counts(self) -> None:
        if self.counters is not None:
            self.counters.set(self.tail_lengths, self.num_blocks)

    def _reserve_tail(self, tokens: int) -> None:
        """Make room for this many tokens in each row's tail, and for some more."""
        if tokens <= self.tail_keys.shape[2]:
            return
        most = self._tail_limit()
        rows = most if self.max_length is not None else min(most, -(-tokens // _TAIL_STEP) * _TAIL_STEP)
        self.tail_keys, self.tail_values = (grow(x, 2, rows) for x in (self.tail_keys, self.tail_values))

    def _tail_limit(self) -> int:
        """Tokens that the tail may have room for."""
        return self.config.residual_length + (ROLLBACK_TOKENS if self.recording else 0)


@contextmanager
def pack_together(stores: Sequence[TailStore]) -> Iterator[None]:
    """What passes inside complete is packed at the end, where the device counts: in few launches for all layers."""
    waiting: list[TailStore] = []
    for store in stores:
        store.waiting = waiting
    try:
        yield
    finally:
        for store in stores:
            store.waiting = None
    alike = defaultdict(list)
    for store in waiting:
        shape = store.records.shape[2], *store.num_blocks, *store.tail_lengths
        alike[layout_key(store.layout), shape].append(store)
    for some in alike.values():
        _flush(some, 0)


def _flush(stores: list[TailStore], hold: int) -> None:
    """Pack on the device what is complete there."""
    device_tail.flush([store.on_device() for store in stores], stores[0].layout, hold)


def take_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """tokens (batch, heads, n, d) at index (batch, m) -> (batch, heads, m, d)."""
    batch, heads, _, dim = tokens.shape
    return tokens.gather(2, index[:, None, :, None].expand(batch, heads, -1, dim))
