"""Attention of many queries over packed history: torch's fused attention on one dequantized range of it at a time.

No query is older than the history, so no mask is needed over it. The ranges are dequantized into a workspace that does
not grow with the context, in the space in which they were quantized: queries are rotated once, keys never. Partial
outputs are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F

from oscar_kv import kernels
from oscar_kv.codec import PackedBlocks, dequantize_blocks
from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.pack import RecordLayout
from oscar_kv.rotate import rotate
from oscar_kv.shared import blocks_between

_WORKSPACE_BYTES = 2**28
_ELEMENT_BYTES = 12  # that dequantizing takes per number, the range before it included (the kernel takes 4)
_FLASH_DIM = 256  # largest head dimension of flash attention


def supported(query: Tensor, layout: RecordLayout) -> bool:
    """Whether this runs torch's fused 16-bit attention on a GPU, and so faster than the reference."""
    if query.device.type != "cuda" or query.dtype != layout.dtype or query.dtype.itemsize != 2:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(query.device) >= (8, 0)


@dataclass
class _Partial:
    """Attention over some of the tokens, and the log-sum-exp of its scores. Merging overwrites."""

    output: Tensor  # float32 (rows, heads, group * q, value_dim)
    lse: Tensor  # float32 (rows, heads, group * q)

    def merge(self, other: _Partial) -> _Partial:
        weight = torch.sigmoid(other.lse - self.lse).unsqueeze(-1)
        return _Partial(self.output.lerp_(other.output, weight), torch.logaddexp(self.lse, other.lse))


def prefill_attention(
    query: Tensor,
    layout: RecordLayout,
    parts: Sequence[PackedBlocks],
    num_blocks: Tensor,
    tail: tuple[Tensor, Tensor],
    tail_lengths: Tensor,
    *,
    scaling: float,
    equalizer: Tensor | None = None,
    sinks: tuple[Tensor, Tensor] | None = None,
    sink_logits: Tensor | None = None,
    tokens: Tensor | None = None,
) -> Tensor:
    """Causal attention of the newest tokens over everything cached.

    Rotated queries, dequantized keys and values and the weights are rounded to the model's dtype: relative to its norm
    the output is off by about 5e-3 for bfloat16 and 6e-4 for float16, of which its own rounding is a third.

    Args:
        query: (rows, query heads, q, key_dim); those that are tokens belong to the last tokens of the tail.
        layout: Of the records.
        parts: Packed blocks (rows, n, ...), one after the other; together at least num_blocks.
        num_blocks: int (rows): packed blocks.
        tail: Keys and values (rows, heads, n, head_dim), the newest tokens included.
        tail_lengths: int (rows): tokens in the tail.
        scaling: Factor on the scores.
        equalizer: float32 (rows, heads, key_dim).
        sinks: Keys and values (rows, heads, num_sinks, head_dim) that are read instead of the first packed tokens.
        sink_logits: (query heads,) learned sinks: one more logit per head, without a value.
        tokens: bool (rows, q): False for padding, whose output is 0. None where there is none.

    Returns:
        (rows, query heads, q, value_dim) in the query's dtype.
    """
    (batch, heads), q_len = query.shape[:2], query.shape[2]
    counts, lengths = torch.stack((num_blocks, tail_lengths)).tolist()
    new = [q_len] * batch
    order: Tensor | None = None
    if tokens is not None:
        tokens = tokens.expand(batch, -1)
        order = (~tokens).long().argsort(dim=1, stable=True)[:, None, :, None]  # tokens first
        query = query.gather(2, order.expand_as(query))
        new = tokens.sum(1).tolist()
    output = query.new_zeros(batch, heads, q_len, layout.value_dim)
    shapes = list(zip(counts, lengths, new, strict=True))
    for (count, length, n), run in groupby(range(batch), key=shapes.__getitem__):  # neighbours of equal lengths
        first, *others = run
        rows = slice(first, first + 1 + len(others))
        if n == 0:
            continue
        output[rows, :, :n] = _attend_rows(
            query[rows, :, :n],
            layout,
            [part.part(rows, slice(None)) for part in blocks_between(parts, 0, count)],
            (tail[0][rows, :, :length], tail[1][rows, :, :length]),
            scaling,
            None if equalizer is None else equalizer[rows],
            None if sinks is None else (sinks[0][rows], sinks[1][rows]),
            sink_logits,
        )
    return output if order is None else torch.zeros_like(output).scatter_(2, order.expand_as(output), output)


