"""Families that are refused, in part or in whole: with the reason, before anything is stored or changed."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
import transformers
from transformers import DynamicCache

import oscar_kv
from families import DENSE, NOTHING, REFUSED, config_class, text_model
from forced import blocks, logits, oscar_logits
from models import COMMON, EXACT, generate, tokens
from oscar_kv import OscarCache
from oscar_kv.integrations.switch import attentions
from oscar_kv.integrations.transformers import CACHE_ARGUMENT

CLOSE = {"atol": 5e-4, "rtol": 1e-4}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """By the configuration alone: no weights have to be loaded to find out."""
    with pytest.raises(NotImplementedError, match=REFUSED[name][1]):
        OscarCache(config_class(name)())


@pytest.mark.parametrize("name", DENSE)
def test_read_by_its_own_attention_alone(name: str) -> None:
    """Attention "oscar" is refused with the reason; the model's own reads what is packed."""
    model = text_model(name)
    before = attentions(model.config)
    ids, mask = tokens(250, 118)
    with pytest.raises(NotImplementedError, match=DENSE[name][1]), oscar_kv.enable(model, EXACT):
        generate(model, ids, None, 20, mask)
    assert attentions(model.config) == before
    assert "generate" not in vars(model)
    inputs, chosen = {"input_ids": ids, "attention_mask": mask}, tokens(20, 20, seed=2)[0]
    want = logits(model, inputs, DynamicCache(config=model.config), chosen)
    got, cache = oscar_logits(model, inputs, EXACT, chosen, "eager")
    torch.testing.assert_close(got, want, **CLOSE)
    assert blocks(cache) == [[2, 1]] * len(cache.packed_layers) != []


@pytest.mark.parametrize("name", NOTHING)
def test_nothing_to_pack(name: str) -> None:
    """Said so in a warning, and the model generates what it did."""
    model = text_model(name)
    if CACHE_ARGUMENT not in signature(model.forward).parameters:
        pytest.skip(f"transformers {transformers.__version__}: {name} has a cache argument of its own")
    ids, mask = tokens(250, 118)
    want = generate(model, ids, DynamicCache(config=model.config), 20, mask)
    with pytest.warns(UserWarning, match="nothing to quantize"), oscar_kv.enable(model):
        assert torch.equal(generate(model, ids, None, 20, mask), want)


def test_a_model_with_a_cache_class_of_its_own() -> None:
    """MiniMax takes no other cache: transformers says so at the first pass, and the model is given back as it was."""
    kind = config_class("MiniMaxConfig")
    from transformers import MiniMaxForCausalLM

    types = ["linear_attention", "full_attention"]
    model = MiniMaxForCausalLM(kind(**{**COMMON, "num_local_experts": 2, "layer_types": types})).eval()
    with pytest.raises(ValueError, match=r"cache of its own|not used by the model"), oscar_kv.enable(model):
        generate(model, tokens(20)[0], None, 5)
    assert "generate" not in vars(model)
