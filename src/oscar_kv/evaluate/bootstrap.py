"""Confidence intervals of means: a paired block bootstrap over the tokens of texts, or over items."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv.config import BLOCK_TOKENS

_LEVEL = 0.95


class BlockBootstrap:
    """Resamples of blocks of consecutive tokens, since neighbouring tokens are alike.

    The same blocks are drawn for all methods, so differences between them are paired.

    Args:
        lengths: Scored tokens of each text; a block never spans two texts.
        block: Tokens in a block; the last one of a text may be shorter.
        resamples: Number of resamples, each of as many blocks as there are.
        seed: Of the draws.

    Raises:
        ValueError: A text without tokens.
    """

    def __init__(
        self, lengths: Sequence[int], *, block: int = BLOCK_TOKENS, resamples: int = 10_000, seed: int = 0
    ) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError(f"nothing to resample: texts of {list(lengths)} tokens")
        self.sizes = [min(block, n - start) for n in lengths for start in range(0, n, block)]
        count = len(self.sizes)
        draws = torch.randint(count, (resamples, count), generator=torch.Generator().manual_seed(seed))
        self.counts = torch.zeros(resamples, count, dtype=torch.float64)
        self.counts.scatter_add_(1, draws, torch.ones_like(draws, dtype=torch.float64))

    def means(self, x: Tensor) -> Tensor:
        """Means of all tokens of the texts, (n,), in each resample: float64 (resamples,)."""
        sums = torch.stack([block.double().sum() for block in x.split(self.sizes)])
        return self.counts @ sums / (self.counts @ torch.tensor(self.sizes, dtype=torch.float64))

    def interval(self, x: Tensor) -> tuple[float, float]:
        """95 % interval of the mean of (n,)."""
        return _percentiles(self.means(x))

    def ratio_interval(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """95 % interval of mean x / mean y, of the same tokens."""
        return _percentiles(self.means(x) / self.means(y))


@dataclass(frozen=True)
class Estimate:
    """A mean over items, and its difference from the 16-bit cache's on the same items, with 95 % intervals."""

    value: float
    low: float
    high: float
    diff: float
    diff_low: float
    diff_high: float


def estimate(values: Tensor, reference: Tensor) -> Estimate:
    """Mean of one number per item, (n,), and of its difference from the reference (n,), by resampling items."""
    bootstrap = BlockBootstrap([len(values)], block=1)
    values, difference = values.double(), values.double() - reference.double()
    return Estimate(
        float(values.mean()), *bootstrap.interval(values), float(difference.mean()), *bootstrap.interval(difference)
    )


def _percentiles(x: Tensor) -> tuple[float, float]:
    edge = (1 - _LEVEL) / 2
    low, high = x.quantile(torch.tensor([edge, 1 - edge], dtype=x.dtype)).tolist()
    return low, high
