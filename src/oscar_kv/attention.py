"""Attention over packed blocks, sinks and the 16-bit tail: the PyTorch reference, and the choice of a faster form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from oscar_kv import kernels, prefill
from oscar_kv.codec import PackedBlocks, dequantize_blocks
from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.pack import RecordLayout
from oscar_kv.rotate import rotate
from oscar_kv.shared import SharedBlocks, blocks_between

_KEY_CHUNK = 1024  # tokens whose scores are held at a time
_QUERY_CHUNK = 256  # queries whose scores are held at a time


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


@dataclass
class _Segment:
    """Consecutive tokens of one kind: packed ones in the space in which they were quantized, others as they are."""

    keys: Tensor  # float32 (batch, heads, n, key_dim)
    values: Tensor  # float32 (batch, heads, n, value_dim)
    gain: Tensor | None  # float32 (batch, 1 or heads, n): token norm, multiplies the score
    slots: Tensor  # int64 (1 or batch, n)
    valid: Tensor  # bool (batch, n)
    packed: bool


def attend(
    query: Tensor,
    view: KVView,
    *,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    causal: bool = True,
    plain_mask: bool = False,
) -> Tensor:
    """Attention of new queries over everything that a layer has cached, the new tokens included.

    Scores and sums are fp32 whatever the inputs are; the token norm multiplies the score, the query is equalized and
    rotated instead of the packed keys, and the output of the packed values is rotated back once (paper section 4.2).

    Args:
        query: (batch, query heads, q, key_dim); the number of query heads is a multiple of the KV heads.
        view: The cached tokens; the queries belong to the last q slots of each row.
        scaling: Factor on the scores.
        mask: (batch or 1, 1 or query heads, q, columns), bool (True attends) or additive. None masks causally.
        softcap: Scores become ``softcap * tanh(score / softcap)`` before the mask.
        sink_logits: (query heads,) learned attention sinks: one more logit per head, without a value.
        causal: Whether mask None masks causally.
        plain_mask: The mask is causal and hides padding, no more: a kernel that skips padding need not read it.

    Returns:
        (batch, query heads, q, value_dim) in the query's dtype.
    """
    plain = mask is None or (plain_mask and not view.padded_queries)
    if view.blocks is not None and causal and plain and _kernel_fits(query, view):
        return _attend_kernel(query, view, scaling, softcap, sink_logits)
    if view.most_blocks == 0 and softcap is None and sink_logits is None:
        return _attend_exact(query, view, scaling, mask, causal)
    fusible = causal and (plain or plain_mask) and softcap is None
    if view.most_blocks and fusible and prefill.supported(query, view.layout):
        return _attend_prefill(query, view, scaling, None if plain else mask, sink_logits)
    outputs = []
    for start in range(0, query.shape[2], _QUERY_CHUNK):
        stop = min(start + _QUERY_CHUNK, query.shape[2])
        chunk = _Queries(query, start, stop, view, scaling, mask, softcap, causal)
        outputs.append(chunk.attend(sink_logits))
    return torch.cat(outputs, dim=2).to(query.dtype)


def _kernel_fits(query: Tensor, view: KVView) -> bool:
    """Whether the GPU kernel takes this; says once why not."""
    if not kernels.usable(query.device):
        return False
    from oscar_kv.kernels.decode_launch import MAX_COLUMNS, unsupported

    columns = query.shape[1] // view.recent[0].shape[1] * query.shape[2]
    reason = unsupported(view.layout, columns, query.shape[0], query.device)
    if reason is not None:
        kernels.warn_unsupported(reason)
    return reason is None and columns <= MAX_COLUMNS


def _attend_kernel(
    query: Tensor, view: KVView, scaling: float, softcap: float | None, sink_logits: Tensor | None
) -> Tensor:
    from oscar_kv.kernels.decode import decode_attention

    assert view.blocks is not None
    output = decode_attention(
        query,
        view.layout,
        view.blocks.records,
        view.blocks.norms,
        view.num_blocks,
        view.recent,
        view.recent_lengths,
        scaling=scaling,
        fresh=view.fresh,
        equalizer=view.equalizer,
        sinks=view.sinks,
        softcap=softcap,
        sink_logits=sink_logits,
        first=view.shared.count,
        pieces=view.shared.table,
    )
    return output.transpose(1, 2)


def _attend_prefill(
    query: Tensor, view: KVView, scaling: float, mask: Tensor | None, sink_logits: Tensor | None
) -> Tensor:
    return prefill.prefill_attention(
        query,
        view.layout,
        view.parts,
        view.num_blocks,
        view.recent,
        view.lengths - BLOCK_TOKENS * view.num_blocks,
        scaling=scaling,
        equalizer=view.equalizer,
        sinks=view.sinks,
        sink_logits=sink_logits,
        tokens=new_tokens(mask, query.shape[2]),
    )


def new_tokens(mask: Tensor | None, q_len: int) -> Tensor | None:
    """bool (batch, q_len): which new columns are tokens, namely those whose query may attend to itself."""
    if mask is None:
        return None
    own = mask[..., -q_len:].diagonal(dim1=-2, dim2=-1)
    return (own if own.dtype == torch.bool else ~is_hidden(own)).any(1)


def is_hidden(mask: Tensor) -> Tensor:
    """Where an additive mask hides a column: -inf, or about the smallest finite number."""
    return mask < 0.5 * torch.finfo(mask.dtype).min


def _attend_exact(query: Tensor, view: KVView, scaling: float, mask: Tensor | None, causal: bool) -> Tensor:
    """Nothing is packed yet: torch's own attention over the 16-bit tokens."""
    keys, values = view.recent
    q_len, n = query.shape[2], keys.shape[2]
    gqa = query.shape[1] != keys.shape[1]
    equal = view.columns is None  # every row has n tokens
    if mask is None and equal and (q_len == 1 or q_len == n or not causal):
        return F.scaled_dot_product_attention(
            query, keys, values, scale=scaling, is_causal=causal and q_len > 1, enable_gqa=gqa
        )
    slots = torch.arange(n, device=query.device).unsqueeze(0)
    allowed = _allowed(slots, slots < view.lengths.unsqueeze(1), view, mask, 0, q_len, q_len, causal)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=allowed, scale=scaling, enable_gqa=gqa)


