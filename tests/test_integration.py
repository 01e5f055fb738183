"""``oscar_kv.enable`` and the attention "oscar" in a model: what they change, and that they undo it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

import oscar_kv
from models import CONFIGS, EXACT, dynamic_cache, forward, generate, make_model, oscar_cache, tokens
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.integrations.transformers import CACHE_ARGUMENT

CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def check_weights(model: PreTrainedModel, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], x) for name, x in before.items())


def test_cache_argument_is_the_one_of_this_version() -> None:
    """``generate`` hands the cache to the model under this name, and the model returns it under this name."""
    assert CACHE_ARGUMENT in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    model = make_model(attention="oscar")
    cache = oscar_cache(model)
    with torch.no_grad():
        out = model(tokens(3)[0], **{CACHE_ARGUMENT: cache})
    assert out[CACHE_ARGUMENT] is cache
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize("attention", ["oscar", "sdpa", "eager"])
@pytest.mark.parametrize("config", [EXACT, None, CONFIGS["paper"]], ids=["exact", "default", "paper"])
def test_enabled_generate_is_generate_with_a_cache(config: OscarConfig | None, attention: str) -> None:
    """The same tokens as with an OscarCache by hand, in a padded batch; at 16 bits those of a DynamicCache."""
    model, by_hand = make_model(), make_model(attention=attention)
    ids, mask = tokens(250, 120)
    plain = generate(model, ids, None, 20, mask)
    cache = oscar_cache(by_hand, config or OscarConfig(), mask)
    want = generate(by_hand, ids, cache, 20, mask)
    handle = oscar_kv.enable(model, config, attention=attention)
    got = generate(model, ids, None, 20, mask)
    again = generate(model, ids, None, 20, mask)
    handle.disable()
    assert torch.equal(got, want)
    assert torch.equal(got, again)  # a fresh cache each time
    assert torch.equal(got, plain) == (config is EXACT)
    assert torch.equal(generate(model, ids, None, 20, mask), plain)


@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
@pytest.mark.parametrize("before", ["sdpa", "eager"])
def test_disable_restores_everything(before: str, attention: str) -> None:
    model = make_model(attention=before)
    attributes, held, method = dict(vars(model)), weights(model), model.generate
    handle = oscar_kv.enable(model, attention=attention)
    assert model.config._attn_implementation == attention
    assert model.generate != method
    generate(model, tokens(250)[0], None, 20)
    check_weights(model, held)
    handle.disable()
    assert vars(model) == attributes
    assert list(vars(model)) == list(attributes)
    assert all(vars(model)[name] is x for name, x in attributes.items())
    assert model.generate == method
    assert model.config._attn_implementation == before
    check_weights(model, held)
    handle.disable()  # twice is once
    assert vars(model) == attributes
    with oscar_kv.enable(model):
        assert model.config._attn_implementation == "oscar"
    assert model.config._attn_implementation == before


def test_a_stale_handle_leaves_the_next_one_alone() -> None:
    model = make_model()
    first = oscar_kv.enable(model)
    first.disable()
    second = oscar_kv.enable(model, attention="eager")
    first.disable()
    assert model.config._attn_implementation == "eager"
    assert model.generate == second.generate
    second.disable()
    assert model.config._attn_implementation == "sdpa"


def test_context_manager() -> None:
    """It ends with the block, also when the block raises."""
    model = make_model()
    ids, _ = tokens(250)
    plain = generate(model, ids, None, 20)
    with oscar_kv.enable(model) as handle:
        assert handle.oscar_config == OscarConfig()
        assert not torch.equal(generate(model, ids, None, 20), plain)
    assert "generate" not in vars(model)
    assert torch.equal(generate(model, ids, None, 20), plain)
    with pytest.raises(RuntimeError, match="mine"), oscar_kv.enable(model):
        raise RuntimeError("mine")
    assert "generate" not in vars(model)
    assert model.config._attn_implementation == "sdpa"


def test_enabling_twice_is_refused() -> None:
    model = make_model()
    with oscar_kv.enable(model, CONFIGS["paper"]) as handle:
        with pytest.raises(ValueError, match="disable"):
            oscar_kv.enable(model)
        assert model.generate == handle.generate
        assert handle.oscar_config == CONFIGS["paper"]
    with oscar_kv.enable(model):
        pass


@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
def test_two_models_do_not_share_anything(attention: str) -> None:
    one, other = make_model(), make_model(seed=1)
    ids, _ = tokens(250)
    want = generate(other, ids, None, 20)
    with oscar_kv.enable(one, attention=attention):
        assert other.config._attn_implementation == "sdpa"
        assert torch.equal(generate(other, ids, None, 20), want)
        with oscar_kv.enable(other, EXACT, attention=attention):
            assert torch.equal(generate(other, ids, None, 20), want)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
def test_given_cache_is_kept(attention: str, name: str) -> None:
    """Whatever cache the caller brings is used, under every name that this version of transformers knows."""
    if name == "cache" != CACHE_ARGUMENT:
        pytest.skip("this transformers knows past_key_values only")
    model = make_model()
    ids, _ = tokens(250)
    plain = generate(model, ids, None, 30)
    with oscar_kv.enable(model, attention=attention):
        mine: Any
        for mine in (DynamicCache(config=model.config), OscarCache(model.config, EXACT)):
            assert torch.equal(model.generate(ids, max_new_tokens=30, do_sample=False, **{name: mine}), plain)
            assert mine.get_seq_length() == 279
        assert mine.packed_layers[0].state.num_blocks == [2]


@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
@pytest.mark.parametrize("where", ["argument", "generation_config", "positional", "model", "model, beside another"])
def test_without_a_cache(where: str, attention: str) -> None:
    """``use_cache=False`` quantizes nothing, wherever it is said."""
    model = make_model()
    ids, mask = tokens(250, 120)
    plain = generate(model, ids, None, 20, mask)
    said, silent = (GenerationConfig(use_cache=x, max_new_tokens=20, do_sample=False) for x in (False, None))
    given: tuple[Any, ...] = (ids,)
    options: dict[str, Any] = {"attention_mask": mask}
    if where == "argument":
        options |= {"use_cache": False, "max_new_tokens": 20, "do_sample": False}
    elif where == "generation_config":
        options["generation_config"] = said
    elif where == "positional":
        given = (ids, said)
    else:
        model.generation_config.use_cache = False
        options["generation_config"] = silent
        if where == "model":
            options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    with oscar_kv.enable(model, attention=attention):
        assert torch.equal(model.generate(*given, **options), plain)


def test_cache_implementation_is_the_callers_choice() -> None:
    """A cache that transformers is told to make is not replaced, wherever it is said."""
    model = make_model()
    ids, mask = tokens(250)
    plain = generate(model, ids, None, 20)
    config = GenerationConfig(cache_implementation="dynamic", max_new_tokens=20, do_sample=False)
    with oscar_kv.enable(model, attention="sdpa"):
        assert torch.equal(generate(model, ids, None, 20, cache_implementation="dynamic"), plain)
        assert torch.equal(model.generate(ids, attention_mask=mask, generation_config=config), plain)
        assert torch.equal(model.generate(ids, config, attention_mask=mask), plain)


@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
def test_hybrid_default_does_not_switch_it_off(attention: str) -> None:
    """Gemma 2 and 3 come with ``cache_implementation="hybrid"``, which transformers itself takes for "no wish"."""
    model = make_model()
    ids, _ = tokens(250)
    plain = generate(model, ids, None, 20)
    with oscar_kv.enable(model, attention=attention):
        want = generate(model, ids, None, 20)
        assert not torch.equal(want, plain)
        model.generation_config.cache_implementation = "hybrid"
        assert torch.equal(generate(model, ids, None, 20), want)


@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
def test_everything_generate_can_do(attention: str) -> None:
    """Beams, several samples, prompt lookup and chunked prefill through the replaced ``generate``."""
    model = make_model()
    ids, mask = tokens(250, 100)
    one, ones = tokens(250)
    assistant = make_model(num_hidden_layers=1, seed=5)
    calls: list[tuple[Tensor, Tensor, dict[str, Any]]] = [
        (ids, mask, {"num_beams": 3}),
        (ids, mask, {"do_sample": True, "num_return_sequences": 2}),
        (ids, mask, {"prefill_chunk_size": 90}),
        (one, ones, {"prompt_lookup_num_tokens": 8}),
        (one, ones, {"assistant_model": assistant}),
    ]
    for prompt, own, options in calls:
        torch.manual_seed(7)
        want = generate(model, prompt, None, 30, own, **options)
        with oscar_kv.enable(model, EXACT, attention=attention):
            torch.manual_seed(7)
            assert torch.equal(generate(model, prompt, None, 30, own, **options), want), options


@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
def test_enabled_assistant(attention: str) -> None:
    """A model that drafts for another is rolled back by as many tokens as it drafted, one pass each."""
    model, assistant = make_model(), make_model(num_hidden_layers=1, seed=5)
    ids, _ = tokens(240)
    want = generate(model, ids, None, 40)
    with oscar_kv.enable(assistant, EXACT, attention=attention):
        assert torch.equal(generate(model, ids, None, 40, assistant_model=assistant), want)
        with oscar_kv.enable(model, EXACT, attention=attention):
            assert torch.equal(generate(model, ids, None, 40, assistant_model=assistant), want)


@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
def test_prompt_of_embeddings(attention: str) -> None:
    model = make_model()
    ids, mask = tokens(250, 100)
    prompt = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), "attention_mask": mask}
    want = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    with oscar_kv.enable(model, EXACT, attention=attention):
        assert torch.equal(model.generate(**prompt, max_new_tokens=20, do_sample=False), want)


def test_batch_without_mask_is_inferred_by_oscar() -> None:
    """``generate`` makes a mask from the padding token where it is given none, and attention "oscar" reads that."""
    model = make_model()
    ids, mask = tokens(250, 100)
    want = generate(model, ids, None, 20, mask)
    with oscar_kv.enable(model, EXACT):
        assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=0), want)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
@pytest.mark.parametrize("grad", ["no_grad", "inference_mode", "grad"])
def test_forward_without_generate(attention: str, enabled: bool, grad: str) -> None:
    """A cache by hand in ``model.forward``, under the name of this version; gradients on or off."""
    model = make_model(attention="sdpa" if enabled else attention)
    truth = make_model()
    ids, _ = tokens(290)
    want = forward(truth, ids, None)
    handle = oscar_kv.enable(model, attention=attention) if enabled else None
    cache = OscarCache(model.config, EXACT)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "grad": torch.enable_grad}[grad]
    with context():
        got = [model(part, **{CACHE_ARGUMENT: cache}).logits for part in ids.split([100, 100, 1, 50, 1, 38], dim=1)]
    torch.testing.assert_close(torch.cat(got, dim=1).detach(), want, **CLOSE)
    assert cache.packed_layers[0].state is not None
    assert cache.packed_layers[0].state.num_blocks == [2]
    if handle is not None:
        handle.disable()


@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
def test_training_without_a_cache(attention: str) -> None:
    """The model's own attention, and its gradients, where there is no cache."""
    model, truth = make_model(), make_model()
    ids, mask = tokens(60, 30)
    with oscar_kv.enable(model, attention=attention):
        gradients = []
        for runner in (truth, model):
            runner(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
            gradients.append(runner.model.layers[0].self_attn.k_proj.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt_oss", "mistral"])
@pytest.mark.filterwarnings("ignore:nothing to quantize")
def test_enable_other_models(name: str, attention: str) -> None:
    """Sliding windows, soft caps and learned sinks; ``sdpa`` only where the model has it."""
    base = "eager" if name in ("gemma2", "gpt_oss") else "sdpa"
    attention = base if attention == "sdpa" else attention
    model = make_model(name, attention=base)
    ids, mask = tokens(250, 100)
    want = generate(model, ids, dynamic_cache(model), 30, mask)
    with oscar_kv.enable(model, EXACT, attention=attention):
        assert torch.equal(generate(model, ids, None, 30, mask), want)
    assert model.config._attn_implementation == base


def tiny_llava() -> LlavaForConditionalGeneration:
    """A model whose decoder is only a part of it, with a configuration of its own."""
    text = {
        **{"model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "head_dim": 32},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2},
        **{"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False},
    }
    vision = {
        **{"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "image_size": 8},
        **{"patch_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2},
    }
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=96)
    torch.manual_seed(0)
    return LlavaForConditionalGeneration(config).eval()


@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
def test_a_decoder_inside_another_model(attention: str) -> None:
    """Only the text decoder's attention decides how the cache is read, and every part gets its own back."""
    model = tiny_llava()
    parts = (model.config, model.config.text_config, model.config.vision_config)
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})
    before = [part._attn_implementation for part in parts]
    ids, mask = tokens(250, 100)
    ids = ids.clamp(max=95)  # no image
    want = generate(model, ids, None, 30, mask)
    with oscar_kv.enable(model, EXACT, attention=attention):
        assert model.config.text_config._attn_implementation == attention
        assert torch.equal(generate(model, ids, None, 30, mask), want)
    assert [part._attn_implementation for part in parts] == before
    with oscar_kv.enable(model, attention=attention):
        assert not torch.equal(generate(model, ids, None, 30, mask), want)
