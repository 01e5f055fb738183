"""The rotation is the block-diagonal Hadamard matrix, and a row's result does not depend on its batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from oscar_kv.rotate import hadamard_block, rotate

DIMS = [1, 3, 16, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256, 512]
BLOCKS = {1: 1, 3: 1, 16: 16, 48: 16, 64: 64, 72: 8, 80: 16, 96: 32, 112: 16, 128: 128}
BLOCKS |= {160: 32, 192: 64, 256: 256, 512: 512}


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", DIMS)
def test_block_is_the_largest_power_of_two(dim: int) -> None:
    assert hadamard_block(dim) == BLOCKS[dim]


@pytest.mark.parametrize("dim", [0, -4])
def test_dimension_without_elements_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        hadamard_block(dim)


@pytest.mark.parametrize("dim", DIMS)
def test_matrix_is_the_kronecker_product(hadamard: Callable[[int], Tensor], dim: int) -> None:
    truth = hadamard(dim)
    h = rotate(torch.eye(dim, dtype=torch.float64))
    # sums of one 1 and zeros, times block ** -0.5: exact but for the last bit of that factor
    torch.testing.assert_close(h, truth, rtol=4e-16, atol=0)
    assert torch.equal(h, h.T)
    # dim products of numbers 1 / sqrt(block), each within 1 ulp: at most dim * 2^-52 / block off
    torch.testing.assert_close(h @ h.T, torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-14)
    # in fp32 it is the same matrix
    torch.testing.assert_close(rotate(torch.eye(dim)).double(), truth, rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_of_vectors(hadamard: Callable[[int], Tensor], dim: int) -> None:
    x = _random(2, 3, 5, dim, seed=dim)
    x[0, 0, 0] *= 1e4
    truth = x.double() @ hadamard(dim)
    # log2(block) additions and one product, each 2^-24 of a partial sum that is at most sqrt(block) * |x|
    bound = 12 * 2.0**-24 * x.double().norm(dim=-1, keepdim=True)
    assert ((rotate(x).double() - truth).abs() <= bound).all()
    assert ((rotate(rotate(x)).double() - x.double()).abs() <= 2 * bound).all()  # its own inverse


@pytest.mark.parametrize("dim", DIMS)
def test_inner_products_are_kept(dim: int) -> None:
    q, k = _random(7, dim, seed=1).double(), _random(9, dim, seed=2).double()
    # fp64 sums over at most 512 numbers of size 1
    torch.testing.assert_close(rotate(q) @ rotate(k).T, q @ k.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", DIMS)
def test_result_does_not_depend_on_the_batch(dim: int) -> None:
    x = _random(3, 2, 37, dim, seed=3)
    together = rotate(x)
    for b in range(3):
        assert torch.equal(rotate(x[b]), together[b])
        assert torch.equal(rotate(x[b, 1, 5]), together[b, 1, 5])
    assert torch.equal(rotate(x[:, :, 4:9]), together[:, :, 4:9])
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(rotate(strided), together)


def test_nan_stays_in_its_vector() -> None:
    x = _random(4, 64)
    clean = rotate(x)
    x[2, 5] = torch.nan
    out = rotate(x)
    assert out[2].isnan().all()
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])


def test_dtype_and_empty_input_are_kept() -> None:
    assert rotate(torch.zeros(0, 64)).shape == (0, 64)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert rotate(torch.ones(2, 16, dtype=dtype)).dtype == dtype
    # 16 ones have inner product 16 with the first row and 0 with the others; 16 / sqrt(16) = 4 exactly
    assert rotate(torch.ones(16)).tolist() == [4.0] + [0.0] * 15
