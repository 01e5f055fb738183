"""What OscarCache refuses, and that a refusal changes nothing; what it must bear."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, PreTrainedModel, T5Config

import oscar_kv
from models import (
    CONFIGS,
    EXACT,
    dynamic_cache,
    forward,
    generate,
    make_model,
    oscar_cache,
    passes,
    tokens,
)
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.integrations.transformers import CACHE_ARGUMENT, oscar_attention

MODES = ("oscar", "sdpa")
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def check_goes_on(cache: OscarCache, model: PreTrainedModel, ids: Tensor, truth: PreTrainedModel) -> None:
    """The cache holds ``ids`` and nothing else, and works."""
    assert cache.get_seq_length() == ids.shape[1]
    more = torch.cat((ids, tokens(20, seed=9)[0]), dim=1)
    got = passes(model, more[:, ids.shape[1] :], cache, [1, 19])
    torch.testing.assert_close(got, forward(truth, more, None)[:, ids.shape[1] :], **CLOSE)


# --- models


def test_latent_attention_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"multi-head latent attention \(kv_lora_rank\)"):
        OscarCache(DeepseekV3Config(num_hidden_layers=1))


def test_encoder_decoder_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        OscarCache(T5Config(num_layers=1))


@pytest.mark.parametrize("head_dim", [24, 8, 528])
def test_head_dimension_is_refused(head_dim: int) -> None:
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, head_dim=head_dim)
    with pytest.raises(NotImplementedError, match=f"head_dim {head_dim}"):
        OscarCache(config)


def test_derived_head_dimension_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="head_dim 24"):
        OscarCache(LlamaConfig(num_hidden_layers=1, hidden_size=96, num_attention_heads=4))


def test_value_group_must_divide_the_head_dimension() -> None:
    model = make_model("qwen3")
    with pytest.raises(ValueError, match="value_group=64 does not divide the value head_dim 16"):
        OscarCache(model.config, OscarConfig(value_group=64))
    with pytest.raises(ValueError, match="value_group=64"):
        oscar_kv.enable(model, OscarConfig(value_group=64))
    assert "generate" not in vars(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("attention", ["oscar", "sdpa"])
def test_enable_refuses_before_anything_changes(attention: str) -> None:
    model = make_model(head_dim=24)
    attributes = dict(vars(model))
    with pytest.raises(NotImplementedError, match="head_dim 24"):
        oscar_kv.enable(model, attention=attention)
    assert vars(model) == attributes
    assert model.config._attn_implementation == "sdpa"


def test_enable_with_an_unknown_attention() -> None:
    model = make_model()
    with pytest.raises((ValueError, ImportError)):
        oscar_kv.enable(model, attention="no_such_attention")
    assert "generate" not in vars(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("mode", MODES)
def test_double_precision_is_refused(mode: str) -> None:
    model = make_model(attention=mode, dtype=torch.float64)
    cache = oscar_cache(model)
    with pytest.raises(NotImplementedError, match="float64"):
        forward(model, tokens(300)[0], cache)
    assert cache.get_seq_length() == 0
    assert cache.memory_bytes()["total"] == 0


# --- arguments


def test_malformed_arguments() -> None:
    config = make_model().config
    for length in (0, -1):
        with pytest.raises(ValueError, match="max_length"):
            OscarCache(config, max_length=length)
    with pytest.raises(ValueError, match="attention_mask"):
        OscarCache(config, attention_mask=torch.ones(2, 1, 5, 5))


def test_mask_of_another_batch() -> None:
    model = make_model()
    ids, mask = tokens(300, 5, 150)
    cache = oscar_cache(model, mask=mask[:2])
    with pytest.raises(ValueError, match="2 rows, the batch 3"):
        forward(model, ids, cache, mask)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("mode", ["sdpa", "eager"])
def test_batch_needs_a_mask(mode: str) -> None:
    """Without attention "oscar" padding would be stored as tokens: the error names every way out, and each works."""
    model = make_model(attention=mode)
    ids, mask = tokens(250, 100)
    cache = OscarCache(model.config, EXACT)
    with pytest.raises(ValueError, match=r"OscarCache\(attention_mask=.*'oscar' or oscar_kv.enable\(model\)"):
        forward(model, ids, cache, mask)
    assert cache.get_seq_length() == 0
    want = generate(model, ids, dynamic_cache(model), 20, mask)
    assert torch.equal(generate(model, ids, oscar_cache(model, mask=mask), 20, mask), want)
    with oscar_kv.enable(model, EXACT):
        assert torch.equal(generate(model, ids, None, 20, mask), want)
    with oscar_kv.enable(model, EXACT, attention=mode):
        assert torch.equal(generate(model, ids, None, 20, mask), want)
    model.set_attn_implementation("oscar")
    assert torch.equal(generate(model, ids, OscarCache(model.config, EXACT), 20, mask), want)


def test_batch_without_padding_needs_a_mask_of_ones() -> None:
    model = make_model()
    ids, mask = tokens(250, 250)
    with pytest.raises(ValueError, match="all ones where there is none"):
        forward(model, ids, OscarCache(model.config))
    cache = oscar_cache(model, mask=mask)
    torch.testing.assert_close(forward(model, ids, cache), forward(model, ids, None), **CLOSE)


# --- another model's cache


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"num_key_value_heads": 4}, r"\(1, 2, 32, 32, torch.float32\).*\(1, 4, 32, 32, torch.float32\)"),
        ({"head_dim": 16}, r"\(1, 2, 32, 32, torch.float32\).*\(1, 2, 16, 16, torch.float32\)"),
        ({"dtype": torch.bfloat16}, r"float32\).*bfloat16\)"),
    ],
    ids=["heads", "head_dim", "dtype"],
)
@pytest.mark.parametrize("mode", MODES)
def test_cache_of_another_model(mode: str, other: dict[str, Any], match: str) -> None:
    model, truth, stranger = make_model(attention=mode), make_model(), make_model(attention=mode, **other)
    ids, _ = tokens(300)
    cache = oscar_cache(model)
    forward(model, ids[:, :270], cache)
    with pytest.raises(ValueError, match=match):
        forward(stranger, ids[:, 270:], cache)
    forward(model, ids[:, 270:], cache)
    check_goes_on(cache, model, ids, truth)


@pytest.mark.parametrize("mode", MODES)
def test_cache_of_another_batch(mode: str) -> None:
    model, truth = make_model(attention=mode), make_model()
    ids, _ = tokens(300)
    cache = oscar_cache(model, mask=torch.ones(1, 300))
    forward(model, ids, cache)
    with pytest.raises(ValueError, match=r"holds \(batch.*\(1, 2, 32.*given \(2, 2, 32"):
        forward(model, tokens(7, 7)[0], cache)
    check_goes_on(cache, model, ids, truth)


@pytest.mark.parametrize("mode", MODES)
def test_more_layers_than_the_cache_has(mode: str) -> None:
    cache = oscar_cache(make_model(attention=mode))
    with pytest.raises(ValueError, match="made for 2 layers, not for layer 2"):
        forward(make_model(attention=mode, num_hidden_layers=3), tokens(300)[0], cache)


@pytest.mark.parametrize("columns", [1, 5, 300])
def test_attention_switched_after_the_cache_was_made(columns: int) -> None:
    """From "oscar" to another: the cache has given out new keys only. An error, not a wrong token."""
    model = make_model(attention="oscar")
    cache = oscar_cache(model)
    ids, _ = tokens(300 + columns)
    forward(model, ids[:, :300], cache)
    model.set_attn_implementation("sdpa")
    with pytest.raises((RuntimeError, ValueError)):
        forward(model, ids[:, 300:], cache)


def test_attention_switched_before_the_first_pass() -> None:
    """Then the first pass may be right, but no token after it may be wrong."""
    model, truth = make_model(attention="oscar"), make_model()
    cache = oscar_cache(model)
    ids, _ = tokens(300)
    model.set_attn_implementation("sdpa")
    with pytest.raises((RuntimeError, ValueError)):  # noqa: PT012 - either pass may raise
        got = forward(model, ids[:, :299], cache)
        torch.testing.assert_close(got, forward(truth, ids[:, :299], None), **CLOSE)
        forward(model, ids[:, 299:], cache)


def test_attention_switched_to_oscar() -> None:
    """The other way round the cache gives out dequantized tokens as before: nothing is wrong."""
    model, truth = make_model(), make_model()
    cache = oscar_cache(model)
    ids, _ = tokens(300)
    forward(model, ids[:, :270], cache)
    model.set_attn_implementation("oscar")
    forward(model, ids[:, 270:], cache)
    check_goes_on(cache, model, ids, truth)


# --- crop


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("columns", "match"),
    [(1, "minus"), (300, "minus"), (-301, "minus"), (-50, "cannot remove 50 tokens"), (-299, "299")],
)
def test_crop_that_cannot_be(mode: str, columns: int, match: str) -> None:
    """A positive number, more than there is, into a packed block: refused, and nothing has changed."""
    model, truth = make_model(attention=mode), make_model()
    ids, _ = tokens(300)
    cache = oscar_cache(model)
    forward(model, ids, cache)
    memory = cache.memory_bytes()
    with pytest.raises(ValueError, match=match):
        cache.crop(columns)
    assert cache.memory_bytes() == memory
    check_goes_on(cache, model, ids, truth)


@pytest.mark.parametrize("mode", MODES)
def test_crop_refused_by_one_row(mode: str) -> None:
    """The first row could go back 30 tokens, the second would end inside its block."""
    model, truth = make_model(attention=mode), make_model()
    ids, mask = tokens(300, 140)
    cache = oscar_cache(model, mask=mask)
    forward(model, ids, cache, mask)
    with pytest.raises(ValueError, match="of row 1"):
        cache.crop(-30)
    more, own = tokens(20, 20, seed=2)
    want = forward(truth, torch.cat((ids, more), dim=1), None, torch.cat((mask, own), dim=1))[:, 300:]
    torch.testing.assert_close(forward(model, more, cache, torch.cat((mask, own), dim=1)), want, **CLOSE)


# --- attention


@pytest.mark.parametrize("fault", ["position_bias", "dropout"])
def test_unknown_attention_arguments(fault: str) -> None:
    """Refused by name, before anything is stored; the cache goes on without the argument."""
    model, truth = make_model(attention="oscar", attention_dropout=0.1), make_model()
    ids, _ = tokens(300)
    cache = oscar_cache(model)
    forward(model, ids[:, :280], cache)
    extra: dict[str, Any] = {CACHE_ARGUMENT: cache}
    if fault == "dropout":
        model.train()
    else:
        extra["position_bias"] = torch.zeros(1, 4, 20, 300)
    with torch.no_grad(), pytest.raises(NotImplementedError, match=fault):
        model(ids[:, 280:], **extra)
    assert cache.get_seq_length() == 280
    model.eval()
    forward(model, ids[:, 280:], cache)
    check_goes_on(cache, model, ids, truth)


def scaled(name: str, attention: str, **overrides: Any) -> PreTrainedModel:
    """Scores far beyond the soft cap, and sinks that take much of the attention."""
    model = make_model(name, attention=attention, **overrides)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(3)
            if name == "gpt_oss":
                layer.self_attn.sinks.copy_(2 + 2 * torch.randn(4, generator=generator))
    return model


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
@pytest.mark.parametrize("mode", ["oscar", "eager"])
def test_soft_cap_and_sinks(mode: str, name: str) -> None:
    """As transformers' eager attention, in sliding and in full layers, in a padded batch; and it matters."""
    model, truth = scaled(name, mode), scaled(name, "eager")
    ids, mask = tokens(250, 100)
    cache = oscar_cache(model, mask=mask)
    assert len(cache.packed_layers) == 2
    want: Any = generate(truth, ids, dynamic_cache(truth), 40, mask, return_dict_in_generate=True, output_logits=True)
    got: Any = generate(model, ids, cache, 40, mask, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=2e-3, rtol=1e-3)
    assert cache.packed_layers[0].state is not None
    assert cache.packed_layers[0].state.num_blocks == [2, 1]
    if name == "gemma2":
        without = scaled(name, "eager", attn_logit_softcapping=None)
    else:
        without = scaled(name, "eager")
        with torch.no_grad():
            for layer in without.model.layers:
                layer.self_attn.sinks.fill_(-100.0)
    assert (forward(without, ids, None, mask) - forward(truth, ids, None, mask))[mask.bool()].abs().max() > 0.5


