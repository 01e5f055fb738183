"""An implementation that is about to be measured."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from oscar_kv.bench.timing import Call, Graph, Spread, capture, time_in_turn


@dataclass(frozen=True)
class Candidate:
    """An implementation and its inputs.

    Args:
        impl: Its name.
        calls: One for each set of inputs.
        bytes: That what is measured has to read and write.
        preset: Of the packed cache.
        form: Of the call.
        optional: Whether it may refuse to run: then it is left out, with a warning.
        times: That a call does what is measured.
    """

    impl: str
    calls: Sequence[Call]
    bytes: int
    preset: str = ""
    form: str = ""
    optional: bool = False
    times: int = 1

    def __str__(self) -> str:
        return " ".join(filter(None, (self.impl, self.preset, self.form)))


Timed = tuple[Candidate, Spread]


def measure(candidates: Iterable[Candidate], where: str, rounds: int) -> list[Timed]:
    """Time candidates in turn; of several forms of one implementation, the fastest is kept.

    Args:
        candidates: They are made one after the other, and all in memory while they are measured.
        where: Names the problem in a warning.
        rounds: Times each is measured.
    """
    ready: list[tuple[Candidate, Graph]] = []
    try:
        for candidate in candidates:
            graph = _captured(candidate, where)
            if graph is not None:
                ready.append((candidate, graph))
    except torch.OutOfMemoryError:
        warnings.warn(f"{where}: the GPU's memory does not hold every implementation", stacklevel=2)
    spreads = time_in_turn([graph for _, graph in ready], rounds)
    return fastest_forms([(candidate, spread) for (candidate, _), spread in zip(ready, spreads, strict=True)])


def fastest_forms(timed: Iterable[Timed]) -> list[Timed]:
    """Of each implementation and preset, the form with the smallest median."""
    best: dict[tuple[str, str], Timed] = {}
    for candidate, spread in timed:
        key = candidate.impl, candidate.preset
        if key not in best or spread.median_us < best[key][1].median_us:
            best[key] = candidate, spread
    return list(best.values())


def _captured(candidate: Candidate, where: str) -> Graph | None:
    if not candidate.optional:
        return capture(candidate.calls, candidate.times)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's reasons, one warning each
            return capture(candidate.calls, candidate.times)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"{where}: {candidate} does not run ({reason})", stacklevel=3)
        return None