def _allowed(
    slots: Tensor, valid: Tensor, view: KVView, mask: Tensor | None, start: int, stop: int, q_len: int, causal: bool
) -> Tensor:
    """Mask of queries start to stop over some slots: (batch, 1 or heads, stop - start, n), bool or additive."""
    valid = valid[:, None, None]
    if mask is None:
        if not causal:
            return valid.expand(-1, 1, stop - start, -1)
        own = view.lengths[:, None] - q_len + torch.arange(start, stop, device=slots.device)  # slot of each query
        return valid & (slots[:, None, None] <= own[:, None, :, None])
    columns = slots
    if view.columns is not None:
        batch = view.columns.shape[0]
        columns = view.columns.gather(1, slots.clamp(max=view.columns.shape[1] - 1).expand(batch, -1))
    mask = mask[:, :, start:stop]
    index = columns.clamp(max=mask.shape[-1] - 1)[:, None, None]
    batch = max(mask.shape[0], index.shape[0])
    picked = mask.expand(batch, -1, -1, -1).gather(3, index.expand(batch, mask.shape[1], mask.shape[2], -1))
    if picked.dtype == torch.bool:
        return picked & valid
    return torch.where(valid, picked, torch.finfo(picked.dtype).min)


class _Queries:
    """A chunk of queries and the running softmax over the segments that it attends to."""

    def __init__(
        self,
        query: Tensor,
        start: int,
        stop: int,
        view: KVView,
        scaling: float,
        mask: Tensor | None,
        softcap: float | None,
        causal: bool,
    ) -> None:
        self.view, self.mask, self.softcap, self.causal = view, mask, softcap, causal
        self.start, self.stop, self.q_len = start, stop, query.shape[2]
        batch, heads = query.shape[0], view.recent[0].shape[1]
        config = view.layout.config
        q = query[:, :, start:stop].float() * scaling
        self.exact = q.unflatten(1, (heads, -1))  # (batch, kv heads, group, q, key_dim)
        q = self.exact
        if config.key_bits != 16:
            if view.equalizer is not None:
                q = q * view.equalizer[:, :, None, None]
            if config.rotate_keys:
                q = rotate(q)
        self.rotated = q
        shape = (batch, heads, q.shape[2], stop - start)
        value_dim = view.recent[1].shape[-1]
        self.largest = torch.full(shape, -torch.inf, device=q.device)
        self.total = torch.zeros(shape, device=q.device)
        self.output = {packed: torch.zeros(*shape, value_dim, device=q.device) for packed in (True, False)}

    def attend(self, sink_logits: Tensor | None) -> Tensor:
        for segment in _segments(self.view):
            self._accumulate(segment)
        packed, exact = self.output[True], self.output[False]
        config = self.view.layout.config
        if self.view.most_blocks and config.rotate_values and config.value_bits != 16:
            packed = rotate(packed)
        total = self.total
        if sink_logits is not None:
            logits = sink_logits.float().view(1, *self.largest.shape[1:3], 1)
            total = total + torch.exp(logits - self.largest)
        # a row without anything to attend to (a padding query) gives 0
        output = (packed + exact) / torch.where(total == 0, 1.0, total).unsqueeze(-1)
        return output.flatten(1, 2)

    def _accumulate(self, segment: _Segment) -> None:
        query = self.rotated if segment.packed else self.exact
        scores = query.flatten(2, 3) @ segment.keys.transpose(-1, -2)  # (batch, kv heads, group * q, n)
        if segment.gain is not None:
            scores = scores * segment.gain.unsqueeze(2)
        scores = scores.unflatten(2, query.shape[2:4])
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        allowed = _allowed(
            segment.slots, segment.valid, self.view, self.mask, self.start, self.stop, self.q_len, self.causal
        )
        # (batch, 1 or query heads, q, n) -> (batch, 1 or kv heads, 1 or group, q, n)
        allowed = allowed.unsqueeze(2) if allowed.shape[1] == 1 else allowed.unflatten(1, scores.shape[1:3])
        if allowed.dtype == torch.bool:
            scores = torch.where(allowed, scores, -torch.inf)
        else:
            scores = torch.where(is_hidden(allowed), -torch.inf, scores + allowed.float())
        largest = torch.maximum(self.largest, scores.amax(-1))
        base = torch.where(largest == -torch.inf, 0.0, largest)  # nothing seen yet: exp(-inf - 0) = 0
        weights = torch.exp(scores - base.unsqueeze(-1))
        decay = torch.exp(self.largest - base)
        self.total = self.total * decay + weights.sum(-1)
        for packed in self.output:
            self.output[packed] = self.output[packed] * decay.unsqueeze(-1)
        sums = weights.flatten(2, 3) @ segment.values
        self.output[segment.packed] += sums.unflatten(2, query.shape[2:4])
        self.largest = largest


