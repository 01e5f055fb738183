"""Which models a cache can be made for: what is not supported is refused with the reason, before anything is stored."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache, PreTrainedConfig, cache_utils


def check_model(config: PreTrainedConfig) -> PreTrainedConfig:
    """The text decoder's configuration; refuses architectures whose keys and values cannot be packed."""
    if getattr(config, "is_encoder_decoder", False):
        raise NotImplementedError("encoder-decoder models: cross-attention caches are not supported")
    decoder = config.get_text_config(decoder=True)
    if getattr(decoder, "kv_lora_rank", None):
        raise NotImplementedError(
            "multi-head latent attention (kv_lora_rank): its cache is a compressed latent, not keys and values per head"
        )
    return decoder


def plain_layers(config: PreTrainedConfig) -> list[Any]:
    """The layers that transformers makes for a model.

    Raises:
        NotImplementedError: The model has layers that bring a cache of their own (DeepSeek V4).
    """
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except KeyError as missing:  # a layer type that is known once the model's module is imported
        raise NotImplementedError(f"layers of type {missing} have a cache of their own") from missing
    for layer in layers:
        if type(layer).__module__ != cache_utils.__name__:
            raise NotImplementedError(f"layers of type {type(layer).__name__} have a cache of their own")
    return layers


def head_dims(decoder: PreTrainedConfig, layer: int) -> tuple[int, int]:
    """The head dimensions of a layer's keys and values, by the configuration: some layers may have wider heads."""
    own = decoder.per_layer_config[layer]
    dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    return dim, getattr(own, "v_head_dim", None) or dim


def kv_heads(decoder: PreTrainedConfig, layer: int) -> int:
    """The KV heads of a layer, by the configuration."""
    own = decoder.per_layer_config[layer]
    return getattr(own, "num_key_value_heads", None) or own.num_attention_heads


def shares_keys(decoder: PreTrainedConfig) -> bool:
    """Whether some layers attend to the keys and values of another layer."""
    return bool(getattr(decoder, "num_kv_shared_layers", 0))


def cross_attention(decoder: PreTrainedConfig) -> frozenset[int]:
    """The layers that attend to images alone (Mllama), whose keys and values never grow."""
    return frozenset(getattr(decoder, "cross_attention_layers", None) or ())


def has_recurrent_state(layer: Any) -> bool:
    """Whether a layer has the state of a linear attention, which knows no earlier one."""
    return any(getattr(layer, "is_recurrent_states_initialized", {}).values())
