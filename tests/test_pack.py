"""The byte layout, bit by bit: written once more as plain loops, from the format's description."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscar_kv.codec import encode
from oscar_kv.config import OscarConfig
from oscar_kv.pack import (
    SECTIONS,
    RecordLayout,
    from_bytes,
    order_metadata,
    order_norms,
    pack_codes,
    to_bytes,
    unorder_metadata,
    unorder_norms,
    unpack_codes,
)

BITS = [2, 3, 4, 8]
ORDER = ["key_codes", "key_scale", "key_center", "units", "value_codes", "value_scale", "value_center"]


def _codes(*shape: int, bits: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _expected_plane(codes: np.ndarray, width: int, tokens_are_rows: bool) -> bytes:
    """One bit plane of (128, D) codes below 2 ** width, as little-endian 32-bit words."""
    channel_tiles = codes.shape[1] // 16
    shape = {1: (), 2: (), 4: (2,), 8: (4,)}[width] + (channel_tiles, 32, 2 if width == 1 else 4)
    words = np.zeros(shape, dtype=np.uint64)
    for p in range(8):
        for tile in range(channel_tiles):
            for lane in range(32):
                gid, tid = lane // 4, lane % 4
                for r in range(4):
                    for h in range(2):
                        row, column = gid + 8 * (r & 1), 2 * tid + h + 8 * (r >> 1)
                        token, channel = (row, column) if tokens_are_rows else (column, row)
                        code = int(codes[16 * p + token, 16 * tile + channel])
                        if width == 1:
                            index, bit = (tile, lane, r >> 1), 16 * h + 2 * p + (r & 1)
                        elif width == 2:
                            index, bit = (tile, lane, r), 16 * h + 2 * p
                        elif width == 4:
                            index, bit = (p >> 2, tile, lane, r), 16 * h + 4 * (p & 3)
                        else:
                            index, bit = (p >> 1, tile, lane, r), 16 * h + 8 * (p & 1)
                        words[index] |= np.uint64(code << bit)
    return words.astype("<u4").tobytes()


def _expected(codes: np.ndarray, bits: int, tokens_are_rows: bool) -> bytes:
    if bits == 3:  # the two low bits, then the high one
        return _expected_plane(codes & 3, 2, tokens_are_rows) + _expected_plane(codes >> 2, 1, tokens_are_rows)
    return _expected_plane(codes, bits, tokens_are_rows)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tokens_are_rows", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("dim", [16, 48, 80])
def test_every_code_is_where_the_layout_says(bits: int, tokens_are_rows: bool, dim: int) -> None:
    codes = _codes(128, dim, bits=bits, seed=dim)
    packed = pack_codes(codes, bits, tokens_are_rows=tokens_are_rows)
    assert packed.dtype == torch.uint8
    assert packed.numpy().tobytes() == _expected(codes.numpy(), bits, tokens_are_rows)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tokens_are_rows", [True, False], ids=["keys", "values"])
def test_one_code_sets_its_own_bits_only(bits: int, tokens_are_rows: bool) -> None:
    """Each place of a tile owns ``bits`` bits: together they fill the bytes and none overlap."""
    dim = 16
    codes = torch.zeros(128 * dim, 128 * dim, dtype=torch.uint8)
    codes.fill_diagonal_(2**bits - 1)
    packed = pack_codes(codes.view(-1, 128, dim), bits, tokens_are_rows=tokens_are_rows)
    set_bits = torch.tensor([bin(i).count("1") for i in range(256)], dtype=torch.uint8)[packed.long()]
    assert (set_bits.sum(-1) == bits).all()
    assert (packed.to(torch.int32).sum(0) == 255).all()


@given(
    st.sampled_from(BITS), st.integers(1, 32), st.booleans(), st.lists(st.integers(1, 3), max_size=3), st.integers(0)
)
def test_round_trip(bits: int, tiles: int, tokens_are_rows: bool, lead: list[int], seed: int) -> None:
    dim = 16 * tiles
    codes = _codes(*lead, 128, dim, bits=bits, seed=seed % 2**63)
    packed = pack_codes(codes, bits, tokens_are_rows=tokens_are_rows)
    assert packed.shape == (*lead, 128 * dim * bits // 8)
    assert torch.equal(unpack_codes(packed, bits, dim, tokens_are_rows=tokens_are_rows), codes)


@given(st.sampled_from(BITS), st.integers(1, 6), st.booleans(), st.integers(0, 2**62))
def test_round_trip_of_any_bytes(bits: int, tiles: int, tokens_are_rows: bool, seed: int) -> None:
    """Every byte pattern is a packing: no bit is left unread."""
    packed = _codes(2, 256 * tiles * bits, bits=8, seed=seed)
    codes = unpack_codes(packed, bits, 16 * tiles, tokens_are_rows=tokens_are_rows)
    assert int(codes.max()) < 2**bits
    assert torch.equal(pack_codes(codes, bits, tokens_are_rows=tokens_are_rows), packed)


def test_packing_strided_codes() -> None:
    codes = _codes(2, 64, 128, bits=4)
    for rows in (True, False):
        packed = pack_codes(codes.transpose(1, 2), 4, tokens_are_rows=rows)
        assert torch.equal(packed, pack_codes(codes.transpose(1, 2).contiguous(), 4, tokens_are_rows=rows))
        wide = torch.full((2, packed.shape[-1] + 9), 255, dtype=torch.uint8)
        wide[:, 5:-4] = packed
        assert torch.equal(unpack_codes(wide[:, 5:-4], 4, 64, tokens_are_rows=rows), codes.transpose(1, 2))


def _metadata_place(i: int) -> int:
    """Where number i of a tile of 16 is: its column is 2 * tid + h + 8 * (r >> 1), stored as (tid, r >> 1, h)."""
    high, tid, h = i >> 3, (i >> 1) & 3, i & 1
    return 4 * tid + 2 * high + h


@pytest.mark.parametrize("tiles", [1, 3, 8])
@pytest.mark.parametrize("groups", [1, 2, 5])
def test_metadata_order(tiles: int, groups: int) -> None:
    n = 16 * tiles
    x = torch.arange(2 * groups * n).view(2, groups, n)
    ordered = order_metadata(x)
    for b in range(2):
        for g in range(groups):
            for i in range(n):
                place = g * n + 16 * (i // 16) + _metadata_place(i % 16)
                assert ordered[b, place] == x[b, g, i]
    assert torch.equal(unorder_metadata(ordered, groups), x)


def test_norm_order() -> None:
    x = torch.arange(256).view(2, 128)
    ordered = order_norms(x)
    for b in range(2):
        for token in range(128):
            p, row = token // 16, token % 16  # row = gid + 8 * (r & 1)
            assert ordered[b, 16 * (row % 8) + 2 * p + row // 8] == x[b, token]
    assert torch.equal(unorder_norms(ordered), x)


GROUPS = [16, 32, 64, 128]


@given(
    st.sampled_from([2, 3, 4, 8, 16]),
    st.sampled_from([2, 3, 4, 8, 16]),
    st.sampled_from(GROUPS),
    st.sampled_from([None, *GROUPS]),
    st.integers(1, 32),
    st.integers(1, 32),
    st.sampled_from(["float16", "bfloat16", "float8_e4m3"]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=200)
def test_sizes_and_offsets(
    key_bits: int,
    value_bits: int,
    key_group: int,
    value_group: int | None,
    key_tiles: int,
    value_tiles: int,
    metadata: str,
    dtype: torch.dtype,
) -> None:
    key_dim, value_dim = 16 * key_tiles, 16 * value_tiles
    if value_group is not None and value_dim % value_group:
        value_group = None
    config = OscarConfig(
        key_bits=key_bits,  # type: ignore[arg-type]
        value_bits=value_bits,  # type: ignore[arg-type]
        key_group=key_group,
        value_group=value_group,
        metadata=metadata,  # type: ignore[arg-type]
    )
    layout = RecordLayout(config, key_dim, value_dim, dtype)
    item = 1 if metadata == "float8_e4m3" else 2
    width = 32 if dtype == torch.float32 else 16
    group = value_group or next(g for g in (64, 32, 16) if value_dim % g == 0)
    key_params = 0 if key_bits == 16 else 128 // key_group * key_dim * item
    value_params = 0 if value_bits == 16 else 128 * value_dim // group * item
    expected = {
        "key_codes": 128 * key_dim * (width if key_bits == 16 else key_bits) // 8,
        "key_scale": key_params,
        "key_center": key_params,
        "units": 16,
        "value_codes": 128 * value_dim * (width if value_bits == 16 else value_bits) // 8,
        "value_scale": value_params,
        "value_center": value_params,
    }
    assert layout.sizes == expected
    assert list(layout.sizes) == list(layout.offsets) == list(SECTIONS) == ORDER
    end = 0
    for name in ORDER:
        assert layout.offsets[name] == end
        assert layout.sizes[name] % 16 == 0
        end += layout.sizes[name]
    assert layout.record_bytes == end
    assert layout.record_bytes % 16 == 0


def test_known_record_sizes() -> None:
    """Worked out by hand for head dimension 128."""
    size = {
        "default": RecordLayout(OscarConfig(), 128, 128, torch.bfloat16).record_bytes,
        "quality": RecordLayout(OscarConfig.quality(), 128, 128, torch.bfloat16).record_bytes,
        "four": RecordLayout(OscarConfig.four_bit(), 128, 128, torch.bfloat16).record_bytes,
        "paper": RecordLayout(OscarConfig.paper(), 128, 128, torch.bfloat16).record_bytes,
    }
    assert size == {
        "default": 4096 + 4096 + 2 * 512 + 2 * 256 + 16,
        "quality": 6144 + 4096 + 2 * 512 + 2 * 256 + 16,
        "four": 8192 + 8192 + 2 * 1024 + 2 * 1024 + 16,
        "paper": 4096 + 4096 + 2 * 1024 + 2 * 1024 + 16,
    }


def test_join_and_split_are_inverse() -> None:
    layout = RecordLayout(OscarConfig.quality(), 80, 48, torch.float16)
    records = _codes(2, 3, layout.record_bytes, bits=8)
    sections = layout.split(records)
    for name in ORDER:
        start = layout.offsets[name]
        assert torch.equal(sections[name], records[..., start : start + layout.sizes[name]])
    assert torch.equal(layout.join(sections), records)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_bytes_are_little_endian_and_read_back_from_any_offset(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, -2.5], [0.0, 448.0]]).to(dtype)
    stored = to_bytes(x.t()).view(2, -1)
    one = {
        torch.float32: struct.pack("<f", 1.0),
        torch.float16: struct.pack("<e", 1.0),
        torch.bfloat16: struct.pack("<f", 1.0)[2:],
        torch.float8_e4m3fn: bytes([0x38]),
    }[dtype]
    assert stored[0].numpy().tobytes()[: dtype.itemsize] == one
    shifted = torch.zeros(2, stored.shape[-1] + 3, dtype=torch.uint8)
    shifted[:, 3:] = stored
    assert torch.equal(from_bytes(shifted[:, 3:], dtype).float(), x.t().float())


@pytest.mark.parametrize("metadata", ["float16", "float8_e4m3"])
def test_a_whole_record_byte_by_byte(metadata: str) -> None:
    """From numbers whose scales, centers and codes are known: a grid of multiples of 2, nothing rotated or scaled."""
    config = OscarConfig(
        rotate_keys=False,
        rotate_values=False,
        token_norm=None,
        equalize=0.0,
        value_fit="minmax",
        key_shrink=1.0,
        value_shrink=1.0,
        metadata=metadata,  # type: ignore[arg-type]
        key_group=64,
        value_group=16,
        key_bits=2,
        value_bits=4,
    )
    key_codes, value_codes = _codes(128, 32, bits=2, seed=1), _codes(128, 48, bits=4, seed=2)
    key_codes[0::64], key_codes[1::64] = 0, 3  # so that each group spans its whole grid
    value_codes[:, 0::16], value_codes[:, 1::16] = 0, 15
    key_step = 2.0 ** torch.randint(-3, 3, (2, 32), generator=torch.Generator().manual_seed(3))  # (group, channel)
    value_step = 2.0 ** torch.randint(-3, 3, (128, 3), generator=torch.Generator().manual_seed(4))
    keys = (key_codes.float() - 1.5) * key_step.repeat_interleave(64, 0)
    values = (value_codes.float() - 7.5) * value_step.repeat_interleave(16, 1)
    record = encode(keys[None, None], values[None, None], config).records
    layout = RecordLayout(config, 32, 48, torch.float32)
    assert record.shape == (1, 1, 1, layout.record_bytes)
    data = record[0, 0, 0].numpy().tobytes()

    def section(name: str) -> bytes:
        return data[layout.offsets[name] :][: layout.sizes[name]]

    assert section("key_codes") == _expected(key_codes.numpy(), 2, True)
    assert section("value_codes") == _expected(value_codes.numpy(), 4, False)
    # the largest scale is 4, so the unit is 8, or 8 / 256 where the stored numbers go up to 256
    unit = 8.0 if metadata == "float16" else 8.0 / 256
    assert section("units") == struct.pack("<ff8x", unit, unit)

    def stored(x: float) -> bytes:
        if metadata == "float16":
            return struct.pack("<e", x / unit)
        exponent = round(np.log2(x / unit))  # 1 sign, 4 exponent (bias 7) and 3 mantissa bits
        return bytes([(exponent + 7) << 3])

    width = 2 if metadata == "float16" else 1
    key_scale = bytearray(len(section("key_scale")))
    for group in range(2):
        for c in range(32):
            place = width * (32 * group + 16 * (c // 16) + _metadata_place(c % 16))
            key_scale[place : place + width] = stored(key_step[group, c].item())
    assert section("key_scale") == bytes(key_scale)
    value_scale = bytearray(len(section("value_scale")))
    for group in range(3):
        for t in range(128):
            place = width * (128 * group + 16 * (t // 16) + _metadata_place(t % 16))
            value_scale[place : place + width] = stored(value_step[t, group].item())
    assert section("value_scale") == bytes(value_scale)
    assert section("key_center") == bytes(len(key_scale))
    assert section("value_center") == bytes(len(value_scale))
