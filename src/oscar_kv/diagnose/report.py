"""The whole diagnosis of a model on an input: run it, and keep it as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import oscar_kv
from oscar_kv import results
from oscar_kv.cache import OscarCache
from oscar_kv.config import BLOCK_TOKENS, REPORT_FORMAT
from oscar_kv.diagnose.capture import LayerStates, capture, modalities, packed_layers
from oscar_kv.diagnose.layer import LayerDiagnosis, diagnose_layer
from oscar_kv.diagnose.recommend import recommend
from oscar_kv.diagnose.steps import packed_bits, steps
from oscar_kv.diagnose.summary import rounded, summarize, theory, verdict
from oscar_kv.diagnose.synthetic import sweep
from oscar_kv.evaluate import compare

JSON_NAME = "report.json"


@dataclass(frozen=True)
class Report:
    """A diagnosis.

    Args:
        numbers: Everything, as JSON can hold it; docs/tni.md says what the fields mean.
        layers: The layers with what the pictures need.
        modality: bool (n,) by name, of the counted tokens.
    """

    numbers: dict[str, Any]
    layers: list[LayerDiagnosis]
    modality: dict[str, Tensor]

    def to_json(self) -> str:
        """One line of JSON: with the statistics of every head and layer it is long."""
        return json.dumps(self.numbers, separators=(",", ":"), allow_nan=False)

    def save(self, folder: Path) -> Path:
        """Write ``report.json`` into a folder, which is made if need be; its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / JSON_NAME
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path


def diagnose(
    model: PreTrainedModel,
    inputs: Mapping[str, Any],
    *,
    name: str = "",
    source: str = "",
    predictions: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """See, layer by layer, whether and why 2-bit quantization of the KV cache will hurt a model on an input.

    Args:
        model: Any decoder model of transformers, multi-modal ones included.
        inputs: Arguments of its forward, one row: ``input_ids`` (1, n), n at least 256, and what goes with them.
        name: The model's name for the report.
        source: What the input is, for the report.
        predictions: Also measure, by running the model with each step's cache, how far its predictions move. It takes
            a forward pass per step, and text alone.
        progress: Called with the work done and the work in all.

    Raises:
        ValueError: The input is too short, has several rows or padding; or ``predictions`` of more than text.
        NotImplementedError: The architecture is not supported.
    """
    ids = inputs["input_ids"]
    modality = modalities(model.config, ids[0])
    if predictions and set(modality) != {"text"}:
        raise ValueError("predictions can be measured on text alone, not on images, videos or audio")
    layers: list[LayerDiagnosis] = []
    work = _Work(len(packed_layers(model.config)) + (ids.shape[1] if predictions else 0), progress)

    def collect(states: LayerStates) -> None:
        layers.append(diagnose_layer(states, modality))
        work.advance(1)

    capture(model, inputs, collect)
    if not layers:
        raise NotImplementedError(f"{type(model).__name__}: no layer's attention could be watched")
    counted = ids.shape[1] // BLOCK_TOKENS * BLOCK_TOKENS
    modality = {key: own[:counted].cpu() for key, own in modality.items()}
    summary = summarize(layers)
    if predictions:
        summary["predictions"] = _predictions(model, ids, layers[0].numbers["value_dim"], work.advance)
    tokens = {"tokens": ids.shape[1], "counted": counted}
    numbers = {
        "format": REPORT_FORMAT,
        "model": _model(model, name, layers),
        "input": {"source": source, **tokens, "modalities": {key: int(own.sum()) for key, own in modality.items()}},
        "notes": _notes(model, modality),
        "summary": summary,
        "theory": {**theory(layers), "sweep": sweep()},
        "verdict": verdict(summary["interventions"]),
        "recommendation": recommend(
            summary,
            [layer.numbers for layer in layers],
            model.config.get_text_config(decoder=True).num_hidden_layers,
        ),
        "provenance": results.provenance(),
        "layers": [layer.numbers for layer in layers],
    }
    return Report(rounded(numbers), layers, modality)


class _Work:
    """Counts what is done."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def advance(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)


def _model(model: PreTrainedModel, name: str, layers: list[LayerDiagnosis]) -> dict[str, Any]:
    decoder = model.config.get_text_config(decoder=True)
    heads, key_dim, value_dim = (layers[0].numbers[name] for name in ("kv_heads", "key_dim", "value_dim"))
    return {
        "name": name or model.config.name_or_path,
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": decoder.num_hidden_layers,
        "diagnosed": [layer.index for layer in layers],
        "kv_heads": heads,
        "key_dim": key_dim,
        "value_dim": value_dim,
        "packed_bits": {
            step: packed_bits(config, heads, key_dim, value_dim) for step, config in steps(value_dim).items()
        },
    }


def _notes(model: PreTrainedModel, own: Mapping[str, Tensor]) -> list[str]:
    notes = ["Errors are relative squared errors; KL is in nats. One input says little about others: run several."]
    if not model.config.name_or_path:
        notes.append("The weights were not loaded from a checkpoint: if they are random, these numbers mean nothing.")
    if set(own) == {"text"}:
        notes.append("All tokens are text: nothing is said about images, videos or audio.")
    return notes


def _predictions(
    model: PreTrainedModel, ids: Tensor, value_dim: int, advance: Callable[[int], None]
) -> dict[str, dict[str, float]]:
    """KL of the predictions, and change of perplexity in percent, with a real cache of each step."""
    configs = steps(value_dim)
    ids = ids.to(model.device)
    start = min(2 * BLOCK_TOKENS, ids.shape[1] - 2)
    with oscar_kv.enable(model), torch.inference_mode():
        caches = {name: partial(OscarCache, model.config, config) for name, config in configs.items()}
        found = compare(model, ids, caches, start=start, progress=advance)
    return {
        name: {"kl": found[name].kl, "kl_p99": found[name].kl_p99, "perplexity_change": found[name].perplexity_change}
        for name in configs
    }
