"""What users of other low-bit caches ran into, where no other test has it; ``docs/user-reports.md`` has the list."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from models import EXACT, forward, make_model, oscar_cache, passes, tokens
from oscar_kv import OscarConfig
from oscar_kv.attention import attend
from oscar_kv.layer import LayerState
from oscar_kv.timeline import Timeline

MODES = ("oscar", "sdpa")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [127, 128, 129, 159, 255, 256, 257])
def test_a_prompt_leaves_its_rest_in_16_bit(length: int, mode: str) -> None:
    """Packed and 16-bit tokens after a prompt around block and group boundaries, and those two blocks later."""
    model = make_model(attention=mode)
    cache = oscar_cache(model, OscarConfig())
    ids, _ = tokens(length + 256)
    for part, held in ((ids[:, :length], length), (ids[:, length:], length + 256)):
        forward(model, part, cache)
        for layer in cache.packed_layers:
            assert layer.state is not None
            assert layer.state.num_blocks == [held // 128]
            assert layer.state.tail_lengths == [held % 128]


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_is_looked_at_like_any_other(mode: str) -> None:
    """Its number of layers, iteration, and keys and values with shape, dtype and device."""
    model, truth = make_model(attention=mode), make_model()
    ids, _ = tokens(300)
    cache, other = oscar_cache(model), DynamicCache(config=truth.config)
    forward(model, ids, cache)
    forward(truth, ids, other)
    assert len(cache) == len(other) == 2
    for mine, theirs in zip(cache, other, strict=True):
        for x, y in zip(mine[:2], theirs[:2], strict=True):
            assert (x.shape, x.dtype, x.device, x.ndim) == (y.shape, y.dtype, y.device, 4)
            torch.testing.assert_close(x, y, atol=2e-4, rtol=1e-4)
    assert not cache.is_sliding[0]
    assert cache.get_max_length() == -1


def biased_keys(length: int, dim: int = 64) -> Tensor:
    """Keys (1, 1, length, dim), 20 wide, with a bias of 900 on one RoPE pair, turned along the sequence."""
    generator = torch.Generator().manual_seed(0)
    keys = 20 * torch.randn(1, 1, length, dim, generator=generator)
    angle = 0.3 * torch.arange(length)
    keys[0, 0, :, 5] += 900 * angle.cos()
    keys[0, 0, :, 5 + dim // 2] += 900 * angle.sin()
    return keys


def test_a_huge_key_bias() -> None:
    """As Qwen2.5 has in its first layer: it would swamp every norm and rotated channel, and is equalized instead.

    The queries hardly use the biased pair: scores come from the other channels, which must survive.
    """
    length, dim = 384, 64
    generator = torch.Generator().manual_seed(1)
    keys, values = biased_keys(length), torch.randn(1, 1, length, dim, generator=generator)
    query = 0.05 * torch.randn(1, 1, length, dim, generator=generator)
    query[..., 5] *= 0.01
    query[..., 5 + dim // 2] *= 0.01

    def output(config: OscarConfig) -> Tensor:
        layer = LayerState(config, Timeline(), keys, values)
        recent = layer.append(keys, values, None)
        layer.commit(recent, query)
        recent = layer.append(keys[:, :, :1], values[:, :, :1], None)
        return attend(query[:, :, :1], layer.view(recent), scaling=dim**-0.5)

    exact = output(EXACT)
    error = {
        name: float((output(config) - exact).norm() / exact.norm())
        for name, config in {"ours": OscarConfig(), "published": OscarConfig.paper()}.items()
    }
    assert error["ours"] < 0.5 * error["published"]
    assert error["ours"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_model(mode: str) -> None:
    """The cache and its attention stay outside of the compiled graphs: the same logits, over two blocks."""
    model = make_model(attention=mode)
    ids, _ = tokens(270)
    sizes = [250, 1, 1, 1, 6, 1]
    want = passes(model, ids, oscar_cache(model, OscarConfig()), sizes)
    cache = oscar_cache(model, OscarConfig())
    torch._dynamo.reset()
    got = passes(torch.compile(model, backend="eager"), ids, cache, sizes)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    assert cache.packed_layers[0].state is not None
    assert cache.packed_layers[0].state.num_blocks == [2]
