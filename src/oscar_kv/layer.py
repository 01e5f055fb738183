"""The state of one layer's cache: what passes read of it, and how its rows change."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from oscar_kv.codec import PackedBlocks, decode
from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.offload import Offload
from oscar_kv.recent import ROLLBACK_TOKENS, Recent, TailStore, take_tokens
from oscar_kv.shared import SharedBlocks, take_rows
from oscar_kv.timeline import Timeline
from oscar_kv.view import KVView


class LayerState(TailStore):
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
            tokens = take_tokens(tokens, index)
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
