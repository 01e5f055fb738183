"""Fidelity: how far a packed cache moves a model's predictions and attentions away from those with 16 bits."""

from oscar_kv.evaluate.attention import attention_errors
from oscar_kv.evaluate.bootstrap import BlockBootstrap
from oscar_kv.evaluate.compare import REFERENCE, Fidelity, compare, pool
from oscar_kv.evaluate.methods import DEFAULT_METHODS, METHODS, PRESETS
from oscar_kv.evaluate.study import Study

__all__ = [
    "DEFAULT_METHODS",
    "METHODS",
    "PRESETS",
    "REFERENCE",
    "BlockBootstrap",
    "Fidelity",
    "Study",
    "attention_errors",
    "compare",
    "pool",
]
