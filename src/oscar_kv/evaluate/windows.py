"""Prompts of equal length from a text."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

_WINDOW = "<<window>>"  # stands for the text while a chat template is filled in


def windows(
    tokenizer: PreTrainedTokenizerBase, text: str, count: int, length: int, request: str | None = None
) -> Tensor:
    """Prompts of equal length from a text: windows at even distances, which overlap where the text is short.

    Args:
        tokenizer: Adds the tokens that a text starts with.
        text: The text.
        count: Number of prompts.
        length: Tokens of each, those around the window included.
        request: Put this and the window into the chat template, as a user's turn.

    Returns:
        int64 (count, length).

    Raises:
        ValueError: The text is too short, or the model has no chat template.
    """
    before, after = _around(tokenizer, request)
    ids = _tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    size = length - len(before) - len(after)
    room = len(ids) - size
    if size < 1 or room < count - 1:
        raise ValueError(f"a text of {len(ids)} tokens has no {count} different windows of {size} tokens")
    starts = [room * i // max(1, count - 1) for i in range(count)]
    return torch.stack([torch.cat((before, ids[start : start + size], after)) for start in starts])


def _around(tokenizer: PreTrainedTokenizerBase, request: str | None) -> tuple[Tensor, Tensor]:
    """Tokens before and after a window of text."""
    if request is None:
        first = tokenizer("x")["input_ids"][0]
        return torch.tensor([first] if first == tokenizer.bos_token_id else [], dtype=torch.long), torch.tensor(
            [], dtype=torch.long
        )
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError("this model has no chat template to put a request into")
    turns = [{"role": "user", "content": f"{request}\n\n{_WINDOW}"}]
    prompt = str(tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    parts = prompt.split(_WINDOW)
    before, after = (_tensor(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in parts)
    return before, after


def _tensor(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.long)
