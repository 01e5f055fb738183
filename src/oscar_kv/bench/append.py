"""Appending one token per row in each layer of a step, with the packing of the blocks that this completes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from oscar_kv.bench.candidate import Candidate
from oscar_kv.bench.measurement import Shape
from oscar_kv.bench.timing import Call
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.kernels.tail import Counters, TailLayer, append, flush
from oscar_kv.pack import RecordLayout

LAYERS = 32  # of a step, at whose end they pack together


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
            yield Candidate(impl, steps, moved, preset=name, times=LAYERS)


def _steps(shape: Shape, layout: RecordLayout, starts: list[int], device: torch.device) -> list[Call]:
    """128 steps of rows that have packed a block, and whose tails begin with so many tokens."""
    counters = torch.stack([Counters.zeros(shape.batch, device).data] * LAYERS)
    for counts in counters:
        Counters(counts).set(starts, [1] * shape.batch)
    initial = counters.clone()
    layers = [_layer(shape, layout, Counters(counts)) for counts in counters]
    size = shape.batch, shape.kv_heads, 1, shape.head_dim
    keys, values = (torch.randn(size, dtype=layout.dtype, device=device) for _ in range(2))

    def step() -> None:
        for layer in layers:
            append(keys, values, layer.tail, layer.counters, layout)
        flush(layers, layout)

    def first() -> None:
        counters.copy_(initial)
        step()

    return [first, *[step] * (BLOCK_TOKENS - 1)]


def _layer(shape: Shape, layout: RecordLayout, counters: Counters) -> TailLayer:
    config, batch, heads, dim, device = layout.config, shape.batch, shape.kv_heads, shape.head_dim, counters.data.device

    def normal(tokens: int) -> torch.Tensor:
        return torch.randn(batch, heads, tokens, dim, dtype=layout.dtype, device=device)

    records = torch.zeros(batch, 3, heads, layout.record_bytes, dtype=torch.uint8, device=device)
    norms = torch.zeros(batch, 3, 1, BLOCK_TOKENS, dtype=torch.bfloat16, device=device) if config.token_norm else None
    equalizer = torch.ones(batch, heads, dim, device=device) if config.equalize else None
    sinks = (normal(config.num_sinks), normal(config.num_sinks)) if config.num_sinks else None
    tail = normal(config.residual_length), normal(config.residual_length)
    return TailLayer(tail, counters, records, norms, equalizer, sinks)
