"""Recall: facts that are packed by the time they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.evaluate.facts import KINDS, Probe, make_probe
from oscar_kv.evaluate.methods import CacheMaker
from oscar_kv.evaluate.paired import Labels, PairedStudy, Progress
from oscar_kv.evaluate.study import Row
from oscar_kv.footprint import packed_span
from oscar_kv.integrations.transformers import CACHE_ARGUMENT

ALL_DEPTHS = "all"

Scores = dict[tuple[str, str], Tensor]  # by kind and metric: float64 (probes,)


@torch.inference_mode()
def score(model: PreTrainedModel, probes: Sequence[Probe], cache: Cache, progress: Progress = None) -> Scores:
    """Ask for the facts of some texts of one length, by teacher forcing in chunks of 128 tokens.

    The chunk with the questions attends to the text as the cache stores it, and exactly to itself. Each question
    follows the right answers to those before it. An answer matches exactly if each of its tokens is the first choice
    after those before it, and so what greedy generation gives.

    Args:
        model: Of the cache.
        probes: Of one length.
        cache: Empty.
        progress: Called with the number of tokens of the texts that are done since the last call.

    Returns:
        By kind and metric, a number per probe: the share of answers that match exactly, and the mean log-likelihood in
        nats of the answers' tokens.

    Raises:
        ValueError: The facts are not packed when they are asked for.
    """
    contexts = torch.stack([probe.context for probe in probes]).to(model.device)
    given = {"use_cache": True, CACHE_ARGUMENT: cache}
    for chunk in contexts.split(BLOCK_TOKENS, dim=1):
        model(chunk, logits_to_keep=1, **given)
        if progress is not None:
            progress(chunk.numel())
    if type(cache) is not DynamicCache:
        _check_packed(probes, packed_span(cache))
    # padding comes after all tokens that are scored
    questions = pad_sequence([probe.questions for probe in probes], batch_first=True).to(model.device)
    following = F.pad(questions, (0, 1))
    log_p, hits = [], []  # of the token after each of the questions' tokens
    for start in range(0, questions.shape[1], BLOCK_TOKENS):
        logits = model(questions[:, start : start + BLOCK_TOKENS], **given).logits
        targets = following[:, start + 1 : start + 1 + logits.shape[1]]
        log_p.append(-F.cross_entropy(logits.mT.float(), targets, reduction="none"))
        hits.append(logits.argmax(-1) == targets)
    return _summary(probes, torch.cat(log_p, dim=1).double().cpu(), torch.cat(hits, dim=1).cpu())


def _check_packed(probes: Sequence[Probe], span: tuple[int, int]) -> None:
    for probe in probes:
        if not span[0] <= probe.start < probe.stop <= span[1]:
            raise ValueError(
                f"the facts at tokens {probe.start} to {probe.stop - 1} are not packed when they are asked for: this "
                f"cache has packed tokens {span[0]} to {span[1] - 1} of {len(probe.context)}"
            )


def _summary(probes: Sequence[Probe], log_p: Tensor, hits: Tensor) -> Scores:
    """Of log-probabilities and hits (probes, n) of the token after each of the questions' tokens."""
    scores: Scores = {}
    for kind in KINDS:
        exact, likelihood = [], []
        for row, probe in enumerate(probes):
            places = [slice(first - 1, stop - 1) for first, stop in probe.answers[kind]]
            exact.append(torch.stack([hits[row, place].all() for place in places]).double().mean())
            likelihood.append(torch.cat([log_p[row, place] for place in places]).mean())
        scores[kind, "exact_match"], scores[kind, "log_likelihood"] = torch.stack(exact), torch.stack(likelihood)
    return scores


@dataclass(frozen=True, kw_only=True)
class RecallStudy(PairedStudy[dict[Labels, Tensor]]):
    """The same facts in the same texts, recalled with several caches; see :class:`PairedStudy`, and

    Args:
        tokenizer: The model's.
        fillers: int64 (probes, context) tokens of the text, for each length of context; equally many for all.
        depths: From 0 to 1, see :func:`make_probe`.
        seed: Of the facts, which are the same at all depths and lengths.
    """

    tokenizer: PreTrainedTokenizerBase
    fillers: Sequence[Tensor]
    depths: Sequence[float]
    seed: int = 0
    labels = ("context", "depth", "kind", "metric")

    @property
    def setting(self) -> Row:
        return {"probes": str(len(self.fillers[0])), "seed": str(self.seed)}

    def complete(self, found: set[Labels]) -> bool:
        """Also the mean over the depths must be that of the same depths."""
        depths = {ALL_DEPTHS, *(f"{x:g}" for x in self.depths)}
        contexts = [str(filler.shape[1]) for filler in self.fillers]
        return all({depth for context, depth, *_ in found if context == wanted} == depths for wanted in contexts)

    def measure(self, make: CacheMaker, progress: Progress = None) -> dict[Labels, Tensor]:
        """By context, depth, kind and metric, a number per probe, see :func:`score`; depth "all" is the mean."""
        # all of them, before hours are spent
        made = [{f"{x:g}": self._probes(filler, x) for x in self.depths} for filler in self.fillers]
        found: dict[Labels, Tensor] = {}
        for filler, by_depth in zip(self.fillers, made, strict=True):
            scores = {depth: self._score(probes, make, progress) for depth, probes in by_depth.items()}
            first = next(iter(scores.values()))
            scores[ALL_DEPTHS] = {key: torch.stack([x[key] for x in scores.values()]).mean(0) for key in first}
            context = str(filler.shape[1])
            found |= {(context, depth, *key): x for depth, own in scores.items() for key, x in own.items()}
        return found

    def numbers(self, found: dict[Labels, Tensor], reference: dict[Labels, Tensor]) -> dict[Labels, Tensor]:
        return found

    def _probes(self, filler: Tensor, depth: float) -> list[Probe]:
        return [make_probe(self.tokenizer, x, depth, (self.seed << 32) + i) for i, x in enumerate(filler)]

    def _score(self, probes: list[Probe], make: CacheMaker, progress: Progress) -> Scores:
        rows, columns = make.max_rows(self.batch_size), len(probes[0].context)
        batches = [probes[start : start + rows] for start in range(0, len(probes), rows)]
        found = [score(self.model, batch, make(len(batch), columns), progress) for batch in batches]
        return {key: torch.cat([scores[key] for scores in found]) for key in found[0]}
