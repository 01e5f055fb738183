"""The methods by name: our presets, their variants and ablations, and the rivals; and empty caches of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from oscar_kv import baselines
from oscar_kv.baselines import AnyMethod, Method, Peer, make_cache
from oscar_kv.config import OscarConfig
from oscar_kv.evaluate.ablations import ABLATIONS
from oscar_kv.evaluate.allocate import allocate_bits
from oscar_kv.evaluate.compare import REFERENCE

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


@dataclass(frozen=True)
class ByLayer:
    """Bits where a model needs them: see :func:`~oscar_kv.evaluate.allocate_bits`.

    Args:
        max_bits: Bits per packed number that are not exceeded.
    """

    max_bits: float


BY_LAYER = {"quality-by-layer": ByLayer(3.05)}
METHODS: Mapping[str, AnyMethod | ByLayer] = {**OURS, **BY_LAYER, **ABLATIONS, **baselines.METHODS}
DEFAULT_METHODS = (*OURS, "kivi")  # what is compared when nothing is asked for


def family(name: str) -> str:
    """The method that an entry of :data:`METHODS` is a setting of."""
    method = METHODS[name]
    if isinstance(method, ByLayer) or name in OURS or name in ABLATIONS:
        return "OScaR"
    if isinstance(method, OscarConfig):
        return "KIVI"
    return f"transformers {method.backend}" if isinstance(method, Peer) else type(method).__name__


def calibrated(name: str, model: PreTrainedModel, ids: Tensor) -> AnyMethod:
    """An entry of :data:`METHODS`, with what it learns from a text (1, n), or of the model alone."""
    method = METHODS[name]
    if isinstance(method, ByLayer):
        return allocate_bits(model, max_bits=method.max_bits)
    return method.calibrated(model, ids) if isinstance(method, Method) else method


class CacheMaker:
    """Makes empty caches for batches without padding.

    Args:
        name: In :data:`METHODS`, or "16-bit".
        model: What the caches are for.
        calibration: int64 (1, n) tokens, for the methods that learn from a text.
    """

    def __init__(self, name: str, model: PreTrainedModel, calibration: Tensor) -> None:
        self.config = model.config
        self.method = None if name == REFERENCE else calibrated(name, model, calibration)

    def max_rows(self, wanted: int) -> int:
        """Rows that may share a cache, at most those wanted: a :class:`Peer` would group numbers across rows."""
        return 1 if isinstance(self.method, Peer) else wanted

    def __call__(self, rows: int, columns: int) -> Cache:
        """A cache for prompts (rows, columns)."""
        if self.method is None:
            return DynamicCache(config=self.config)
        return make_cache(self.method, self.config, attention_mask=torch.ones(rows, columns, dtype=torch.long))
