"""Switching the attention of a model's text decoder, and of nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel


@contextmanager
def replaced_attention(model: PreTrainedModel, attention: str) -> Iterator[None]:
    """Run a model's text decoder with another attention implementation for a while."""
    own = set_attention(model, attention)
    try:
        yield
    finally:
        model.config._attn_implementation = own


def set_attention(model: PreTrainedModel, attention: str) -> dict[str, Any]:
    """Set the attention of the text decoder; towers for images and sound, and talkers, keep theirs.

    Returns:
        What every part had: ``model.config._attn_implementation = ...`` gives it back.

    Raises:
        NotImplementedError: The decoder cannot run this attention.
    """
    config = model.config
    before, wanted = attentions(config), attentions(config)
    decoder = config.get_text_config(decoder=True)
    part = wanted
    for name in _path(config, decoder):
        part[""], part = attention, part[name]
    part[""] = attention
    inner = (x for x in model.modules() if isinstance(x, PreTrainedModel) and x.config is decoder)
    try:
        next(inner, model).set_attn_implementation(attention)  # which checks that this part can run it
        if decoder._attn_implementation != attention:
            raise NotImplementedError(
                f"{type(model).__name__} cannot run attention '{attention}': try another, or the model's own "
                f"'{decoder._attn_implementation}'"
            )
    except Exception:
        config._attn_implementation = before
        raise
    config._attn_implementation = wanted
    return before


def attentions(config: PreTrainedConfig) -> dict[str, Any]:
    """The attention of a configuration (under "") and of its parts, as transformers nests them."""
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": config._attn_implementation} | {name: attentions(x) for name, x in parts.items() if x is not None}


def _path(config: PreTrainedConfig, decoder: PreTrainedConfig) -> list[str]:
    """Names of the parts that lead to the decoder's configuration; none where it is the model's own."""
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is decoder:
            return [name]
        if part is not None and (rest := _path(part, decoder)):
            return [name, *rest]
    return []
