"""The cache that the rivals share, in models: generation against a 16-bit cache, beams, bytes, refusals."""

import pytest
import torch
from transformers import DynamicCache, T5Config

from baseline_cases import config, fill, states
from models import dynamic_cache, forward, generate, make_model, passes, tokens
from oscar_kv import OscarConfig
from oscar_kv.baselines import METHODS, RTN, BaselineCache, Method, Peer, QuaRot, TogetherOSCAR, make_cache
from oscar_kv.footprint import bits_per_element, memory_bytes, packed_bits

RIVALS = {name: method for name, method in METHODS.items() if isinstance(method, Method)}
FINE = RTN(bits=8, group=16, metadata="float32")  # so fine that predictions hardly change


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


def made(name, model):
    ids, _ = tokens(200, seed=9)
    return RIVALS[name].calibrated(model, ids)


@pytest.mark.parametrize("name", RIVALS)
def test_generation_reads_what_the_cache_holds(name, model):
    """Greedy tokens over two flush boundaries, against a 16-bit cache that is handed what ours holds at each step."""
    ids, _ = tokens(250)
    method = made(name, model)
    cache = BaselineCache(model.config, method)
    out = generate(model, ids, cache, 140)
    ours, theirs = BaselineCache(model.config, method), DynamicCache(config=model.config)
    logits = forward(model, ids, ours)
    expected = [int(logits[0, -1].argmax())]
    for _ in range(139):
        theirs = DynamicCache(config=model.config)
        for i, layer in enumerate(ours.layers):
            theirs.update(layer.keys, layer.values, i)
        step = torch.tensor([expected[-1:]])
        want = forward(model, step, theirs)
        torch.testing.assert_close(forward(model, step, ours), want, rtol=1e-4, atol=1e-4)
        expected.append(int(want[0, -1].argmax()))
    assert out[0, 250:].tolist() == expected
    assert cache.get_seq_length() == 250 + 139


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3", "gpt_oss", "lfm2"])
def test_fine_quantization_gives_the_tokens_of_the_16_bit_cache(name, attention):
    if name == "gpt_oss" and attention == "sdpa":
        pytest.skip("transformers has no sdpa for it")
    model = make_model(name, attention=attention)
    ids, _ = tokens(150)
    cache = BaselineCache(model.config, FINE)
    exact = passes(model, ids, dynamic_cache(model), [70, 1, 30])
    found = passes(model, ids, cache, [70, 1, 30])
    assert (found - exact).abs().max() < 0.15 * exact.std()
    assert not torch.equal(found, exact)
    assert (found.argmax(-1) == exact.argmax(-1)).double().mean() > 0.9


@pytest.mark.parametrize("name", ["rtn", "ott", "rotatekv", "together-oscar-published", "turboquant-plus-published"])
def test_a_rows_tokens_do_not_depend_on_its_neighbours(name, model):
    ids = torch.cat([tokens(400, seed=seed)[0] for seed in (1, 2)])
    method = made(name, model)
    both = BaselineCache(model.config, method, attention_mask=torch.ones_like(ids))
    logits = passes(model, ids, both, [130, 1, 128])
    for row in range(2):
        alone = passes(model, ids[row : row + 1], BaselineCache(model.config, method), [130, 1, 128])
        # the sums of a batch are rounded differently, which moves a few codes
        assert (logits[row] - alone[0]).abs().mean() < 0.02 * alone.std()


@pytest.mark.parametrize("name", ["rtn", "ott-published", "rotatekv", "turboquant-plus"])
def test_rows_can_be_rearranged(name):
    keys, values = states(300, rows=3)
    cache, k, v = fill(RIVALS[name], keys, values, [130, 1, 70], layer=2)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    assert torch.equal(cache.layers[2].keys, k[[2, 0, 0]])
    cache.batch_select_indices(torch.tensor([0, 1]))
    assert torch.equal(cache.layers[2].values, v[[2, 0]])
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.layers[2].keys, k[[2, 2, 0, 0]])


