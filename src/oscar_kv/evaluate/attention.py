"""The error of each layer's attention output, for the same queries, keys and values as in the 16-bit run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oscar_kv.baselines.cache import BaselineLayer
from oscar_kv.cache_layer import OscarLayer
from oscar_kv.config import BLOCK_TOKENS
from oscar_kv.integrations.switch import replaced_attention
from oscar_kv.integrations.transformers import CACHE_ARGUMENT

_NAME = "oscar_kv_errors"


@torch.inference_mode()
def attention_errors(
    model: PreTrainedModel,
    ids: Tensor,
    make: Callable[[], Cache],
    *,
    chunk: int = BLOCK_TOKENS,
    start: int = 2 * BLOCK_TOKENS,
) -> dict[int, float]:
    """Relative error of each packed layer's attention output, before the output projection.

    The model runs with a 16-bit cache. Each layer's attention is computed again over what a packed cache makes of the
    same keys and values, so errors do not pass from layer to layer.

    Args:
        model: A model that can run attention "sdpa"; it is given back as it was.
        ids: int64 (1, n) tokens of a text.
        make: Makes an empty cache of ours or of a rival.
        chunk: Tokens per forward pass.
        start: Outputs at positions from here on count.

    Returns:
        By layer, ``|packed output - output|^2 / |output|^2``, summed over tokens and heads.

    Raises:
        ValueError: ``ids`` is not one row, or too short.
    """
    n = ids.shape[-1]
    if ids.ndim != 2 or ids.shape[0] != 1 or not 0 <= start < n:
        raise ValueError(f"cannot compare attention on ids {tuple(ids.shape)} from {start} on")
    errors: dict[int, float] = {}
    norms: dict[int, float] = {}

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        out, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        index, q_len = int(module.layer_idx), query.shape[2]  # type: ignore[arg-type]
        layer = packed.layers[index]
        if isinstance(layer, (OscarLayer, BaselineLayer)):
            history = layer.update(key[:, :, -q_len:], value[:, :, -q_len:])
            found, _ = sdpa_attention_forward(module, query, *history, mask, **kwargs)
            skip = max(0, start - (key.shape[2] - q_len))  # (batch, q, heads, value_dim)
            exact, difference = (x[:, skip:].double().square().sum() for x in (out, found.double() - out))
            errors[index] = errors.get(index, 0.0) + float(difference)
            norms[index] = norms.get(index, 0.0) + float(exact)
        return out, None

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    with replaced_attention(model, _NAME):
        packed, cache = make(), DynamicCache(config=model.config)  # made for this attention: it must be dequantized
        for first, stop in pairwise([*range(0, n, chunk), n]):
            model(ids[:, first:stop], logits_to_keep=1, use_cache=True, **{CACHE_ARGUMENT: cache})
    return {index: errors[index] / norms[index] for index in sorted(errors)}
