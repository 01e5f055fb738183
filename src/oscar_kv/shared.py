"""Packed blocks that several caches, or several rows of one, read and none writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from oscar_kv.codec import PackedBlocks

_MOST_PIECES = 8  # pieces beyond these are joined, so that a long line of forks is not searched block by block


@dataclass(frozen=True)
class SharedBlocks:
    """The first blocks of every row, in pieces that follow one another and never change.

    Args:
        pieces: Each (rows, n, ...), or (1, n, ...) where all rows have the same blocks.

    Attributes:
        table: Where a kernel finds the pieces, on their device: int64 (pieces, 5); None on a CPU. Of each piece the
            addresses of the records and the norms that block 0 would have, the bytes from row to row of both, and the
            block at which it ends. Made at once, since a CUDA graph could not.
    """

    pieces: tuple[PackedBlocks, ...] = ()
    table: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", _table(self.pieces))

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedBlocks:
        return self

    def __reduce__(self) -> tuple[type[SharedBlocks], tuple[tuple[PackedBlocks, ...]]]:
        return SharedBlocks, (self.pieces,)  # addresses are those of this process

    @cached_property
    def count(self) -> int:
        """Blocks of each row."""
        return sum(piece.records.shape[1] for piece in self.pieces)

    @cached_property
    def stored(self) -> int:
        """Blocks in memory: those that rows have in common count once."""
        return sum(piece.records.shape[0] * piece.records.shape[1] for piece in self.pieces)

    def expanded(self, rows: int) -> Iterator[PackedBlocks]:
        """The pieces as (rows, n, ...), without a copy."""
        for piece in self.pieces:
            norms = None if piece.norms is None else piece.norms.expand(rows, -1, -1, -1)
            yield PackedBlocks(piece.records.expand(rows, -1, -1, -1), norms)

    def followed_by(self, piece: PackedBlocks) -> SharedBlocks:
        """With one more piece; where these are too many, the two neighbours that are smallest together are joined."""
        pieces = [*self.pieces, piece]
        if len(pieces) > _MOST_PIECES:
            sizes = [x.nbytes for x in pieces]
            at = min(range(len(pieces) - 1), key=lambda i: sizes[i] + sizes[i + 1])
            pieces[at : at + 2] = [_joined(*pieces[at : at + 2])]
        return SharedBlocks(tuple(pieces))

    def first(self, count: int) -> SharedBlocks:
        """The first blocks of each row, without a copy."""
        return SharedBlocks(tuple(blocks_between(self.pieces, 0, count)))

    def select(self, rows: Tensor) -> SharedBlocks:
        """Row i is what row ``rows[i]`` was; what all rows have in common is not copied."""
        return SharedBlocks(tuple(x if x.records.shape[0] == 1 else _rows(x, rows) for x in self.pieces))


def blocks_between(parts: Iterable[PackedBlocks], start: int, stop: int) -> list[PackedBlocks]:
    """Blocks ``start`` to ``stop`` of parts (rows, n, ...) that follow one another, without a copy."""
    found, at = [], 0
    for part in parts:
        if max(start, at) < min(stop, at + part.records.shape[1]):
            found.append(part.part(slice(None), slice(max(0, start - at), stop - at)))
        at += part.records.shape[1]
    return found


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], page-locked if x is."""
    taken = x[rows.to(x.device)]
    return taken.pin_memory() if x.is_pinned() else taken


def _rows(blocks: PackedBlocks, rows: Tensor) -> PackedBlocks:
    return PackedBlocks(
        take_rows(blocks.records, rows), None if blocks.norms is None else take_rows(blocks.norms, rows)
    )


def _joined(*pieces: PackedBlocks) -> PackedBlocks:
    rows = max(piece.records.shape[0] for piece in pieces)
    joined = PackedBlocks.cat(list(SharedBlocks(pieces).expanded(rows)))
    if not pieces[0].records.is_pinned():
        return joined
    return PackedBlocks(joined.records.pin_memory(), None if joined.norms is None else joined.norms.pin_memory())


def _table(pieces: Sequence[PackedBlocks]) -> Tensor | None:
    if not pieces or pieces[0].records.device.type != "cuda":
        return None
    rows, end = [], 0
    for piece in pieces:
        (records, record_row), (norms, norm_row) = (_place(x, end) for x in (piece.records, piece.norms))
        end += piece.records.shape[1]
        rows.append((records, norms, record_row, norm_row, end))
    return torch.tensor(rows, dtype=torch.int64).to(pieces[0].records.device)


def _place(x: Tensor | None, start: int) -> tuple[int, int]:
    """The address at which block 0 would be if block ``start`` is the first, and the bytes from row to row."""
    if x is None:
        return 0, 0
    row = 0 if x.shape[0] == 1 else x.stride(0) * x.itemsize
    return x.data_ptr() - start * x.stride(1) * x.itemsize, row
