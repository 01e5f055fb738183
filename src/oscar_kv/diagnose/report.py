"""The result of a diagnosis, kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from oscar_kv.diagnose.layer import LayerDiagnosis
from oscar_kv.diagnose.steps import packed_bits, steps

JSON_NAME = "report.json"
_TEXT_INPUTS = {"input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids"}


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


def model_section(model: PreTrainedModel, name: str, layers: list[LayerDiagnosis]) -> dict[str, Any]:
    """What was diagnosed, and the bits that each step takes in it."""
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


def notes(model: PreTrainedModel, inputs: Mapping[str, Any], modality: Mapping[str, Tensor]) -> list[str]:
    """What a reader of the numbers has to know."""
    found = ["Errors are relative squared errors; KL is in nats. One input says little about others: run several."]
    if not model.config.name_or_path:
        found.append("The weights were not loaded from a checkpoint: if they are random, these numbers mean nothing.")
    if set(modality) == {"text"}:
        found.append(
            "The configuration has no ids of placeholders for what was given besides text: it counts as text."
            if set(inputs) - _TEXT_INPUTS
            else "All tokens are text: nothing is said about images, videos or audio."
        )
    return found
