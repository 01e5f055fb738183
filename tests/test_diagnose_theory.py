"""The bound on the error of a group, the synthetic sweep and the repairs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from oscar_kv.diagnose.interventions import NORMS, PLAIN, ROTATED, WITHOUT_ALL_SINKS, interventions
from oscar_kv.diagnose.layer import LayerDiagnosis
from oscar_kv.diagnose.steps import NONE, roundtrip, steps
from oscar_kv.diagnose.summary import verdict
from oscar_kv.diagnose.synthetic import sweep, synthetic_keys
from oscar_kv.diagnose.theory import check_bounds, group_bounds, regress


@given(
    seed=st.integers(0, 2**32 - 1),
    sigma=st.floats(0, 3),
    bits=st.sampled_from([2, 3, 4, 8]),
    offset=st.floats(0, 100),
    dim=st.sampled_from([2, 16, 64]),
)
def test_the_bounds_are_below_the_modelled_error_and_in_order(seed, sigma, bits, offset, dim):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 32, dim, generator=generator, dtype=torch.float64)
    x = (x + offset) * torch.exp(sigma * torch.randn(5, 32, 1, generator=generator, dtype=torch.float64))
    found = group_bounds(x, bits)
    slack = 1 + 1e-9
    assert (found["gap"] <= found["extremes"] * slack).all()
    assert (found["extremes"] <= found["diameter"] * slack).all()
    assert (found["diameter"] <= found["modelled"] * slack).all()


def test_bounds_in_closed_form():
    """Two tokens: every channel's range is their distance, so that all but the norm gap is equal to the model."""
    x = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])
    found = {name: float(value[0]) for name, value in group_bounds(x, 2).items()}
    assert found == pytest.approx({"modelled": 18 / 108, "extremes": 18 / 108, "diameter": 18 / 108, "gap": 16 / 108})


@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.5])
def test_noise_of_the_model_never_beats_the_bound(sigma):
    """The model taken at its word: uniform noise of each channel's step, drawn a thousand times."""
    keys = synthetic_keys(sigma)[0, 0, :128].double().unflatten(0, (-1, 32))
    step = (keys.amax(1, keepdim=True) - keys.amin(1, keepdim=True)) / 3
    generator = torch.Generator().manual_seed(1)
    noise = (torch.rand(1000, *keys.shape, generator=generator, dtype=torch.float64) - 0.5) * step
    error = noise.square().sum(-1).mean((0, 2))  # per token, of each group
    found = group_bounds(keys, 2)
    torch.testing.assert_close(error, found["modelled"], rtol=0.02, atol=0)
    for name in ("gap", "extremes", "diameter"):
        assert (error >= found[name] * 0.98).all()


def test_real_codes_may_beat_the_bound():
    """Tokens of two kinds lie on the ends of the grid and have hardly an error: the bound is one of the model only."""
    kinds = torch.tensor([1.0, 5.0]).repeat(64).view(1, 1, 128, 1).expand(1, 1, 128, 32).contiguous()
    config = steps(32)[NONE]
    packed = roundtrip(kinds, kinds, config)[0]
    found = check_bounds(kinds[0], packed[0], 2, 32)
    assert found["groups"] == 4
    assert found["violations"] == 0
    assert found["measured_below_gap"] == 1.0
    assert found["measured"]["max"] < 1e-3


def test_sweep_grows_with_the_spread_unless_norms_are_taken_out():
    rows = sweep()
    plain = [row["errors"]["none"] for row in rows]
    assert plain == sorted(plain)
    assert plain[-1] > 2 * plain[0]
    assert [row["gap"] for row in rows] == sorted(row["gap"] for row in rows)
    for step in ("scaling", "rotation+scaling"):
        errors = [row["errors"][step] for row in rows]
        assert max(errors) < 1.1 * min(errors)
    assert all(row["bound"]["violations"] == 0 and row["bound"]["groups"] == 32 for row in rows)


def test_synthetic_norms_have_the_asked_spread():
    norms = synthetic_keys(0.5).norm(dim=-1).log()
    assert float(norms.std()) == pytest.approx(0.5, rel=0.1)
    assert torch.equal(norms[0, 0], norms[0, 1]) or torch.allclose(norms[0, 0], norms[0, 1], atol=1e-5)


