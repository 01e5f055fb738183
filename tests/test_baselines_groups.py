"""RTN, QuaRot, RotateKV and KIVI against their papers' formulas in float64; bits in bytes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from baseline_cases import DIM, EXACT, assert_same_codes, fill, round_to_nearest, states, steps_of
from models import forward, make_model, tokens
from oscar_kv import OscarCache
from oscar_kv.baselines import RTN, BaselineCache, QuaRot, RotateKV, kivi
from oscar_kv.baselines.bits import pack_bits, unpack_bits
from oscar_kv.baselines.rope import Rope

TOKENS = 300  # two blocks of 128 and an odd rest
SIZES = [129, 1, 70]


@given(st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 70), st.integers(0, 2**31))
def test_bits_survive_packing_and_take_what_they_should(bits, n, seed):
    codes = torch.randint(0, 2**bits, (3, n), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert torch.equal(unpack_bits(packed, bits, n), codes)
    assert packed.shape[1] == sum(math.ceil(n * width / 8) for width in ((2, 1) if bits == 3 else (bits,)))


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [32, None])
def test_rtn(bits, group):
    keys, values = states(TOKENS)
    method = RTN(bits=bits, group=group, block=128, **EXACT)
    cache, *found = fill(method, keys, values, SIZES)
    size = group or DIM
    for x, y in zip((keys, values), found, strict=True):
        assert torch.equal(y[:, :, 256:], x[:, :, 256:])  # the tail
        packed = x[:, :, :256]
        assert_same_codes(y[:, :, :256], round_to_nearest(packed, bits, size), steps_of(packed, bits, size))
    assert cache.packed_bits() == bits + 64 / size


def test_rtn_with_16_bit_metadata_is_close_and_smaller():
    keys, values = states(TOKENS)
    cache, k, v = fill(RTN(), keys, values, SIZES)
    assert cache.packed_bits() == 3.0
    for x, y in ((keys, k), (values, v)):
        error = float((y.double() - x).square().mean())
        assert error == pytest.approx(float((round_to_nearest(x, 2, 32) - x).square().mean()), rel=0.01)


def test_quarot(hadamard):
    keys, values = states(TOKENS)
    _, *found = fill(QuaRot(group=None, **EXACT), keys, values, SIZES)
    h = hadamard(DIM)
    for x, y in zip((keys, values), found, strict=True):
        rotated = x.double() @ h
        assert_same_codes(y.double() @ h, round_to_nearest(rotated, 2, DIM), steps_of(rotated, 2, DIM))


def rotary(x, theta, start=0):
    """RoPE written out channel by channel: (..., tokens, dim), float64."""
    dim = x.shape[-1]
    out = x.clone()
    for i in range(dim // 2):
        angle = torch.arange(start, start + x.shape[-2], dtype=torch.float64) * theta ** (-2 * i / dim)
        a, b = x[..., i], x[..., i + dim // 2]
        out[..., i], out[..., i + dim // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


@pytest.mark.parametrize(("heads", "together"), [(1, 1), (2, 2), (3, 1), (4, 4), (8, 4)])
def test_rotatekv(hadamard, heads, together):
    before, values = states(TOKENS, heads=heads)
    keys = rotary(before.double(), 10000.0)
    order = torch.randperm(heads * DIM, generator=torch.Generator().manual_seed(1))
    method = RotateKV(group=32, num_sinks=5, order={0: order}, **EXACT)
    _, k, v = fill(method, keys.float(), values, SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    h = torch.block_diag(*[hadamard(together * DIM)] * (heads // together))

    def transformed(x):  # before RoPE -> rotated over heads, reordered
        return (x.double().transpose(1, 2).flatten(2) @ h)[..., order]

    expected = round_to_nearest(transformed(before), 2, 32, clip=0.8, integer_zero=True)
    found = transformed(undo(k.double(), 10000.0))
    assert_same_codes(found[:, 5:], expected[:, 5:], steps_of(transformed(before)[:, 5:], 2, 32))
    torch.testing.assert_close(k[:, :, :5], keys[:, :, :5].float())
    rotated = values.double() @ hadamard(DIM)
    expected = round_to_nearest(rotated, 2, 32, clip=0.8, integer_zero=True)
    assert_same_codes((v.double() @ hadamard(DIM))[:, :, 5:], expected[:, :, 5:], steps_of(rotated[:, :, 5:], 2, 32))


def undo(x, theta):
    """RoPE by the negative angles."""
    dim = x.shape[-1]
    swapped = torch.cat((x[..., dim // 2 :], x[..., : dim // 2]), -1)  # turning (b, a) forwards turns (a, b) back
    turned = rotary(swapped, theta)
    return torch.cat((turned[..., dim // 2 :], turned[..., : dim // 2]), -1)


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2", "gemma3"])
def test_rope_is_undone_as_the_model_did_it(name):
    """The keys of the cache, turned back, are what the key projection (and norm) gave."""
    model = make_model(name)
    attention = model.model.layers[1].self_attn
    ids, _ = tokens(200)
    made = []
    last = attention.k_norm if hasattr(attention, "k_norm") else attention.k_proj
    handle = last.register_forward_hook(lambda module, args, out: made.append(out))
    cache = DynamicCache(config=model.config)
    forward(model, ids, cache)
    handle.remove()
    keys = cache.layers[1].keys
    before = made[0].reshape(1, 200, *keys.shape[1:2], keys.shape[3]) if last is attention.k_proj else made[0]
    before = before if before.shape[1] == keys.shape[1] else before.transpose(1, 2)
    rope = Rope(model.config, 1)
    torch.testing.assert_close(rope.undo(keys, 0), before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rope.apply(before[:, :, 50:], 50), keys[:, :, 50:], rtol=1e-4, atol=1e-4)


def test_rope_that_depends_on_the_length_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = make_model("llama", rope_parameters=rope)
    with pytest.raises(NotImplementedError, match="dynamic"):
        BaselineCache(model.config, RotateKV())


def test_rotatekv_sorts_channels_by_their_sums():
    model = make_model("llama")
    ids, _ = tokens(200, seed=4)
    method = RotateKV().calibrated(model, ids)
    cache = DynamicCache(config=model.config)
    forward(model, ids, cache)
    for layer, order in method.order.items():
        keys = undo(cache.layers[layer].keys.double(), model.config.rope_parameters["rope_theta"])
        h = torch.ones(1, 1, dtype=torch.float64)
        while len(h) < 64:  # two heads of 32
            h = torch.kron(h, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
        sums = (keys.transpose(1, 2).flatten(2) @ h).sum((0, 1))[order]
        assert (sums.diff() >= -1e-2).all()


@pytest.mark.parametrize(("zero_point", "integer"), [("float", False), ("int", True)])
def test_kivi_is_a_setting_of_our_cache(zero_point, integer):
    model = make_model("llama")
    ids, _ = tokens(TOKENS)
    cache = OscarCache(model.config, kivi(zero_point=zero_point))
    exact = DynamicCache(config=model.config)
    forward(model, ids, cache)
    forward(model, ids, exact)
    found, true = cache.layers[0], exact.layers[0]
    keys, values = true.keys[:, :, :256], true.values[:, :, :256]
    by_channel = keys.transpose(2, 3)  # groups of 32 tokens
    for x, y in ((by_channel, found.keys[:, :, :256].transpose(2, 3)), (values, found.values[:, :, :256])):
        expected = round_to_nearest(x, 2, 32, integer_zero=integer)
        difference = (y.double() - expected).abs() / steps_of(x, 2, 32)
        assert (difference > 0.01).double().mean() < 0.01  # 16-bit metadata moves a few codes
        assert difference.max() < 1.05
    assert torch.equal(found.keys[:, :, 256:], true.keys[:, :, 256:])
