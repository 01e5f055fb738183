"""Teacher forcing: how far a packed cache moves a model's predictions away from those with the 16-bit cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, DynamicCache, PreTrainedModel

from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.footprint import bits_per_element, memory_bytes, packed_bits
from oscar_kv.integrations.transformers import CACHE_ARGUMENT

REFERENCE = "16-bit"  # the name of transformers' own cache among the results


@dataclass(frozen=True)
class Fidelity:
    """How close the predictions with one cache are to those with the 16-bit cache, over the scored tokens.

    Args:
        kl: Mean Kullback-Leibler divergence KL(16-bit || this cache) of the next token, in nats.
        kl_p99: Its 99th percentile.
        perplexity: exp of the mean negative log-likelihood of the text.
        perplexity_change: Against the 16-bit cache, in percent.
        top1: Share of tokens for which both rank the same next token first.
        packed_bits: Bits per packed number, codes, scales, zeros and norms included.
        bits_per_element: Bits per cached key and value number at the end of the text, everything held included.
        memory_bytes: Bytes by component at the end of the text, see ``OscarCache.memory_bytes``.
        kl_per_token: float32 (scored,).
    """

    kl: float
    kl_p99: float
    perplexity: float
    perplexity_change: float
    top1: float
    packed_bits: float
    bits_per_element: float
    memory_bytes: dict[str, int]
    kl_per_token: Tensor


@torch.inference_mode()
def compare(
    model: PreTrainedModel,
    ids: Tensor,
    caches: Mapping[str, Callable[[], Cache]],
    *,
    chunk: int = BLOCK_TOKENS,
    start: int = 2 * BLOCK_TOKENS,
    prefill: int = 0,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Fidelity]:
    """Teacher forcing: run a text through the model chunk by chunk, with every cache side by side.

    The queries of a chunk attend to the history as the cache stores it. With chunks of 128 (and ``residual_length``
    128) each query attends to packed blocks before its own block of 128 tokens and to exact keys inside it.

    Args:
        model: Runs attention "oscar" (``register()``, ``set_attn_implementation``) if packed bytes are to be read.
        ids: int64 (1, n) tokens of the text.
        caches: By name, what makes an empty cache.
        chunk: Tokens per forward pass.
        start: The predictions of tokens ``start + 1`` to n - 1 are scored (those made at positions from start on).
        prefill: So many tokens at first go through in a single pass, and so attend to each other exactly.
        progress: Called with the number of tokens that have gone through all caches since the last call.

    Returns:
        By name; "16-bit" is the reference, transformers' DynamicCache.

    Raises:
        ValueError: ``ids`` is not one row, or too short to score anything.
    """
    n = ids.shape[-1]
    if ids.ndim != 2 or ids.shape[0] != 1 or not 0 <= start < n - 1 or not 0 <= prefill <= start:
        raise ValueError(f"cannot score ids {tuple(ids.shape)} from {start} on after a prefill of {prefill} tokens")
    made = {REFERENCE: DynamicCache(config=model.config), **{name: make() for name, make in caches.items()}}
    tallies = {name: _Tally() for name in made}
    edges = [0, *range(prefill, n, chunk), n] if prefill else [*range(0, n, chunk), n]
    for first, stop in pairwise(edges):
        scored = ids[0, max(first, start) + 1 : stop + 1]  # the tokens that follow this chunk's scored ones
        reference: Tensor | None = None
        for name, cache in made.items():
            log_p = _log_probs(model, ids[:, first:stop], cache, stop - max(first, start))[: len(scored)]
            reference = log_p if reference is None else reference
            tallies[name].add(reference, log_p, scored)
        if progress is not None:
            progress(stop - first)
    perplexity = tallies[REFERENCE].perplexity()
    return {name: tallies[name].fidelity(cache, perplexity) for name, cache in made.items()}


def _log_probs(model: PreTrainedModel, ids: Tensor, cache: Cache, keep: int) -> Tensor:
    """Log-probabilities float32 (keep, vocabulary) after the last ``keep`` of some tokens (1, n); (0, ...) if < 1."""
    logits = model(ids, logits_to_keep=max(1, keep), use_cache=True, **{CACHE_ARGUMENT: cache}).logits
    return logits[0, max(0, logits.shape[1] - keep) :].float().log_softmax(-1)


@dataclass
class _Tally:
    """Per-token numbers of one cache, chunk by chunk: KL, negative log-likelihood, whether the first choice agrees."""

    kl: list[Tensor] = field(default_factory=list)
    nll: list[Tensor] = field(default_factory=list)
    agree: list[Tensor] = field(default_factory=list)

    def add(self, reference: Tensor, log_p: Tensor, targets: Tensor) -> None:
        """Log-probabilities (n, vocabulary) and the tokens (n,) that followed."""
        self.kl.append(F.kl_div(log_p, reference, reduction="none", log_target=True).sum(-1).cpu())
        self.nll.append(-log_p.gather(1, targets.unsqueeze(1)).squeeze(1).cpu())
        self.agree.append((log_p.argmax(-1) == reference.argmax(-1)).cpu())

    def perplexity(self) -> float:
        return float(torch.cat(self.nll).double().mean().exp())

    def fidelity(self, cache: Cache, reference_perplexity: float) -> Fidelity:
        kl, perplexity = torch.cat(self.kl), self.perplexity()
        return Fidelity(
            kl=float(kl.double().mean()),
            kl_p99=float(kl.quantile(0.99)),
            perplexity=perplexity,
            perplexity_change=100 * (perplexity / reference_perplexity - 1),
            top1=float(torch.cat(self.agree).double().mean()),
            packed_bits=packed_bits(cache),
            bits_per_element=bits_per_element(cache),
            memory_bytes=memory_bytes(cache),
            kl_per_token=kl,
        )


def pool(found: Sequence[Fidelity], reference: Sequence[Fidelity]) -> Fidelity:
    """One result of the same method on several texts, every scored token counting the same.

    Args:
        found: The method's results, text by text; the bits and bytes are those of the last one.
        reference: Those of the 16-bit cache on the same texts.
    """
    counts = torch.tensor([len(x.kl_per_token) for x in found], dtype=torch.float64)

    def mean(numbers: Sequence[float]) -> float:
        return float(torch.tensor(numbers, dtype=torch.float64) @ counts / counts.sum())

    nll, exact = (mean([math.log(x.perplexity) for x in results]) for results in (found, reference))
    kl = torch.cat([x.kl_per_token for x in found])
    return replace(
        found[-1],
        kl=float(kl.double().mean()),
        kl_p99=float(kl.quantile(0.99)),
        perplexity=math.exp(nll),
        perplexity_change=100 * math.expm1(nll - exact),
        top1=mean([x.top1 for x in found]),
        kl_per_token=kl,
    )
