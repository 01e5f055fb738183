"""What appending and packing cost a decoding step: a layer's attention alone, and with both around it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv.bench.append import Rows
from oscar_kv.bench.candidate import Candidate
from oscar_kv.bench.decode import Packed, normal, packed_sets, sample
from oscar_kv.bench.measurement import Shape
from oscar_kv.bench.timing import Call
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.kernels.decode import decode_attention


@dataclass(frozen=True)
class _Layer:
    """A layer whose packed blocks are attended to, and whose tail fills and is packed elsewhere.

    Args:
        packed: What attention reads.
        rows: The tail, and where its blocks go.
        query: bf16 (batch, query heads, 1, head_dim).
        packing: Recorded when the last block is packed.
    """

    packed: Packed
    rows: Rows
    query: Tensor
    packing: torch.cuda.Event

    def attend(self, fresh: int) -> None:
        packed, counters = self.packed, self.rows.counters
        decode_attention(
            self.query, packed.layout, packed.records, packed.norms, packed.num_blocks, self.rows.tail,
            counters.lengths, fresh=fresh, scaling=self.query.shape[-1] ** -0.5, equalizer=packed.equalizer,
        )  # fmt: skip

    def step(self, beside: torch.cuda.Stream, first: bool) -> None:
        """As :class:`oscar_kv.DecodeGraph` does it: the next layer does not wait for this one's packing."""
        current = torch.cuda.current_stream()
        if first:
            self.rows.reset()
        else:
            current.wait_event(self.packing)
        self.rows.append()
        self.attend(fresh=1)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            self.rows.flush()
            self.packing.record()


def candidates(
    shape: Shape, presets: dict[str, OscarConfig], impls: tuple[str, ...], device: torch.device
) -> Iterator[Candidate]:
    """A call is one layer of a step; the time is the mean over 128 steps, in which every row packs one block."""
    for name, config in presets.items():
        layers: list[_Layer] = []
        for packed in packed_sets(shape, config, *sample(shape, device)):
            query = normal(shape.batch, shape.q_heads, 1, shape.head_dim, device=device)
            rows = Rows(shape, packed.layout, [BLOCK_TOKENS // 2] * shape.batch, device)
            layers.append(_Layer(packed, rows, query, torch.cuda.Event()))
        read = layers[0].packed.read_bytes
        if "attention" in impls:
            yield Candidate("attention", [_attention(layer) for layer in layers], read, preset=name)
        for impl, starts in (
            ("oscar", [0] * shape.batch),
            ("oscar-staggered", [row * BLOCK_TOKENS // shape.batch for row in range(shape.batch)]),
        ):
            if impl in impls:
                own = [
                    _Layer(x.packed, Rows(shape, x.packed.layout, starts, device), x.query, torch.cuda.Event())
                    for x in layers
                ]
                yield Candidate(impl, _steps(own, device), read, preset=name)


def _attention(layer: _Layer) -> Call:
    return lambda: layer.attend(fresh=0)


def _steps(layers: list[_Layer], device: torch.device) -> list[Call]:
    beside, last = torch.cuda.Stream(device), BLOCK_TOKENS * len(layers) - 1

    def call(number: int) -> None:
        layers[number % len(layers)].step(beside, first=number < len(layers))
        if number == last:
            torch.cuda.current_stream().wait_stream(beside)

    return [lambda number=number: call(number) for number in range(last + 1)]  # type: ignore[misc]
