"""Together's OSCAR: its calibration against the plain projections of a model, its quantizer against its formula."""

import pytest
import torch

from baseline_cases import EXACT, assert_same_codes, fill, round_to_nearest, states, steps_of
from models import make_model, tokens
from oscar_kv.baselines import BaselineCache, Rotations, TogetherOSCAR, calibrate

N = 200


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


def turned(x, theta):
    """RoPE by complex numbers: (heads, tokens, dim) float64."""
    dim = x.shape[-1]
    angle = torch.outer(torch.arange(x.shape[1]).double(), theta ** (-torch.arange(0, dim, 2).double() / dim))
    z = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((z.real, z.imag), dim=-1)


@torch.no_grad()
def test_calibration_diagonalizes_the_moments_that_the_paper_names(model, hadamard):
    """First layer, from its weights in float64: R = U H with U the eigenvectors."""
    ids, _ = tokens(N, seed=8)
    found = calibrate(model, ids)
    layer = model.model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(ids))[0].double()
    attention = layer.self_attn
    q, k, v = ((x @ p.weight.double().T).unflatten(-1, (-1, 32)).transpose(0, 1)
               for p in (attention.q_proj, attention.k_proj, attention.v_proj))  # fmt: skip
    theta = model.config.rope_parameters["rope_theta"]
    q, k = turned(q, theta), turned(k, theta)
    of_queries, of_values = (torch.zeros(32, 32, dtype=torch.float64) for _ in range(2))
    for head in range(2):
        group = q[2 * head : 2 * head + 2].reshape(-1, 32)  # GQA: two query heads per KV head
        moment = sum(torch.outer(y, y) for y in group) / len(group)
        of_queries += moment / 2
        weight = torch.stack([y @ moment @ y for y in k[head]])
        weight = weight / weight.mean()
        of_values += sum(w * torch.outer(y, y) for w, y in zip(weight, v[head], strict=True)) / N / 2
    for moment, rotation in ((of_queries, found.keys[0]), (of_values, found.values[0])):
        u = rotation.double() @ hadamard(32)
        torch.testing.assert_close(u @ u.T, torch.eye(32, dtype=torch.float64), rtol=0, atol=1e-5)
        diagonal = u.T @ moment @ u
        assert (diagonal - diagonal.diagonal().diag()).abs().max() < 1e-4 * moment.trace()
        torch.testing.assert_close(diagonal.diagonal(), torch.linalg.eigvalsh(moment), rtol=1e-3, atol=1e-4)


def test_the_model_is_given_back_as_it_was(model):
    ids, _ = tokens(N)
    before = model.config._attn_implementation
    calibrate(model, ids)
    assert model.config._attn_implementation == before


def test_quantizer(hadamard):
    keys, values = states(500)
    r = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(0))).Q
    method = TogetherOSCAR(group=32, rotations=Rotations({0: r}, {0: r.T}), **EXACT)
    cache, *found = fill(method, keys, values, [129, 1, 70])
    packed = slice(64, 244)  # 64 sinks, 256 in the window
    for x, y, rotation, index in ((keys, found[0], r, 61), (values, found[1], r.T, 58)):  # int(.96 D), int(.92 D)
        assert torch.equal(y[:, :, :64], x[:, :, :64])
        assert torch.equal(y[:, :, 244:], x[:, :, 244:])
        z = x[:, :, packed].double() @ rotation.double()
        limit = z.abs().sort(-1).values[..., index : index + 1]
        z = z.clamp(-limit, limit)
        assert_same_codes(y[:, :, packed].double() @ rotation.double(), round_to_nearest(z, 2, 32), steps_of(z, 2, 32))
    assert cache.packed_bits() == 2 + 64 / 32
    numbers = 2 * 2 * 64  # sides, heads, channels
    assert cache.memory_bytes()["sinks"] == 64 * numbers * 4
    assert cache.memory_bytes()["tail"] == 256 * numbers * 4


def test_rotations_survive_a_file(model, tmp_path):
    ids, _ = tokens(N)
    made = calibrate(model, ids)
    made.save(tmp_path / "rotations.safetensors")
    loaded = Rotations.load(tmp_path / "rotations.safetensors")
    for own, other in ((made.keys, loaded.keys), (made.values, loaded.values)):
        assert own.keys() == other.keys() == {0, 1}
        assert all(torch.equal(own[i], other[i]) for i in own)


def test_it_must_be_calibrated(model):
    with pytest.raises(ValueError, match="calibrated"):
        BaselineCache(model.config, TogetherOSCAR())
