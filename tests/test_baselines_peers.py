"""transformers' own quantized cache as a rival: its bytes by hand, and its error when a backend is missing."""

import sys

import pytest
import torch

from models import dynamic_cache, forward, generate, make_model, tokens
from oscar_kv.baselines import Peer, make_cache
from oscar_kv.footprint import bits_per_element, memory_bytes, packed_bits

BACKENDS = {"quanto": "optimum.quanto", "hqq": "hqq.core.quantize"}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bits", [2, 4])
def test_bytes_and_tokens(backend, bits):
    pytest.importorskip(BACKENDS[backend])
    model = make_model("llama")
    ids, _ = tokens(192)
    cache = make_cache(Peer(backend=backend, bits=bits), model.config)
    forward(model, ids, cache)
    forward(model, ids[:, :10], cache)
    numbers = 2 * 2 * 2 * 32  # layers, sides, heads, channels
    expected = {
        "codes": 192 * numbers * bits // 8,
        "scales_zeros": 192 * numbers // 64 * 2 * 4,  # float32, as the model
        "tail": 10 * numbers * 4,
    }
    assert memory_bytes(cache) == {**expected, "total": sum(expected.values())}
    assert packed_bits(cache) == bits + 1
    assert bits_per_element(cache) == pytest.approx((192 * (bits + 1) + 10 * 32) / 202)
    out = generate(model, ids, make_cache(Peer(backend=backend, bits=bits), model.config), 140)
    exact = generate(model, ids, dynamic_cache(model), 140)
    assert out.shape == exact.shape
    assert torch.equal(out[:, :193], exact[:, :193])  # the first token comes from the exact prompt


def token_errors(peer, scale):
    """Relative errors of keys, some of which are larger: of each token (1, heads, n), and of each channel (.., 64)."""
    pytest.importorskip(BACKENDS[peer.backend])
    keys, values = torch.randn(2, 1, 2, 384, 64, generator=torch.Generator().manual_seed(0))
    keys = keys * scale
    layer = make_cache(peer, make_model("llama").config).layers[0]
    for part in (slice(0, 128), slice(128, 256), slice(256, 384)):
        layer.update(keys[:, :, part], values[:, :, part])
    found, _ = layer.update(keys[:, :, :1], values[:, :, :1])
    return [(found[:, :, :384] - keys).norm(dim=dim) / keys.norm(dim=dim) for dim in (3, 2)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_token_disturbs_no_other_token(backend):
    scale = torch.ones(384, 1)
    scale[5] = 1000.0
    by_token, _ = token_errors(Peer(backend=backend), scale)
    assert by_token.max() < 0.75  # 1: nothing is left of it


def test_keys_per_channel_keep_a_large_channel_from_the_others():
    scale = torch.ones(64)
    scale[7] = 1000.0
    _, by_channel = token_errors(Peer(backend="quanto", keys_per_channel=True), scale)
    assert by_channel.max() < 0.75
    _, by_channel = token_errors(Peer(backend="quanto"), scale)
    assert by_channel.median() > 0.9
    with pytest.raises(ValueError, match="only quanto"):
        Peer(backend="hqq", keys_per_channel=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_missing_backend_names_the_extra(backend, monkeypatch):
    monkeypatch.setitem(sys.modules, BACKENDS[backend], None)
    with pytest.raises(ImportError, match=r"pip install 'oscar-kv\[peers\]'"):
        make_cache(Peer(backend=backend), make_model("llama").config)
