"""The multiple-choice questions of MMAU-Pro, asked and scored as lmms-eval asks and scores those of MMAU."""

from __future__ import annotations

import os
import random
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from datasets import Dataset
from lmms_eval.tasks.mmau.utils import mmau_aggregate_results, parse_multi_choice_response

accuracy = mmau_aggregate_results


def multiple_choice(items: Dataset) -> Dataset:
    """Only items with choices and an answer among them: no open questions, no instructions."""
    return items.filter(lambda item: _right(item) is not None)


def sounds(item: dict[str, Any]) -> list[str]:
    """Paths of the item's sounds, one or several."""
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "mmau_pro"
    return [str(home / path) for path in item["audio_path"]]


def question(item: dict[str, Any], lmms_eval_specific_kwargs: dict[str, str]) -> str:
    """The question and its choices, lettered."""
    choices = [f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, item["choices"], strict=False)]
    return "\n".join([item["question"], *choices]) + lmms_eval_specific_kwargs["post_prompt"]


def results(item: dict[str, Any], answers: list[str]) -> dict[str, Any]:
    """Whether the letter that an answer names is right; an answer without one is a guess, the same in every run."""
    letters = list(ascii_uppercase[: len(item["choices"])])
    random.seed(item["id"])
    found = letters.index(parse_multi_choice_response(answers[0], letters))
    return {"accuracy": {"overall": float(found == _right(item)), "task": item["category"]}}


def _right(item: dict[str, Any]) -> int | None:
    """Place of the right choice."""
    choices = [choice.strip().lower() for choice in item["choices"] or []]
    answer = (item["answer"] or "").strip().lower()
    return choices.index(answer) if answer in choices else None