def _attend_rows(
    query: Tensor,
    layout: RecordLayout,
    parts: Sequence[PackedBlocks],
    tail: tuple[Tensor, Tensor],
    scaling: float,
    equalizer: Tensor | None,
    sinks: tuple[Tensor, Tensor] | None,
    sink_logits: Tensor | None,
) -> Tensor:
    """The same for rows of equal lengths: all of the parts and of the tail are theirs."""
    heads, new = tail[0].shape[1], query.shape[2]
    old = tail[0].shape[2] - new
    grouped = query.unflatten(1, (heads, -1))  # (rows, heads, group, q, key_dim)
    folded = grouped.flatten(2, 3)
    keys, values = tail
    result = _attend_new(grouped, keys[:, :, old:], values[:, :, old:], scaling)
    exact = [(keys[:, :, :old], values[:, :, :old])] if old else []
    if parts and sinks is not None:
        exact.append(sinks)
    if exact:
        keys, values = (torch.cat(x, dim=2) for x in zip(*exact, strict=True))
        result = result.merge(_fused(folded, keys, values, scaling))
    if parts:
        result = result.merge(_attend_packed(folded, layout, parts, scaling, equalizer, sinks))
    output = result.output.unflatten(2, grouped.shape[2:4]).flatten(1, 2)
    if sink_logits is not None:
        lse = result.lse.unflatten(2, grouped.shape[2:4]).flatten(1, 2)
        output = output * torch.sigmoid(lse - sink_logits.float().unsqueeze(-1)).unsqueeze(-1)
    return output.to(query.dtype)


def _attend_new(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> _Partial:
    """Causal attention of the new tokens (rows, heads, group, q, key_dim) to each other."""
    group = query.shape[2]
    keys, values = (x.flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1) for x in (keys, values))  # no copy
    partial = _fused(query.flatten(0, 1), keys, values, scaling, causal=True)
    return _Partial(*(x.flatten(1, 2).unflatten(0, query.shape[:2]) for x in (partial.output, partial.lse)))


def _attend_packed(
    query: Tensor,
    layout: RecordLayout,
    parts: Sequence[PackedBlocks],
    scaling: float,
    equalizer: Tensor | None,
    sinks: tuple[Tensor, Tensor] | None,
) -> _Partial:
    """Attention to packed tokens but the sinks, the output rotated back."""
    config, dtype = layout.config, query.dtype
    if config.key_bits != 16:
        query = query.float() if equalizer is None else query * equalizer.unsqueeze(2)
        query = (rotate(query) if config.rotate_keys else query).to(dtype)
    num_sinks = 0 if sinks is None else sinks[0].shape[2]
    result: _Partial | None = None
    for keys, values in _ranges(layout, parts, num_sinks):
        partial = _fused(query, keys, values, scaling)
        result = partial if result is None else result.merge(partial)
    assert result is not None  # there are blocks
    if config.rotate_values and config.value_bits != 16:
        result.output = rotate(result.output)
    return result


def range_blocks(layout: RecordLayout, rows: int, heads: int) -> int:
    """Blocks of each row that are dequantized at a time."""
    numbers = rows * heads * BLOCK_TOKENS * (layout.key_dim + layout.value_dim)
    return max(1, _WORKSPACE_BYTES // (_ELEMENT_BYTES * numbers))


def _ranges(layout: RecordLayout, parts: Sequence[PackedBlocks], skip: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values of ranges of blocks in the model's dtype, without the first ``skip`` tokens."""
    for part in parts:
        rows, count, heads = part.records.shape[:3]
        step = range_blocks(layout, rows, heads)
        for start in range(0, count, step):
            keys, values = _dequantize(part.part(slice(None), slice(start, start + step)), layout)
            yield keys[:, :, skip:], values[:, :, skip:]
            skip = 0


def _dequantize(blocks: PackedBlocks, layout: RecordLayout) -> tuple[Tensor, Tensor]:
    """Keys, their norms multiplied in, and values: (rows, heads, 128 * blocks, head_dim) in the model's dtype."""
    if kernels.usable(blocks.records.device):
        from oscar_kv.kernels import dequantize as gpu

        return gpu.dequantize_blocks(blocks.records, blocks.norms, layout)
    keys, values = dequantize_blocks(blocks, layout)
    norms = blocks.token_norms()
    if norms is not None:
        keys *= norms.unsqueeze(-1)
    return keys.to(layout.dtype), values.to(layout.dtype)


def _fused(query: Tensor, keys: Tensor, values: Tensor, scaling: float, *, causal: bool = False) -> _Partial:
    """torch's attention of (rows, heads, q, key_dim), with the log-sum-exp that its public function leaves out.

    Causal only with as many keys as queries.
    """
    value_dim, width = values.shape[-1], max(query.shape[-1], values.shape[-1])
    if query.shape[-1] != value_dim:  # flash attention has one head dimension; zeros add nothing to a score
        query, keys, values = (F.pad(x, (0, width - x.shape[-1])) for x in (query, keys, values))
    aten, tokens = torch.ops.aten, (query, keys, values)
    if query.device.type == "cpu":
        output, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(*tokens, 0.0, causal, scale=scaling)
    elif width <= _FLASH_DIM:
        output, lse, *_ = aten._scaled_dot_product_flash_attention.default(*tokens, 0.0, causal, scale=scaling)
    else:
        efficient = aten._scaled_dot_product_efficient_attention.default
        output, lse, *_ = efficient(*tokens, None, True, 0.0, causal, scale=scaling)
        lse = lse[:, :, : query.shape[2]]  # comes in multiples of 32 queries
    return _Partial(output[..., :value_dim].float(), lse)
