"""The rivals: other quantizations of the KV cache, each a cache for ``model.generate``, with all its bytes counted.

``BaselineCache(model.config, QuaRot())`` is used like an :class:`~oscar_kv.OscarCache`. :data:`METHODS` has each rival
at about 3.0 bits per number, and with "-published" at its own setting where that is another; group sizes are the
largest that the head dimension allows, so bits differ between models. At equal bytes all pack 128 tokens at a time,
as we do; only methods that have sinks of their own keep any, four as we do.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import Cache, PreTrainedConfig

from oscar_kv.baselines.base import Method
from oscar_kv.baselines.cache import BaselineCache
from oscar_kv.baselines.kivi import kivi
from oscar_kv.baselines.ott import OTT
from oscar_kv.baselines.peers import Peer
from oscar_kv.baselines.quarot import QuaRot
from oscar_kv.baselines.rotatekv import RotateKV
from oscar_kv.baselines.rtn import RTN
from oscar_kv.baselines.together import Rotations, TogetherOSCAR, calibrate
from oscar_kv.baselines.turboquant import TurboQuant
from oscar_kv.cache import OscarCache
from oscar_kv.config import BLOCK_TOKENS, OscarConfig

AnyMethod = OscarConfig | Method | Peer

METHODS: Mapping[str, AnyMethod] = {
    "rtn": RTN(block=BLOCK_TOKENS),
    "rtn-published": RTN(group=None),
    "kivi": kivi(),
    "kivi-int-zero": kivi(zero_point="int"),
    "kivi-g128": kivi(group=128),
    "quarot": QuaRot(block=BLOCK_TOKENS),
    "quarot-published": QuaRot(group=None),
    "rotatekv": RotateKV(group=32, num_sinks=4, block=BLOCK_TOKENS),
    "rotatekv-published": RotateKV(),
    "ott": OTT(group=32, pool=5, residual_length=0),
    "ott-published": OTT(),
    "together-oscar": TogetherOSCAR(group=32, num_sinks=4, residual_length=0, block=BLOCK_TOKENS),
    "together-oscar-published": TogetherOSCAR(),
    "turboquant-2": TurboQuant(),
    "turboquant-3": TurboQuant(bits=3),
    "turboquant-prod-3": TurboQuant(bits=3, variant="prod"),
    "turboquant-prod-published": TurboQuant(outlier_bits=3, variant="prod"),
    "turboquant-plus": TurboQuant(outlier_bits=3, budget=3.0, block=BLOCK_TOKENS),
    "turboquant-plus-published": TurboQuant(outlier_bits=3),
    "quanto-2": Peer(backend="quanto"),
    "quanto-2-channels": Peer(backend="quanto", keys_per_channel=True),
    "quanto-4": Peer(backend="quanto", bits=4),
    "hqq-2": Peer(backend="hqq"),
    "hqq-4": Peer(backend="hqq", bits=4),
}


def make_cache(method: AnyMethod, config: PreTrainedConfig, *, attention_mask: Tensor | None = None) -> Cache:
    """An empty cache for a model of this configuration (``model.config``), of ours or of a rival.

    Args:
        method: What to pack and how.
        config: The model's configuration.
        attention_mask: (batch, columns) padding mask of the prompts; a batch needs it. A rival takes no padding, and
            a :class:`Peer` does not look at it.
    """
    if isinstance(method, OscarConfig):
        return OscarCache(config, method, attention_mask=attention_mask)
    if isinstance(method, Peer):
        return method.make_cache(config)
    return BaselineCache(config, method, attention_mask=attention_mask)


__all__ = [
    "METHODS",
    "OTT",
    "RTN",
    "AnyMethod",
    "BaselineCache",
    "Method",
    "Peer",
    "QuaRot",
    "RotateKV",
    "Rotations",
    "TogetherOSCAR",
    "TurboQuant",
    "calibrate",
    "kivi",
    "make_cache",
]
