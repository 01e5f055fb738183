"""What the queries of a pass may attend to in one layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from oscar_kv.codec import PackedBlocks
from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.pack import RecordLayout
from oscar_kv.shared import SharedBlocks


@dataclass
class KVView:
    """What one layer's queries may attend to. Row b has ``lengths[b]`` tokens, in slots 0 to ``lengths[b] - 1``.

    Slots below ``128 * num_blocks[b]`` are packed, of which the first ``num_sinks`` are read from their 16-bit copy;
    the others are in ``recent``, of which the ``fresh`` newest came with this pass and are not counted elsewhere.

    Args:
        layout: Layout of the records.
        blocks: Packed blocks (batch, >= num_blocks, ...), or None where no row can have any; after ``shared`` ones.
        num_blocks: int32 (batch,).
        equalizer: float32 (batch, heads, key_dim) or None.
        sinks: Keys and values (batch, heads, num_sinks, head_dim) of the first slots, or None.
        recent: Keys and values (batch, heads, n, head_dim); index i is slot ``128 * num_blocks[b] + i``.
        recent_lengths: int32 (batch,): tokens in ``recent``, but for the fresh ones.
        most_blocks: Largest of num_blocks. A kernel does not look at it, and so can run again when there are more.
        fresh: New tokens of each row that ``recent_lengths`` leaves out.
        columns: int64 (batch, >= lengths) column of the attention mask of each slot; None where slot is column and all
            rows are of one length.
        padded_queries: Whether some of the newest columns, and so of the queries, are padding.
        shared: The first blocks of each row, where ``blocks`` begins with those that follow.
    """

    layout: RecordLayout
    blocks: PackedBlocks | None
    num_blocks: Tensor
    equalizer: Tensor | None
    sinks: tuple[Tensor, Tensor] | None
    recent: tuple[Tensor, Tensor]
    recent_lengths: Tensor
    most_blocks: int
    fresh: int = 0
    columns: Tensor | None = None
    padded_queries: bool = False
    shared: SharedBlocks = field(default_factory=SharedBlocks)

    @property
    def parts(self) -> list[PackedBlocks]:
        """All packed blocks (batch, n, ...), in parts that follow one another."""
        shared = self.shared.expanded(self.num_blocks.shape[0])
        return [] if self.blocks is None else [*shared, self.blocks]

    @property
    def lengths(self) -> Tensor:
        """int32 (batch,): all tokens of each row."""
        return BLOCK_TOKENS * self.num_blocks + self.recent_lengths + self.fresh

    def snapshot(self) -> KVView:
        """The same, of tensors that stay as they are when the layer packs and its tail moves on."""
        keys, values = self.recent
        return replace(
            self,
            num_blocks=self.num_blocks.clone(),
            recent=(keys.clone(), values.clone()),
            recent_lengths=self.recent_lengths + self.fresh,
            fresh=0,
        )
