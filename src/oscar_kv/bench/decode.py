"""Decode attention of one query token per row: over packed blocks, and PyTorch's over the same tokens in bf16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from oscar_kv.bench.candidate import Candidate
from oscar_kv.bench.measurement import Shape
from oscar_kv.bench.timing import input_sets
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.kernels.decode import decode_attention
from oscar_kv.kernels.encode import encode
from oscar_kv.pack import RecordLayout
from oscar_kv.scale import channel_equalizer

BACKENDS = {"sdpa-flash": SDPBackend.FLASH_ATTENTION, "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION}
_BLOCKS = 8  # different ones; a longer context repeats them


@dataclass(frozen=True)
class Packed:
    """One set of packed inputs: whole blocks only, neither a 16-bit tail nor sinks.

    Args:
        layout: Of the records.
        records: uint8 (batch, blocks, heads, record bytes).
        norms: bfloat16 (batch, blocks, 1 or heads, 128), or None without token scaling.
        equalizer: float32 (batch, heads, head_dim), or None.
        num_blocks: int32 (batch,).
        tail: Keys and values (batch, heads, 128, head_dim), of which none are in use.
        tail_lengths: int32 (batch,) zeros.
    """

    layout: RecordLayout
    records: Tensor
    norms: Tensor | None
    equalizer: Tensor | None
    num_blocks: Tensor
    tail: tuple[Tensor, Tensor]
    tail_lengths: Tensor

    @property
    def read_bytes(self) -> int:
        return sum(x.nbytes for x in (self.records, self.norms, self.equalizer) if x is not None)

    def attend(self, query: Tensor) -> Tensor:
        """(batch, 1, query heads, head_dim) of a query (batch, query heads, 1, head_dim)."""
        return decode_attention(
            query,
            self.layout,
            self.records,
            self.norms,
            self.num_blocks,
            self.tail,
            self.tail_lengths,
            scaling=query.shape[-1] ** -0.5,
            equalizer=self.equalizer,
        )


def normal(*shape: int, device: torch.device) -> Tensor:
    """Random numbers in bf16."""
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _repeated(x: Tensor, dim: int, length: int) -> Tensor:
    """x (1, ...) over and over along a dimension, up to this length."""
    return x.index_select(dim, torch.arange(length, device=x.device) % x.shape[dim])


def packed_sets(
    shape: Shape, config: OscarConfig, keys: Tensor, values: Tensor, count: int | None = None
) -> list[Packed]:
    """Sets of packed inputs that share nothing but what is small.

    Args:
        shape: Whole blocks of context.
        config: The quantization; its sinks are left out.
        keys: bf16 (1, heads, n, head_dim): a whole number of blocks, which are packed and repeated.
        values: The same.
        count: How many; None takes enough to leave the L2 cache cold.
    """
    device, batch, blocks = keys.device, shape.batch, shape.context // BLOCK_TOKENS
    config = replace(config, num_sinks=0)
    equalizer = None
    if config.equalize:
        equalizer = channel_equalizer(keys[:, :, :BLOCK_TOKENS].float(), config.equalize, config.key_group, 0)
    records, norms = encode(keys, values, config, equalizer=equalizer)
    records, norms = _repeated(records, 1, blocks), None if norms is None else _repeated(norms, 1, blocks)
    count = count or input_sets(batch * (records.nbytes + (0 if norms is None else norms.nbytes)), device)
    no_tokens = torch.zeros(batch, shape.kv_heads, BLOCK_TOKENS, shape.head_dim, dtype=keys.dtype, device=device)
    return [
        Packed(
            RecordLayout(config, shape.head_dim, shape.head_dim, keys.dtype),
            records.repeat(batch, 1, 1, 1),
            None if norms is None else norms.repeat(batch, 1, 1, 1),
            None if equalizer is None else equalizer.repeat(batch, 1, 1),
            torch.full((batch,), blocks, dtype=torch.int32, device=device),
            (no_tokens, no_tokens),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )
        for _ in range(count)
    ]


def sdpa(query: Tensor, keys: Tensor, values: Tensor, backend: SDPBackend, form: str) -> Tensor:
    """PyTorch's attention of one query token per row.

    Args:
        query: (batch, query heads, 1, head_dim).
        keys: (batch, KV heads, tokens, head_dim).
        values: The same.
        backend: Which of PyTorch's kernels.
        form: "gqa" leaves the groups to the kernel; "folded" passes the query heads of a group as that many query
            tokens of its KV head, which is the same where all of them see every token.

    Returns:
        (batch, query heads, 1, head_dim), or folded (batch, KV heads, group, head_dim).
    """
    with sdpa_kernel(backend):
        if form == "gqa":
            grouped = query.shape[1] != keys.shape[1]
            return F.scaled_dot_product_attention(query, keys, values, enable_gqa=grouped)
        folded = query.view(query.shape[0], keys.shape[1], -1, query.shape[-1])
        return F.scaled_dot_product_attention(folded, keys, values)


def candidates(
    shape: Shape, presets: dict[str, OscarConfig], impls: tuple[str, ...], device: torch.device
) -> Iterator[Candidate]:
    """What decode attention of this shape may run on, one at a time: making one takes its memory."""
    tokens = (1, shape.kv_heads, BLOCK_TOKENS * _BLOCKS, shape.head_dim)
    keys, values = normal(*tokens, device=device), normal(*tokens, device=device)
    queries = (shape.batch, shape.q_heads, 1, shape.head_dim)
    through = 2 * shape.batch * shape.q_heads * shape.head_dim * keys.itemsize  # bytes of query and output
    backends = [name for name in BACKENDS if name in impls]
    if backends:
        size = 2 * shape.batch * shape.kv_heads * shape.context * shape.head_dim * keys.itemsize
        long = [_repeated(x, 2, shape.context) for x in (keys, values)]
        inputs = [
            (normal(*queries, device=device), *(x.repeat(shape.batch, 1, 1, 1) for x in long))
            for _ in range(input_sets(size, device))
        ]
        for name in backends:
            for form in ("gqa",) if shape.q_heads == shape.kv_heads else ("gqa", "folded"):
                calls = [partial(sdpa, q, k, v, BACKENDS[name], form) for q, k, v in inputs]
                yield Candidate(name, calls, size + through, form=form, optional=True)
    for name, config in presets.items() if "oscar" in impls else ():
        sets = packed_sets(shape, config, keys, values)
        calls = [partial(packed.attend, normal(*queries, device=device)) for packed in sets]
        yield Candidate("oscar", calls, sets[0].read_bytes + through, preset=name)
