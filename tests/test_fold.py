"""The rotation of values folded into the weights: the same model, whose values are rotated, until it is undone."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Linear
from transformers import BitNetConfig, BitNetForCausalLM, DynamicCache, PreTrainedModel

import oscar_kv
from families import TEXT, media_model, text_model
from forced import blocks, logits
from models import COMMON, make_model, tokens
from oscar_kv import OscarCache, OscarConfig

FOLDABLE = [name for name, family in TEXT.items() if family.unfoldable is None]
CLOSE = {"atol": 5e-4, "rtol": 1e-4}


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def changed(model: PreTrainedModel, before: dict[str, Tensor]) -> list[str]:
    return [name for name, x in model.state_dict().items() if not torch.equal(x, before[name])]


def prompts() -> tuple[dict[str, Tensor], Tensor]:
    ids, mask = tokens(250, 118)
    return {"input_ids": ids, "attention_mask": mask}, tokens(20, 20, seed=2)[0]


def run(model: PreTrainedModel, inputs: Any, chosen: Tensor, **options: Any) -> tuple[Tensor, OscarCache]:
    """Logits of an enabled model, and its cache."""
    with oscar_kv.enable(model, **options) as handle:
        mask = None if options.get("attention", "oscar") == "oscar" else inputs["attention_mask"]
        cache = OscarCache(model.config, handle.oscar_config, attention_mask=mask)
        return logits(model, inputs, cache, chosen), cache


def check_alike(folded: OscarCache, online: OscarCache) -> None:
    """The same codes of the values, but for numbers that rounding moves across the middle between two."""
    for mine, other in zip(folded.packed_layers, online.packed_layers, strict=True):
        assert mine.state is not None
        assert other.state is not None
        for row, packed in enumerate(mine.state.num_blocks):
            same = mine.state.records[row, :packed] == other.state.records[row, :packed]
            assert same.float().mean() > 0.998


@pytest.mark.parametrize("name", FOLDABLE)
def test_folded_is_online(name: str) -> None:
    """Logits and codes over two blocks; biases included; and the weights come back bit for bit."""
    model = copy.deepcopy(text_model(name))
    for parameter, x in model.named_parameters():
        if parameter.endswith("proj.bias"):
            torch.nn.init.normal_(x, std=0.2)
    held, places = weights(model), {name: x.data_ptr() for name, x in model.named_parameters()}
    inputs, chosen = prompts()
    want, online = run(model, inputs, chosen)
    with oscar_kv.enable(model, fold_values=True) as handle:
        cache = OscarCache(model.config, handle.oscar_config)
        got = logits(model, inputs, cache, chosen)
        written = {name.split(".")[-2] for name in changed(model, held)}
        assert "v_proj" in written
        assert written <= {"v_proj", "o_proj", "out_proj", "dense"}
        assert not handle.oscar_config.rotate_values
    assert blocks(cache) == [[2, 1]] * len(cache.packed_layers)
    check_alike(cache, online)
    exact = logits(model, inputs, DynamicCache(config=model.config), chosen)
    assert (got - want).abs().mean() < 0.02 * (want - exact).abs().mean()
    assert changed(model, held) == []
    assert {name: x.data_ptr() for name, x in model.named_parameters()} == places


@pytest.mark.parametrize("name", [name for name in TEXT if name not in FOLDABLE])
def test_what_cannot_be_folded(name: str) -> None:
    """Refused with the reason, and nothing has changed; online the family works."""
    check_refused(text_model(name), re.escape(TEXT[name].unfoldable or ""))


def check_refused(model: PreTrainedModel, match: str) -> None:
    held, attributes, attention = weights(model), dict(vars(model)), model.config._attn_implementation
    with pytest.raises(NotImplementedError, match=match):
        oscar_kv.enable(model, fold_values=True)
    assert changed(model, held) == []
    assert vars(model) == attributes
    assert model.config._attn_implementation == attention


def test_something_unknown_in_between() -> None:
    """BitNet has a norm between attention and o_proj: no name gives it away, but its logits do."""
    model = BitNetForCausalLM(BitNetConfig(**{**COMMON, "head_dim": 16})).eval()
    for layer in model.model.layers:
        torch.nn.init.uniform_(layer.self_attn.attn_sub_norm.weight, 0.2, 2.0)
    check_refused(model, "logits move by .*something must stand between")


class Adapted(Linear):
    """A linear layer with something on top, as adapters and quantizers make them."""


def packed_linear(plain: Linear) -> torch.nn.Module:
    """torch's own 8-bit linear layer, whose weight is no parameter."""
    return torch.ao.nn.quantized.dynamic.Linear(plain.in_features, plain.out_features)