def test_regression_recovers_known_exponents():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(500, generator=generator, dtype=torch.float64) + 0.1 for _ in range(2))
    found = regress(a**2 * b, {"a": a, "b": b})
    assert found["r2"] == pytest.approx(1.0)
    y, x = (2 * a.log() + b.log()), a.log()
    assert found["alone"]["a"] == pytest.approx(float(torch.corrcoef(torch.stack((x, y)))[0, 1]) ** 2)
    expected = 2 * float(a.log().std(correction=0) / y.std(correction=0))
    assert found["coefficients"]["a"] == pytest.approx(expected)


def test_regression_needs_groups():
    assert regress(torch.ones(3), {"a": torch.ones(3), "b": torch.ones(3)}) == {"groups": 3}


@pytest.fixture(scope="module")
def keys():
    keys = synthetic_keys(0.5)
    keys[:, :, [2, 300]] *= 0.05
    return keys


def mean_square(x):
    return float(x.double().square().sum())


def test_repairs(keys):
    unusual = torch.zeros(512, dtype=torch.bool)
    unusual[[2, 300]] = True
    found = {name: k for name, (k, _) in interventions(keys, unusual).items()}
    exact = found[WITHOUT_ALL_SINKS][:, :, unusual]
    assert torch.equal(exact, keys[:, :, unusual])
    errors = {name: mean_square(k - keys) / mean_square(keys) for name, k in found.items()}
    assert errors[NORMS[0]] < 0.6 * errors[PLAIN]  # norms are what was planted
    assert errors[NORMS[1]] < errors[PLAIN]
    assert errors[ROTATED] > 0.9 * errors[PLAIN]
    assert len(found) == 9


def test_equal_norms_by_hand(keys):
    """(b): directions through the codec, norms exact."""
    unusual = torch.zeros(512, dtype=torch.bool)
    found, bits = interventions(keys, unusual)[NORMS[0]]
    directions = F.normalize(keys, dim=-1)
    expected = roundtrip(directions, directions, steps(64)[NONE])[0] * keys.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert bits == 0.5  # a float32 per key of 64 numbers


def test_subtracting_the_mean_of_a_group_changes_nothing():
    """Why (g) takes out a direction: asymmetric groups per channel do not see a shift (a grid in fp16 apart)."""
    keys = synthetic_keys(0.5)
    config = steps(64)[NONE]
    mean = keys.unflatten(2, (-1, 32)).mean(3, keepdim=True).expand(-1, -1, -1, 32, -1).flatten(2, 3)
    plain, shifted = (roundtrip(x, x, config)[0] for x in (keys, keys - mean))
    assert mean_square(plain - (shifted + mean)) < 1e-2 * mean_square(plain - keys)
    assert math.isclose(mean_square(plain - keys), mean_square(shifted + mean - keys), rel_tol=1e-2)


def layer_with(index, plain, equal, grouped, rotated):
    """A layer of which only the output errors of four repairs are given; the others repair nothing."""
    rows = {name: {"output_error": plain} for name in interventions(synthetic_keys(0.0), torch.zeros(512, dtype=bool))}
    for name, error in ((NORMS[0], equal), (NORMS[1], grouped), (ROTATED, rotated)):
        rows[name] = {"output_error": error}
    return LayerDiagnosis(index, {"interventions": rows}, {}, {}, torch.empty(0), torch.empty(0))


def test_norms_are_primary_by_the_rule():
    layers = [
        layer_with(0, plain=0.1, equal=0.04, grouped=0.2, rotated=0.09),  # equal norms: over half
        layer_with(1, plain=0.1, equal=0.2, grouped=0.04, rotated=0.09),  # groups by norm: over half
        layer_with(2, plain=0.1, equal=0.06, grouped=0.2, rotated=0.09),  # less than half
        layer_with(3, plain=0.1, equal=0.04, grouped=0.2, rotated=0.03),  # rotation does more
        layer_with(4, plain=1e-4, equal=1e-5, grouped=1e-4, rotated=1e-4),  # nothing to repair
    ]
    found = [verdict(layer.numbers["interventions"], layers) for layer in layers]
    assert [one["primary"] for one in found] == [True, True, False, False, None]
    assert all(one["layers"] == [0, 1] for one in found)
    assert "Layer by layer it is in 2 of 5." in found[0]["text"]
    assert "Repairing norms alone removes 60% of that, rotation alone 10%" in found[0]["text"]
    assert found[2]["removed"][NORMS[0]] == pytest.approx(0.4)
