"""Packing on the GPU against the CPU reference: the same bytes, but where a sum in another order tips a rounding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from oscar_kv import codec
from oscar_kv.codec import PackedBlocks, dequantize_blocks
from oscar_kv.config import OscarConfig
from oscar_kv.kernels.encode import _encode_blocks, encode, encode_blocks, start_rows
from oscar_kv.kernels.records import layout_key
from oscar_kv.kernels.tail import Counters, TailLayer, append, flush
from oscar_kv.layer import LayerState
from oscar_kv.pack import RecordLayout, from_bytes, unpack_codes
from oscar_kv.scale import channel_equalizer
from oscar_kv.timeline import Timeline

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BATCH, HEADS, BLOCKS = 2, 3, 3

DEFAULT = OscarConfig()
EXACT = OscarConfig(token_norm=None, value_fit="minmax")  # no sum whose order could matter
CASES = {
    "default": (DEFAULT, 128, 128, torch.bfloat16),
    "paper": (OscarConfig.paper(), 128, 128, torch.bfloat16),
    "quality": (OscarConfig.quality(), 128, 128, torch.bfloat16),
    "four_bit": (OscarConfig.four_bit(), 128, 128, torch.bfloat16),
    **{f"exact-k{k}v{v}": (replace(EXACT, key_bits=k, value_bits=v), 128, 128, torch.bfloat16)
       for k, v in ((2, 3), (3, 4), (4, 8), (8, 16), (16, 2))},
    **{f"exact-group{g}-{m}": (replace(EXACT, key_group=g, value_group=g, metadata=m), 128, 128, torch.float16)
       for g, m in ((16, "float16"), (32, "bfloat16"), (64, "float8_e4m3"), (128, "float16"))},
    **{f"exact-D{k}-{v}": (EXACT, k, v, torch.bfloat16)
       for k, v in ((16, 32), (64, 64), (80, 80), (96, 112), (192, 128), (256, 256), (512, 512))},
    **{f"exact-{t}".replace("torch.", ""): (EXACT, 128, 128, t) for t in (torch.float16, torch.float32)},
    "exact-unrotated": (replace(EXACT, rotate_keys=False, rotate_values=False), 128, 128, torch.bfloat16),
    "exact-gain": (replace(EXACT, value_gain=1.3), 128, 128, torch.float16),
    "exact-integer-zero": (replace(OscarConfig.paper(), token_norm=None), 128, 128, torch.bfloat16),
    "lstsq-keys": (replace(DEFAULT, key_fit="lstsq", key_group=128, value_group=128), 128, 128, torch.float16),
    "lstsq-8-bit": (replace(DEFAULT, key_fit="lstsq", key_bits=8, value_bits=8), 128, 128, torch.bfloat16),
    "lstsq-unrotated": (replace(DEFAULT, rotate_values=False, value_group=16), 64, 64, torch.bfloat16),
    "max-per-head": (replace(DEFAULT, token_norm="max", scale_scope="head"), 128, 128, torch.bfloat16),
    "mean-abs": (replace(DEFAULT, token_norm="mean_abs", rotate_keys=False), 256, 128, torch.float32),
    **{f"sums-D{k}-{v}-{t}".replace("torch.", ""): (DEFAULT, k, v, t)
       for k, v, t in ((64, 32, torch.bfloat16), (80, 112, torch.float16), (192, 96, torch.float16),
                       (256, 256, torch.bfloat16), (128, 128, torch.float32))},
    "sums-no-norm": (replace(DEFAULT, token_norm=None, key_fit="lstsq"), 128, 128, torch.bfloat16),
    "l2-per-head-bf16": (replace(DEFAULT, scale_scope="head", metadata="bfloat16"), 80, 48, torch.bfloat16),
}  # fmt: skip


def tokens(config: OscarConfig, key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys with unequal channels and tokens, and values with an offset."""
    generator = torch.Generator().manual_seed(key_dim + value_dim)
    shape = (BATCH, HEADS, 128 * BLOCKS)
    keys = torch.randn(*shape, key_dim, generator=generator)
    keys *= torch.randn(key_dim, generator=generator).exp()
    keys *= torch.randn(BATCH, 1, 128 * BLOCKS, 1, generator=generator).mul(0.5).exp()
    values = torch.randn(*shape, value_dim, generator=generator) + 0.3 * torch.randn(value_dim, generator=generator)
    return keys.to(dtype), values.to(dtype)