def test_beam_search_reads_each_beams_own_history(model):
    """The score of the winner is what a 16-bit cache gives its tokens; with another beam's history it is not."""
    ids, _ = tokens(140)
    cache = BaselineCache(model.config, FINE, attention_mask=torch.ones_like(ids))
    options = {"num_beams": 3, "length_penalty": 0.0, "return_dict_in_generate": True, "output_scores": True}
    found = generate(model, ids, cache, 20, **options)
    log_p = forward(model, found.sequences, None)[0, 139:-1].log_softmax(-1)
    exact = float(log_p.gather(1, found.sequences[0, 140:, None]).sum())
    assert float(found.sequences_scores[0]) == pytest.approx(exact, abs=0.3)
    assert exact > -40  # 20 tokens of another history would be near 20 log(1 / 97) = -91


def test_crop_and_reset():
    keys, values = states(300)
    cache, k, _ = fill(RTN(block=128), keys, values, [300])
    cache.crop(-44)
    assert torch.equal(cache.layers[0].keys, k[:, :, :256])
    with pytest.raises(ValueError, match="tail"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="tail"):
        cache.crop(1)
    cache.reset()
    assert cache.get_seq_length() == 0
    cache.update(keys, values, 0)
    assert torch.equal(cache.layers[0].keys, k)


def test_bytes_are_counted():
    keys, values = (x.bfloat16() for x in states(300))
    cache, _, _ = fill(QuaRot(num_sinks=3, residual_length=10, block=20), keys, values, [300])
    numbers = 2 * 2 * 64  # sides, heads, channels
    packed = 280 - 3
    assert cache.memory_bytes() == {
        "codes": packed * numbers // 4,
        "scales_zeros": packed * numbers // 32 * 4,
        "norms": 0,
        "tail": 20 * numbers * 2,
        "sinks": 3 * numbers * 2,
        "state": 0,
        "other_layers": 0,
        "total": packed * numbers * 3 // 8 + 23 * numbers * 2,
    }
    assert cache.bits_per_element() == (packed * 3 + 23 * 16) / 300
    assert (bits_per_element(cache), packed_bits(cache)) == (cache.bits_per_element(), 3.0)
    assert memory_bytes(cache) == cache.memory_bytes()


def test_storage_is_no_larger_than_what_is_counted():
    """No tensor is a view that keeps a larger one alive."""
    keys, values = states(300)
    cache, _, _ = fill(RIVALS["ott"], keys, values, [130, 1, 70], layer=2)
    store = cache.layers[2].store
    held = [*store.packed.values(), *store.tail, *store.sinks, *store.codec.state.values()]
    assert sum(x.untyped_storage().nbytes() for x in held) == cache.memory_bytes()["total"]


def test_refusals(model):
    ids, mask = tokens(20, 30)
    with pytest.raises(NotImplementedError, match="padding"):
        BaselineCache(model.config, RTN(), attention_mask=mask)
    with pytest.raises(ValueError, match="batch"):
        forward(model, ids, BaselineCache(model.config, RTN()))
    with pytest.raises(NotImplementedError, match="encoder-decoder"):
        BaselineCache(T5Config(), RTN())
    with pytest.raises(ValueError, match="at least 0"):
        RTN(num_sinks=-1)
    cache = BaselineCache(config(), RTN())
    with pytest.raises(ValueError, match="empty"):
        cache.bits_per_element()
    cache.update(*states(5), 0)
    with pytest.raises(ValueError, match="holds"):
        cache.update(*states(5, heads=3), 0)


def test_every_method_makes_a_cache(model):
    for name, method in METHODS.items():
        if name.startswith("together"):
            with pytest.raises(ValueError, match="calibrated"):
                make_cache(method, model.config)
        elif isinstance(method, (Method, OscarConfig)):
            assert make_cache(method, model.config).get_seq_length() == 0
    assert isinstance(METHODS["together-oscar"], TogetherOSCAR)


@pytest.mark.parametrize("name", [name for name in RIVALS if "published" not in name and "turboquant" not in name])
def test_at_equal_bytes_means_3_bits(name, model):
    """The head dimension of the test model is 32; TurboQuant's norms only fit from 64 on, and are tested there."""
    ids, _ = tokens(260)
    cache = BaselineCache(model.config, made(name, model))
    forward(model, ids, cache)
    assert cache.packed_bits() == 3.0
    assert all(store.tail[0].shape[2] == 4 for store in cache.stores)


@pytest.mark.parametrize("wrong", [{"bits": 5}, {"group": 24}, {"metadata": "float8"}, {"block": 0}])
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match="must be"):
        RTN(**wrong)


def test_peers_that_do_not_exist():
    with pytest.raises(ValueError, match="quanto or hqq"):
        Peer(backend="x")