@pytest.mark.parametrize("place", ["v_proj", "o_proj"])
@pytest.mark.parametrize("kind", ["adapted", "quantized", "int8", "tied", "meta"])
def test_weights_that_are_not_touched(kind: str, place: str) -> None:
    """Quantized, adapted, shared and missing weights, in one layer: no layer is folded."""
    model = make_model(num_key_value_heads=4)  # v_proj and o_proj have transposed shapes otherwise
    attention, first = model.model.layers[1].self_attn, model.model.layers[0].self_attn
    plain = getattr(attention, place)
    if kind == "adapted":
        other = Adapted(plain.in_features, plain.out_features, bias=False)
        setattr(attention, place, other)
    elif kind == "quantized":
        setattr(attention, place, packed_linear(plain))
    elif kind == "int8":
        plain.weight = torch.nn.Parameter(torch.ones_like(plain.weight, dtype=torch.int8), requires_grad=False)
    elif kind == "tied":
        plain.weight = getattr(first, place).weight
    else:
        plain.weight = torch.nn.Parameter(torch.empty_like(plain.weight, device="meta"))
    reason = {"tied": "shared with another", "meta": "not loaded"}.get(kind, "are not touched")
    held = {name: x.clone() for name, x in model.named_parameters() if x.device.type == "cpu"}
    with pytest.raises(NotImplementedError, match=f"layer [01] cannot be folded.*{reason}"):
        oscar_kv.enable(model, fold_values=True)
    assert all(torch.equal(x, held[name]) for name, x in model.named_parameters() if name in held)
    assert "generate" not in vars(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_once(hadamard: Callable[[int], Tensor], dtype: torch.dtype) -> None:
    """Against the product in float64: half a unit in the last place, and float32 sums of 32 terms in between."""
    model = make_model(dtype=dtype)
    held, matrix = weights(model), hadamard(32)
    with oscar_kv.enable(model, fold_values=True):
        for i, layer in enumerate(model.model.layers):
            name = f"model.layers.{i}.self_attn"
            rows = held[f"{name}.v_proj.weight"].double().unflatten(0, (-1, 32))
            columns = held[f"{name}.o_proj.weight"].double().unflatten(1, (-1, 32))
            for got, want in (
                (layer.self_attn.v_proj.weight, torch.einsum("de,hei->hdi", matrix, rows).flatten(0, 1)),
                (layer.self_attn.o_proj.weight, (columns @ matrix).flatten(1)),
            ):
                torch.testing.assert_close(got.double(), want, rtol=0.502 * torch.finfo(dtype).eps, atol=1e-7)
    assert changed(model, held) == []


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_read_dense(attention: str) -> None:
    """What is dequantized for another attention is rotated, too, as its weights want it."""
    model = make_model()
    inputs, chosen = prompts()
    want, _ = run(model, inputs, chosen, attention=attention)
    got, cache = run(model, inputs, chosen, attention=attention, fold_values=True)
    torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)  # a code may fall on the other side
    assert (got - want).abs().mean() < CLOSE["atol"]
    assert blocks(cache) == [[2, 1]] * 2


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_omni"])
def test_a_decoder_that_sees(name: str) -> None:
    """Its decoder is folded, and its towers are not."""
    model, prompt = media_model(name)
    held, inputs = weights(model), prompt([100, "image", 150], 1)
    chosen = torch.randint(98, 123, (1, 20), generator=torch.Generator().manual_seed(1))
    want, online = run(model, inputs, chosen)
    with oscar_kv.enable(model, fold_values=True) as handle:
        cache = OscarCache(model.config, handle.oscar_config)
        got = logits(model, inputs, cache, chosen)
        assert all("vision" not in x and "visual" not in x and "audio" not in x for x in changed(model, held))
    check_alike(cache, online)
    assert (got - want).abs().mean() < CLOSE["atol"]
    assert changed(model, held) == []


@pytest.mark.parametrize("config", [OscarConfig(rotate_values=False), OscarConfig(value_bits=16)])
def test_nothing_to_fold(config: OscarConfig) -> None:
    with pytest.raises(ValueError, match="rotates no values"):
        oscar_kv.enable(make_model(), config, fold_values=True)


def test_weights_come_back_when_the_attention_is_refused() -> None:
    model = make_model()
    held = weights(model)
    with pytest.raises((ValueError, ImportError)):
        oscar_kv.enable(model, attention="no_such_attention", fold_values=True)
    assert changed(model, held) == []
    assert "generate" not in vars(model)