def equalizer_of(keys: Tensor, config: OscarConfig) -> Tensor | None:
    if config.equalize == 0 or config.key_bits == 16:
        return None
    return channel_equalizer(keys[:, :, :128].float(), config.equalize, config.key_group, config.num_sinks)


def on_gpu(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(DEVICE)


def check(records: Tensor, norms: Tensor | None, reference: PackedBlocks, layout: RecordLayout) -> None:
    """The bytes are those of the reference, or nearly so where sums come in; no code is off by more than one."""
    config = layout.config
    records = records.cpu()
    tipped = 0  # norms that another order of the sum rounded otherwise
    if reference.norms is not None:
        assert norms is not None
        a, b = norms.cpu(), reference.norms
        assert torch.equal(a.isnan(), b.isnan())
        tipped = int((a != b).logical_and(~a.isnan()).sum())
        torch.testing.assert_close(a, b, rtol=2**-7, atol=0.0, equal_nan=True)
        assert tipped <= 1 + 1e-3 * a.numel()
    exact = {"key": config.token_norm in (None, "max") and config.key_fit == "minmax"}
    exact["value"] = config.value_fit == "minmax"
    ours, theirs = layout.split(records), layout.split(reference.records)
    assert torch.equal(ours["units"], theirs["units"])
    for side, dim, bits in (("key", layout.key_dim, config.key_bits), ("value", layout.value_dim, config.value_bits)):
        names = [f"{side}_{part}" for part in ("codes", "scale", "center")]
        total = sum(theirs[name].numel() for name in names)
        differing = 0
        for name in names:
            a, b = ours[name], theirs[name]
            if name != f"{side}_codes" and bits != 16:  # NaN has many encodings
                a, b = (from_bytes(x, layout.metadata_dtype).float() for x in (a, b))
                assert torch.equal(a.isnan(), b.isnan())
            differing += int((a != b).logical_and(a == a).sum())
        # a code that tips during a fit moves scale, center and a code or two of its group
        thresholds = 2**bits / 4  # where a rounding error may tip a code
        limit = 0.0 if exact[side] or bits == 16 else 8 + 1e-4 * (1 + tipped) * thresholds * total
        assert differing <= limit, f"{differing} of {total} bytes of the {side}s differ"
        if bits != 16:
            codes = [
                unpack_codes(x[f"{side}_codes"], bits, dim, tokens_are_rows=side == "key").int() for x in (ours, theirs)
            ]
            assert int((codes[0] - codes[1]).abs().max()) <= 1


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_those_of_the_reference(name: str) -> None:
    config, key_dim, value_dim, dtype = CASES[name]
    keys, values = tokens(*CASES[name])
    layout = RecordLayout(config, key_dim, value_dim, dtype)
    equalizer = equalizer_of(keys, config)
    reference = codec.encode(keys, values, config, equalizer=equalizer, num_sinks=config.num_sinks)
    records, norms = encode(
        keys.to(DEVICE), values.to(DEVICE), config, equalizer=on_gpu(equalizer), num_sinks=config.num_sinks
    )
    check(records, norms, reference, layout)


@pytest.mark.parametrize("config", [DEFAULT, EXACT, replace(DEFAULT, key_fit="lstsq")], ids=["norm", "none", "lstsq"])
def test_what_is_not_finite_spoils_itself_only(config: OscarConfig) -> None:
    keys, values = tokens(config, 128, 128, torch.bfloat16)
    keys[0, 0, 37, 5], keys[1, 1, 70, 5], keys[0, 1, 2, 0] = torch.nan, torch.inf, torch.nan
    values[0, 0, 50, 3], values[1, 1, 60, 3] = torch.nan, -torch.inf
    reference = codec.encode(keys, values, config, num_sinks=4)
    records, norms = encode(keys.to(DEVICE), values.to(DEVICE), config, num_sinks=4)
    layout = RecordLayout(config, 128, 128, torch.bfloat16)
    check(records, norms, reference, layout)
    ours = codec.decode(PackedBlocks(records.cpu(), None if norms is None else norms.cpu()), layout)
    for a, b in zip(ours, codec.decode(reference, layout), strict=True):
        assert torch.equal(a.isnan(), b.isnan())


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_tokens(value: float) -> None:
    keys = torch.full((1, 2, 128, 128), value, dtype=torch.bfloat16)
    reference = codec.encode(keys, keys, DEFAULT)
    records, norms = encode(keys.to(DEVICE), keys.to(DEVICE), DEFAULT)
    check(records, norms, reference, RecordLayout(DEFAULT, 128, 128, torch.bfloat16))


def test_huge_sinks_leave_the_others_alone() -> None:
    for config in (DEFAULT, EXACT):
        keys, values = tokens(config, 128, 128, torch.bfloat16)
        keys[:, :, :4] *= 1e30
        reference = codec.encode(keys, values, config, num_sinks=4)
        records, norms = encode(keys.to(DEVICE), values.to(DEVICE), config, num_sinks=4)
        check(records, norms, reference, RecordLayout(config, 128, 128, torch.bfloat16))


def test_round_numbers_on_the_thresholds() -> None:
    config = replace(EXACT, rotate_keys=False, rotate_values=False, equalize=0.0, key_shrink=1.0, value_shrink=1.0)
    for value_fit in ("minmax", "lstsq"):
        config = replace(config, value_fit=value_fit, metadata="float16")
        keys, values = (x.mul(2).round() for x in tokens(config, 128, 128, torch.bfloat16))
        reference = codec.encode(keys, values, config)
        records, _ = encode(keys.to(DEVICE), values.to(DEVICE), config)
        check(records, None, reference, RecordLayout(config, 128, 128, torch.bfloat16))


def test_strides() -> None:
    keys, values = (x.to(DEVICE) for x in tokens(DEFAULT, 128, 128, torch.bfloat16))
    expected, _ = encode(keys, values, DEFAULT)
    by_token = keys.transpose(1, 2).contiguous().transpose(1, 2)
    fused = torch.cat((keys, values), dim=-1)
    shifted = torch.cat((keys[..., :1], keys), dim=-1)[..., 1:]  # not aligned to 16 bytes
    for k, v in ((by_token, fused[..., 128:]), (fused[..., :128], values), (shifted, values)):
        assert not k.is_contiguous() or not v.is_contiguous()
        assert torch.equal(encode(k, v, DEFAULT)[0], expected)


def test_rows_with_their_own_starts_counts_and_places() -> None:
    keys, values = tokens(DEFAULT, 128, 128, torch.bfloat16)
    layout = RecordLayout(DEFAULT, 128, 128, torch.bfloat16)
    starts, counts, places = [7, 0], [1, 2], [3, 0]
    equalizer = equalizer_of(keys, DEFAULT)
    records = torch.full((BATCH, 5, HEADS, layout.record_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    norms = torch.full((BATCH, 5, 1, 128), -1, dtype=torch.int16, device=DEVICE).view(torch.bfloat16)
    plan = torch.tensor((starts, counts, places), dtype=torch.int32, device=DEVICE)
    encode_blocks(keys.to(DEVICE), values.to(DEVICE), layout, on_gpu(equalizer), 4, plan, records, norms)
    records, norms = records.cpu(), norms.cpu()
    assert equalizer is not None
    for row, (start, count, place) in enumerate(zip(starts, counts, places, strict=True)):
        part = slice(start, start + 128 * count)
        reference = codec.encode(
            keys[row : row + 1, :, part],
            values[row : row + 1, :, part],
            DEFAULT,
            equalizer=equalizer[row : row + 1],
            num_sinks=4 if place == 0 else 0,
        )
        own = slice(place, place + count)
        check(records[row : row + 1, own], norms[row : row + 1, own], reference, layout)
        others = [b for b in range(5) if not place <= b < place + count]
        assert (records[row, others] == 0xFF).all()
        assert (norms[row, others].view(torch.int16) == -1).all()


@pytest.mark.parametrize(("exponent", "query_exponent"), [(0.5, 0.25), (0.3, 0.5), (0.5, 0.0)])
def test_equalizer_and_sinks_of_fresh_rows(exponent: float, query_exponent: float) -> None:
    config = replace(DEFAULT, equalize=exponent, equalize_queries=query_exponent)
    keys, values = tokens(config, 128, 64, torch.bfloat16)
    keys[0, 0, 50, 3] = torch.nan
    keys[0, 1, :128] = 1.0
    layout = RecordLayout(config, 128, 64, torch.bfloat16)
    plan = torch.tensor([[0, 128], [2, 1], [0, 1]], dtype=torch.int32, device=DEVICE)  # row 1 is no fresh one
    sinks = [torch.full((BATCH, HEADS, 4, d), 9.0, dtype=keys.dtype, device=DEVICE) for d in (128, 64)]
    equalizer = torch.full((BATCH, HEADS, 128), 9.0, device=DEVICE)
    power = None
    if query_exponent:
        power = torch.randn(BATCH, HEADS, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).exp()
        power[0, 0, 7], power[0, 1] = 0.0, 0.0
    start_rows(keys.to(DEVICE), values.to(DEVICE), layout, plan, (sinks[0], sinks[1]), equalizer, on_gpu(power))
    expected = channel_equalizer(keys[:, :, :128].float(), exponent, config.key_group, 4, power, query_exponent)
    torch.testing.assert_close(equalizer[0].cpu(), expected[0], rtol=1e-5, atol=0.0)
    for stored, x in zip(sinks, (keys, values), strict=True):
        torch.testing.assert_close(stored[0].cpu(), x[0, :, :4], rtol=0.0, atol=0.0, equal_nan=True)
        assert (stored[1] == 9.0).all()
    assert (equalizer[1] == 9.0).all()


def fresh_cache(
    config: OscarConfig, lengths: list[int], dims: tuple[int, int], steps: int, dtype: torch.dtype, seed: int = 1
) -> dict:
    """A cache of fixed capacity on the GPU and a LayerState, both with a prompt of its own length in each row."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = len(lengths), max(lengths)
    prompt, stream = (
        [torch.randn(rows, HEADS, n, d, generator=generator).to(dtype) for d in dims] for n in (columns, steps)
    )
    valid = torch.arange(columns) >= columns - torch.tensor(lengths).unsqueeze(1)  # padding on the left
    state = LayerState(config, Timeline(), *(x[:, :, :0] for x in prompt))
    state.commit(state.append(*prompt, valid))
    layout = state.layout
    blocks = (max(lengths) + steps) // 128
    tail = tuple(torch.zeros(rows, HEADS, config.residual_length, d, dtype=dtype, device=DEVICE) for d in dims)
    for row, length in enumerate(lengths):
        for store, x in zip(tail, prompt, strict=True):
            store[row, :, :length] = x[row, :, columns - length :].to(DEVICE)
    counters = Counters.zeros(rows, torch.device(DEVICE))
    counters.set(lengths, [0] * rows)
    records = torch.full((rows, blocks, HEADS, layout.record_bytes), 0xFF, dtype=torch.uint8, device=DEVICE)
    norms = torch.zeros(rows, blocks, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    equalizer = torch.zeros(rows, HEADS, dims[0], device=DEVICE)
    sinks = [torch.zeros(rows, HEADS, config.num_sinks, d, dtype=dtype, device=DEVICE) for d in dims]
    store = (records, norms, equalizer, (sinks[0], sinks[1]))
    return {"state": state, "tail": tail, "counters": counters, "stream": stream, "store": store}


def same_as(cache: dict) -> None:
    state, tail, counters = cache["state"], cache["tail"], cache["counters"]
    records, norms, equalizer, sinks = cache["store"]
    assert counters.num_blocks.tolist() == state.num_blocks
    assert counters.lengths.tolist() == state.tail_lengths
    for row, (blocks, length) in enumerate(zip(state.num_blocks, state.tail_lengths, strict=True)):
        assert torch.equal(tail[0][row, :, :length].cpu(), state.tail_keys[row, :, :length])
        assert torch.equal(tail[1][row, :, :length].cpu(), state.tail_values[row, :, :length])
        assert (records[row, blocks:] == 0xFF).all()
        if blocks:
            assert state.norms is not None
            assert state.equalizer is not None
            assert torch.equal(sinks[0][row].cpu(), state.sink_keys[row])
            assert torch.equal(sinks[1][row].cpu(), state.sink_values[row])
            torch.testing.assert_close(equalizer[row].cpu(), state.equalizer[row], rtol=1e-5, atol=0.0)
            one = slice(row, row + 1)
            reference = PackedBlocks(state.records[one, :blocks], state.norms[one, :blocks])
            check(records[one, :blocks], norms[one, :blocks], reference, state.layout)


@pytest.mark.parametrize("residual_length", [128, 384])
def test_append_and_flush_are_those_of_the_layer(residual_length: int) -> None:
    config = replace(DEFAULT, residual_length=residual_length)
    steps = 400 + residual_length
    cache = fresh_cache(config, [30, 77], (64, 32), steps, torch.bfloat16)
    state, tail, counters, store = (cache[name] for name in ("state", "tail", "counters", "store"))
    for step in range(steps):
        keys, values = (x[:, :, step : step + 1] for x in cache["stream"])
        before = list(state.num_blocks)
        state.commit(state.append(keys, values, None))
        append(keys.to(DEVICE), values.to(DEVICE), tail, counters, state.layout)
        flush([TailLayer(tail, counters, *store)], state.layout)
        if state.num_blocks != before or step % 50 == 0:
            same_as(cache)
    assert min(state.num_blocks) >= 3
    same_as(cache)


@pytest.mark.parametrize("residual_length", [128, 384])
def test_layers_pack_together(residual_length: int) -> None:
    """More of them than one launch takes, each of which finds its own bytes and counts."""
    config = replace(DEFAULT, residual_length=residual_length)
    steps = 200 + residual_length
    caches = [fresh_cache(config, [30, 77], (64, 32), steps, torch.bfloat16, seed) for seed in range(17)]
    layout = caches[0]["state"].layout
    layers = [TailLayer(cache["tail"], cache["counters"], *cache["store"]) for cache in caches]
    streams = [[x.to(DEVICE) for x in cache["stream"]] for cache in caches]
    for step in range(steps):
        for layer, stream in zip(layers, streams, strict=True):
            keys, values = (x[:, :, step : step + 1] for x in stream)
            append(keys, values, layer.tail, layer.counters, layout)
        flush(layers, layout)
    for cache in caches:
        state = cache["state"]
        state.commit(state.append(*cache["stream"], None))
        assert min(state.num_blocks) >= 2 if residual_length == 128 else 1
        same_as(cache)


def test_many_rows_pack_in_their_own_steps() -> None:
    lengths = [1 + 37 * row % 127 for row in range(150)]  # more rows than the kernel looks at at a time
    cache = fresh_cache(DEFAULT, lengths, (64, 32), 260, torch.bfloat16)
    state, tail, counters, store = (cache[name] for name in ("state", "tail", "counters", "store"))
    for step in range(260):
        keys, values = (x[:, :, step : step + 1] for x in cache["stream"])
        state.commit(state.append(keys, values, None))
        append(keys.to(DEVICE), values.to(DEVICE), tail, counters, state.layout)
        flush([TailLayer(tail, counters, *store)], state.layout)
    assert {*state.num_blocks} == {2, 3}
    same_as(cache)


def test_records_may_begin_with_a_later_block() -> None:
    """Packing and flushing write the same bytes where the first two blocks of each row are elsewhere."""
    cache = fresh_cache(DEFAULT, [30, 77], (64, 32), 400, torch.bfloat16)
    state, tail, counters, store = (cache[name] for name in ("state", "tail", "counters", "store"))
    records, norms, equalizer, sinks = store
    later = [torch.zeros_like(x[:, 2:]) for x in (records, norms)]
    for step in range(400):
        keys, values = (x[:, :, step : step + 1] for x in cache["stream"])
        first, target = (2, later) if min(state.num_blocks) >= 2 else (0, (records, norms))
        state.commit(state.append(keys, values, None))
        append(keys.to(DEVICE), values.to(DEVICE), tail, counters, state.layout)
        flush([TailLayer(tail, counters, *target, equalizer, sinks, first=first)], state.layout)
    assert state.num_blocks == [3, 3]
    assert (records[:, 2:] == 0xFF).all()
    records[:, 2:], norms[:, 2:] = later
    same_as(cache)


def test_packing_into_records_that_begin_later() -> None:
    keys, values = (x.to(DEVICE) for x in tokens(DEFAULT, 64, 64, torch.bfloat16))
    layout = RecordLayout(DEFAULT, 64, 64, torch.bfloat16)
    rows, heads, length = keys.shape[:3]
    whole, part = (
        (
            torch.zeros(rows, blocks, heads, layout.record_bytes, dtype=torch.uint8, device=DEVICE),
            torch.zeros(rows, blocks, 1, 128, dtype=torch.bfloat16, device=DEVICE),
        )
        for blocks in (5 + length // 128, length // 128 + 2)
    )
    plan = torch.tensor([[0] * rows, [length // 128] * rows, [3 + row % 2 for row in range(rows)]], dtype=torch.int32)
    for (records, norms), first in ((whole, 0), (part, 3)):
        encode_blocks(keys, values, layout, None, 4, plan.to(DEVICE), records, norms, first)
    assert whole[0].any()
    for x, y in zip(whole, part, strict=True):
        assert torch.equal(x[:, 3:], y)


def test_appending_several_tokens_at_once() -> None:
    cache = fresh_cache(DEFAULT, [100, 27], (64, 32), 60, torch.float16)
    state, tail, counters, store = (cache[name] for name in ("state", "tail", "counters", "store"))
    for first, last in pairwise((0, 5, 6, 20, 28, 60)):
        keys, values = (x[:, :, first:last] for x in cache["stream"])
        if max(counters.lengths.tolist()) + last - first > 128:  # beyond the capacity, as a cache would refuse
            continue
        state.commit(state.append(keys, values, None))
        append(keys.to(DEVICE), values.to(DEVICE), tail, counters, state.layout)
        flush([TailLayer(tail, counters, *store)], state.layout)
        same_as(cache)
    assert state.num_blocks == [1, 0]


def test_cuda_graph() -> None:
    cache = fresh_cache(DEFAULT, [30, 77], (64, 32), 150, torch.bfloat16)
    state, tail, counters, store = (cache[name] for name in ("state", "tail", "counters", "store"))
    keys, values = (x[:, :, :1].to(DEVICE) for x in cache["stream"])
    scratch = fresh_cache(DEFAULT, [1, 1], (64, 32), 150, torch.bfloat16)
    append(keys, values, scratch["tail"], scratch["counters"], state.layout)  # compiles
    flush([TailLayer(scratch["tail"], scratch["counters"], *scratch["store"])], state.layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(keys, values, tail, counters, state.layout)
        flush([TailLayer(tail, counters, *store)], state.layout)
    for step in range(150):
        new = [x[:, :, step : step + 1] for x in cache["stream"]]
        state.commit(state.append(*new, None))
        keys.copy_(new[0])
        values.copy_(new[1])
        graph.replay()
    same_as(cache)
    assert state.num_blocks == [1, 1]


def test_operator_is_well_formed() -> None:
    keys, values = (x.to(DEVICE) for x in tokens(DEFAULT, 64, 64, torch.bfloat16))
    layout = RecordLayout(DEFAULT, 64, 64, torch.bfloat16)
    records = torch.zeros(BATCH, BLOCKS, HEADS, layout.record_bytes, dtype=torch.uint8, device=DEVICE)
    norms = torch.zeros(BATCH, BLOCKS, 1, 128, dtype=torch.bfloat16, device=DEVICE)
    plan = torch.tensor([[0, 0], [1, 1], [0, 0]], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(_encode_blocks, (keys, values, None, plan, records, norms, layout_key(layout), 0))


def test_norms_must_be_there_if_and_only_if_keys_are_scaled() -> None:
    layout = RecordLayout(DEFAULT, 64, 64, torch.bfloat16)
    x = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device=DEVICE)
    plan = torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    records = torch.zeros(1, 1, 1, layout.record_bytes, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="norms"):
        encode_blocks(x, x, layout, None, 0, plan, records, None)


def test_decoded_values_are_those_of_the_reference() -> None:
    keys, values = tokens(DEFAULT, 128, 128, torch.bfloat16)
    reference = codec.encode(keys, values, DEFAULT)
    records, norms = encode(keys.to(DEVICE), values.to(DEVICE), DEFAULT)
    assert norms is not None
    layout = RecordLayout(DEFAULT, 128, 128, torch.bfloat16)
    ours = dequantize_blocks(PackedBlocks(records.cpu(), norms.cpu()), layout)
    for a, b in zip(ours, dequantize_blocks(reference, layout), strict=True):
        assert (a != b).float().mean() < 1e-3
