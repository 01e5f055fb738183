"""The model type "oscar" of lm-eval: a transformers model whose generation and log-likelihoods read a packed cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from oscar_kv.cache import OscarCache
from oscar_kv.cache_layer import ATTENTION_NAME
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.integrations.transformers import CACHE_ARGUMENT
from oscar_kv.tasks.caches import cache_config, enabled
from oscar_kv.tasks.presets import Truncate


@register_model("oscar")
class OscarLM(HFLM):  # type: ignore[misc]
    """lm-eval's ``HFLM`` with a packed cache.

    ``generate_until`` gives each call of ``generate`` an :class:`~oscar_kv.OscarCache`: the prompt attends to exact
    keys, each generated token to packed history. Log-likelihoods are taken by teacher forcing in chunks of 128 tokens,
    whose queries attend to the chunks before as the cache stores them; without a cache, as in ``HFLM``, no
    quantization would show.

    Args:
        pretrained: As for ``HFLM``: a model, a folder or an id on the hub.
        cache: "16-bit" for transformers' own cache; "unquantized", "default", "quality", "four-bit", "paper"; or what
            to quantize and how.
        attention: "oscar" reads the packed bytes; any other attention of transformers a dequantized copy.
        truncate: What a prompt loses that is too long: its beginning ("left") or its "middle".
        kwargs: As for ``HFLM``, such as ``batch_size``, ``max_length``, ``dtype``.

    Raises:
        ValueError: There is no such cache or truncation.
        NotImplementedError: The model is not supported.

    Example:
        >>> import lm_eval, oscar_kv.tasks.model
        >>> lm_eval.simple_evaluate("oscar", "pretrained=...,cache=quality", tasks=["gsm8k"])  # doctest: +SKIP
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        cache: str | OscarConfig = "default",
        attention: str = ATTENTION_NAME,
        truncate: Truncate = "left",
        **kwargs: Any,
    ) -> None:
        self.oscar_config = cache_config(cache)
        if truncate not in ("left", "middle"):
            raise ValueError(f"truncate must be left or middle, not {truncate!r}")
        super().__init__(pretrained, **kwargs)
        self.oscar_attention, self.truncate = attention, truncate
        self._enabled = partial(enabled, self.model, self.oscar_config, attention)
        with self._enabled():  # an unsupported model is refused before any data is loaded
            pass

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits (batch, tokens, vocabulary) of token ids (batch, tokens), padded on the right.

        Padding comes after all tokens that are scored, and a chunk is packed after its queries are through: no
        scored query reads a block with padding in it.
        """
        if self.oscar_config is None:
            exact: Tensor = super()._model_call(inps, attn_mask, labels)
            return exact
        mask = None if self.oscar_attention == ATTENTION_NAME else torch.ones_like(inps)
        mixed = self.mixed_precision_dtype
        with torch.no_grad(), torch.autocast(self.device.type, mixed, enabled=mixed is not None), self._enabled():
            cache = OscarCache(self.model.config, self.oscar_config, max_length=inps.shape[1], attention_mask=mask)
            given = {"use_cache": True, CACHE_ARGUMENT: cache}
            return torch.cat([self.model(chunk, **given).logits for chunk in inps.split(BLOCK_TOKENS, dim=1)], dim=1)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        with self._enabled():
            tokens: Tensor = super()._model_generate(context, max_length, stop, **generation_kwargs)
        return tokens

    def tok_batch_encode(
        self,
        strings: list[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Token ids and mask (batch, tokens) of prompts, no longer than ``left_truncate_len`` tokens."""
        limit = left_truncate_len if self.truncate == "left" else None
        ids, mask = super().tok_batch_encode(strings, padding_side, limit, truncation)
        if self.truncate == "left" or left_truncate_len is None:
            return ids, mask
        rows = [_without_middle(row[kept.bool()], left_truncate_len) for row, kept in zip(ids, mask, strict=True)]
        padding = int(self.tokenizer.pad_token_id)
        return (
            pad_sequence(rows, batch_first=True, padding_value=padding, padding_side=padding_side),
            pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side=padding_side),
        )


def _without_middle(row: Tensor, length: int) -> Tensor:
    """The first and the last half of ``length`` tokens of a longer row (n,)."""
    if len(row) <= length:
        return row
    return torch.cat((row[: length // 2], row[len(row) - (length - length // 2) :]))
