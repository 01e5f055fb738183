"""Packing a prompt, and copies of its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from oscar_kv.bench.candidate import Candidate
from oscar_kv.bench.measurement import Shape
from oscar_kv.bench.timing import Call, input_sets
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.kernels.encode import encode, encode_blocks
from oscar_kv.pack import RecordLayout
from oscar_kv.scale import channel_equalizer


def candidates(
    shape: Shape, presets: dict[str, OscarConfig], impls: tuple[str, ...], device: torch.device
) -> Iterator[Candidate]:
    """What to measure: packing keys and values, and for each preset a copy that moves as many bytes.

    The equalization vector is given, as it is for all blocks of a row but its first.
    """
    tokens = (shape.batch, shape.kv_heads, shape.context, shape.head_dim)
    size = 2 * 2 * shape.batch * shape.kv_heads * shape.context * shape.head_dim  # bytes of keys and values in bf16
    sets = torch.randn(input_sets(size, device), 2, *tokens, dtype=torch.bfloat16, device=device)
    sources, targets = (x.view(torch.uint8).view(len(sets), -1) for x in (sets, torch.empty_like(sets)))

    def copies(length: int) -> list[Call]:
        pairs = zip(targets, sources, strict=True)
        return [partial(target[:length].copy_, source[:length]) for target, source in pairs]

    if "copy" in impls:
        yield Candidate("copy", copies(size), 2 * size)
    for name, config in presets.items():
        calls, written = _encoding(sets, config)
        moved = size + written
        if "oscar" in impls:
            yield Candidate("oscar", calls, moved, preset=name)
        if "copy-packed" in impls:
            yield Candidate("copy-packed", copies(moved // 2), moved, preset=name)


def _encoding(sets: Tensor, config: OscarConfig) -> tuple[list[Call], int]:
    """Calls that pack each set (sets, keys and values, batch, heads, tokens, head_dim), and the bytes one writes."""
    keys, values = sets[0]
    batch, _, length, dim = keys.shape
    equalizer = None
    if config.equalize:
        first = keys[:, :, :BLOCK_TOKENS].float()
        equalizer = channel_equalizer(first, config.equalize, config.key_group, config.num_sinks)
    records, norms = encode(keys, values, config, equalizer=equalizer, num_sinks=config.num_sinks)
    layout = RecordLayout(config, dim, dim, keys.dtype)
    plan = torch.tensor([[0], [length // BLOCK_TOKENS], [0]], dtype=torch.int32, device=sets.device).repeat(1, batch)
    calls: list[Call] = []
    for keys, values in sets:
        own = torch.empty_like(records), None if norms is None else torch.empty_like(norms)
        calls.append(partial(encode_blocks, keys, values, layout, equalizer, config.num_sinks, plan, *own))
    return calls, records.nbytes + (0 if norms is None else norms.nbytes)
