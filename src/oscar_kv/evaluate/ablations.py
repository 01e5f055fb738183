"""Our presets with one thing changed, to see what each is worth: ``oscar-kv eval fidelity --preset no-sinks ...``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from oscar_kv.config import OscarConfig

_DEFAULT, _QUALITY = OscarConfig(), OscarConfig.quality()

ABLATIONS: Mapping[str, OscarConfig] = {
    "no-rotation": replace(_DEFAULT, rotate_keys=False, rotate_values=False),
    "no-token-norm": replace(_DEFAULT, token_norm=None),
    "no-equalizer": replace(_DEFAULT, equalize=0.0),
    "no-queries": replace(_DEFAULT, equalize_queries=0.0),
    "no-sinks": replace(_DEFAULT, num_sinks=0),
    "no-fit": replace(_DEFAULT, key_shrink=1.0, value_fit="minmax", value_shrink=1.0),
    "float16-metadata": replace(_DEFAULT, metadata="float16"),
    "quality-shrunk": replace(_QUALITY, key_shrink=_DEFAULT.key_shrink),
    "quality-float16": replace(_QUALITY, metadata="float16"),
    "quality-keys-16": replace(_QUALITY, key_bits=16),
    "quality-values-16": replace(_QUALITY, value_bits=16),
    "quality-values-3": replace(_QUALITY, value_bits=3, value_gain=1.0),
    "quality-values-g32": replace(_QUALITY, value_group=32),
    "quality-no-gain": replace(_QUALITY, value_gain=1.0),
}
