"""Attention over packed blocks, sinks and the 16-bit tail: the fastest form that there is for it here."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from oscar_kv import kernels, prefill
from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.reference import allowed_slots, attend_reference, is_hidden
from oscar_kv.view import KVView


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
    return attend_reference(query, view, scaling, mask, softcap, sink_logits, causal)


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
    allowed = allowed_slots(slots, slots < view.lengths.unsqueeze(1), view, mask, 0, q_len, q_len, causal)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=allowed, scale=scaling, enable_gqa=gqa)
