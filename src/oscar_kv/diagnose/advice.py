"""What is wrong with a single layer, and the bits that it would need."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from oscar_kv.diagnose.steps import RECOMMENDABLE

WIDE_GROUP = 4.0  # largest over smallest norm of a group from which on norms count as imbalanced
_WEAK_LAYER = 0.1  # relative error of a layer's attention output from which on more bits are advised
_MODALITY_GAP = 2.0  # ratio of median norms
SETTINGS: dict[int, dict[str, Any]] = {  # of a layer that needs so many bits
    4: {"key_bits": 4, "value_bits": 4, "key_shrink": 1.0, "value_shrink": 1.0, "value_gain": 1.0},
    16: {"key_bits": 16, "value_bits": 16},
}


def causes(layer: dict[str, Any]) -> list[str]:
    """What makes a layer hard to quantize, each in a few words with its number."""
    found, tokens = [], layer["tokens"]
    if tokens["sinks"]:
        sink = max(tokens["sinks"], key=lambda sink: sink["attention"])
        found.append(
            f"{_count(tokens['sinks'], 'sink')}, token {sink['position']} takes {sink['attention']:.0%} of the "
            f"attention at {sink['norm_over_median']:.2g} of the median norm"
        )
    for kind in ("low_norm", "high_norm"):
        if places := tokens[kind]:
            found.append(f"{_count(places, 'token')} of {kind.replace('_', ' ')}, the first at {places[0]}")
    ratio = widest(layer)
    if ratio > WIDE_GROUP:
        found.append(f"norms differ {ratio:.3g} times within a group")
    channels = max(layer["heads"], key=lambda head: len(head["channels"]["outliers"]))["channels"]
    if channels["outliers"]:
        count = _count(channels["outliers"], "outlier channel")
        found.append(f"{count}, up to {channels['max_over_median']:.3g} x the median range")
    for name, gap in layer["modalities"].items():
        ratio = gap["key_over_text"]
        if ratio < 1 / _MODALITY_GAP or ratio > _MODALITY_GAP:
            found.append(f"{name} keys have {ratio:.2g} times the norm of text")
    return found


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def widest(layer: dict[str, Any]) -> float:
    """Largest ratio of two norms within a group, over the heads."""
    return float(max(head["imbalance_ratio"]["max"] for head in layer["heads"]))


def layer_advice(layer: dict[str, Any], preset: str) -> dict[str, Any] | None:
    """Bits for a layer whose attention output suffers under the preset, and what else is unusual about it."""
    errors = {name: layer["steps"][name]["output_error"] for name in (preset, RECOMMENDABLE[-1])}
    bits = None
    if errors[preset] > _WEAK_LAYER:
        bits = 4 if errors[RECOMMENDABLE[-1]] <= _WEAK_LAYER and preset != RECOMMENDABLE[-1] else 16
    found = causes(layer)
    if bits is None and not found:
        return None
    return {"layer": layer["layer"], "output_error": errors[preset], "bits": bits, "causes": found}
