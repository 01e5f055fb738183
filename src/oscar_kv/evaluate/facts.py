"""Random facts, where they are put in a text, and the questions that ask for them again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from oscar_kv.config import BLOCK_TOKENS

KINDS = ("needle", "verbatim")
LEAD, TRAIL = 64, 2 * BLOCK_TOKENS  # exact tokens that any method keeps at the start (sinks) and at the end
_PAIRS, _SENTENCE = 4, 12  # pairs, and words of the sentence, in each text
_WORDS = (
    "anchor apple arrow basket beach bottle branch bridge button candle castle cherry circle clock cloud copper corner "
    "cotton desert dragon engine falcon feather fence finger forest garden ginger hammer harbor helmet honey island "
    "jacket kettle ladder lantern lemon magnet marble meadow mirror needle oyster paper pepper pillow pirate planet "
    "pocket powder rabbit ribbon river saddle shadow silver spider statue summer temple thunder tunnel velvet violet "
    "wagon walnut window winter"
)


@dataclass(frozen=True)
class Fact:
    """A sentence that begins with ``stem``; asked for by its stem, it is to be continued with ``answer``."""

    kind: str
    stem: str
    answer: str


def random_facts(seed: int) -> list[Fact]:
    """Four codes of five digits, of words that differ, and last a sentence of twelve random words."""
    draw, known = random.Random(seed), _WORDS.split()
    keys = draw.sample(known, _PAIRS)
    pairs = [Fact("needle", f"\n\nThe code of {key} is", f" {draw.randrange(10_000, 100_000)}.") for key in keys]
    words = " ".join(draw.choice(known) for _ in range(_SENTENCE))
    return [*pairs, Fact("verbatim", "\n\nThe sentence of the day is:", f" {words}.")]


@dataclass(frozen=True)
class Probe:
    """A text with facts in it, and the questions after it.

    Args:
        context: int64 (n,) tokens.
        start: First token of the facts.
        stop: The token after them.
        questions: int64 (m,) tokens: the facts once more, in another order, to be scored by teacher forcing.
        answers: By kind, of each question the tokens [first, stop) that are its answer.
    """

    context: Tensor
    start: int
    stop: int
    questions: Tensor
    answers: dict[str, list[tuple[int, int]]]


def make_probe(tokenizer: PreTrainedTokenizerBase, filler: Tensor, depth: float, seed: int) -> Probe:
    """Put random facts into a text, without making it longer.

    Args:
        tokenizer: The model's.
        filler: int64 (n,) tokens of the text, whole blocks of 128, so that all of it can be packed.
        depth: 0: the facts come after the first 64 tokens; 1: 256 tokens follow them.
        seed: Of the facts, and of the order of the questions.

    Raises:
        ValueError: A depth that is not from 0 to 1, or a text that is too short or does not end with a block.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be from 0 to 1, not {depth}")
    if len(filler) % BLOCK_TOKENS:
        raise ValueError(f"the context must be a multiple of {BLOCK_TOKENS} tokens, not {len(filler)}")
    facts = random_facts(seed)
    parts = [_tokens(tokenizer, fact.stem + fact.answer) for fact in facts]
    told = [token for part in parts for token in part]
    room = len(filler) - LEAD - TRAIL - len(told)
    if room < 0:
        raise ValueError(f"a context of {len(filler)} tokens is too short: the facts need {len(filler) - room}")
    start = LEAD + round(depth * room)
    stop = start + len(told)
    context = torch.cat((filler[:start], torch.tensor(told), filler[start : len(filler) - len(told)]))
    order = random.Random(seed).sample(range(len(facts)), len(facts))
    questions: list[int] = []
    answers: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
    for i in order:
        first = len(questions) + _common(_tokens(tokenizer, facts[i].stem), parts[i])
        questions += parts[i]
        answers[facts[i].kind].append((first, len(questions)))
    return Probe(context, start, stop, torch.tensor(questions), answers)


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _common(stem: Sequence[int], whole: Sequence[int]) -> int:
    """Tokens that both start with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(stem, whole, strict=False)))
