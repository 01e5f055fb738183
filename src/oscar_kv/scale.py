"""Step 2, Omni-Token Scaling: the norm of each token is taken out of its key (paper section 4.2).

And before it, channel equalization: one positive number per channel that is divided out of the keys and multiplied
into the queries, so that no channel dominates what the rotation spreads (see docs/method.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_kv.config import TokenNorm

_MIN_RANGE = 2.0**-10  # smallest relative channel range that equalization amplifies
_MIN_QUERY = 1 / 32  # smallest relative size of queries that equalization makes up for


def token_norm(keys: Tensor, kind: TokenNorm, scope: str) -> Tensor:
    """The norm that is taken out of each token's key, as it is stored.

    The l2 norm is divided by the square root of the number of elements, so that scaled keys have RMS 1 at any
    number of heads. It is stored in bfloat16 for its range; since keys are divided by the *stored* norm, its
    coarse steps cost no accuracy.

    Args:
        keys: (batch, heads, tokens, head_dim), float32.
        kind: "l2", "max" (largest magnitude) or "mean_abs".
        scope: "all": over heads and channels; "head": over channels only.

    Returns:
        bfloat16 (batch, 1 or heads, tokens); NaN for a token that is not finite, or whose squares are not (l2 beyond
        about 1e19).
    """
    x = keys
    if scope == "all":  # heads and channels side by side, so that the sum runs over contiguous memory
        x = keys.transpose(1, 2).flatten(2).unsqueeze(1)  # (batch, 1, tokens, heads * head_dim)
    x = x.contiguous()
    if kind == "l2":
        norm = x.square().mean(-1).sqrt()
    elif kind == "max":
        norm = x.abs().amax(-1)
    else:
        norm = x.abs().mean(-1)
    stored = norm.to(torch.bfloat16)
    return torch.where(stored.isfinite(), stored, torch.nan)


def divide_by_norm(keys: Tensor, norm: Tensor) -> Tensor:
    """``keys / norm``; tokens whose norm is zero or not finite become zero (their norm restores them).

    Args:
        keys: (batch, heads, tokens, head_dim), float32.
        norm: (batch, 1 or heads, tokens), as returned by :func:`token_norm`.
    """
    norm = norm.float().unsqueeze(-1)
    usable = norm.isfinite() & (norm > 0)
    return torch.where(usable, keys, 0.0) / torch.where(usable, norm, 1.0)


def channel_equalizer(
    keys: Tensor,
    exponent: float,
    group: int,
    num_sinks: int,
    query_power: Tensor | None = None,
    query_exponent: float = 0.0,
) -> Tensor:
    """Equalization vector of a sequence, from its first block of keys, and the queries of the same tokens.

    ``r_c`` is the mean over token groups of (max - min) of channel c, and ``q_c`` the root mean square of the queries,
    each divided by its mean over channels; the result is ``r_c ** exponent / q_c ** query_exponent``. Sinks and tokens
    that are not finite are left out.

    Args:
        keys: (batch, heads, block tokens, head_dim), float32, before the rotation.
        exponent: 0 gives ones, 1 gives every channel the same range.
        group: Tokens per group.
        num_sinks: Tokens at the start to leave out.
        query_power: float64 (batch, heads, head_dim) sums of the squares of queries; None, or zeros where they are not
            known, equalizes by the keys alone.
        query_exponent: 0.5 with exponent 0.5 makes the error of a score smallest if rotation spreads it evenly.

    Returns:
        float32 (batch, heads, head_dim), positive.
    """
    batch, heads, tokens, dim = keys.shape
    keep = keys.isfinite().all(-1, keepdim=True)
    keep[:, :, :num_sinks] = False
    shape = (batch, heads, tokens // group, group)
    low = torch.where(keep, keys, torch.inf).view(*shape, dim).amin(3)
    high = torch.where(keep, keys, -torch.inf).view(*shape, dim).amax(3)
    ranges = (high - low).clamp(min=0.0).mean(2)  # (batch, heads, head_dim); a group without tokens counts as 0
    relative = ranges / ranges.mean(-1, keepdim=True)
    relative = torch.where(relative.isfinite(), relative, 1.0)  # all channels constant, or overflow
    equalizer = relative.clamp(min=_MIN_RANGE) ** exponent
    if query_power is None or query_exponent == 0.0:
        return equalizer
    rms = query_power.sqrt()
    relative = (rms / rms.mean(-1, keepdim=True)).float()
    relative = torch.where(relative.isfinite(), relative, 1.0)  # no queries
    return equalizer / relative.clamp(min=_MIN_QUERY) ** query_exponent
