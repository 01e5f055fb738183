"""From the statistics of all layers to a configuration and advice. The rules and thresholds are all here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from oscar_kv.diagnose.statistics import OUTLIER_CHANNEL
from oscar_kv.diagnose.steps import BOTH, RECOMMENDABLE, SCALING
from oscar_kv.evaluate import PRESETS

KL_CLASSES = {"negligible": 0.01, "small": 0.1, "noticeable": 0.5, "severe": float("inf")}  # upper ends, nats
KL_PER_OUTPUT_ERROR = 2.0  # nats per output error, mean over all layers, of three small models: see docs/tni.md
_ACCEPTED = ("negligible", "small")
_MAX_SINKS = 64
_WEAK_LAYER = 0.1  # relative error of a layer's attention output from which on more bits are advised
_WIDE_GROUP = 4.0  # largest over smallest norm of a group from which on norms count as imbalanced
_MODALITY_GAP = 2.0  # ratio of median norms
_WORSE = 1.25  # ratio of errors from which on one step is called worse than another


def kl_class(kl: float) -> str:
    return next(name for name, end in KL_CLASSES.items() if kl < end)


def recommend(summary: dict[str, Any], layers: Sequence[dict[str, Any]], num_layers: int) -> dict[str, Any]:
    """The cheapest preset whose predictions should stay near those of the 16-bit cache, sinks, and advice by layer.

    Args:
        summary: Means over the layers, with "predictions" if they were measured.
        layers: Numbers of each diagnosed layer.
        num_layers: Layers of the model; those that are not packed have no error.

    Returns:
        "preset"; "config", fields of :class:`~oscar_kv.OscarConfig`; "expected_kl" and its class, by preset;
        "kl_is_measured"; "reasons"; "layers": what is wrong with single layers, and bits for those that need more.
    """
    measured = summary.get("predictions")
    factor = KL_PER_OUTPUT_ERROR * len(layers) / num_layers
    expected = {
        name: measured[name]["kl"] if measured else factor * summary["steps"][name]["output_error"]
        for name in RECOMMENDABLE
    }
    preset = next((name for name in RECOMMENDABLE if kl_class(expected[name]) in _ACCEPTED), RECOMMENDABLE[-1])
    sinks = max(PRESETS[preset].num_sinks, leading_sinks(layers))
    advice = [found for layer in layers if (found := _layer_advice(layer, preset))]
    return {
        "preset": preset,
        "config": asdict(replace(PRESETS[preset], num_sinks=sinks)),
        "expected_kl": {name: {"kl": kl, "class": kl_class(kl)} for name, kl in expected.items()},
        "kl_is_measured": measured is not None,
        "reasons": _reasons(summary, layers, expected, preset, sinks),
        "layers": advice,
        "layers_are_advice_only": "OscarCache has one configuration for all layers; from_report() leaves these out.",
    }


def leading_sinks(layers: Sequence[dict[str, Any]]) -> int:
    """Length of the run of tokens from the start on that are sinks or of low norm in some layer."""
    places = {s["position"] for layer in layers for s in layer["tokens"]["sinks"]}
    places |= {i for layer in layers for i in layer["tokens"]["low_norm"]}
    return next(i for i in range(_MAX_SINKS + 1) if i not in places or i == _MAX_SINKS)


def causes(layer: dict[str, Any]) -> list[str]:
    """What makes a layer hard to quantize, each in a few words with its number."""
    found, tokens = [], layer["tokens"]
    if tokens["sinks"]:
        strongest = max(tokens["sinks"], key=lambda sink: sink["attention"])
        found.append(
            f"{len(tokens['sinks'])} sinks, token {strongest['position']} takes {strongest['attention']:.0%} of the "
            f"attention at {strongest['norm_over_median']:.2g} of the median norm"
        )
    for kind in ("low_norm", "high_norm"):
        if tokens[kind]:
            found.append(f"{len(tokens[kind])} tokens of {kind.replace('_', ' ')}, the first at {tokens[kind][0]}")
    ratio = _widest(layer)
    if ratio > _WIDE_GROUP:
        found.append(f"norms differ {ratio:.3g} times within a group")
    channels = max(layer["heads"], key=lambda head: len(head["channels"]["outliers"]))["channels"]
    if channels["outliers"]:
        found.append(
            f"{len(channels['outliers'])} outlier channels, up to {channels['max_over_median']:.3g} x the median"
        )
    for name, gap in layer["modalities"].items():
        if not 1 / _MODALITY_GAP <= gap["key_over_text"] <= _MODALITY_GAP and name != "text":
            found.append(f"{name} keys have {gap['key_over_text']:.2g} times the norm of text")
    return found


def _widest(layer: dict[str, Any]) -> float:
    """Largest ratio of two norms within a group, over the heads."""
    return float(max(head["imbalance_ratio"]["max"] for head in layer["heads"]))


def _layer_advice(layer: dict[str, Any], preset: str) -> dict[str, Any] | None:
    """Bits for a layer whose attention output suffers under the preset, and what else is unusual about it."""
    errors = {name: layer["steps"][name]["output_error"] for name in (preset, RECOMMENDABLE[-1])}
    bits = None
    if errors[preset] > _WEAK_LAYER:
        bits = 4 if errors[RECOMMENDABLE[-1]] <= _WEAK_LAYER and preset != RECOMMENDABLE[-1] else 16
    found = causes(layer)
    if bits is None and not found:
        return None
    return {"layer": layer["layer"], "output_error": errors[preset], "bits": bits, "causes": found}


def _reasons(
    summary: dict[str, Any], layers: Sequence[dict[str, Any]], expected: dict[str, float], preset: str, sinks: int
) -> list[str]:
    bounds = " and ".join(f"{name} below {KL_CLASSES[name]:g}" for name in _ACCEPTED)
    how = "measured" if "predictions" in summary else f"expected: {KL_PER_OUTPUT_ERROR:g} x the output error"
    levels = ", ".join(f"{name} {kl:.2g} ({kl_class(kl)})" for name, kl in expected.items())
    reasons = [f"{preset}: the fewest bits with a small KL of predictions ({bounds} nats); {how}: {levels}."]
    if kl_class(expected[preset]) not in _ACCEPTED:
        reasons[0] = f"{preset}: even the preset with the most bits does not keep the KL small; {how}: {levels}."
    lead = leading_sinks(layers)
    if sinks > PRESETS[preset].num_sinks:
        reasons.append(f"num_sinks={sinks}: the first {lead} tokens are sinks or of low norm in some layer.")
    scattered = sorted({s["position"] for layer in layers for s in layer["tokens"]["sinks"] if s["position"] >= sinks})
    if scattered:
        places = ", ".join(map(str, scattered[:8])) + (", ..." if len(scattered) > 8 else "")
        reasons.append(f"Sinks beyond the first tokens, which no setting keeps in 16 bit: positions {places}.")
    outliers = [n for n in layers if any(head["channels"]["outliers"] for head in n["heads"])]
    if outliers:
        reasons.append(
            f"{len(outliers)} of {len(layers)} layers have outlier channels (range above {OUTLIER_CHANNEL:g} x the "
            "median): the presets equalize channels before they rotate."
        )
    wide = {n["layer"]: ratio for n in layers if (ratio := _widest(n)) > _WIDE_GROUP}
    if wide:
        worst = max(wide, key=lambda layer: wide[layer])
        reasons.append(
            f"{len(wide)} of {len(layers)} layers have groups whose norms differ more than {_WIDE_GROUP:g} times, "
            f"layer {worst} {wide[worst]:.3g} times: the presets take the norm out of each key."
        )
    rotated, plain = (summary["steps"][name]["output_error"] for name in (BOTH, SCALING))
    if rotated > _WORSE * plain:
        reasons.append(
            f"Do not use the published method here: its rotation raises the mean output error from {plain:.2g} to "
            f"{rotated:.2g}."
        )
    return reasons
