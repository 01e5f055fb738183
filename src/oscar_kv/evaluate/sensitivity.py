"""Which layers a model's memory of what it has read hangs on, by a probe of random tokens. Needs no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from oscar_kv.cache import OscarCache, packed_layers
from oscar_kv.cache_layer import ATTENTION_NAME
from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.evaluate.compare import compare
from oscar_kv.integrations.switch import replaced_attention
from oscar_kv.integrations.transformers import register

PLAIN: dict[str, dict[str, Any]] = {  # what each side is packed with, alone
    "key": {"key_bits": 2, "key_shrink": 0.9, "key_group": 32},
    "value": {"value_bits": 2, "value_gain": 1.1},
}
_LENGTH = 2 * BLOCK_TOKENS  # random tokens, that come twice
_LEAD = 8  # of the second time, after which a model has found the first
_LAYERS_AT_ONCE = 8  # whose caches are held side by side

Place = tuple[str, int]  # side and layer
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Sensitivity:
    """What each layer's keys and values cost when they alone are packed in 2 bits.

    Args:
        kl: By side ("key", "value") and layer, the mean KL divergence of the predictions, in nats.
    """

    kl: Mapping[Place, float]


def sensitivity(model: PreTrainedModel, *, seed: int = 0, progress: Progress | None = None) -> Sensitivity:
    """Measure where packing hurts a model's memory of what it has read, one layer and side at a time.

    The probe is 256 random tokens, twice. What a model predicts the second time it has from the first alone, which is
    packed by then: so the layers show that look things up in the text (Olsson et al., "In-context Learning and
    Induction Heads", arXiv 2209.11895), and no text has to be chosen.

    Args:
        model: A decoder model.
        seed: Of the random tokens.
        progress: Called with the layers done and the layers in all.
    """
    register()
    layers = packed_layers(model.config)
    exact = OscarConfig(key_bits=16, value_bits=16)
    ids = _probe(model.config, seed).to(model.device)
    found: dict[Place, float] = {}
    with replaced_attention(model, ATTENTION_NAME):
        for first in range(0, len(layers), _LAYERS_AT_ONCE):
            some = layers[first : first + _LAYERS_AT_ONCE]
            configs = {(side, i): replace(exact, layers={i: PLAIN[side]}) for i in some for side in PLAIN}
            caches = {f"{side} {i}": partial(OscarCache, model.config, config) for (side, i), config in configs.items()}
            caches["exact"] = partial(OscarCache, model.config, exact)  # what the order of rounding alone changes
            kl = {name: x.kl for name, x in compare(model, ids, caches, start=_LENGTH + _LEAD).items()}
            found |= {(side, i): max(0.0, kl[f"{side} {i}"] - kl["exact"]) for side, i in configs}
            if progress is not None:
                progress(first + len(some), len(layers))
    return Sensitivity(found)


def _probe(config: PreTrainedConfig, seed: int) -> Tensor:
    """The token that texts start with, if there is one, and random tokens twice: int64 (1, n)."""
    decoder = config.get_text_config(decoder=True)
    size = decoder.vocab_size  # tokens that mean something special are at its ends
    tokens = torch.randint(size // 100, size // 2, (1, _LENGTH), generator=torch.Generator().manual_seed(seed))
    start = decoder.bos_token_id
    first = torch.full((1, 0 if start is None else 1), 0 if start is None else start)
    return torch.cat((first, tokens, tokens), dim=1)
