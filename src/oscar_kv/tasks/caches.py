"""The caches that tasks are run with, by name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

from transformers import PreTrainedModel

from oscar_kv.config import OscarConfig
from oscar_kv.evaluate import PRESETS, REFERENCE
from oscar_kv.integrations.transformers import Enabled, enable

CACHES: dict[str, OscarConfig | None] = {
    REFERENCE: None,  # transformers' own
    "unquantized": OscarConfig(key_bits=16, value_bits=16),
    **PRESETS,
}


def cache_config(cache: str | OscarConfig) -> OscarConfig | None:
    """What a cache quantizes and how; None for transformers' own.

    Raises:
        ValueError: There is no such cache.
    """
    if isinstance(cache, OscarConfig):
        return cache
    if cache not in CACHES:
        raise ValueError(f"no cache {cache}: choose from {', '.join(CACHES)}")
    return CACHES[cache]


def enabled(model: PreTrainedModel, config: OscarConfig | None, attention: str) -> Enabled | nullcontext[None]:
    """A context in which ``model.generate`` uses such a cache; for None, transformers' own.

    Raises:
        NotImplementedError: The model is not supported.
    """
    return nullcontext() if config is None else enable(model, config, attention=attention)


def chosen(caches: Sequence[str] | None) -> list[str]:
    """Names of caches, each once, the 16-bit cache first; by default that and "default".

    Raises:
        ValueError: There is no such cache.
    """
    found = sorted(dict.fromkeys(caches or (REFERENCE, "default")), key=lambda name: name != REFERENCE)
    for name in found:
        cache_config(name)
    return found
