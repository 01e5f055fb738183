"""Attention over packed blocks, sinks and the 16-bit tail in plain PyTorch: what every kernel is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv.codec import PackedBlocks, dequantize_blocks
from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.rotate import rotate
from oscar_kv.shared import blocks_between
from oscar_kv.view import KVView

_KEY_CHUNK = 1024  # tokens whose scores are held at a time
_QUERY_CHUNK = 256  # queries whose scores are held at a time


@dataclass
class _Segment:
    """Consecutive tokens of one kind: packed ones in the space in which they were quantized, others as they are."""

    keys: Tensor  # float32 (batch, heads, n, key_dim)
    values: Tensor  # float32 (batch, heads, n, value_dim)
    gain: Tensor | None  # float32 (batch, 1 or heads, n): token norm, multiplies the score
    slots: Tensor  # int64 (1 or batch, n)
    valid: Tensor  # bool (batch, n)
    packed: bool


def attend_reference(
    query: Tensor,
    view: KVView,
    scaling: float,
    mask: Tensor | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    causal: bool,
) -> Tensor:
    """What :func:`oscar_kv.attention.attend` does, of which it is the last resort and the definition."""
    outputs = []
    for start in range(0, query.shape[2], _QUERY_CHUNK):
        stop = min(start + _QUERY_CHUNK, query.shape[2])
        chunk = _Queries(query, start, stop, view, scaling, mask, softcap, causal)
        outputs.append(chunk.attend(sink_logits))
    return torch.cat(outputs, dim=2).to(query.dtype)


def is_hidden(mask: Tensor) -> Tensor:
    """Where an additive mask hides a column: -inf, or about the smallest finite number."""
    return mask < 0.5 * torch.finfo(mask.dtype).min


def allowed_slots(
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
        allowed = allowed_slots(
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
