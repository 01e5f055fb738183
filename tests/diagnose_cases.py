"""What the tests of diagnose share: models whose exact caches and reports are at hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import dynamic_cache, forward, make_model, tokens
from oscar_kv import OscarCache
from oscar_kv.diagnose import Report, diagnose
from oscar_kv.diagnose.steps import steps

LENGTH, COUNTED = 400, 384  # three blocks and a rest
GROUP = 32
QUERIES = [int(x) for x in torch.linspace(128, COUNTED - 1, 128)]
SINK, LOW, HIGH = 3, 70, 200  # positions that plant() changes


@dataclass(frozen=True)
class Case:
    """A model and a text, transformers' exact cache of it, and the report."""

    model: PreTrainedModel
    ids: Tensor
    cache: Any
    report: Report

    @property
    def layers(self) -> list[dict[str, Any]]:
        return self.report.numbers["layers"]

    def exact(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, float64 (heads, counted tokens, D)."""
        layer = self.cache.layers[index]
        return layer.keys[0, :, :COUNTED].double(), layer.values[0, :, :COUNTED].double()

    def packed(self, step: str) -> list[tuple[Tensor, Tensor]]:
        """The same from a real cache with that step, by layer."""
        self.model.set_attn_implementation("oscar")  # shows the cache its queries
        cache = OscarCache(self.model.config, steps(self.layers[0]["value_dim"])[step])
        forward(self.model, self.ids, cache)
        found = {layer["layer"]: cache.layers[layer["layer"]] for layer in self.layers}
        return {i: tuple(x[0, :, :COUNTED].double() for x in (n.keys, n.values)) for i, n in found.items()}


def make_case(model: PreTrainedModel) -> Case:
    ids, _ = tokens(LENGTH)
    cache = dynamic_cache(model)
    forward(model, ids, cache)
    return Case(model, ids, cache, diagnose(model, {"input_ids": ids}))


def planted() -> PreTrainedModel:
    """Llama with one token that takes much attention, one of low norm and one of high norm in every layer."""

    def plant(module: torch.nn.Module, arguments: Any, output: Tensor) -> Tensor:
        output = output.clone()
        for position, factor in ((SINK, 40.0), (LOW, 0.05), (HIGH, 2.5)):
            output[:, position] *= factor
        return output

    model = make_model("llama", attention="eager", initializer_range=0.06)
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(plant)
    return model
