"""What quantized keys and values change: relative errors by group and class, attention weights, attention output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.diagnose.capture import LayerStates
from oscar_kv.diagnose.statistics import in_groups
from oscar_kv.reference import is_hidden

_QUERIES, _FEWEST = 128, 32  # queries per layer whose attention is compared
_SCORES = 2**26  # as many scores are held at a time, which leaves fewer queries to a long text


def relative_error(exact: Tensor, packed: Tensor, tokens: Tensor | None = None) -> float:
    """Squared error over squared norm: (..., n, D), of all tokens or of some, bool (n,)."""
    if tokens is not None:
        exact, packed = exact[..., tokens, :], packed[..., tokens, :]
    norm = exact.double().square().sum()
    return float((exact - packed).double().square().sum() / norm) if norm > 0 else 0.0


def group_errors(exact: Tensor, packed: Tensor, group: int) -> Tensor:
    """Squared error over squared norm of each group of tokens: (..., n, D) -> (..., n / group)."""
    error, norm = (in_groups(x, group).square().sum((-2, -1)) for x in (exact - packed, exact))
    return torch.where(norm > 0, error / norm, 0.0)


def class_errors(exact: Tensor, packed: Tensor, classes: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of the tokens of each class that has any."""
    return {name: relative_error(exact, packed, own) for name, own in classes.items() if own.any()}


@dataclass(frozen=True)
class Effect:
    """What a packed history does to the attention of a layer, by KV head over its queries.

    Args:
        kl: float64 (KV heads,) mean KL(exact || packed) of the attention weights, in nats.
        error: float64 (KV heads,) squared error of the attention output.
        norm: float64 (KV heads,) squared norm of the exact output.
    """

    kl: Tensor
    error: Tensor
    norm: Tensor

    def numbers(self) -> dict[str, float]:
        """Of the layer: "attention_kl", and "output_error", squared error over squared norm."""
        return _effect(self.kl.mean(), self.error.sum(), self.norm.sum())

    def by_head(self) -> list[dict[str, float]]:
        """The same of each KV head."""
        return [_effect(*head) for head in zip(self.kl, self.error, self.norm, strict=True)]


def _effect(kl: Tensor, error: Tensor, norm: Tensor) -> dict[str, float]:
    return {"attention_kl": float(kl), "output_error": float(error / norm) if norm > 0 else 0.0}


class Attention:
    """The attention of up to 128 queries, evenly spaced from position 128 on, with exact and with packed history.

    A query reads packed tokens before its own block of 128 and exact ones inside it, as decoding does.

    Args:
        states: A layer's states, cut to whole blocks.
    """

    def __init__(self, states: LayerStates) -> None:
        self._states = states
        n, device = states.key.shape[2], states.key.device
        count = min(_QUERIES, n - BLOCK_TOKENS, max(_FEWEST, _SCORES // (states.query.shape[1] * n)))
        self.positions = torch.linspace(BLOCK_TOKENS, n - 1, count, device=device).long()
        columns = torch.arange(n, device=device)
        self._packed = columns < self.positions[:, None] // BLOCK_TOKENS * BLOCK_TOKENS  # (m, n)
        causal = columns <= self.positions[:, None]
        self._bias = torch.where(causal, 0.0, -torch.inf) if states.mask is None else self._given_mask(states.mask)
        self._query = states.query[0, :, self.positions].float()  # (query heads, m, D)
        self.keys, self.values = (self._repeat(x[0].float()) for x in (states.key, states.value))
        self._scores = self._query @ self.keys.mT
        self._log_p = self._log_weights(self._scores)
        self.output = self._log_p[..., :n].exp() @ self.values

    def _given_mask(self, mask: Tensor) -> Tensor:
        rows = mask[0][:, self.positions]
        hidden = ~rows if rows.dtype == torch.bool else is_hidden(rows)
        return torch.where(hidden, -torch.inf, 0.0 if rows.dtype == torch.bool else rows.float())

    def _repeat(self, x: Tensor) -> Tensor:
        """(KV heads, n, D) -> (query heads, n, D)"""
        return x.repeat_interleave(self._states.query.shape[1] // x.shape[0], dim=0)

    def _log_weights(self, scores: Tensor) -> Tensor:
        """(query heads, m, n) -> the same, and one more column where there are learned sinks."""
        scores, cap, sinks = scores * self._states.scaling, self._states.softcap, self._states.sink_logits
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        scores = scores + self._bias
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)), dim=-1)
        return scores.log_softmax(-1)

    @property
    def weights(self) -> Tensor:
        """Exact attention weights (query heads, m, n)."""
        return self._log_p[..., : self.keys.shape[1]].exp()

    def compare(self, keys: Tensor, values: Tensor) -> Effect:
        """Effect of a packed history.

        Args:
            keys: float32 (KV heads, n, key_dim) as packed.
            values: float32 (KV heads, n, value_dim) as packed.
        """
        heads = keys.shape[0]
        keys, values = self._repeat(keys), self._repeat(values)
        log_p = self._log_weights(torch.where(self._packed, self._query @ keys.mT, self._scores))
        p = self._log_p.exp()
        kl = torch.where(p > 0, p * (self._log_p - log_p), 0.0).sum(-1)  # (query heads, m)
        weights = log_p[..., : keys.shape[1]].exp()
        output = (weights * self._packed) @ values + (weights * ~self._packed) @ self.values
        error, norm = (x.double().square().sum((1, 2)) for x in (output - self.output, self.output))
        kl, error, norm = (x.unflatten(0, (heads, -1)) for x in (kl.double().mean(-1), error, norm))
        return Effect(kl.mean(-1), error.sum(-1), norm.sum(-1))
