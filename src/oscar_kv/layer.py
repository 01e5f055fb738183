"""The state of one layer's cache: packed blocks, sinks and the 16-bit tail, and when a block is packed."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv import kernels
from oscar_kv.attention import KVView
from oscar_kv.blocks import BlockStore, grow
from oscar_kv.codec import PackedBlocks, decode
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.kernels import tail as device_tail
from oscar_kv.kernels.decode_launch import unsupported
from oscar_kv.kernels.tail import Counters
from oscar_kv.observe import add_query_power
from oscar_kv.offload import Offload
from oscar_kv.shared import SharedBlocks, take_rows
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


class LayerState(BlockStore):
    """Keys and values of one layer.

    A token's slot is its place in its own row, padding left out. A block of 128 slots is packed, once and for all,
    when ``residual_length`` tokens from its start on are there; its bytes depend on its row's tokens alone. A pass
    reads as packed what was packed before it, and its own tokens as they are.

    Args:
        config: The quantization.
        timeline: Shared by the layers of a cache.
        keys: (batch, heads, any, key_dim): shape, dtype and device of what will be stored.
        values: (batch, heads, any, value_dim).
        max_length: Allocate for this many columns at once and never grow; None grows geometrically.
        offload: Of the cache, where packed blocks are kept in host memory.

    Raises:
        NotImplementedError: The head dimension, dtype or device is not supported.
        ValueError: ``value_group`` does not divide the head dimension.
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
                tokens = tokens if index is None else _take(tokens, index)
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

    def view(self, recent: Recent) -> KVView:
        """What the queries of this pass may attend to."""
        most = max(self.num_blocks)
        here = most > 0 or self.counters is not None  # a kernel may run again, in a graph, when there are some
        shared, blocks = self._readable() if here else (SharedBlocks(), None)
        sinks = self.sinks if here else None
        if recent.on_device and self.counters is not None:
            num_blocks, lengths, fresh = self.counters.num_blocks, self.counters.lengths, recent.columns
        else:
            num_blocks, lengths = torch.tensor((self.num_blocks, recent.lengths), dtype=torch.int32).to(self.device)
            fresh = 0
        return KVView(
            self.layout,
            blocks,
            num_blocks,
            self.equalizer,
            sinks,
            (recent.keys, recent.values),
            lengths,
            most,
            fresh,
            columns=self._here(self.timeline.column_of_slot),
            padded_queries=self.timeline.last is not None and self.timeline.last.order is not None,
            shared=shared,
        )

    def _readable(self) -> tuple[SharedBlocks, PackedBlocks]:
        """Packed blocks where the queries are: shared ones, and those that follow."""
        if self.offload is not None:
            return self.offload.fetch(self)
        return self.shared, PackedBlocks(self.records, self.norms)

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
            self._flush(hold)
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

    def _flush(self, hold: int) -> None:
        """Pack on the device what is complete there."""
        tail, store = (self.tail_keys, self.tail_values), (self.records, self.norms, self.equalizer, self.sinks)
        assert self.counters is not None
        device_tail.flush(tail, self.counters, self.layout, *store, self.query_power, hold, self.first)

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

    def dense(self, recent: Recent) -> tuple[Tensor, Tensor]:
        """All keys and values, packed ones dequantized: (batch, heads, columns, head_dim); padding columns are 0."""
        keys, values = recent.keys, recent.values
        most, batch = max(self.num_blocks), self.batch
        if most:
            shared, rest = self._readable()
            parts = [*shared.expanded(batch), rest.part(slice(None), slice(most - shared.count))]
            decoded = [decode(x, self.layout, equalizer=self.equalizer) for x in parts if x.records.shape[1]]
            for tokens, sinks in zip(decoded[0], (self.sink_keys, self.sink_values), strict=True):
                tokens[:, :, : self.config.num_sinks] = sinks
            sides = zip(*decoded, (keys, values), strict=True)
            keys, values = (torch.cat(side, dim=2) for side in sides)
        column_of_slot = self._here(self.timeline.column_of_slot)
        if column_of_slot is None:
            return keys, values
        lengths = torch.tensor(self.timeline.lengths, device=self.device).unsqueeze(1)
        slots = torch.arange(max(self.timeline.lengths), device=self.device).unsqueeze(0)
        own = BLOCK_TOKENS * torch.tensor(self.num_blocks, device=self.device).unsqueeze(1)
        index = torch.where(slots < own, slots, BLOCK_TOKENS * most + slots - own).clamp(max=keys.shape[2] - 1)
        columns = self.columns + recent.columns
        target = column_of_slot[:, : slots.shape[1]]
        target = torch.where(slots < lengths, target, columns)  # one spare column takes what is no token
        out = []
        for tokens in (keys, values):
            tokens = _take(tokens, index)
            placed = tokens.new_zeros(batch, tokens.shape[1], columns + 1, tokens.shape[-1])
            place = target[:, None, :, None].expand_as(tokens)
            out.append(placed.scatter_(2, place, tokens)[:, :, :columns])
        return out[0], out[1]

    def check_crop(self, columns: int) -> None:
        """Refuse a roll-back that would need tokens which only exist packed.

        Raises:
            ValueError: Some row would end inside a packed block.
        """
        for row, length in enumerate(self.timeline.cropped(columns)):
            packed = BLOCK_TOKENS * self.num_blocks[row]
            if length < packed and length % BLOCK_TOKENS:
                raise ValueError(
                    f"cannot remove {columns} tokens: the newest {self.tail_lengths[row]} of row {row} are in 16 bit, "
                    "older ones are packed in blocks of 128 that cannot be cut. Call activate_past_recording() before "
                    f"the pass to be able to take back up to {ROLLBACK_TOKENS} tokens"
                )

    def crop(self, columns: int) -> None:
        """Take off the last columns; call :meth:`check_crop` first, and crop the timeline last.

        What equalization has seen of the queries of removed tokens stays, unless none is left to be seen.
        """
        for row, length in enumerate(self.timeline.cropped(columns)):
            if self.query_power is not None and length <= self.config.num_sinks:
                self.query_power[row] = 0.0
            self.num_blocks[row] = min(self.num_blocks[row], length // BLOCK_TOKENS)
            self.tail_lengths[row] = length - BLOCK_TOKENS * self.num_blocks[row]
        self.columns -= columns
        self.version += 1
        self.unshare()
        self._upload_counts()

    def select(self, rows: Tensor) -> None:
        """Make row i what row ``rows[i]`` was; copies of an only row share its blocks."""
        if self.batch == 1 and len(rows) > 1:
            self.share()
        self.version += 1
        self.shared = self.shared.select(rows)
        for name, x in self.tensors().items():
            setattr(self, name, take_rows(x, rows))
        counts = (self.num_blocks, self.tail_lengths)
        self.take_counts(*([each[row] for row in rows.tolist()] for each in counts))

    def take_counts(self, num_blocks: list[int], tail_lengths: list[int]) -> None:
        """Blocks and 16-bit tokens of the rows that the tensors are of now."""
        self.num_blocks, self.tail_lengths = list(num_blocks), list(tail_lengths)
        self.counters = self._counters(self.batch, self.device)
        self._upload_counts()

    def fork(self, timeline: Timeline, offload: Offload | None) -> LayerState:
        """A copy that goes its own way and holds the same packed blocks, of which every row must have as many."""
        self.share()
        other = copy.copy(self)
        other.timeline, other.offload = timeline, offload
        other._own_from(self.first)
        for name, x in self.tensors().items():
            if name not in ("records", "norms"):
                setattr(other, name, x.clone())
        other.take_counts(self.num_blocks, self.tail_lengths)
        if offload is not None:
            offload.add(other)
        return other

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that this layer holds, by attribute, but for shared blocks."""
        names = ("records", "norms", "equalizer", "query_power", "sink_keys", "sink_values", "tail_keys", "tail_values")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of every tensor that this layer holds, by component; of shared blocks too."""
        heads, sizes = self.records.shape[2], self.layout.sizes
        codes = heads * (sizes["key_codes"] + sizes["value_codes"])
        record, norms = heads * self.layout.record_bytes, 2 * BLOCK_TOKENS * self.layout.norm_heads(heads)  # of a block
        own, capacity = sum(self.num_blocks) - self.batch * self.first, self.batch * self.records.shape[1]
        used = self.shared.stored + own
        return {
            "codes": used * codes,
            "scales_zeros": used * (record - codes),
            "norms": used * norms,
            "reserved": (capacity - own) * (record + norms),
            "tail": self.tail_keys.nbytes + self.tail_values.nbytes,
            "sinks": self.sink_keys.nbytes + self.sink_values.nbytes,
            "equalizer": sum(x.nbytes for x in (self.equalizer, self.query_power) if x is not None),
            "index": 0 if self.shared.table is None else self.shared.table.nbytes,
        }


def _take(tokens: Tensor, index: Tensor) -> Tensor:
    """tokens (batch, heads, n, d) at index (batch, m) -> (batch, heads, m, d)."""
    batch, heads, _, dim = tokens.shape
    return tokens.gather(2, index[:, None, :, None].expand(batch, heads, -1, dim))
