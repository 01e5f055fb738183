"""Appending one token per row, with the packing of the blocks that this completes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from oscar_kv.bench.candidate import Candidate
from oscar_kv.bench.measurement import Shape
from oscar_kv.bench.timing import Call
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.kernels.tail import Counters, append, flush
from oscar_kv.pack import RecordLayout


def candidates(
    shape: Shape, presets: dict[str, OscarConfig], impls: tuple[str, ...], device: torch.device
) -> Iterator[Candidate]:
    """128 steps, in which every row packs one block: all in the same step, or ("oscar-staggered") each in its own."""
    for name, config in presets.items():
        for impl in impls:
            if impl == "oscar-staggered" and shape.batch > 1:
                starts = [row * BLOCK_TOKENS // shape.batch for row in range(shape.batch)]
            elif impl == "oscar":
                starts = [0] * shape.batch
            else:
                continue
            layout = RecordLayout(config, shape.head_dim, shape.head_dim, torch.bfloat16)
            token = 2 * shape.head_dim * torch.bfloat16.itemsize * shape.kv_heads * shape.batch
            packed = (layout.record_bytes + 2 * (config.token_norm is not None)) * shape.kv_heads * shape.batch
            steps = _steps(shape, layout, starts, device)
            moved = 3 * token + packed // BLOCK_TOKENS  # read, written, and read again when its block is packed
            yield Candidate(impl, steps, moved, preset=name)


def _steps(shape: Shape, layout: RecordLayout, starts: list[int], device: torch.device) -> list[Call]:
    """Calls of 128 steps, of rows that have packed blocks and whose tails begin with so many tokens."""
    config, batch, heads, dim = layout.config, shape.batch, shape.kv_heads, shape.head_dim

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=layout.dtype, device=device)

    counters = Counters.zeros(batch, device)
    counters.set(starts, [1] * batch)
    initial = counters.data.clone()
    capacity = config.residual_length
    tail = normal(batch, heads, capacity, dim), normal(batch, heads, capacity, dim)
    keys, values = normal(batch, heads, 1, dim), normal(batch, heads, 1, dim)
    records = torch.zeros(batch, 3, heads, layout.record_bytes, dtype=torch.uint8, device=device)
    norms = torch.zeros(batch, 3, 1, BLOCK_TOKENS, dtype=torch.bfloat16, device=device)
    equalizer = torch.ones(batch, heads, dim, device=device) if config.equalize else None
    sinks = (normal(batch, heads, config.num_sinks, dim),) * 2 if config.num_sinks else None

    def step() -> None:
        append(keys, values, tail, counters, layout)
        flush(tail, counters, layout, records, norms if config.token_norm else None, equalizer, sinks)

    def first() -> None:
        counters.data.copy_(initial)
        step()

    return [first, *[step] * (BLOCK_TOKENS - 1)]