def _segments(view: KVView) -> Iterator[_Segment]:
    """Everything a view holds, at most ``_KEY_CHUNK`` tokens at a time: the workspace is bounded."""
    device = view.lengths.device
    num_blocks = view.num_blocks.unsqueeze(1)
    sinks = 0 if view.sinks is None else view.sinks[0].shape[2]
    step = _KEY_CHUNK // BLOCK_TOKENS
    for start in range(0, 0 if view.blocks is None else view.most_blocks, step):
        chunk = PackedBlocks.cat(blocks_between(view.parts, start, min(start + step, view.most_blocks)))
        keys, values = dequantize_blocks(chunk, view.layout)
        gain = chunk.token_norms()
        slots = (BLOCK_TOKENS * start + torch.arange(keys.shape[2], device=device)).unsqueeze(0)
        valid = (slots >= sinks) & (slots < BLOCK_TOKENS * num_blocks)
        # unused blocks hold arbitrary bytes: NaN times weight 0 must not reach the sum
        values = torch.where(valid[:, None, :, None], values, 0.0)
        yield _Segment(keys, values, gain, slots, valid, packed=True)
    if view.sinks is not None and sinks:
        slots = torch.arange(sinks, device=device).unsqueeze(0)
        yield _exact_segment(*view.sinks, slots, (num_blocks > 0).expand(-1, sinks))
    keys, values = view.recent
    for start in range(0, keys.shape[2], _KEY_CHUNK):
        stop = min(start + _KEY_CHUNK, keys.shape[2])
        slots = BLOCK_TOKENS * num_blocks + torch.arange(start, stop, device=device)
        valid = slots < view.lengths.unsqueeze(1)
        yield _exact_segment(keys[:, :, start:stop], values[:, :, start:stop], slots, valid)


def _exact_segment(keys: Tensor, values: Tensor, slots: Tensor, valid: Tensor) -> _Segment:
    values = torch.where(valid[:, None, :, None], values, 0.0).float()
    return _Segment(keys.float(), values, None, slots, valid, packed=False)
