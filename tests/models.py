"""Tiny random models for the cache tests, and the few calls that the tests make of them.

The weights are drawn so wide (``initializer_range``) that greedy tokens hardly repeat and depend on far tokens: a wrong
cache shows in the tokens at once. There is no end-of-sequence token, so every generation runs its full length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

import oscar_kv
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.integrations.transformers import CACHE_ARGUMENT

VOCAB = 97
WINDOW = 48  # sliding window of the models that have one
EXACT = OscarConfig(key_bits=16, value_bits=16)
PLAIN = OscarConfig(token_norm=None, rotate_keys=False, equalize=0.0)
CONFIGS = {
    "default": OscarConfig(),
    "quality": OscarConfig.quality(),
    "four_bit": OscarConfig.four_bit(),
    "paper": OscarConfig.paper(),
    "per_head": OscarConfig(scale_scope="head"),
    "plain": PLAIN,
}

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_SLIDING_AND_FULL = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": WINDOW,
}
_CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen2": (Qwen2Config, {"head_dim": 16}),  # 64 / 4: Qwen2 has no head_dim of its own
    "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    "gemma3": (Gemma3TextConfig, {**_SLIDING_AND_FULL, "query_pre_attn_scalar": 32}),
    "phi3": (Phi3Config, {"head_dim": 16}),
    "gemma2": (Gemma2Config, {**_SLIDING_AND_FULL, "query_pre_attn_scalar": 4, "attn_logit_softcapping": 5.0}),
    "gpt_oss": (GptOssConfig, {**_SLIDING_AND_FULL, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "lfm2": (Lfm2Config, {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "full_attention"]}),
    "gemma4": (  # the last two layers share the keys and values of the first two
        Gemma4TextConfig,
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": WINDOW,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
}


def make_model(
    name: str = "llama",
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 3,
    **overrides: Any,
) -> PreTrainedModel:
    """A random model in eval mode; the same arguments give the same weights.

    The padding token has an embedding like any other, since it is generated like any other.
    """
    kind, own = _CONFIGS[name]
    config = kind(**{**COMMON, **own, **overrides})
    oscar_kv.register()
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            torch.nn.init.normal_(module.weight.detach()[module.padding_idx], std=config.initializer_range)
    model = model.to(dtype).eval()
    model.set_attn_implementation(attention)
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<end>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>")


def exact_first_layer(model: PreTrainedModel) -> PreTrainedModel:
    """Make a Llama's first queries, keys and values free of rounding: the same bits in any batch and chunk.

    The embedding is +-1, its RMS norm is exactly 1, and the projections are multiples of 2 ** -10 below 4: all partial
    sums of the matrix product are exact in float32, in whatever order they are taken.
    """
    layer = model.model.layers[0]
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.copy_(torch.where(embedding < 0, -1.0, 1.0))
        layer.input_layernorm.variance_epsilon = 0.0
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight.copy_((projection.weight * 2**10).round() / 2**10)
    return model


def tokens(*lengths: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths, left-padded: input_ids and attention_mask (rows, longest)."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(1, VOCAB, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return ids, mask


def oscar_cache(
    model: PreTrainedModel, config: OscarConfig = EXACT, mask: Tensor | None = None, **kwargs: Any
) -> OscarCache:
    """A fresh cache; the padding mask is only handed over where the attention does not."""
    packed = model.config._attn_implementation == "oscar"
    return OscarCache(model.config, config, attention_mask=None if packed else mask, **kwargs)


def dynamic_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config)


def generate(
    model: PreTrainedModel, ids: Tensor, cache: Cache | None, new: int, mask: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """The whole sequences, prompts included: greedy, unless ``kwargs`` say otherwise."""
    mask = torch.ones_like(ids) if mask is None else mask
    given = {} if cache is None else {CACHE_ARGUMENT: cache}
    kwargs = {"do_sample": False, **kwargs, **given}
    out: Tensor = model.generate(ids, attention_mask=mask, max_new_tokens=new, **kwargs)
    return out


def forward(model: PreTrainedModel, ids: Tensor, cache: Cache | None, mask: Tensor | None = None) -> Tensor:
    """Logits (rows, q, vocab) of one pass over the newest columns ``ids``; ``mask`` covers the cached ones too."""
    given = {} if cache is None else {CACHE_ARGUMENT: cache}
    if mask is not None:
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given |= {"attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        logits: Tensor = model(ids, use_cache=cache is not None, **given).logits
    return logits


def passes(
    model: PreTrainedModel, ids: Tensor, cache: Cache | None, sizes: Sequence[int], mask: Tensor | None = None
) -> Tensor:
    """Logits of all columns, fed in passes of these sizes; the last size is repeated to the end."""
    start, out = cache.get_seq_length() if cache is not None else 0, []
    first, done, turn = start, 0, 0
    while done < ids.shape[1]:
        size = sizes[min(turn, len(sizes) - 1)]
        seen = None if mask is None else mask[:, : first + done + size]
        out.append(forward(model, ids[:, done : done + size], cache, seen))
        done, turn = done + size, turn + 1
    return torch.cat(out, dim=1)
