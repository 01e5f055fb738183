"""What the equalizer knows of the queries: their power per channel over the tokens of a sequence's first block."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kv.config import BLOCK_TOKENS


def add_query_power(
    power: Tensor, query: Tensor, first: list[int], counts: list[int], order: Tensor | None, num_sinks: int
) -> None:
    """Add the squares of new queries, those of tokens in slots num_sinks to 127 of their row.

    Sums are float64, so that they do not depend on how a row's tokens came in passes and batches.

    Args:
        power: float64 (batch, KV heads, key_dim), written; summed over the query heads of a group.
        query: (batch, query heads, q, key_dim); numbers that are not finite are left out.
        first: Slot of each row's first new token.
        counts: New tokens of each row.
        order: int64 (batch, q) that lists each row's tokens first, or None where every column is a token.
        num_sinks: Tokens at the start to leave out.
    """
    some = min(query.shape[2], BLOCK_TOKENS - min(first))
    if some <= 0:
        return
    rank = torch.arange(some, device=query.device)
    starts, number = torch.tensor((first, counts)).to(query.device).unsqueeze(-1)
    slots = starts + rank
    used = (slots >= num_sinks) & (slots < BLOCK_TOKENS) & (rank < number)  # (batch, some)
    if order is None:
        query = query[:, :, :some]
    else:
        index = order[:, None, :some, None]
        query = query.gather(2, index.expand(-1, query.shape[1], -1, query.shape[3]))
    squares = query.double().square()
    squares = torch.where(used[:, None, :, None] & squares.isfinite(), squares, 0.0)
    power += squares.unflatten(1, (power.shape[1], -1)).sum((2, 3))
