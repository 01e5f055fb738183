"""From the statistics of all layers to a configuration. Its rules and thresholds are all here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from oscar_kv.diagnose.advice import SETTINGS, WIDE_GROUP, layer_advice, widest
from oscar_kv.diagnose.statistics import OUTLIER_CHANNEL
from oscar_kv.diagnose.steps import BOTH, RECOMMENDABLE, SCALING
from oscar_kv.evaluate import PRESETS

KL_CLASSES = {"negligible": 0.01, "small": 0.1, "noticeable": 0.5, "severe": float("inf")}  # upper ends, nats
KL_PER_OUTPUT_ERROR = 2.0  # nats per output error, mean over all layers, of three small models: see docs/tni.md
_ACCEPTED = ("negligible", "small")
_MAX_SINKS = 64
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
        "kl_is_measured"; "reasons"; "layers": what is wrong with single layers, and bits for those that need more,
        which are in "config" as well.
    """
    measured = summary.get("predictions")
    factor = KL_PER_OUTPUT_ERROR * len(layers) / num_layers
    expected = {
        name: measured[name]["kl"] if measured else factor * summary["steps"][name]["output_error"]
        for name in RECOMMENDABLE
    }
    preset = next((name for name in RECOMMENDABLE if kl_class(expected[name]) in _ACCEPTED), RECOMMENDABLE[-1])
    sinks = max(PRESETS[preset].num_sinks, leading_sinks(layers))
    advice = [found for layer in layers if (found := layer_advice(layer, preset))]
    own = {found["layer"]: SETTINGS[found["bits"]] for found in advice if found["bits"] is not None}
    return {
        "preset": preset,
        "config": asdict(replace(PRESETS[preset], num_sinks=sinks, layers=own)),
        "expected_kl": {name: {"kl": kl, "class": kl_class(kl)} for name, kl in expected.items()},
        "kl_is_measured": measured is not None,
        "reasons": _reasons(summary, layers, expected, preset, sinks),
        "layers": advice,
    }


def leading_sinks(layers: Sequence[dict[str, Any]]) -> int:
    """Length of the run of tokens from the start on that are sinks or of low norm in some layer."""
    places = {s["position"] for layer in layers for s in layer["tokens"]["sinks"]}
    places |= {i for layer in layers for i in layer["tokens"]["low_norm"]}
    return next(i for i in range(_MAX_SINKS + 1) if i not in places or i == _MAX_SINKS)


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
    wide = {n["layer"]: ratio for n in layers if (ratio := widest(n)) > WIDE_GROUP}
    if wide:
        worst = max(wide, key=lambda layer: wide[layer])
        reasons.append(
            f"{len(wide)} of {len(layers)} layers have groups whose norms differ more than {WIDE_GROUP:g} times, "
            f"layer {worst} the most, {wide[worst]:.3g} times: the presets take the norm out of each key."
        )
    rotated, plain = (summary["steps"][name]["output_error"] for name in (BOTH, SCALING))
    if rotated > _WORSE * plain:
        reasons.append(
            f"Do not use the published method here: its rotation raises the mean output error from {plain:.2g} to "
            f"{rotated:.2g}."
        )
    return reasons
