"""Groups: the nearest code, ranges and least squares, integer zero points, and how scales are stored."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oscar_kv.quantize import dequantize, fit_group, quantize, round_metadata

BITS = [2, 3, 4, 8]
ULP = 2.0**-24  # relative rounding error of one fp32 operation
TINY = 2.0**-140  # near the smallest fp32 numbers, 2^-149, rounding is absolute

numbers = st.floats(-1e4, 1e4, width=32)
groups = st.lists(numbers, min_size=16, max_size=16)
bit_widths = st.sampled_from(BITS)


def _all() -> Tensor:
    return torch.ones((), dtype=torch.bool)


def _grid(scale: Tensor, center: Tensor, bits: int) -> Tensor:
    """fp64 (..., 2 ** bits): every number that a code can stand for."""
    levels = 2**bits - 1
    q = torch.arange(levels + 1, dtype=torch.float64)
    return center.double().unsqueeze(-1) + (q - levels / 2) * scale.double().unsqueeze(-1)


def _errors(x: Tensor, scale: Tensor, center: Tensor, bits: int) -> Tensor:
    decoded = dequantize(quantize(x, scale, center, bits), scale, center, bits)
    return (decoded.double() - x.double()).abs()


@given(groups, bit_widths, st.floats(2.0**-20, 1e4, width=32), numbers)
def test_code_is_the_nearest_on_the_grid(x: list[float], bits: int, scale: float, center: float) -> None:
    group, s, c = torch.tensor(x), torch.tensor(scale), torch.tensor(center)
    codes = quantize(group, s, c, bits)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) < 2**bits
    grid = _grid(s, c, bits)
    nearest = (group.double().unsqueeze(-1) - grid).abs().amin(-1)
    chosen = (group.double() - grid[codes.long()]).abs()
    # (x - center) / scale + levels / 2 in fp32: three roundings, of numbers up to |x - center| and levels * scale
    slack = 4 * ULP * ((group - c).abs().double() + 2**bits * scale)
    assert (chosen <= nearest + slack).all()
    low, high = grid[0], grid[-1]
    inside = (group.double() >= low) & (group.double() <= high)
    assert (chosen <= scale / 2 + slack)[inside].all()
    assert (codes[group.double() < low - slack] == 0).all()
    assert (codes[group.double() > high + slack] == 2**bits - 1).all()


@given(groups, bit_widths)
def test_dequantize_is_the_grid(x: list[float], bits: int) -> None:
    s, c = torch.tensor([x[0]]).abs(), torch.tensor([x[1]])
    codes = torch.arange(2**bits, dtype=torch.uint8).unsqueeze(0)
    decoded = dequantize(codes, s, c, bits).double()
    # one product and one sum
    slack = 2 * ULP * (2**bits * s.double() + c.double().abs()) + TINY
    assert ((decoded - _grid(s, c, bits)).abs() <= slack).all()


@pytest.mark.parametrize("bits", BITS)
def test_special_numbers(bits: int) -> None:
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    one, zero = torch.tensor(1.0), torch.tensor(0.0)
    top = 2**bits - 1
    codes = quantize(x, one, zero, bits).tolist()
    assert codes[:3] == [0, top, 0]
    assert codes[3] in (top // 2, top // 2 + 1)
    # scale 0: the middle of the grid, whatever the number, and it decodes to the center
    codes = quantize(torch.tensor([-5.0, 0.0, 1e30]), zero, torch.tensor(2.5), bits)
    assert codes.unique().item() in (top // 2, top // 2 + 1)
    assert (dequantize(codes, zero, torch.tensor(2.5), bits) == 2.5).all()
    # scale NaN: code 0, not an error; it decodes to NaN
    codes = quantize(torch.zeros(3), torch.tensor(math.nan), torch.tensor(math.nan), bits)
    assert dequantize(codes, torch.tensor(math.nan), torch.tensor(math.nan), bits).isnan().all()


@given(groups, bit_widths)
def test_minmax_covers_the_range(x: list[float], bits: int) -> None:
    group = torch.tensor(x)
    scale, center = fit_group(group, _all(), bits, fit="minmax", shrink=1.0, integer_zero=False)
    grid = _grid(scale, center, bits)
    # a handful of roundings of numbers up to max|x|; a rounded step counts levels / 2 times
    slack = 8 * ULP * max(map(abs, x)) + 2**bits * TINY
    assert abs(grid[0].item() - min(x)) <= slack
    assert abs(grid[-1].item() - max(x)) <= slack
    assert (_errors(group, scale, center, bits) <= scale.double() / 2 + 2 * slack).all()


@given(groups, bit_widths, st.floats(0.125, 1.0, width=32))
def test_shrink_takes_the_range_in_around_its_middle(x: list[float], bits: int, shrink: float) -> None:
    group = torch.tensor(x)
    scale, center = fit_group(group, _all(), bits, fit="minmax", shrink=shrink, integer_zero=False)
    span = max(x) - min(x)
    slack = 8 * ULP * max(map(abs, x)) + 2**bits * TINY
    assert abs(scale.item() * (2**bits - 1) - shrink * span) <= slack
    assert abs(center.item() - (max(x) + min(x)) / 2) <= slack
    # what the shrunk grid leaves out is at most half of what the range lost
    bound = max(scale.item() / 2, (1 - shrink) * span / 2)
    assert (_errors(group, scale, center, bits) <= bound + 2 * slack).all()


@given(groups, bit_widths, st.sampled_from([0.5, 0.85, 1.0]))
def test_least_squares_never_loses_to_the_range_it_starts_from(x: list[float], bits: int, shrink: float) -> None:
    """Each step is optimal for its codes, and the codes for their grid: the squared error cannot grow."""
    group = torch.tensor(x)
    rms = {}
    for fit in ("minmax", "lstsq"):
        scale, center = fit_group(group, _all(), bits, fit=fit, shrink=shrink, integer_zero=False)
        assert scale >= 0
        rms[fit] = _errors(group, scale, center, bits).square().mean().sqrt().item()
    # sums of 16 products in fp32, three times: no error grows by more than this
    assert rms["lstsq"] <= rms["minmax"] * (1 + 1e-5) + 64 * ULP * max(map(abs, x)) + TINY


def _least_squares(x: list[float], keep: list[bool], bits: int, shrink: float) -> tuple[float, float]:
    """Alternating least squares in plain fp64: nearest codes, then the line through (code, number)."""
    levels = 2**bits - 1
    used = [v for v, k in zip(x, keep, strict=True) if k]
    scale = (max(used) - min(used)) * shrink / levels
    center = (max(used) + min(used)) / 2
    for _ in range(3):
        u = [min(max(round((v - center) / scale + levels / 2), 0), levels) - levels / 2 for v in used]
        mean_u, mean_v = math.fsum(u) / len(u), math.fsum(used) / len(used)
        variance = math.fsum((a - mean_u) ** 2 for a in u)
        if variance:
            scale = math.fsum((a - mean_u) * (v - mean_v) for a, v in zip(u, used, strict=True)) / variance
            center = mean_v - scale * mean_u
    return scale, center


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("dropped", [0, 5])
def test_least_squares_against_plain_arithmetic(bits: int, size: int, dropped: int) -> None:
    x = torch.randn(12, size, generator=torch.Generator().manual_seed(size + bits))
    keep = torch.ones(12, size, dtype=torch.bool)
    keep[:, 1 : 1 + dropped] = False
    scale, center = fit_group(x, keep, bits, fit="lstsq", shrink=0.85, integer_zero=False)
    for i in range(12):
        s, c = _least_squares(x[i].tolist(), keep[i].tolist(), bits, 0.85)
        # sums of up to 128 numbers in fp32
        assert abs(scale[i].item() - s) <= 1e-5 * s
        assert abs(center[i].item() - c) <= 1e-5


@given(st.lists(st.floats(-100, 100, width=16), min_size=16, max_size=16), st.sampled_from([2, 4]))
def test_integer_zero_is_a_whole_number_of_steps(x: list[float], bits: int) -> None:
    """The released method: z = round(-min / s), x ~ s * (q - z)."""
    group, levels = torch.tensor(x), 2**bits - 1
    scale, center = fit_group(group, _all(), bits, fit="minmax", shrink=1.0, integer_zero=True)
    if max(x) == min(x):
        assert scale == 0
        assert center == x[0]
        return
    s = scale.item()
    assert abs(s - (max(x) - min(x)) / levels) <= 4 * ULP * s
    zero = -(center.item() - levels / 2 * s) / s
    # center = (levels / 2 - zero) * s, rounded once: as exact as a number of zero steps can be
    slack = 4 * ULP * (abs(zero) + levels)
    assert abs(zero - round(zero)) <= slack
    assert abs(round(zero) + min(x) / s) <= 0.5 + slack  # the nearest one
    # shifting the grid by at most half a step leaves no number more than one step away
    assert (_errors(group, scale, center, bits) <= s * (1 + slack)).all()


@pytest.mark.parametrize("fit", ["minmax", "lstsq"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 3.25, -1e-30, 1e30, 1e-44])
def test_constant_group_is_exact(fit: str, bits: int, value: float) -> None:
    x = torch.full((3, 32), value)
    scale, center = fit_group(x, _all(), bits, fit=fit, shrink=0.85, integer_zero=False)
    assert (scale == 0).all()
    assert torch.equal(center, x[:, 0])
    assert torch.equal(dequantize(quantize(x, scale, center, bits), scale, center, bits), x)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [3.25, -7.0])
def test_constant_group_with_integer_zero_is_exact(bits: int, value: float) -> None:
    x = torch.full((32,), value)
    scale, center = fit_group(x, _all(), bits, fit="minmax", shrink=1.0, integer_zero=True)
    assert (scale.item(), center.item()) == (0.0, value)


@pytest.mark.parametrize("fit", ["minmax", "lstsq"])
@pytest.mark.parametrize("integer_zero", [False, True])
def test_empty_group_is_zero(fit: str, integer_zero: bool) -> None:
    x = torch.randn(2, 32)
    x[0, 0] = math.nan
    keep = torch.zeros(2, 32, dtype=torch.bool)
    keep[1] = True
    scale, center = fit_group(x, keep, 2, fit=fit, shrink=1.0, integer_zero=integer_zero)
    assert (scale[0].item(), center[0].item()) == (0.0, 0.0)
    assert scale[1] > 0


@pytest.mark.parametrize("fit", ["minmax", "lstsq"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_number_that_is_not_finite_spoils_its_group_unless_left_out(fit: str, bad: float) -> None:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    clean = fit_group(x, _all(), 2, fit=fit, shrink=0.9, integer_zero=False)
    x[2, 7] = bad
    scale, center = fit_group(x, _all(), 2, fit=fit, shrink=0.9, integer_zero=False)
    decoded = dequantize(quantize(x, scale, center, 2), scale, center, 2)
    assert not decoded[2].isfinite().any()  # the group is marked
    for i in (0, 1, 3):
        assert scale[i] == clean[0][i]
        assert center[i] == clean[1][i]
    # left out, it changes nothing for the others of its group
    keep = torch.ones(4, 32, dtype=torch.bool)
    keep[2, 7] = False
    without = fit_group(x, keep, 2, fit=fit, shrink=0.9, integer_zero=False)
    x[2, 7] = 123.0
    assert all(map(torch.equal, fit_group(x, keep, 2, fit=fit, shrink=0.9, integer_zero=False), without))
    others = x[2, torch.arange(32) != 7]
    alone = fit_group(others, _all(), 2, fit=fit, shrink=0.9, integer_zero=False)
    for a, b in zip(without, alone, strict=True):
        torch.testing.assert_close(a[2], b, rtol=1e-5, atol=1e-6)  # sums of 31 numbers in another order


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-6, 1e-3, 1.0, 1e3, 65000.0, 1e5, 1e6, 1e30, 3e38])
def test_stored_metadata_is_within_the_dtypes_rounding(dtype: torch.dtype, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    # numbers over five decades below the largest, which has the given size
    scale = torch.rand(3, 4, 50, generator=generator) * torch.logspace(-5, 0, 50)
    center = (torch.rand(3, 4, 50, generator=generator) * 2 - 1) * torch.logspace(-5, 0, 50)
    scale[:, 0, 49] = 1.0
    scale, center = scale * size, center * size
    s, c, unit = round_metadata(scale, center, dtype, (-2, -1))
    assert s.dtype == c.dtype == dtype
    assert unit.shape == (3, 1, 1)
    assert unit.dtype == torch.float32
    assert all(math.frexp(u)[0] == 0.5 for u in unit.flatten().tolist())  # a power of two
    info = torch.finfo(dtype)
    for stored, exact in ((s, scale), (c, center)):
        assert stored.float().isfinite().all()
        error = (stored.double() * unit.double() - exact.double()).abs()
        # half a unit in the last place: relative for normal numbers, absolute below the smallest normal one
        step = torch.maximum(info.eps * exact.double().abs(), info.smallest_normal * info.eps * unit.double())
        assert (error <= step / 2).all()
        if size >= 1e-30:  # below 2^-100 the unit stops following
            assert (error <= info.eps / 2 * size * (1 + ULP)).all()


@given(st.floats(2.0**-20, 1e6, width=32), st.floats(-1e6, 1e6, width=32))
def test_stored_metadata_error_for_any_pair(scale: float, center: float) -> None:
    largest = max(scale, abs(center))
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        s, c, unit = round_metadata(torch.tensor([scale]), torch.tensor([center]), dtype, (-1,))
        bound = torch.finfo(dtype).eps / 2 * largest
        assert abs(s.double().item() * unit.item() - scale) <= bound
        assert abs(c.double().item() * unit.item() - center) <= bound


def test_unit_belongs_to_its_record_and_skips_what_is_not_finite() -> None:
    scale = torch.tensor([[1.0, 2.0], [1e5, 1.0], [0.0, 0.0], [math.nan, 4.0], [math.inf, 4.0]])
    center = torch.zeros(5, 2)
    center[4, 1] = -9.0
    s, _, unit = round_metadata(scale, center, torch.float16, (-1,))
    # the smallest power of two above the largest finite number; 1 where there is none
    assert unit.flatten().tolist() == [4.0, 131072.0, 1.0, 8.0, 16.0]
    assert s[3, 0].isnan()
    for i in range(3):
        alone, _, u = round_metadata(scale[i : i + 1], center[i : i + 1], torch.float16, (-1,))
        assert torch.equal(alone, s[i : i + 1])
        assert u.item() == unit[i].item()
    _, _, unit = round_metadata(scale, center, torch.float8_e4m3fn, (-1,))
    assert unit.flatten().tolist() == [4.0 / 256, 512.0, 1.0, 8.0 / 256, 16.0 / 256]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_metadata_that_is_not_finite_is_stored_as_such(dtype: torch.dtype, bad: float) -> None:
    """A group that a number spoiled must not come back as a finite one."""
    s, c, _ = round_metadata(torch.tensor([1.0, bad]), torch.tensor([bad, 2.0]), dtype, (-1,))
    assert s.float().isfinite().tolist() == [True, False]
    assert c.float().isfinite().tolist() == [False, True]
