"""Which token of which row stands in which column of the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_GROWTH = 1.25


@dataclass
class Step:
    """New columns of one forward pass: which of them are tokens of which row.

    Args:
        counts: Tokens of each row.
        order: int64 (batch, q) that lists each row's tokens first, or None where every column is a token.
    """

    counts: list[int]
    order: Tensor | None


@dataclass
class Timeline:
    """Where the tokens of each row stand in the columns of the batch, the padded positions that the model counts.

    Shared by the layers of a cache, which see the same columns one after the other: padding is looked at once.

    Args:
        max_columns: Allocate for this many columns at once; None grows.
    """

    max_columns: int | None = None
    columns: int = 0
    lengths: list[int] = field(default_factory=list)
    column_of_slot: Tensor | None = None  # int64 (batch, capacity); None while no row has padding
    last: Step | None = None

    def extend(self, start: int, batch: int, q_len: int, valid: Tensor | None) -> Step:
        """Register columns start to start + q_len; ``valid`` is bool (batch, q_len), None where all are tokens."""
        if self.last is not None and start + q_len == self.columns and len(self.lengths) == batch:
            return self.last  # an earlier layer of the same pass
        if start != self.columns:
            raise RuntimeError(f"layers are out of step: {start} columns here, {self.columns} in the first layer")
        if not self.lengths:
            self.lengths = [0] * batch
        if valid is None or bool(valid.all()):
            step = Step([q_len] * batch, None)
        else:
            counts: list[int] = valid.sum(-1).tolist()
            step = Step(counts, torch.argsort(~valid, dim=-1, stable=True))
        if step.order is not None and self.column_of_slot is None:
            self.column_of_slot = torch.zeros(
                batch, max(start, self.max_columns or 0), dtype=torch.long, device=step.order.device
            )
            self.column_of_slot[:, :start] = torch.arange(start, device=step.order.device)
        if self.column_of_slot is not None:
            self._append_columns(start, q_len, step)
        self.lengths = [n + count for n, count in zip(self.lengths, step.counts, strict=True)]
        self.columns += q_len
        self.last = step
        return step

    def _append_columns(self, start: int, q_len: int, step: Step) -> None:
        assert self.column_of_slot is not None
        batch, capacity = self.column_of_slot.shape
        needed = max(n + q_len for n in self.lengths)  # a row's padding is written too, beyond its length
        if needed > capacity:
            grown = self.column_of_slot.new_zeros(batch, max(needed, int(capacity * _GROWTH)))
            grown[:, :capacity] = self.column_of_slot
            self.column_of_slot = grown
        new = torch.arange(q_len, device=self.column_of_slot.device).repeat(batch, 1)
        new = start + (new if step.order is None else step.order)
        first = torch.tensor(self.lengths, device=new.device).unsqueeze(1)
        self.column_of_slot.scatter_(1, first + torch.arange(q_len, device=new.device), new)

    def cropped(self, columns: int) -> list[int]:
        """Length of each row when the last ``columns`` columns are taken off."""
        if self.column_of_slot is None:
            return [n - columns for n in self.lengths]
        slots = torch.arange(self.column_of_slot.shape[1], device=self.column_of_slot.device)
        held = slots < torch.tensor(self.lengths, device=slots.device).unsqueeze(1)
        return (held & (self.column_of_slot < self.columns - columns)).sum(-1).tolist()

    def crop(self, columns: int) -> None:
        self.lengths = self.cropped(columns)
        self.columns -= columns
        self.last = None

    def select(self, rows: Tensor) -> None:
        """Make row i what row ``rows[i]`` was."""
        self.lengths = [self.lengths[i] for i in rows.tolist()] if self.lengths else []
        if self.column_of_slot is not None:
            self.column_of_slot = self.column_of_slot[rows.to(self.column_of_slot.device)]
        self.last = None

    def clear(self) -> None:
        self.columns, self.lengths, self.column_of_slot, self.last = 0, [], None, None

    def copy(self) -> Timeline:
        other = Timeline(self.max_columns)
        other.load_state_dict(self.state_dict())
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that are held while rows have padding."""
        order = None if self.last is None else self.last.order
        return sum(x.nbytes for x in (self.column_of_slot, order) if x is not None)

    def state_dict(self) -> dict[str, Any]:
        columns = None if self.column_of_slot is None else self.column_of_slot.clone()
        return {"columns": self.columns, "lengths": list(self.lengths), "column_of_slot": columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.columns, self.lengths, self.last = state["columns"], list(state["lengths"]), None
        columns = state["column_of_slot"]
        self.column_of_slot = None if columns is None else columns.clone()
