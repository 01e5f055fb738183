"""Token norms and channel equalization against plain fp64 loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from oscar_kv.observe import add_query_power
from oscar_kv.rotate import rotate
from oscar_kv.scale import channel_equalizer, divide_by_norm, token_norm

KINDS = ["l2", "max", "mean_abs"]
# bf16 keeps 8 bits, so a stored norm is within 2^-8 of the exact one; a little more for the fp32 sum before it
BF16 = 2.0**-8 * 1.001


def _keys(batch: int = 2, heads: int = 3, tokens: int = 7, dim: int = 48, seed: int = 0) -> Tensor:
    x = torch.randn(batch, heads, tokens, dim, generator=torch.Generator().manual_seed(seed))
    return x * torch.logspace(-3, 4, tokens).view(1, 1, tokens, 1)  # tokens of very different size


def _exact_norm(numbers: list[float], kind: str) -> float:
    if kind == "l2":
        return math.sqrt(math.fsum(x * x for x in numbers) / len(numbers))
    if kind == "max":
        return max(abs(x) for x in numbers)
    return math.fsum(abs(x) for x in numbers) / len(numbers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", ["all", "head"])
def test_norm_against_a_plain_loop(kind: str, scope: str) -> None:
    keys = _keys()
    norm = token_norm(keys, kind, scope)
    assert norm.dtype == torch.bfloat16
    assert norm.shape == (2, 1 if scope == "all" else 3, 7)
    for b in range(2):
        for t in range(7):
            heads = [keys[b, :, t].flatten()] if scope == "all" else list(keys[b, :, t])
            for h, numbers in enumerate(heads):
                exact = _exact_norm(numbers.tolist(), kind)
                assert abs(norm[b, h, t].item() - exact) <= BF16 * exact


def test_l2_norm_is_one_where_every_number_is_one() -> None:
    """RMS, not length: the same at any number of heads."""
    for heads in (1, 2, 8):
        assert token_norm(torch.ones(1, heads, 1, 64), "l2", "all").item() == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", ["all", "head"])
def test_divided_keys_times_the_stored_norm_are_the_keys(kind: str, scope: str) -> None:
    keys = _keys(seed=1)
    norm = token_norm(keys, kind, scope)
    scaled = divide_by_norm(keys, norm)
    # divided by the stored norm, not by the exact one: only fp32 rounding (2^-24 each way) is left
    torch.testing.assert_close(scaled * norm.float().unsqueeze(-1), keys, rtol=2.0**-22, atol=0)
    again = [_exact_norm(x.tolist(), kind) for x in scaled[0, :, 3]]
    if scope == "head":
        assert all(abs(x - 1) <= 2 * BF16 for x in again)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", ["all", "head"])
def test_zero_token_has_norm_zero_and_stays_zero(kind: str, scope: str) -> None:
    keys = _keys(seed=2)
    keys[1, :, 4] = 0
    norm = token_norm(keys, kind, scope)
    assert (norm[1, :, 4] == 0).all()
    assert (norm[0] > 0).all()
    scaled = divide_by_norm(keys, norm)
    assert (scaled[1, :, 4] == 0).all()
    assert scaled.isfinite().all()
    restored = rotate(scaled * norm.float().unsqueeze(-1))
    assert (restored[1, :, 4] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", ["all", "head"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_token_that_is_not_finite_has_norm_nan(kind: str, scope: str, bad: float) -> None:
    keys = _keys(seed=3)
    clean = token_norm(keys, kind, scope)
    scaled_clean = divide_by_norm(keys, clean)
    keys[1, 2, 4, 11] = bad
    norm = token_norm(keys, kind, scope)
    expected = torch.zeros_like(norm, dtype=torch.bool)
    expected[1, 0 if scope == "all" else 2, 4] = True
    assert torch.equal(norm.isnan(), expected)
    assert torch.equal(norm[~expected], clean[~expected])  # the same bits for all others
    scaled = divide_by_norm(keys, norm)
    spoiled = expected.expand(2, 3, 7)
    assert (scaled[spoiled] == 0).all()
    assert torch.equal(scaled[~spoiled], scaled_clean[~spoiled])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-12, 1e-6, 1e6, 1e15])
def test_norm_far_beyond_fp16(kind: str, size: float) -> None:
    keys = _keys(tokens=1, seed=4) * 1e3 * size
    norm = token_norm(keys, kind, "all")
    exact = _exact_norm(keys[0].flatten().tolist(), kind)
    assert abs(norm[0, 0, 0].item() - exact) <= BF16 * exact
    assert divide_by_norm(keys, norm).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_norm_of_a_huge_finite_token(kind: str) -> None:
    """bf16 holds 1e30: the norm is right, or NaN where the squares are no fp32 numbers; never infinite or wrong."""
    keys = torch.full((1, 2, 1, 64), 1e30).bfloat16().float()
    norm = token_norm(keys, kind, "all")
    if kind == "l2":
        assert norm.isnan().all()
    else:
        assert abs(norm.item() - keys[0, 0, 0, 0].item()) <= BF16 * 1e30


@pytest.mark.parametrize("kind", KINDS)
def test_tiny_token_is_restored_to_within_the_smallest_normal_number(kind: str) -> None:
    keys = torch.tensor([1e-45, 1e-39, 1e-30, 1e-20]).view(1, 1, 4, 1).expand(1, 2, 4, 64)
    norm = token_norm(keys, kind, "all")
    scaled = divide_by_norm(keys, norm)
    assert scaled.isfinite().all()
    restored = scaled * norm.float().unsqueeze(-1)
    assert ((restored - keys).abs() <= 2.0**-22 * keys + 2.0**-74).all()  # squares below 2^-149 vanish


def _check_independence(kind: str, scope: str, dim: int) -> None:
    keys = _keys(3, 4, 256, dim, seed=5)
    together = token_norm(keys, kind, scope)
    for b in range(3):
        assert torch.equal(token_norm(keys[b : b + 1], kind, scope), together[b : b + 1])
        assert torch.equal(token_norm(keys[b : b + 1, :, 128:], kind, scope), together[b : b + 1, :, 128:])
    strided = keys.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(token_norm(strided, kind, scope), together)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scope", ["all", "head"])
@pytest.mark.parametrize("dim", [16, 64, 80, 128])
def test_norm_does_not_depend_on_the_batch(kind: str, scope: str, dim: int) -> None:
    _check_independence(kind, scope, dim)


@pytest.mark.parametrize("scope", ["all", "head"])
def test_norm_does_not_depend_on_the_batch_with_threads(scope: str) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        _check_independence("l2", scope, 64)
    finally:
        torch.set_num_threads(before)


def _equalizer(keys: Tensor, exponent: float, group: int, num_sinks: int) -> Tensor:
    """One head of keys (tokens, dim): the formula, number by number."""
    tokens, dim = keys.shape
    ranges = []
    for c in range(dim):
        spans = []
        for start in range(0, tokens, group):
            column = [
                keys[t, c].item()
                for t in range(start, start + group)
                if t >= num_sinks and all(math.isfinite(x) for x in keys[t].tolist())
            ]
            spans.append(max(column) - min(column) if column else 0.0)
        ranges.append(math.fsum(spans) / len(spans))
    mean = math.fsum(ranges) / dim
    return torch.tensor([max(r / mean, 2.0**-10) ** exponent if mean else 1.0 for r in ranges], dtype=torch.float64)


# two subtractions, two means and a power in fp32: a few times 2^-24
FP32 = 5e-6


@pytest.mark.parametrize("exponent", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("num_sinks", [0, 4, 40])
def test_equalizer_against_a_plain_loop(exponent: float, group: int, num_sinks: int) -> None:
    keys = _keys(1, 2, 128, 8, seed=6) * torch.logspace(-2, 2, 8)
    keys[0, 1, 50] = math.nan
    keys[0, 0, 60, 3] = math.inf
    e = channel_equalizer(keys, exponent, group, num_sinks)
    assert e.dtype == torch.float32
    for h in range(2):
        truth = _equalizer(keys[0, h], exponent, group, num_sinks)
        torch.testing.assert_close(e[0, h].double(), truth, rtol=FP32, atol=0)
    if exponent == 0.0:
        assert (e == 1).all()


def test_equalizer_leaves_sinks_and_non_finite_tokens_out() -> None:
    keys = _keys(2, 2, 128, 16, seed=7)
    keys[:, :, 4:] = keys[:, :, 4:].clamp(-1, 1)
    e = channel_equalizer(keys, 0.5, 32, 4)
    for other in (0.0, 1e30, math.nan, math.inf):
        changed = keys.clone()
        changed[:, :, :4] = other
        assert torch.equal(channel_equalizer(changed, 0.5, 32, 4), e)
    changed = keys.clone()
    changed[0, 0, 77] = math.nan
    by_nan = channel_equalizer(changed, 0.5, 32, 4)
    changed[0, 0, 77] = keys[0, 0, 76]  # a copy of a neighbour adds nothing to a range
    assert torch.equal(channel_equalizer(changed, 0.5, 32, 4), by_nan)
    assert torch.equal(by_nan[1], e[1])  # other rows and heads do not notice
    assert torch.equal(by_nan[0, 1], e[0, 1])


def test_exponent_one_gives_every_channel_the_same_range() -> None:
    keys = _keys(1, 1, 128, 16, seed=8) * torch.logspace(-1, 1, 16)
    divided = keys / channel_equalizer(keys, 1.0, 32, 0).unsqueeze(2)
    blocks = divided.view(4, 32, 16)
    ranges = (blocks.amax(1) - blocks.amin(1)).mean(0)
    torch.testing.assert_close(ranges, ranges[:1].expand(16), rtol=FP32, atol=0)


def test_equalizer_of_degenerate_channels_is_finite_and_positive() -> None:
    keys = _keys(1, 2, 128, 16, seed=9)
    keys[0, 0] = 3.5  # every channel of head 0 constant
    keys[0, 1, :, 5] = -2.0  # one channel of head 1 constant
    e = channel_equalizer(keys, 0.5, 32, 4)
    assert (e[0, 0] == 1).all()
    assert e[0, 1, 5].item() == 2.0**-5  # the floor 2^-10, to the power 1/2
    for x in (
        torch.zeros(1, 1, 128, 16),
        torch.full((1, 1, 128, 16), math.nan),
        torch.full((1, 1, 128, 16), 1e-45),
        torch.full((1, 1, 128, 16), 3e38) * torch.ones(128).view(128, 1).cumsum(0).remainder(2).mul(2).sub(1),
        torch.eye(128)[:, :16].view(1, 1, 128, 16),
    ):
        e = channel_equalizer(x, 0.5, 32, 4)
        assert e.isfinite().all()
        assert (e > 0).all()


def _relative_queries(power: Tensor, exponent: float) -> Tensor:
    """One head of sums of squares (dim,): the formula, number by number."""
    rms = [math.sqrt(x) for x in power.tolist()]
    mean = math.fsum(rms) / len(rms)
    return torch.tensor([max(x / mean, 1 / 32) ** exponent if mean else 1.0 for x in rms], dtype=torch.float64)


@pytest.mark.parametrize("exponent", [0.0, 0.25, 0.5, 1.0])
def test_equalizer_looks_at_queries(exponent: float) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, 3, 128, 48, generator=generator)
    power = torch.randn(2, 3, 48, generator=generator, dtype=torch.float64).mul(2).exp()
    power[0, 0, 5] = 0.0  # smaller than what is made up for
    power[1, 2] = 0.0  # no queries
    e = channel_equalizer(keys, 0.5, 32, 4, power, exponent)
    alone = channel_equalizer(keys, 0.5, 32, 4)
    for b in range(2):
        for h in range(3):
            truth = alone[b, h].double() / _relative_queries(power[b, h], exponent)
            torch.testing.assert_close(e[b, h].double(), truth, rtol=FP32, atol=0.0)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("size", [1, 7, 100, 300])
def test_query_power_of_the_first_block(size: int, padding: bool) -> None:
    """Whatever the passes and the padding: the squares of the row's own tokens 4 to 127, those not finite left out."""
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(2, 6, 300, 16, generator=generator)
    query[0, 3, 50, 2] = torch.nan
    valid = torch.rand(2, 300, generator=generator) < 0.7 if padding else torch.ones(2, 300, dtype=torch.bool)
    power, seen = torch.zeros(2, 3, 16, dtype=torch.float64), [0, 0]
    for start in range(0, 300, size):
        part = valid[:, start : start + size]
        order = torch.argsort(~part, dim=-1, stable=True) if padding else None
        add_query_power(power, query[:, :, start : start + size], seen, part.sum(1).tolist(), order, 4)
        seen = [n + int(count) for n, count in zip(seen, part.sum(1), strict=True)]
    for b in range(2):
        own = query[b][:, valid[b]][:, 4:128].double().square().nan_to_num(0.0)
        torch.testing.assert_close(power[b], own.sum(1).view(3, 2, 16).sum(1), rtol=1e-12, atol=1e-12)