# --- numbers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("config", [*CONFIGS.values(), EXACT], ids=[*CONFIGS, "exact"])
def test_nan_stays_in_its_row(config: OscarConfig, mode: str) -> None:
    """One token's embedding is NaN: the other rows of the batch do not change by a bit."""
    sick = 96
    ids, mask = tokens(300, 150, 170)
    ids = ids.clamp(max=95)
    ids[1, 200] = sick
    outputs = []
    for value in (0.5, torch.nan):
        model = make_model(attention=mode)
        with torch.no_grad():
            model.model.embed_tokens.weight[sick] = value
        cache = oscar_cache(model, config, mask)
        outputs.append(passes(model, ids, cache, [270, 1, 20, 9], mask))
        state = cache.packed_layers[0].state
        assert state is not None
        assert state.num_blocks == [2, 1, 1]
    well = torch.tensor([0, 2])
    assert torch.equal(outputs[0][well], outputs[1][well])
    assert outputs[0].isfinite().all()
    assert outputs[1][1, 200:].isnan().all()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_large_bfloat16_numbers(config: OscarConfig) -> None:
    """Beyond fp16's 65504: stored scales do not overflow, and the error stays relative to the numbers."""
    model = make_model(attention="sdpa", dtype=torch.bfloat16, num_hidden_layers=1)
    cache = OscarCache(model.config, config)
    torch.manual_seed(0)
    keys, values = (1e6 * torch.randn(1, 2, 300, 32, dtype=torch.bfloat16) for _ in range(2))
    assert keys.abs().max() > 65504
    cache.update(keys[:, :, :270], values[:, :, :270], 0)
    got = cache.update(keys[:, :, 270:], values[:, :, 270:], 0)
    for x, want in zip(got, (keys, values), strict=True):
        assert x.isfinite().all()
        error = (x.float() - want.float()).square().mean().sqrt() / want.float().square().mean().sqrt()
        assert 0 < error < 0.5


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_large_bfloat16_numbers_in_packed_attention(config: OscarConfig) -> None:
    """The same through attention "oscar": what softmax attention over the dequantized tokens gives, in float64."""
    model = make_model(attention="oscar", dtype=torch.bfloat16, num_hidden_layers=1)
    cache = OscarCache(model.config, config)
    module: Any = SimpleNamespace(is_causal=True)
    torch.manual_seed(0)
    keys, values = (1e6 * torch.randn(1, 2, 300, 32, dtype=torch.bfloat16) for _ in range(2))
    query = 1e-6 * torch.randn(1, 4, 300, 32, dtype=torch.bfloat16)
    for part in (slice(0, 299), slice(299, 300)):
        new = cache.update(keys[:, :, part], values[:, :, part], 0)
        out, _ = oscar_attention(module, query[:, :, part], *new, None)
    assert out.isfinite().all()
    layer = cache.packed_layers[0]
    assert layer.keys is not None
    assert layer.values is not None
    k, v = (x.double().repeat_interleave(2, dim=1) for x in (layer.keys, layer.values))
    weights = torch.softmax(query[:, :, 299:].double() @ k.transpose(-1, -2) * 32**-0.5, dim=-1)
    want = (weights @ v).transpose(1, 2)
    # what is read back is rounded to bfloat16, the packed path is not: 2 ** -9 of the largest number
    torch.testing.assert_close(out.double(), want, rtol=2**-7, atol=2**-8 * float(want.abs().max()))
