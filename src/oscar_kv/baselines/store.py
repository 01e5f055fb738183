"""What one layer of a rival's cache holds: sinks, packed tokens and the 16-bit tail, in the order of the text."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from oscar_kv.baselines.base import COMPONENTS, Codec, Method
from oscar_kv.baselines.groups import Packed

Tokens = tuple[Tensor, Tensor]  # keys and values (batch, heads, tokens, head_dim)


class Store:
    """Keys and values of one layer.

    Args:
        method: What stays in 16 bit, and how many tokens are packed at a time.
        codec: How they are packed.
        tokens: Any keys and values: shape, dtype and device of what will be stored.
    """

    def __init__(self, method: Method, codec: Codec, tokens: Tokens) -> None:
        self.method, self.codec = method, codec
        self.sinks = self.tail = _part(tokens, 0, 0)
        self.packed: Packed = {}
        self.num_packed = 0

    @property
    def length(self) -> int:
        """Tokens of each row."""
        return self.sinks[0].shape[2] + self.num_packed + self.tail[0].shape[2]

    def append(self, tokens: Tokens) -> Tokens:
        """Take new tokens and return the whole history: what was packed before as it is read back, the rest exactly.

        Raises:
            ValueError: They do not belong to what is stored.
        """
        for own, new in zip(self.tail, tokens, strict=True):
            if (own.shape[:2], own.shape[3], own.dtype) != (new.shape[:2], new.shape[3], new.dtype):
                raise ValueError(
                    f"the cache holds {tuple(own.shape)} in {own.dtype}, not {tuple(new.shape)}, {new.dtype}"
                )
        self.tail = _join(self.tail, tokens)
        history = self.dense()
        self._pack()
        return history

    def _pack(self) -> None:
        """Move tokens from the tail to the sinks, and whole blocks to what is packed."""
        missing = self.method.num_sinks - self.sinks[0].shape[2]
        if missing > 0:
            self.sinks, self.tail = _join(self.sinks, _part(self.tail, 0, missing)), _part(self.tail, missing, None)
        start = self.sinks[0].shape[2] + self.num_packed
        stop = (self.length - self.method.residual_length) // self.method.block * self.method.block
        count = stop - start
        if count <= 0:
            return
        keys, values = _part(self.tail, 0, count)
        new = self.codec.encode(keys.float(), values.float(), start)
        self.packed = {name: torch.cat((self.packed[name], x), 2) if self.packed else x for name, x in new.items()}
        self.num_packed += count
        self.tail = _part(self.tail, count, None)

    def dense(self) -> Tokens:
        """All keys and values, packed ones dequantized."""
        if not self.packed:
            return _join(self.sinks, self.tail)
        keys, values = self.codec.decode(self.packed, self.sinks[0].shape[2])
        packed = keys.to(self.tail[0].dtype), values.to(self.tail[1].dtype)
        return _join(_join(self.sinks, packed), self.tail)

    def crop(self, count: int) -> None:
        """Remove the last tokens.

        Raises:
            ValueError: They are not all in the tail.
        """
        kept = self.tail[0].shape[2] - count
        if count < 0 or kept < 0:
            raise ValueError(f"cannot remove {count} tokens: only those of the 16-bit tail can be")
        self.tail = _part(self.tail, 0, kept)

    def select(self, rows: Tensor) -> None:
        """Make row i what row ``rows[i]`` was."""
        rows = rows.to(self.tail[0].device)
        self.sinks, self.tail = ((keys[rows], values[rows]) for keys, values in (self.sinks, self.tail))
        self.packed = {name: x[rows] for name, x in self.packed.items()}
        self.codec.state = {name: x[rows] for name, x in self.codec.state.items()}

    def memory_bytes(self) -> Counter[str]:
        """Bytes of every tensor that belongs to the sequences, by component."""
        sizes: Counter[str] = Counter()
        for name, x in self.packed.items():
            sizes[COMPONENTS[name.rsplit("_", 1)[-1]]] += x.nbytes
        sizes["tail"] += sum(x.nbytes for x in self.tail)
        sizes["sinks"] += sum(x.nbytes for x in self.sinks)
        sizes["state"] += sum(x.nbytes for x in self.codec.state.values())
        return sizes

    def elements(self, tokens: int) -> int:
        """Key and value numbers of this many tokens of all rows."""
        return sum(x.shape[0] * x.shape[1] * x.shape[3] for x in self.tail) * tokens


def _join(first: Tokens, second: Tokens) -> Tokens:
    keys, values = (torch.cat(pair, dim=2) for pair in zip(first, second, strict=True))
    return keys, values


def _part(tokens: Tokens, start: int, stop: int | None) -> Tokens:
    """Some tokens; a copy, so that the others can be freed."""
    keys, values = (x[:, :, start:stop].clone() for x in tokens)
    return keys, values
