"""Free generation: whether long greedy answers end, repeat themselves, and are those with the 16-bit cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StoppingCriteria, StoppingCriteriaList

from oscar_kv.evaluate.methods import CacheMaker
from oscar_kv.evaluate.paired import Labels, PairedStudy, Progress
from oscar_kv.evaluate.study import Row
from oscar_kv.integrations.transformers import CACHE_ARGUMENT

NGRAM = 4

# of the model's own generation settings only the end-of-sequence and padding tokens apply
_GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


def repetition(tokens: Sequence[int], n: int = NGRAM) -> float:
    """Share of the n-grams of a generation that it had before: 1 - distinct / all; 0 where there are none."""
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Tokens that are the same as the reference's, up to the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, reference, strict=False)))


def measures(tokens: Sequence[int], reference: Sequence[int], eos: Collection[int]) -> dict[str, float]:
    """The numbers of one generation.

    Args:
        tokens: What was generated, up to and including an end-of-sequence token if there is one.
        reference: The same with the 16-bit cache.
        eos: The end-of-sequence tokens.

    Returns:
        "length" (tokens before the end of sequence), "unfinished" (0 or 1), "repetition", "agreement" (tokens, the
        end-of-sequence token included) and "identical" (0 or 1).
    """
    finished = len(tokens) > 0 and tokens[-1] in eos
    text = tokens[:-1] if finished else tokens
    return {
        "length": float(len(text)),
        "unfinished": float(not finished),
        "repetition": repetition(text),
        "agreement": float(agreement(tokens, reference)),
        "identical": float(list(tokens) == list(reference)),
    }


@dataclass(frozen=True, kw_only=True)
class GenerationStudy(PairedStudy[list[list[int]]]):
    """Long greedy generations from the same prompts with several caches; see :class:`PairedStudy`, and

    Args:
        prompts: int64 (prompts, tokens).
        new_tokens: Where a generation is cut off.
        request: What the prompts ask for, in the rows.
    """

    prompts: Tensor
    new_tokens: int
    request: str = ""
    labels = ("metric",)

    @property
    def setting(self) -> Row:
        count, tokens = self.prompts.shape
        sizes = {"prompts": str(count), "prompt_tokens": str(tokens), "new_tokens": str(self.new_tokens)}
        return {"request": self.request, **sizes}

    @property
    def eos(self) -> set[int]:
        """The model's end-of-sequence tokens."""
        eos = self.model.generation_config.eos_token_id
        return set(eos) if isinstance(eos, list) else {eos} - {None}

    def measure(self, make: CacheMaker, progress: Progress = None) -> list[list[int]]:
        """The tokens generated from each prompt, up to and including an end-of-sequence token."""
        batches = self.prompts.split(make.max_rows(self.batch_size))
        return [tokens for batch in batches for tokens in self._generate(batch, make(*batch.shape), progress)]

    def numbers(self, found: list[list[int]], reference: list[list[int]]) -> dict[Labels, Tensor]:
        """By metric, see :func:`measures`."""
        rows = [measures(*pair, self.eos) for pair in zip(found, reference, strict=True)]
        return {(name,): torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in rows[0]}

    def _generate(self, prompts: Tensor, cache: Cache, progress: Progress) -> list[list[int]]:
        """From prompts (rows, tokens)."""
        counter = _Counter(len(prompts), progress)
        pad = self.model.generation_config.pad_token_id
        options: dict[str, Any] = {
            **_GREEDY,
            "attention_mask": torch.ones_like(prompts),
            "max_new_tokens": self.new_tokens,
            "pad_token_id": min(self.eos, default=0) if pad is None else pad,
            "stopping_criteria": StoppingCriteriaList([counter]),
            CACHE_ARGUMENT: cache,
        }
        output: Tensor = self.model.generate(prompts, **options)  # type: ignore[operator]
        counter.count(self.new_tokens - counter.steps)  # all rows have ended
        return [_until_end(tokens, self.eos) for tokens in output[:, prompts.shape[1] :].tolist()]


def _until_end(tokens: list[int], eos: Collection[int]) -> list[int]:
    ends = (i + 1 for i, token in enumerate(tokens) if token in eos)
    return tokens[: next(ends, len(tokens))]


class _Counter(StoppingCriteria):
    """Stops nothing, and counts the steps of a batch."""

    def __init__(self, rows: int, progress: Progress) -> None:
        self.rows, self.progress, self.steps = rows, progress, 0

    def count(self, steps: int) -> None:
        self.steps += steps
        if self.progress is not None:
            self.progress(steps * self.rows)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.count(1)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
