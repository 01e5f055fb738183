"""Shared by all tests: one hypothesis profile, one form of decode attention, and the Hadamard matrix written out."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from oscar_kv.kernels import decode_launch

# The same examples on every run, and no time limit for one: the machines that run the tests are shared.
settings.register_profile("oscar", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("oscar")

collect_ignore = [] if find_spec("lm_eval") else ["test_tasks.py"]  # the GPU tests run without the extra "eval"


@pytest.fixture
def same_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode attention in one form: which one is fastest depends on a cache's room, and the order of sums on that."""
    monkeypatch.setattr(decode_launch, "short", lambda *args: None)


@pytest.fixture(scope="session")
def hadamard() -> Callable[[int], Tensor]:
    """The rotation in fp64: Sylvester's matrix by Kronecker products, block-diagonal where dim is no power of two."""

    def build(dim: int) -> Tensor:
        blocks = dim
        while blocks % 2 == 0:
            blocks //= 2
        matrix = torch.ones(1, 1, dtype=torch.float64)
        while matrix.shape[0] < dim // blocks:
            matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
        matrix = matrix / matrix.shape[0] ** 0.5
        return torch.kron(torch.eye(blocks, dtype=torch.float64), matrix)

    return build
