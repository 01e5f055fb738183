"""Generation of given tokens: logits of the same tokens with any cache, whatever the model would have chosen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LogitsProcessor, PreTrainedModel

from oscar_kv import OscarCache, OscarConfig
from oscar_kv.integrations.switch import replaced_attention
from oscar_kv.integrations.transformers import CACHE_ARGUMENT

Inputs = Mapping[str, Tensor]


class _Forced(LogitsProcessor):
    """Leaves one token to choose at each step."""

    def __init__(self, chosen: Tensor, start: int) -> None:
        self.chosen, self.start = chosen, start  # (rows, steps)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = self.chosen[:, input_ids.shape[1] - self.start, None]
        return torch.full_like(scores, -torch.inf).scatter(1, chosen, 0.0)


def logits(model: PreTrainedModel, inputs: Inputs, cache: Cache, chosen: Tensor, **kwargs: Any) -> Tensor:
    """Logits (rows, steps, vocabulary) from which ``generate`` would choose, if not for these tokens (rows, steps)."""
    out: Any = model.generate(
        **inputs, **{CACHE_ARGUMENT: cache}, max_new_tokens=chosen.shape[1], do_sample=False,
        logits_processor=[_Forced(chosen, inputs["input_ids"].shape[1])], return_dict_in_generate=True,
        output_logits=True, **kwargs,
    )  # fmt: skip
    return torch.stack(out.logits, dim=1)


def oscar_logits(
    model: PreTrainedModel, inputs: Inputs, config: OscarConfig, chosen: Tensor, attention: str = "oscar"
) -> tuple[Tensor, OscarCache]:
    """The same with an :class:`OscarCache`, which is given back too."""
    with replaced_attention(model, attention):
        mask = None if attention == "oscar" else inputs["attention_mask"]
        cache = OscarCache(model.config, config, attention_mask=mask)
        return logits(model, inputs, cache, chosen), cache


def second_turn(
    model: PreTrainedModel, inputs: Inputs, config: OscarConfig, chosen: Tensor, question: Tensor
) -> tuple[Tensor, Tensor, OscarCache]:
    """Logits of the turn after these tokens and a question: with an OscarCache and a DynamicCache; and the former."""
    asked = torch.cat((inputs["input_ids"], chosen, question), dim=1)
    again = {"input_ids": asked, "attention_mask": torch.ones_like(asked)}
    kept = DynamicCache(config=model.config)
    logits(model, inputs, kept, chosen)
    want = logits(model, again, kept, chosen)
    _, cache = oscar_logits(model, inputs, config, chosen)
    with replaced_attention(model, "oscar"):
        return logits(model, again, cache, chosen), want, cache


def blocks(cache: OscarCache) -> list[list[int]]:
    """Packed blocks of each row, of every packed layer."""
    return [layer.state.num_blocks for layer in cache.packed_layers if layer.state is not None]


def divergence(truth: Tensor, other: Tensor) -> float:
    """Mean KL divergence in nats of other logits from the true ones."""
    p, q = (x.double().log_softmax(-1) for x in (truth, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def check_packed_alike(alone: OscarCache, together: OscarCache, row: int) -> None:
    """A row of a batch has the bytes that it has by itself, but for codes that a sum in another order tips over."""
    for mine, other in zip(alone.packed_layers, together.packed_layers, strict=True):
        assert mine.state is not None
        assert other.state is not None
        packed = mine.state.num_blocks[0]
        assert packed == other.state.num_blocks[row] > 0
        same = mine.state.records[0, :packed] == other.state.records[row, :packed]
        assert same.float().mean() > 0.998
