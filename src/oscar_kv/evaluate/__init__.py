"""What a packed cache changes: predictions and attentions, long generations, and what is recalled of a text."""

from oscar_kv.evaluate.ablations import ABLATIONS
from oscar_kv.evaluate.allocate import allocate_bits
from oscar_kv.evaluate.attention import attention_errors
from oscar_kv.evaluate.bootstrap import BlockBootstrap, Estimate, estimate
from oscar_kv.evaluate.compare import REFERENCE, Fidelity, compare, pool
from oscar_kv.evaluate.generation import GenerationStudy
from oscar_kv.evaluate.methods import DEFAULT_METHODS, METHODS, PRESETS
from oscar_kv.evaluate.recall import RecallStudy
from oscar_kv.evaluate.sensitivity import Sensitivity, sensitivity
from oscar_kv.evaluate.study import Study

__all__ = [
    "ABLATIONS",
    "DEFAULT_METHODS",
    "METHODS",
    "PRESETS",
    "REFERENCE",
    "BlockBootstrap",
    "Estimate",
    "Fidelity",
    "GenerationStudy",
    "RecallStudy",
    "Sensitivity",
    "Study",
    "allocate_bits",
    "attention_errors",
    "compare",
    "estimate",
    "pool",
    "sensitivity",
]
