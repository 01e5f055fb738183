"""evaluate.compare against a plain float64 computation from full logits, and footprint against real caches."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import oscar_kv
from oscar_kv import OscarCache, OscarConfig
from oscar_kv.evaluate import METHODS, PRESETS, REFERENCE, compare
from oscar_kv.footprint import bits_per_element, bytes_at, memory_bytes, packed_bits
from oscar_kv.integrations.transformers import CACHE_ARGUMENT

VOCABULARY, TOKENS, START = 61, 600, 256


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with oscar_kv.enable(model):
        yield model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def full_logits(model, ids, cache, edges):
    """Logits of the whole text, float64 (n, vocabulary), in passes that end at the edges."""
    parts = []
    with torch.inference_mode():
        for first, stop in zip([0, *edges[:-1]], edges, strict=True):
            parts.append(model(ids[:, first:stop], **{CACHE_ARGUMENT: cache}).logits[0].double())
    return torch.cat(parts)


def kl_and_nll(model, ids, config, edges, start):
    """Independent of compare: softmax, logarithm and sums written out in float64."""
    exact = full_logits(model, ids, DynamicCache(config=model.config), [TOKENS])[start : TOKENS - 1]
    packed = full_logits(model, ids, OscarCache(model.config, config), edges)[start : TOKENS - 1]
    p, q = exact.softmax(-1), packed.softmax(-1)
    kl = (p * (p.log() - q.log())).sum(-1)
    rows = torch.arange(len(kl))
    targets = ids[0, start + 1 :]
    return kl, -p[rows, targets].log(), -q[rows, targets].log(), p.argmax(-1) == q.argmax(-1)


@pytest.mark.parametrize("start", [0, START, 300])
def test_compare_in_chunks_matches_the_written_out_computation(model, ids, start):
    config = OscarConfig()
    found = compare(model, ids, {"int2": lambda: OscarCache(model.config, config)}, start=start)["int2"]
    kl, exact_nll, nll, agree = kl_and_nll(model, ids, config, [128, 256, 384, 512, 600], start)
    torch.testing.assert_close(found.kl_per_token.double(), kl, rtol=1e-3, atol=2e-6)
    assert found.kl == pytest.approx(kl.mean().item(), rel=1e-4)
    assert found.kl > 1e-3  # the test compares something
    assert found.kl_p99 == pytest.approx(kl.quantile(0.99).item(), rel=1e-3)
    assert found.perplexity == pytest.approx(nll.mean().exp().item(), rel=1e-5)
    change = 100 * math.expm1((nll.mean() - exact_nll.mean()).item())
    assert found.perplexity_change == pytest.approx(change, abs=1e-3)
    assert found.top1 == pytest.approx(agree.double().mean().item(), abs=2 / len(kl))


def test_compare_step_by_step_after_a_prefill(model, ids):
    config = OscarConfig.quality()
    made = {"packed": lambda: OscarCache(model.config, config)}
    found = compare(model, ids, made, chunk=1, start=580, prefill=580)["packed"]
    kl, *_ = kl_and_nll(model, ids, config, [580, *range(581, 601)], 580)
    torch.testing.assert_close(found.kl_per_token.double(), kl, rtol=1e-3, atol=2e-6)


def test_nothing_is_lost_with_16_bits(model, ids):
    config = OscarConfig(key_bits=16, value_bits=16)
    found = compare(model, ids, {"16/16": lambda: OscarCache(model.config, config)})
    assert found[REFERENCE].kl == 0
    assert found[REFERENCE].top1 == 1
    assert found[REFERENCE].perplexity_change == 0
    assert abs(found["16/16"].kl) < 1e-6
    assert found["16/16"].top1 == 1


def test_progress_counts_every_token_once(model, ids):
    seen = []
    compare(model, ids, {}, progress=seen.append)
    assert sum(seen) == TOKENS


@pytest.mark.parametrize(("start", "prefill"), [(TOKENS - 1, 0), (-1, 0), (10, 11)])
def test_compare_refuses_what_it_cannot_score(model, ids, start, prefill):
    with pytest.raises(ValueError, match="cannot score"):
        compare(model, ids, {}, start=start, prefill=prefill)


def test_compare_takes_one_row(model, ids):
    with pytest.raises(ValueError, match="cannot score"):
        compare(model, ids.expand(2, -1), {})


def test_methods_are_what_their_names_say():
    assert PRESETS["default"] == OscarConfig()
    assert PRESETS.keys() <= METHODS.keys()
    assert METHODS["paper-float-zero"] == replace(OscarConfig.paper(), zero_point="float")
    kivi = METHODS["kivi"]
    assert not any((kivi.rotate_keys, kivi.rotate_values, kivi.token_norm, kivi.equalize, kivi.num_sinks))
    assert (kivi.key_bits, kivi.value_bits, kivi.key_shrink, kivi.value_shrink) == (2, 2, 1, 1)


def run(model, ids, cache):
    with torch.inference_mode():
        model(ids, **{CACHE_ARGUMENT: cache})
    return cache


@pytest.mark.parametrize("config", [OscarConfig(), OscarConfig.paper(), OscarConfig(residual_length=256)])
def test_bytes_at_predicts_what_a_longer_cache_holds(model, ids, config):
    short = run(model, ids[:, :400], OscarCache(model.config, config))
    long = run(model, ids.repeat(1, 2)[:, :1024], OscarCache(model.config, config, max_length=1024))
    expected = memory_bytes(long)
    held = config.residual_length // 128 - 1  # complete blocks that stay in the tail: room that max_length reserved
    expected["total"] -= expected["reserved"]
    expected["reserved"] = 0
    assert held == 8 - long.packed_layers[0].state.num_blocks[0]
    assert bytes_at(short, 1024) == expected


def test_bytes_of_the_16_bit_cache(model, ids):
    cache = run(model, ids, DynamicCache(config=model.config))
    numbers = 2 * 2 * TOKENS * 2 * 32  # layers, keys and values, tokens, heads, head_dim
    assert memory_bytes(cache) == {"tokens": 4 * numbers, "other_layers": 0, "total": 4 * numbers}
    assert bytes_at(cache, 10 * TOKENS)["total"] == 40 * numbers
    assert bits_per_element(cache) == packed_bits(cache) == 32  # the model is float32


def test_packed_bits(model, ids):
    paper = run(model, ids, OscarCache(model.config, OscarConfig.paper()))
    # codes 2; scale and zero 16 + 16 per 32 numbers; a bfloat16 norm per token and layer; units of 16 bytes per record
    expected = 2 + 1 + 16 / (2 * 2 * 32) + 8 * 16 / (128 * 2 * 32)
    assert packed_bits(paper) == pytest.approx(expected)
    assert math.isnan(packed_bits(run(model, ids[:, :100], OscarCache(model.config))))


def test_bytes_at_needs_a_packed_block(model, ids):
    with pytest.raises(ValueError, match="no block is packed"):
        bytes_at(run(model, ids[:, :100], OscarCache(model.config)), 1024)
