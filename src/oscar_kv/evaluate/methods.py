"""The methods by name: our presets, their variants, and the rivals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from oscar_kv import baselines
from oscar_kv.baselines import AnyMethod, Peer
from oscar_kv.config import OscarConfig

PRESETS = {
    "default": OscarConfig(),
    "quality": OscarConfig.quality(),
    "four-bit": OscarConfig.four_bit(),
    "paper": OscarConfig.paper(),
}
OURS = {
    "unquantized": OscarConfig(key_bits=16, value_bits=16),  # what the order of rounding alone changes
    **PRESETS,
    "paper-float-zero": replace(OscarConfig.paper(), zero_point="float"),
}
METHODS: Mapping[str, AnyMethod] = {**OURS, **baselines.METHODS}
DEFAULT_METHODS = (*OURS, "kivi")  # what is compared when nothing is asked for


def family(name: str) -> str:
    """The method that an entry of :data:`METHODS` is a setting of."""
    method = METHODS[name]
    if name in OURS:
        return "OScaR"
    if isinstance(method, OscarConfig):
        return "KIVI"
    return f"transformers {method.backend}" if isinstance(method, Peer) else type(method).__name__
