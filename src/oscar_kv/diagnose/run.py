"""The whole diagnosis of a model on an input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import oscar_kv
from oscar_kv import results
from oscar_kv.cache import OscarCache, packed_layers
from oscar_kv.config import BLOCK_TOKENS, REPORT_FORMAT
from oscar_kv.diagnose.capture import LayerStates, capture
from oscar_kv.diagnose.layer import LayerDiagnosis, diagnose_layer
from oscar_kv.diagnose.recommend import recommend
from oscar_kv.diagnose.report import Report, model_section, notes
from oscar_kv.diagnose.steps import steps
from oscar_kv.diagnose.summary import rounded, summarize, theory, verdict
from oscar_kv.diagnose.synthetic import sweep
from oscar_kv.diagnose.tokens import modalities
from oscar_kv.evaluate import compare


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
        "model": model_section(model, name, layers),
        "input": {"source": source, **tokens, "modalities": {key: int(own.sum()) for key, own in modality.items()}},
        "notes": notes(model, inputs, modality),
        "summary": summary,
        "theory": {**theory(layers), "sweep": sweep()},
        "verdict": verdict(summary["interventions"], layers),
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
