"""``bench kernels`` on a GPU: what it times is what it says. Needs a CUDA GPU, but no package of the command line."""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from oscar_kv import codec
from oscar_kv.bench import decode, encode, kernels
from oscar_kv.bench.measurement import Shape, append, read_runs
from oscar_kv.bench.timing import COLD, input_sets
from oscar_kv.codec import PackedBlocks

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("preset", kernels.PRESETS)
def test_what_is_timed_is_attention_over_the_packed_tokens(preset: str) -> None:
    torch.manual_seed(0)
    keys, values = (decode.normal(1, 2, 1024, 128, device=DEVICE) for _ in range(2))
    query = decode.normal(2, 8, 1, 128, device=DEVICE)
    for packed in decode.packed_sets(Shape(2, 1024, 8, 2), kernels.PRESETS[preset], keys, values, count=2):
        got = packed.attend(query).transpose(1, 2).double()
        blocks, layout = PackedBlocks(packed.records, packed.norms), replace(packed.layout, dtype=torch.float32)
        dense = (x.double() for x in codec.decode(blocks, layout, equalizer=packed.equalizer))
        exact = F.scaled_dot_product_attention(query.double(), *dense, enable_gqa=True)
        assert ((got - exact).norm() / exact.norm()).item() < 4e-3
        given = (x.repeat(2, 1, 1, 1).double() for x in (keys, values))
        unpacked = F.scaled_dot_product_attention(query.double(), *given, enable_gqa=True)
        assert F.cosine_similarity(got.flatten(), unpacked.flatten(), dim=0) > 0.75


@pytest.mark.parametrize("backend", decode.BACKENDS)
@pytest.mark.parametrize("form", ["gqa", "folded"])
def test_bf16_attends_to_the_same_tokens(backend: str, form: str) -> None:
    torch.manual_seed(0)
    query, keys, values = (decode.normal(2, h, n, 128, device=DEVICE) for h, n in ((8, 1), (2, 1024), (2, 1024)))
    try:
        got = decode.sdpa(query, keys, values, decode.BACKENDS[backend], form)
    except RuntimeError as error:
        pytest.skip(f"{backend} does not run here: {error}")
    exact = F.scaled_dot_product_attention(query.double(), keys.double(), values.double(), enable_gqa=True)
    assert ((got.reshape(query.shape) - exact).norm() / exact.norm()).item() < 1e-2


def test_packing_is_timed_on_inputs_that_are_packed() -> None:
    candidates = list(encode.candidates(Shape(1, 1024, 0, 2), kernels.PRESETS, ("oscar",), DEVICE))
    assert [candidate.preset for candidate in candidates] == list(kernels.PRESETS)
    for candidate in candidates:
        call = candidate.calls[1]
        assert isinstance(call, partial)
        keys, values, layout, equalizer, *_, records, norms = call.args
        records.fill_(0xFF)
        call()
        got = codec.decode(PackedBlocks(records, norms), layout, equalizer=equalizer)
        for given, packed in zip((keys, values), got, strict=True):
            x, y = given[:, :, 4:].float(), packed[:, :, 4:].float()  # without sinks
            assert ((y - x).norm() / x.norm()).item() < 0.6


def test_input_sets_exceed_the_cache() -> None:
    l2 = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    for size in (100_000, l2 // 3, 10 * l2):
        assert input_sets(size, DEVICE) * size >= COLD * l2
        assert input_sets(size, DEVICE) >= 2


def test_a_small_run_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for found in kernels.measure(kernels.problems(tuple(kernels.IMPLS), (1,), (1024,), ((8, 2),)), rounds=3):
        append(path, found)
    (run,) = read_runs(path)
    packed = {(m.op, m.preset): m for m in run if m.impl == "oscar"}
    assert set(packed) == {(op, preset) for op in kernels.IMPLS for preset in kernels.PRESETS}
    assert {m.impl for m in run} >= {"sdpa-flash", "copy", "copy-packed"}
    assert {m.form for m in run if m.impl.startswith("sdpa")} <= {"gqa", "folded"}
    for m in run:
        assert 0 < m.p10_us <= m.median_us <= m.p90_us < 1e5
        assert 0 < m.of_limit < 1.5
        assert m.copy_gbps > 100
    # codes and metadata, 3 bits; units of 16 blocks; norms, one per token; query and output
    expected = 1024 * 2 * 256 * 3 // 8 + 16 * 16 + 1024 * 2 + 2 * 8 * 128 * 2
    assert packed["decode", "published"].bytes == expected
    flash = next(m for m in run if m.impl == "sdpa-flash")
    assert flash.bytes == 1024 * 2 * 256 * 2 + 2 * 8 * 128 * 2
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(row[name] for row in rows for name in ("gpu", "torch", "cuda", "cuda_core", "command", "date"))
