"""Queries, keys and values of every layer as the cache would see them, one layer at a time during a forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from oscar_kv.cache import packed_layers
from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.integrations.transformers import oscar_attention

_NAME = "oscar_diagnose"


@dataclass(frozen=True)
class LayerStates:
    """What the attention of one layer was given.

    Args:
        index: The layer.
        query: (1, query heads, n, key_dim), after RoPE.
        key: (1, KV heads, n, key_dim), after RoPE.
        value: (1, KV heads, n, value_dim).
        mask: (1, 1 or query heads, n, n), bool (True attends) or additive; None is causal.
        scaling: Factor on the scores.
        softcap: Soft cap of the scores.
        sink_logits: (query heads,) learned attention sinks.
    """

    index: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None
    sink_logits: Tensor | None


@torch.inference_mode()
def capture(model: PreTrainedModel, inputs: Mapping[str, Any], collect: Callable[[LayerStates], None]) -> None:
    """Run one forward pass and hand over each packed layer's queries, keys and values. Nothing is kept here.

    Only the text decoder's attention is replaced, for the time of the pass, by one that computes the same.

    Args:
        model: Any decoder model of transformers, multi-modal ones included.
        inputs: Arguments of the model's forward: ``input_ids`` (1, n) and what goes with them.
        collect: Called once per packed layer, in order.

    Raises:
        ValueError: More than one row, padding, or fewer than two blocks of 128 tokens.
        NotImplementedError: The architecture is not supported.
    """
    _check(inputs)
    layers = frozenset(packed_layers(model.config))
    given = {name: x.to(model.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        given["logits_to_keep"] = 1
    with _watching(model, _Watch(layers, collect)):
        model(**given, use_cache=False)


def _check(inputs: Mapping[str, Any]) -> None:
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 2 * BLOCK_TOKENS:
        raise ValueError(
            f"diagnose needs input_ids (1, n) with at least {2 * BLOCK_TOKENS} tokens, not {tuple(ids.shape)}"
        )
    if mask is not None and not bool(mask.all()):
        raise ValueError("diagnose takes one text without padding: the attention_mask hides tokens")


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention as ever; the layers that are being watched are handed over first."""
    watch, index = _watched.get(), getattr(module, "layer_idx", None)
    if watch is not None and index in watch.layers:
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        extras = kwargs.get("softcap"), kwargs.get("s_aux")
        watch.collect(LayerStates(index, query, key, value, mask, scaling, *extras))
    return oscar_attention(module, query, key, value, mask, **kwargs)


@dataclass(frozen=True)
class _Watch:
    layers: frozenset[int]
    collect: Callable[[LayerStates], None]


_watched: ContextVar[_Watch | None] = ContextVar("watched", default=None)


@contextmanager
def _watching(model: PreTrainedModel, watch: _Watch) -> Iterator[None]:
    """Give the text decoder the attention above; take it back afterwards."""
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    decoder = _decoder(model)
    before, token = decoder.config._attn_implementation, _watched.set(watch)
    try:
        decoder.set_attn_implementation(_NAME)
        if decoder.config._attn_implementation != _NAME:
            raise NotImplementedError(f"{type(model).__name__} does not let its attention be replaced")
        yield
    finally:
        _watched.reset(token)
        decoder.set_attn_implementation(before)


def _decoder(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that runs its text decoder: the model itself, or the language model inside."""
    config = model.config.get_text_config(decoder=True)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module.config is config:
            return module
    raise NotImplementedError(f"{type(model).__name__}: no text decoder found")
