"""TurboQuant: the published codebooks and errors, unbiased products, and the formulas in float64."""

import math

import pytest
import torch

from baseline_cases import DIM, fill, states
from oscar_kv.baselines import TurboQuant
from oscar_kv.baselines.codebook import gaussian, haar_rotation, lloyd_max

PUBLISHED = {1: [0.7979], 2: [0.4528, 1.5104], 3: [0.2451, 0.7560, 1.3439, 2.1520]}
DISTORTION = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497}  # of a normal number, Max 1960


@pytest.mark.parametrize("bits", PUBLISHED)
def test_codebooks_of_the_normal_distribution(bits):
    codebook = lloyd_max(bits)
    assert codebook[2 ** (bits - 1) :].tolist() == pytest.approx(PUBLISHED[bits], abs=5e-4)
    torch.testing.assert_close(codebook, -codebook.flip(0), rtol=0, atol=2e-4)


@pytest.mark.parametrize("bits", DISTORTION)
def test_distortion_of_the_normal_distribution(bits):
    x = torch.randn(400_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nearest = (x.unsqueeze(1) - lloyd_max(bits).double()).abs().min(1).values
    assert float(nearest.square().mean()) == pytest.approx(DISTORTION[bits], rel=0.02)


@pytest.mark.parametrize("dim", [4, 16, 64])
def test_codebooks_of_a_sphere_satisfy_the_conditions_of_lloyd_and_max(dim):
    """Each entry is the mean of the coordinates that are nearest to it; checked by sampling the sphere."""
    x = torch.randn(200_000, dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = (x / x.norm(dim=1, keepdim=True))[:, 0] * dim**0.5
    codebook = lloyd_max(2, dim).double()
    nearest = (x.unsqueeze(1) - codebook).abs().argmin(1)
    for code in range(4):
        assert float(x[nearest == code].mean()) == pytest.approx(float(codebook[code]), abs=0.01)
    assert lloyd_max(2, dim)[-1] < lloyd_max(2)[-1]  # a sphere has no tails


def test_rotations_are_orthonormal_and_have_no_preferred_sign():
    for seed in range(3):
        q = haar_rotation(DIM, seed).double()
        torch.testing.assert_close(q @ q.T, torch.eye(DIM, dtype=torch.float64), rtol=0, atol=1e-5)
    traces = torch.stack([haar_rotation(8, seed).trace() for seed in range(200)])
    assert abs(float(traces.mean())) < 4 / 200**0.5  # the trace has mean 0 and variance 1


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.117), (3, 0.0345), (4, 0.0095)])
def test_mse_variant_reaches_the_published_error(bits, distortion):
    keys, values = torch.randn(2, 1, 2, 300, 128, generator=torch.Generator().manual_seed(2))
    cache, *found = fill(TurboQuant(bits=bits), keys, values, [129, 1, 70])
    for x, y in zip((keys, values), found, strict=True):
        relative = (y - x).square().sum(-1) / x.square().sum(-1)
        assert float(relative.mean()) == pytest.approx(distortion, rel=0.06)
    assert cache.packed_bits() == bits + 16 / 128


def decoded(x, bits, seed, sketch):
    """The formula in float64, nearest codebook entries by comparison with all; norms in half precision."""
    x = x.double()
    dim = x.shape[-1]
    rotation = haar_rotation(dim, seed).double()
    codebook = lloyd_max(bits, dim).double() / dim**0.5
    norm = x.norm(dim=-1, keepdim=True)
    y = (x / norm) @ rotation.T
    unit = codebook[(y.unsqueeze(-1) - codebook).abs().argmin(-1)] @ rotation
    if sketch:
        s = gaussian(dim, seed + 1).double()
        residual = x / norm - unit
        gain = residual.norm(dim=-1, keepdim=True).half().double() * math.sqrt(math.pi / 2) / dim
        unit = unit + gain * (torch.where(residual @ s.T >= 0, 1.0, -1.0).double() @ s)
    return norm.half().double() * unit


@pytest.mark.parametrize("variant", ["mse", "prod"])
@pytest.mark.parametrize("bits", [2, 3])
def test_formula(variant, bits):
    keys, values = states(300)
    cache, *found = fill(TurboQuant(bits=bits, variant=variant), keys, values, [129, 1, 70])
    for x, y in zip((keys, values), found, strict=True):
        want = decoded(x, bits - (variant == "prod"), 0, variant == "prod")
        close = ((y.double() - want).abs() < 1e-3 * (1 + want.abs())).all(-1)  # a code on the border spoils its token
        assert close.double().mean() > 0.99
    assert cache.packed_bits() == bits + (16 if variant == "mse" else 32) / DIM


def test_inner_products_are_unbiased_in_the_prod_variant_only():
    """Over random sketches and rotations: the mean error is 0 within four standard errors; not so for mse."""
    from oscar_kv.baselines.turboquant import VectorQuantizer

    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(2, 16, generator=generator).double()
    errors = {}
    for variant in ("mse", "prod"):
        found = []
        for seed in range(0, 1200, 2):
            quantizer = VectorQuantizer(16, 2, variant, 1000 + seed, torch.device("cpu"))
            decoded = quantizer.decode(quantizer.encode(x.float().view(1, 1, 1, -1), 0), 0).double().flatten()
            found.append(float((decoded - x) @ y))
        errors[variant] = torch.tensor(found)
    prod, mse = errors["prod"], errors["mse"]
    assert abs(prod.mean()) < 4 * prod.std() / len(prod) ** 0.5
    along = float(x @ y / y.square().sum() ** 0.5)
    assert abs(along) > 0.5  # there is something to be biased about
    assert abs(mse.mean()) > 4 * mse.std() / len(mse) ** 0.5


def test_split_into_outlier_and_regular_channels():
    keys, values = states(300, dim=128)
    cache, *found = fill(TurboQuant(outlier_bits=3), keys, values, [129, 1, 70])
    for x, y in zip((keys, values), found, strict=True):
        for head in range(x.shape[1]):
            size = x[0, head, :129].abs().mean(0)  # of the first pass, which is the prompt
            order = size.argsort(descending=True, stable=True)
            outliers, regular = order[:32], order[32:]
            for channels, bits, seed in ((outliers, 3, 2), (regular, 2, 0)):
                want = decoded(x[0, head][:, channels], bits, seed, False)
                got = y[0, head][:, channels].double()
                close = ((got - want).abs() < 1e-3 * (1 + want.abs())).all(-1)
                assert close.double().mean() > 0.98
    assert cache.packed_bits() == 2.5
    assert cache.memory_bytes()["state"] == 2 * 2 * 128 * 2  # sides, heads, the order of the channels in int16


@pytest.mark.parametrize(("dim", "outliers"), [(64, 32), (128, 96), (256, 224)])
def test_a_budget_decides_how_many_channels_are_outliers(dim, outliers):
    keys, values = states(140, dim=dim)
    cache, _, _ = fill(TurboQuant(outlier_bits=3, budget=3.0), keys, values, [140])
    packed = cache.stores[0].packed
    assert packed["key_outlier_codes"].shape[-1] == outliers * 3 // 8
    assert cache.packed_bits() == 3.0


def test_a_zero_vector_stays_zero():
    zeros = torch.zeros(1, 1, 5, 64)
    _, k, _ = fill(TurboQuant(variant="prod"), zeros, zeros, [5])
    assert torch.equal(k, zeros)


@pytest.mark.parametrize("wrong", [{"bits": 0}, {"bits": 1, "variant": "prod"}, {"variant": "x"}, {"outlier_bits": 2}])
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=r"bits|variant"):
        TurboQuant(**wrong)
