"""Means over the layers, the bound over all groups, and plain numbers that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from oscar_kv.diagnose.interventions import (
    NORMS,
    NORMS_AND_SINKS,
    PLAIN,
    ROTATED,
    WITHOUT_ALL_SINKS,
    WITHOUT_SINKS,
    removed,
)
from oscar_kv.diagnose.layer import LayerDiagnosis
from oscar_kv.diagnose.theory import regress

_ERRORS = ("output_error", "attention_kl", "key_error", "value_error", "extra_bits")
_ORDER = ("sink", "low_norm", "neighbour", "high_norm", "other", "text", "image", "video", "audio")
_WORTH_REPAIRING = 1e-3  # relative error of the attention output with plain groups


def rounded(x: Any) -> Any:
    """Floats of nested dictionaries and lists to 4 significant digits; those that are not finite become None."""
    if isinstance(x, dict):
        return {key: rounded(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [rounded(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.4g}") if math.isfinite(x) else None
    return x


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def summarize(layers: Sequence[LayerDiagnosis]) -> dict[str, Any]:
    """Means over layers of what each step and each intervention leaves, and by token class."""
    numbers = [layer.numbers for layer in layers]
    return {
        "steps": {name: _means([n["steps"][name] for n in numbers]) for name in numbers[0]["steps"]},
        "interventions": {
            name: _means([n["interventions"][name] for n in numbers]) for name in numbers[0]["interventions"]
        },
    }


def _means(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {name: mean([row[name] for row in rows]) for name in _ERRORS if name in rows[0]}
    for kind in ("classes", "modalities"):
        if kind in rows[0]:
            found_names = {name for row in rows for name in row[kind]["key"]}
            names = sorted(found_names, key=_ORDER.index)
            found[kind] = {
                name: mean([row[kind]["key"][name] for row in rows if name in row[kind]["key"]]) for name in names
            }
    return found


def theory(layers: Sequence[LayerDiagnosis]) -> dict[str, Any]:
    """The bound over all groups of all layers, and what the error of a plain group goes with."""
    spaces = {}
    for space in layers[0].numbers["theory"]:
        rows = [layer.numbers["theory"][space] for layer in layers if layer.numbers["theory"][space]["groups"]]
        spaces[space] = {
            "groups": sum(row["groups"] for row in rows),
            "violations": sum(row["violations"] for row in rows),
            **{
                f"{name}_median": mean([row[name]["median"] for row in rows])
                for name in ("gap", "extremes", "diameter", "measured")
            },
            "measured_below_gap": mean([row["measured_below_gap"] for row in rows]),
        }
    together = {name: torch.cat([layer.groups[name] for layer in layers]) for name in layers[0].groups}
    factors = {"norm gap": together["gap"], "directional spread": together["spread"]}
    return {"bound": spaces, "regression": regress(together["error"], factors)}


def verdict(interventions: dict[str, dict[str, float]], layers: Sequence[LayerDiagnosis]) -> dict[str, Any]:
    """Whether token norms are what hurts most, by how much of the error of the attention output each repair removes.

    The rule: a repair of norms alone removes more than half of the error of plain groups, and more than rotation does.

    Args:
        interventions: Means over the layers.
        layers: The layers, of each of which the same is asked.

    Returns:
        "primary", None where there is nothing to repair; "removed" by repair; "layers" in which the rule holds; "text".
    """
    worst = interventions[PLAIN]["output_error"]
    own = [layer.index for layer in layers if _norms_are_primary(layer.numbers["interventions"])]
    if worst < _WORTH_REPAIRING:
        text = "Plain 2-bit keys change the attention output hardly at all."
        return {"primary": None, "removed": {}, "layers": own, "text": text}
    shares = removed(interventions)
    norms = max(shares[name] for name in NORMS)
    primary = _norms_are_primary(interventions)
    text = (
        f"Plain 2-bit keys change the attention output by {worst:.3g} (relative squared error). Repairing norms alone "
        f"removes {norms:.0%} of that, rotation alone {shares[ROTATED]:.0%}, first tokens in 16 bit "
        f"{shares[WITHOUT_SINKS]:.0%}, all sinks and low-norm tokens in 16 bit {shares[WITHOUT_ALL_SINKS]:.0%}, "
        f"these and equal norms {shares[NORMS_AND_SINKS]:.0%}. Token norm imbalance is {'' if primary else 'not '}"
        "the primary bottleneck here, by the rule that repairing norms removes more than half, and more than rotation. "
        f"Layer by layer it is in {len(own)} of {len(layers)}."
    )
    return {"primary": primary, "removed": shares, "layers": own, "text": text}


def _norms_are_primary(interventions: dict[str, dict[str, float]]) -> bool:
    shares = removed(interventions)
    norms = max(shares[name] for name in NORMS)
    hurts = interventions[PLAIN]["output_error"] >= _WORTH_REPAIRING
    return hurts and norms > 0.5 and norms > shares[ROTATED]
