"""What methods learn from a text: a model's queries, keys and values, layer by layer, as attention gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oscar_kv.integrations.switch import replaced_attention

_NAME = "oscar_kv_capture"


@torch.inference_mode()
def capture(model: PreTrainedModel, ids: Tensor, visit: Callable[[int, Tensor, Tensor, Tensor], None]) -> None:
    """Run a text through a model and visit every attention.

    Args:
        model: A decoder model; it is given back as it was.
        ids: int64 (1, n).
        visit: Called with the layer, queries (1, query heads, n, key_dim), keys (1, KV heads, n, key_dim) and values
            (1, KV heads, n, value_dim), after RoPE.
    """

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        visit(int(module.layer_idx), query, key, value)  # type: ignore[arg-type]
        out: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return out

    AttentionInterface.register(_NAME, attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    with replaced_attention(model, _NAME):
        model(ids, use_cache=False, logits_to_keep=1)
