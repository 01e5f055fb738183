"""Scores of a task by item, and how two caches differ on the same items."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

RESAMPLES = 2000
LENGTH_EDGES = (4000, 8000)  # words, between LongBench-E's three ranges of length
NO_VALUE = -1.0  # RULER's mark on items of another length

# what lm-eval makes of the mean over items, which perplexities weight by words or bytes
_FINISH: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda mean: mean,
    "perplexity": lambda mean: (-mean).exp(),
    "bits_per_byte": lambda mean: -mean / math.log(2),
}


@dataclass(frozen=True)
class Score:
    """One metric of one task: ``finish`` of the sum of ``values`` over the sum of ``weights``.

    Args:
        value: As reported.
        values: By item; NaN where ``value`` is made in another way.
        weights: By item.
        strata: By item, from 0: the mean is taken in each stratum, then over the strata, unweighted.
        finish: What is made of the mean: "mean" (nothing), "perplexity" or "bits_per_byte".
    """

    value: float
    values: list[float]
    weights: list[float]
    strata: list[int]
    finish: str = "mean"

    @property
    def n(self) -> int:
        return len(self.values)

    def resampled(self, seed: int) -> Tensor:
        """The value on items drawn with replacement, float64 (RESAMPLES,); one seed draws the same items."""
        generator = torch.Generator().manual_seed(seed)
        values, weights = (torch.tensor(x, dtype=torch.float64) for x in (self.values, self.weights))
        strata, means = torch.tensor(self.strata), []
        for stratum in strata.unique():
            items = (strata == stratum).nonzero().squeeze(1)
            drawn = items[torch.randint(len(items), (RESAMPLES, len(items)), generator=generator)]
            means.append(values[drawn].sum(1) / weights[drawn].sum(1))
        return _FINISH[self.finish](torch.stack(means).mean(0))


def score(value: float, items: Sequence[Any]) -> Score | None:
    """The score that lm-eval reports as ``value`` over ``items``: numbers, or pairs of a sum and its weight.

    How the value is made of them is found by making it again. Where that fails (BLEU, say) the score has its value,
    and no standard error.

    Returns:
        None if no item has a value.
    """
    pairs = [pair for pair in map(_pair, items) if pair is not None]
    with_value = [pair for pair in pairs if pair[0] != NO_VALUE]
    for kept in (pairs, with_value) if with_value and len(pairs) == len(items) else ():
        values, weights = [x for x, _ in kept], [w for _, w in kept]
        mean = torch.tensor(math.fsum(values), dtype=torch.float64) / math.fsum(weights)
        for name, finish in _FINISH.items():
            if math.isclose(float(finish(mean)), value, rel_tol=1e-6, abs_tol=1e-9):
                return Score(value, values, weights, [0] * len(values), name)
    if pairs and not with_value:
        return None
    return Score(value, [math.nan] * len(items), [1.0] * len(items), [0] * len(items))


def _pair(item: Any) -> tuple[float, float] | None:
    """A sum and its weight, or None for anything else."""
    match item:
        case int() | float():
            return float(item), 1.0
        case (int() | float() as total, int() | float() as weight):
            return float(total), float(weight)
    return None


def by_length(found: Score, lengths: Sequence[int]) -> Score:
    """LongBench-E's score: the unweighted mean over three ranges of length, of items of these many words."""
    strata = [sum(length >= edge for edge in LENGTH_EDGES) for length in lengths]
    means = []
    for stratum in set(strata):
        values = [x for x, s in zip(found.values, strata, strict=True) if s == stratum]
        means.append(math.fsum(values) / len(values))
    return Score(math.fsum(means) / len(means), found.values, found.weights, strata, found.finish)


@dataclass(frozen=True)
class Estimate:
    """A value over one or several tasks, and its difference from the same with the 16-bit cache on the same items.

    Args:
        value: Mean over the tasks.
        stderr: Its standard error, by bootstrap over items.
        n: Items.
        diff: Value minus that of the 16-bit cache; None without one.
        low: Lower end of the 95 % interval of the difference, by paired bootstrap over items.
        high: Upper end.
    """

    value: float
    stderr: float
    n: int
    diff: float | None = None
    low: float | None = None
    high: float | None = None


def estimate(scores: Sequence[Score], references: Sequence[Score] | None = None) -> Estimate:
    """The mean over tasks of one metric; items are drawn anew in each task.

    Args:
        scores: Of each task.
        references: The same with the 16-bit cache, item by item.
    """
    drawn = torch.stack([found.resampled(seed) for seed, found in enumerate(scores)]).mean(0)
    value = math.fsum(found.value for found in scores) / len(scores)
    plain = Estimate(value, float(drawn.std()), sum(found.n for found in scores))
    if references is None:
        return plain
    reference = torch.stack([found.resampled(seed) for seed, found in enumerate(references)]).mean(0)
    low, high = (drawn - reference).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    diff = value - math.fsum(found.value for found in references) / len(references)
    return Estimate(value, plain.stderr, plain.n, diff, low, high)
