"""Attention of many queries in merged ranges, against a naive fp64 softmax over decoded keys and values."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import models
from oscar_kv import prefill
from oscar_kv.attention import attend
from oscar_kv.codec import PackedBlocks
from oscar_kv.config import OscarConfig
from oscar_kv.pack import RecordLayout
from oscar_kv.prefill import prefill_attention, range_blocks
from oscar_kv.view import KVView
from test_attention import Case, _case, _naive, _random

TOLERANCE = 2e-5  # fp32 sums of a few hundred numbers of size 1
RELATIVE = {torch.bfloat16: 1e-2, torch.float16: 1e-3}  # of the norm of the output
DEFAULT = OscarConfig()
CONFIGS = {
    "default": DEFAULT,
    "quality": OscarConfig.quality(),
    "four_bit": OscarConfig.four_bit(),
    "paper": OscarConfig.paper(),
    "eight_bit_head": OscarConfig(key_bits=8, value_bits=8, scale_scope="head", token_norm="max", metadata="bfloat16"),
    "no_norm": replace(DEFAULT, token_norm=None, equalize=0.0),
    "no_rotation": replace(DEFAULT, rotate_keys=False, rotate_values=False),
    "many_sinks": replace(DEFAULT, num_sinks=37),
    "keys_16": replace(DEFAULT, key_bits=16),
    "values_16": replace(DEFAULT, key_bits=4, value_bits=16),
}
DIMS = [(64, 64), (80, 80), (128, 128), (256, 256), (512, 512), (192, 128), (64, 96)]


def _limit(monkeypatch: pytest.MonkeyPatch, case: Case, blocks: int) -> None:
    """Let the workspace hold this many blocks of one row."""
    layout, heads = case.view.layout, case.view.recent[0].shape[1]
    block = 128 * heads * (layout.key_dim + layout.value_dim) * prefill._ELEMENT_BYTES
    monkeypatch.setattr(prefill, "_WORKSPACE_BYTES", blocks * block)
    assert range_blocks(layout, 1, heads) == blocks


def _prefill(query: Tensor, view: KVView, device: str = "cpu", **kwargs: Any) -> Tensor:
    def to(x: Any) -> Any:
        return tuple(to(y) for y in x) if isinstance(x, tuple) else x.to(device) if isinstance(x, Tensor) else x

    assert view.blocks is not None
    return prefill_attention(
        to(query),
        view.layout,
        [PackedBlocks(to(view.blocks.records), to(view.blocks.norms))],
        to(view.num_blocks),
        to(view.recent),
        to(view.lengths - 128 * view.num_blocks),
        equalizer=to(view.equalizer),
        sinks=to(view.sinks),
        **{"scaling": query.shape[-1] ** -0.5, **{k: to(x) for k, x in kwargs.items()}},
    ).cpu()


def _check(query: Tensor, case: Case, device: str = "cpu", **kwargs: Any) -> None:
    out = _prefill(query, case.view, device, **kwargs)
    truth = _naive(query, case, **{"scaling": query.shape[-1] ** -0.5, **kwargs})
    assert out.dtype == query.dtype
    if query.dtype == torch.float32:
        torch.testing.assert_close(out.double(), truth, rtol=0, atol=TOLERANCE)
    else:
        for row, own in zip(out.double(), truth, strict=True):
            assert (row - own).norm() <= RELATIVE[query.dtype] * own.norm()


DEVICES = [
    pytest.param("cpu", torch.float32, id="cpu-float32"),
    pytest.param("cpu", torch.bfloat16, id="cpu-bfloat16"),
    pytest.param("cpu", torch.float16, id="cpu-float16"),
    pytest.param("cuda", torch.bfloat16, id="cuda-bfloat16", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, id="cuda-float16", marks=pytest.mark.gpu),
]
everywhere = pytest.mark.parametrize(("device", "dtype"), DEVICES)


@everywhere
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_different_length(name: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row without a block, one with a tail, one whose tail is the queries only; up to three ranges are merged."""
    q_len = 21
    case = _case([0, 5, 3], [q_len + 7, 640 + q_len + 90, 384 + q_len], config=CONFIGS[name], dtype=dtype)
    _limit(monkeypatch, case, 2)
    _check(_random(3, 4, q_len, 64, seed=99).to(dtype), case, device)


@everywhere
def test_rows_of_equal_length_share_a_range(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case([4, 4, 4, 1, 4], [580, 580, 580, 196, 580], dtype=dtype)
    _limit(monkeypatch, case, 3)  # one block of each of three rows
    _check(_random(5, 4, 40, 64, seed=99).to(dtype), case, device)


@everywhere
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("sink_logits", [False, True])
def test_grouped_queries(group: int, sink_logits: bool, device: str, dtype: torch.dtype) -> None:
    case = _case([2, 1], [256 + 99, 128 + 40], dtype=dtype)
    logits = torch.linspace(-3.0, 9.0, 2 * group) if sink_logits else None
    _check(_random(2, 2 * group, 33, 64, seed=99).to(dtype), case, device, sink_logits=logits, scaling=0.2)


@everywhere
@pytest.mark.parametrize(("key_dim", "value_dim"), DIMS)
def test_head_dims(
    key_dim: int, value_dim: int, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _case([3], [384 + 50], key_dim=key_dim, value_dim=value_dim, dtype=dtype)
    _limit(monkeypatch, case, 1)
    _check(_random(1, 4, 35, key_dim, seed=99).to(dtype), case, device)


@everywhere
def test_scores_far_apart(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores in the hundreds: which range holds the largest one differs from query to query."""
    case = _case([6], [768 + 64], dtype=dtype)
    _limit(monkeypatch, case, 1)
    query = 8 * _random(1, 4, 64, 64, seed=99).to(dtype)
    out, truth = _prefill(query, case.view, device).double(), _naive(query, case, scaling=0.125)
    assert out.isfinite().all()
    # scores of this size are off by their own rounding, which an exponential turns into a factor
    bound = 1e-3 if dtype == torch.float32 else 30 * RELATIVE[dtype]
    assert (out - truth).norm() <= bound * truth.norm()


@everywhere
@pytest.mark.parametrize("side", ["left", "right", "middle", "all"])
def test_padding_among_the_queries(side: str, device: str, dtype: torch.dtype) -> None:
    """Output 0 for padding, and for the others what the row without padding gives."""
    case = _case([2, 0, 1], [256 + 60, 40, 128 + 33], dtype=dtype)
    full = _random(3, 4, 30, 64, seed=99).to(dtype)
    tokens = torch.ones(3, 30, dtype=torch.bool)
    padding = {"left": slice(0, 11), "right": slice(11, 30), "middle": slice(5, 9), "all": slice(0, 30)}[side]
    tokens[1, padding] = False
    tokens[2, 1:30:3] = False
    out = _prefill(full, case.view, device, tokens=tokens)
    assert (out.transpose(1, 2)[~tokens] == 0).all()
    for b in range(3):
        if tokens[b].any():
            query = full[b : b + 1, :, tokens[b]]
            one = Case(case.row(b), case.keys[b : b + 1], case.values[b : b + 1])
            truth = _naive(query, one, scaling=0.125)
            bound = TOLERANCE * 100 if dtype == torch.float32 else RELATIVE[dtype] * truth.norm()
            assert (out[b : b + 1, :, tokens[b]].double() - truth).norm() <= bound


@everywhere
def test_whatever_lies_beyond_a_row_is_ignored(device: str, dtype: torch.dtype) -> None:
    """Unused blocks are 0xFF bytes with norm NaN, unused slots of the tail NaN, sinks of a row without blocks NaN."""
    case = _case([0, 4, 1], [50, 512 + 60, 128 + 99], garbage=math.nan, dtype=dtype)
    assert _prefill(_random(3, 4, 25, 64, seed=99).to(dtype), case.view, device).isfinite().all()


@everywhere
def test_a_nan_key_stays_in_its_own_row(device: str, dtype: torch.dtype) -> None:
    for slot in (0, 200, 258):  # a sink, packed, in the tail
        case = _case([2, 2], [300, 300], nan_keys={1: slot}, dtype=dtype)
        out = _prefill(_random(2, 4, 25, 64, seed=99).to(dtype), case.view, device)
        assert out[0].isfinite().all()
        assert out[1].isnan().all()


@everywhere
def test_later_tokens_are_hidden(device: str, dtype: torch.dtype) -> None:
    case = _case([1], [128 + 40], dtype=dtype)
    query = _random(1, 4, 30, 64, seed=99).to(dtype)
    before = _prefill(query, case.view, device)
    case.view.recent[0][:, :, 25:] = 100.0
    case.view.recent[1][:, :, 25:] = 100.0  # from query 15 on
    after = _prefill(query, case.view, device)
    assert torch.equal(after[:, :, :15], before[:, :, :15])
    assert (after[:, :, 15:] != before[:, :, 15:]).any(-1).all()


class _Memory(TorchDispatchMode):
    """Bytes of the storages made inside that live at the same time, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.alive: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known | self.alive.keys():
                storage = x.untyped_storage()
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.now = sum(self.alive.values())
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, address: int) -> None:
        del self.alive[address]


def _peak(case: Case, query: Tensor) -> int:
    with _Memory() as memory:
        _prefill(query, case.view)
    return memory.peak


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (192, 128)])
def test_the_workspace_does_not_grow_with_the_context(
    name: str, key_dim: int, value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is as large as allowed, beside what the queries themselves take."""
    dims: dict[str, Any] = {"key_dim": key_dim, "value_dim": value_dim, "dtype": torch.bfloat16}
    short, long = (_case([blocks], [128 * blocks + 20], config=CONFIGS[name], **dims) for blocks in (4, 12))
    query = _random(1, 2, 20, key_dim, seed=99).bfloat16()
    _limit(monkeypatch, short, 4)
    peaks = [_peak(case, query) for case in (short, long)]
    assert peaks[1] <= 1.02 * peaks[0] + 2 * 4 * 128 * 2 * (key_dim + value_dim) * 2
    of_queries = 40 * query.numel()
    assert peaks[1] <= prefill._WORKSPACE_BYTES + of_queries
    assert peaks[1] >= prefill._WORKSPACE_BYTES // 3  # it is what is measured here


def test_ranges_fit_the_workspace() -> None:
    for heads, dims in ((8, 128), (2, 64), (128, 512)):
        layout = RecordLayout(DEFAULT, dims, dims, torch.bfloat16)
        for rows in (1, 3, 64, 10**6):
            blocks = range_blocks(layout, rows, heads)
            size = blocks * rows * heads * 128 * 2 * dims * prefill._ELEMENT_BYTES
            assert blocks == 1 or size <= prefill._WORKSPACE_BYTES


def test_a_cpu_keeps_the_reference() -> None:
    """So that evaluation on a CPU computes in fp32."""
    case = _case([1], [128 + 30], dtype=torch.bfloat16)
    query = _random(1, 4, 25, 64, seed=99).bfloat16()
    assert not prefill.supported(query, case.view.layout)
    truth = _naive(query, case, scaling=0.125)
    out = attend(query, case.view, scaling=0.125)
    bound = torch.finfo(torch.bfloat16).eps / 2 * truth.abs() + TOLERANCE
    assert ((out.double() - truth).abs() <= bound).all()


@pytest.mark.gpu
def test_a_gpu_fuses_in_16_bit_only() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        query = torch.zeros(1, 1, 1, 64, dtype=dtype, device="cuda")
        assert prefill.supported(query, RecordLayout(DEFAULT, 64, 64, dtype)) == (dtype != torch.float32)


@everywhere
@pytest.mark.parametrize("name", ["default", "four_bit", "paper"])
def test_a_model_whose_prompt_comes_in_chunks(
    name: str, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A left-padded batch of 1100, 700 and 30 tokens: the logits are those of the reference but for rounding.

    One layer, since rounding tips codes of the layers above it.
    """
    ids, mask = (x.to(device) for x in models.tokens(1100, 700, 30))
    model = models.make_model(attention="oscar", dtype=dtype, head_dim=64, num_hidden_layers=1).to(device)
    monkeypatch.setattr(prefill, "_WORKSPACE_BYTES", 3 * 128 * 2 * 128 * prefill._ELEMENT_BYTES)
    passes: list[int] = []  # that were fused

    def logits(fused: bool) -> Tensor:
        def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            passes.append(query.shape[2])
            return prefill_attention(query, *args, **kwargs)

        monkeypatch.setattr(prefill, "supported", lambda query, layout: fused)
        monkeypatch.setattr(prefill, "prefill_attention", attention)
        out = models.passes(model, ids, models.oscar_cache(model, CONFIGS[name]), [300], mask)
        return out[mask.bool()].double()

    reference = logits(False)
    assert not passes
    fused = logits(True)
    assert passes == [300, 300, 200]
    bound = 1e-5 if dtype == torch.float32 else 2 * RELATIVE[dtype]
    assert (fused - reference).norm() <= bound * reference.norm()
    assert not torch.equal(fused, reference)
