"""encode and decode: error bounds worked out again in fp64, independence of the batch, and numbers that go wrong."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscar_kv.codec import PackedBlocks, decode, dequantize_blocks, encode
from oscar_kv.config import OscarConfig
from oscar_kv.pack import RecordLayout, from_bytes, unorder_metadata
from oscar_kv.scale import channel_equalizer

Hadamard = Callable[[int], Tensor]

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float8_e4m3": torch.float8_e4m3fn}
# One choice of everything that changes which code runs; the property test below goes through their mixtures.
VARIANTS = {
    "default": OscarConfig(),
    "quality": OscarConfig.quality(),
    "four_bit": OscarConfig.four_bit(),
    "paper": OscarConfig.paper(),
    "eight_bit_head": OscarConfig(key_bits=8, value_bits=8, scale_scope="head", token_norm="max", metadata="bfloat16"),
    "no_norm": OscarConfig(token_norm=None, key_fit="lstsq", key_group=16, value_group=16),
    "no_rotation": OscarConfig(rotate_keys=False, rotate_values=False, token_norm="mean_abs", key_group=128),
    "keys_16": OscarConfig(key_bits=16, value_bits=3),
    "values_16": OscarConfig(key_bits=4, value_bits=16),
}


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _kv(
    batch: int = 2, heads: int = 2, tokens: int = 256, key_dim: int = 64, value_dim: int = 64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Keys with offset and outlier channels and tokens of different size, as models make them, and values."""
    keys = _random(batch, heads, tokens, key_dim, seed=seed) + 2 * _random(1, heads, 1, key_dim, seed=seed + 1)
    keys[..., ::13] *= 8
    keys *= 2 ** _random(batch, 1, tokens, 1, seed=seed + 2)
    return keys, _random(batch, heads, tokens, value_dim, seed=seed + 3)


def _equalizer_of(keys: Tensor, config: OscarConfig, num_sinks: int = 0) -> Tensor | None:
    if not config.equalize or config.key_bits == 16:
        return None
    return channel_equalizer(keys[:, :, :128].float(), config.equalize, config.key_group, num_sinks)


def _norms(blocks: PackedBlocks) -> Tensor | None:
    """Token norms (batch, blocks, 1 or heads, 128) in natural order: token 16 p + 8 r + g is stored at (g, p, r)."""
    if blocks.norms is None:
        return None
    return blocks.norms[..., [16 * (t % 8) + 2 * (t // 16) + t // 8 % 2 for t in range(128)]]


def _layout(keys: Tensor, values: Tensor, config: OscarConfig) -> RecordLayout:
    return RecordLayout(config, keys.shape[-1], values.shape[-1], keys.dtype)


def _round_trip(
    keys: Tensor, values: Tensor, config: OscarConfig, equalizer: Tensor | None = None, num_sinks: int = 0
) -> tuple[Tensor, Tensor]:
    blocks = encode(keys, values, config, equalizer=equalizer, num_sinks=num_sinks)
    return decode(blocks, _layout(keys, values, config), equalizer=equalizer)


def _same(a: PackedBlocks, b: PackedBlocks, at: Any = slice(None)) -> bool:
    """Whether b holds the same bits as part ``at`` of a (its batch and blocks)."""
    if not torch.equal(a.records[at], b.records):
        return False
    if a.norms is None or b.norms is None:
        return a.norms is b.norms
    return torch.equal(a.norms[at].view(torch.int16), b.norms.view(torch.int16))


# ---- the error bound


def _key_groups(x: Tensor, group: int) -> Tensor:
    """(batch, heads, tokens, dim) -> (batch, blocks, heads, token group, channel, token in group)."""
    b, h, t, d = x.shape
    return x.reshape(b, h, t // 128, 128 // group, group, d).permute(0, 2, 1, 3, 5, 4)


def _value_groups(x: Tensor, group: int) -> Tensor:
    """(batch, heads, tokens, dim) -> (batch, blocks, heads, token, channel group, channel in group)."""
    b, h, t, d = x.shape
    return x.reshape(b, h, t // 128, 128, d // group, group).transpose(1, 2)


@dataclasses.dataclass
class _Truth:
    """What must hold for the error of decoded groups, from the exact numbers alone.

    A number inside its exact grid is within half a step, one that the shrunk range left out within half of what the
    range lost; an integer zero point moves the grid by up to half a step more. Stored scale and center are off by
    half a unit in the last place (relative, or absolute below the dtype's smallest normal number): the ends of the
    grid move by the center's error and ``levels / 2`` times the scale's.
    """

    x: Tensor  # fp64 (..., groups, n), records are all dimensions but the last three
    keep: Tensor  # bool, broadcastable to x
    bits: int
    fit: str
    shrink: float
    integer_zero: bool
    dtype: torch.dtype

    def check(self, decoded: Tensor, stored: tuple[Tensor, Tensor, Tensor]) -> None:
        """``stored``: scale and center as stored, and the unit, all (..., groups) or broadcastable."""
        levels = 2**self.bits - 1
        low = torch.where(self.keep, self.x, torch.inf).amin(-1)
        high = torch.where(self.keep, self.x, -torch.inf).amax(-1)
        empty = low > high
        low, high = torch.where(empty, 0.0, low), torch.where(empty, 0.0, high)
        span = high - low
        scale, center = span * self.shrink / levels, (low + high) / 2
        if self.integer_zero:  # it moves the center by at most half a step
            center = center.abs() + scale / 2
        # rotations, divisions and sums in fp32: a few dozen times 2^-24 of the largest number around
        noise = 2e-6 * self.x.abs().amax((-3, -2, -1), keepdim=True)
        error = (decoded - self.x).abs()
        s, c, unit = (x.double() for x in stored)
        nearest = (self._nearest(s * unit, c * unit) - self.x).abs()  # on the grid as it is stored
        assert (error <= nearest + 2 * noise).all()
        if self.fit == "minmax":
            # sinks may or may not count for the unit
            all_low, all_high = self.x.amin(-1), self.x.amax(-1)
            largest = torch.maximum((all_high - all_low) / levels, (all_low + all_high).abs() / 2)
            largest = torch.maximum(largest, center.abs()).amax((-2, -1), keepdim=True)
            own_unit = 2.0 ** (largest.clamp(min=1e-300).log2().floor() + 1 - self._top())
            scale_error, center_error = self._rounding(scale, own_unit), self._rounding(center, own_unit)
            bound = torch.maximum(scale / 2 + scale_error / 2, (1 - self.shrink) * span / 2)
            bound = bound + center_error + levels / 2 * scale_error + (scale / 2 if self.integer_zero else 0)
            assert (error <= bound.unsqueeze(-1) + noise)[self.keep.expand_as(error)].all()
            return
        # Least squares: its squared error is at most that of the range that it started from
        start = self._nearest(scale, center)
        moved = self._rounding(c * unit, unit) + levels / 2 * self._rounding(s * unit, unit)
        count = self.keep.expand_as(error).sum(-1).clamp(min=1)
        rms, start_rms = (
            (torch.where(self.keep, e, 0.0).square().sum(-1) / count).sqrt() for e in (error, start - self.x)
        )
        assert (rms <= start_rms + moved + noise.squeeze(-1)).all()

    def _nearest(self, scale: Tensor, center: Tensor) -> Tensor:
        levels, step = 2**self.bits - 1, torch.where(scale > 0, scale, 1.0).unsqueeze(-1)
        codes = ((self.x - center.unsqueeze(-1)) / step + levels / 2).round().clamp(0, levels) - levels / 2
        return center.unsqueeze(-1) + codes * scale.unsqueeze(-1)

    def _top(self) -> int:
        return 8 if self.dtype == torch.float8_e4m3fn else 0

    def _rounding(self, x: Tensor, unit: Tensor) -> Tensor:
        info = torch.finfo(self.dtype)
        smallest = 2 * info.smallest_normal * info.eps * unit  # times 2: the largest may be just below a power of two
        return 0.5 * torch.maximum(1.001 * info.eps * x.abs(), smallest)


def _stored(blocks: PackedBlocks, layout: RecordLayout, side: str) -> tuple[Tensor, Tensor, Tensor]:
    sections = layout.split(blocks.records)
    groups = 128 // layout.config.key_group if side == "key" else layout.value_dim // layout.value_group
    scale, center = (
        unorder_metadata(from_bytes(sections[f"{side}_{name}"], layout.metadata_dtype), groups).float()
        for name in ("scale", "center")
    )
    if side == "value":
        scale, center = scale.transpose(-1, -2), center.transpose(-1, -2)
    unit = from_bytes(sections["units"], torch.float32)[..., 0 if side == "key" else 1]
    return scale, center, unit[..., None, None]


def _check_error(
    keys: Tensor, values: Tensor, config: OscarConfig, equalizer: Tensor | None, num_sinks: int, hadamard: Hadamard
) -> None:
    blocks = encode(keys, values, config, equalizer=equalizer, num_sinks=num_sinks)
    layout = _layout(keys, values, config)
    decoded_keys, decoded_values = decode(blocks, layout, equalizer=equalizer)
    integer_zero = config.zero_point == "int"
    dtype = DTYPES[config.metadata]
    keep = torch.ones(keys.shape[:3], dtype=torch.bool).unsqueeze(-1)
    keep[:, :, :num_sinks] = False
    if config.key_bits == 16:
        assert torch.equal(decoded_keys, keys)
    else:

        def normalized(x: Tensor) -> Tensor:
            x = x.double()
            if equalizer is not None:
                x = x / equalizer.double().unsqueeze(2)
            if config.rotate_keys:
                x = x @ hadamard(x.shape[-1])
            norms = _norms(blocks)
            return x if norms is None else x / norms.double().transpose(1, 2).flatten(2).unsqueeze(-1)

        truth = _Truth(
            _key_groups(normalized(keys), config.key_group),
            _key_groups(keep, config.key_group),
            config.key_bits,
            config.key_fit,
            config.key_shrink,
            integer_zero,
            dtype,
        )
        truth.check(_key_groups(normalized(decoded_keys), config.key_group), _stored(blocks, layout, "key"))
    if config.value_bits == 16:
        assert torch.equal(decoded_values, values)
    else:
        turn = hadamard(values.shape[-1]) if config.rotate_values else torch.eye(values.shape[-1], dtype=torch.float64)
        group = config.resolve_value_group(values.shape[-1])
        truth = _Truth(
            _value_groups(values.double() @ turn, group),
            _value_groups(keep, 1),
            config.value_bits,
            config.value_fit,
            config.value_shrink,
            integer_zero,
            dtype,
        )
        scale, center, unit = (x.double() for x in _stored(blocks, layout, "value"))
        middle = (center * unit).unsqueeze(-1)  # from which the gain has moved what the codes were chosen for
        moved = _value_groups(decoded_values.double() @ turn, group)
        truth.check(middle + (moved - middle) / config.value_gain, (scale / config.value_gain, center, unit))


@st.composite
def _configs(draw: st.DrawFn) -> OscarConfig:
    bits = st.sampled_from([2, 3, 4, 8, 16])
    integer = draw(st.booleans())
    fits = st.just("minmax") if integer else st.sampled_from(["minmax", "lstsq"])
    return OscarConfig(
        key_bits=draw(bits),  # type: ignore[arg-type]
        value_bits=draw(bits),  # type: ignore[arg-type]
        key_group=draw(st.sampled_from([16, 32, 64, 128])),
        value_group=draw(st.sampled_from([None, 16, 32, 64, 128])),
        rotate_keys=draw(st.booleans()),
        rotate_values=draw(st.booleans()),
        token_norm=draw(st.sampled_from([None, "l2", "max", "mean_abs"])),  # type: ignore[arg-type]
        scale_scope=draw(st.sampled_from(["all", "head"])),  # type: ignore[arg-type]
        equalize=draw(st.sampled_from([0.0, 0.5, 1.0])),
        metadata=draw(st.sampled_from(list(DTYPES)[: 2 if integer else 3])),  # type: ignore[arg-type]
        zero_point="int" if integer else "float",
        key_fit=draw(fits),  # type: ignore[arg-type]
        value_fit=draw(fits),  # type: ignore[arg-type]
        key_shrink=draw(st.sampled_from([0.8, 0.9, 1.0])),
        value_shrink=draw(st.sampled_from([0.85, 1.0])),
        value_gain=1.0 if integer else draw(st.sampled_from([1.0, 1.1, 2.0])),
    )


@given(_configs(), st.integers(1, 12), st.integers(1, 12), st.sampled_from([0, 4]), st.integers(0, 2**30))
@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
def test_error_is_what_the_step_size_allows(
    hadamard: Hadamard, config: OscarConfig, key_tiles: int, value_tiles: int, num_sinks: int, seed: int
) -> None:
    group = config.value_group or 16
    value_dim = max(16 * value_tiles // group, 1) * group
    keys, values = _kv(1, 2, 256, 16 * key_tiles, value_dim, seed=seed)
    equalizer = _equalizer_of(keys, config, num_sinks)
    _check_error(keys, values, config, equalizer, num_sinks, hadamard)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(192, 128), (80, 80), (256, 64), (512, 512)])
def test_error_at_the_head_dims_of_models(hadamard: Hadamard, variant: str, key_dim: int, value_dim: int) -> None:
    config = VARIANTS[variant]
    if value_dim % (config.value_group or 16):
        config = dataclasses.replace(config, value_group=None)
    keys, values = _kv(1, 2, 128, key_dim, value_dim, seed=key_dim)
    _check_error(keys, values, config, _equalizer_of(keys, config, 4), 4, hadamard)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_undoes_scaling_rotation_and_equalization(hadamard: Hadamard, variant: str) -> None:
    """decode is dequantize_blocks, which attention reads, and then the plain inverse of the other steps."""
    config = VARIANTS[variant]
    keys, values = _kv(key_dim=48, value_dim=96)
    equalizer = _equalizer_of(keys, config)
    blocks = encode(keys, values, config, equalizer=equalizer)
    layout = _layout(keys, values, config)
    k, v = (x.double() for x in dequantize_blocks(blocks, layout))
    if config.key_bits != 16:
        norms = _norms(blocks)
        if norms is not None:
            k = k * norms.double().transpose(1, 2).flatten(2).unsqueeze(-1)
        k = k @ hadamard(48) if config.rotate_keys else k
        k = k * equalizer.double().unsqueeze(2) if equalizer is not None else k
    v = v @ hadamard(96) if config.rotate_values and config.value_bits != 16 else v
    for decoded, truth in zip(decode(blocks, layout, equalizer=equalizer), (k, v), strict=True):
        # log2(96) additions and three products in fp32
        torch.testing.assert_close(decoded.double(), truth, rtol=1e-5, atol=1e-6 * truth.abs().max().item())


@pytest.mark.parametrize("dim", [64, 128])
def test_values_of_quality_keep_their_size_on_average(dim: int) -> None:
    """Of normal numbers: the slope of what is decoded over what was encoded, in fp64, is 1; without the gain, below."""
    keys, values = _kv(tokens=1024, value_dim=dim)

    def slope(gain: float) -> float:
        config = dataclasses.replace(OscarConfig.quality(), value_gain=gain)
        decoded, exact = _round_trip(keys, values, config)[1].double(), values.double()
        return float((decoded * exact).sum() / exact.square().sum())

    assert slope(OscarConfig.quality().value_gain) == pytest.approx(1.0, abs=0.02)
    assert slope(1.0) < 0.93


# ---- the same bits whatever is encoded along


def _check_independence(config: OscarConfig, key_dim: int, value_dim: int) -> None:
    keys, values = _kv(3, 2, 384, key_dim, value_dim)
    equalizer = _equalizer_of(keys, config, 4)
    together = encode(keys, values, config, equalizer=equalizer, num_sinks=4)
    for b in range(3):
        row = slice(b, b + 1)
        own = None if equalizer is None else equalizer[row]
        assert _same(together, encode(keys[row], values[row], config, equalizer=own, num_sinks=4), row)
        for j in range(3):
            at = (row, slice(None), slice(128 * j, 128 * j + 128))
            one = encode(keys[at], values[at], config, equalizer=own, num_sinks=0 if j else 4)
            assert _same(together, one, (row, slice(j, j + 1)))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values)]  # as models hand them over
    assert _same(together, encode(*strided, config, equalizer=equalizer, num_sinks=4))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (80, 96), (128, 32)])
def test_bytes_do_not_depend_on_batch_or_blocks(variant: str, key_dim: int, value_dim: int) -> None:
    _check_independence(VARIANTS[variant], key_dim, value_dim)


@pytest.mark.parametrize("variant", ["default", "no_norm"])
def test_bytes_do_not_depend_on_the_batch_with_threads(variant: str) -> None:
    """More numbers than torch gives to one thread: who works out what must not show."""
    keys, values = _kv(3, 2, 256)
    one_thread = encode(keys, values, VARIANTS[variant])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert _same(one_thread, encode(keys, values, VARIANTS[variant]))
        assert _same(one_thread, encode(keys[1:2], values[1:2], VARIANTS[variant]), slice(1, 2))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decoded_numbers_do_not_depend_on_batch_or_blocks(variant: str) -> None:
    config = VARIANTS[variant]
    keys, values = _kv(2, 2, 384, 80, 96)
    equalizer = _equalizer_of(keys, config)
    blocks = encode(keys, values, config, equalizer=equalizer)
    together = decode(blocks, _layout(keys, values, config), equalizer=equalizer)
    norms = None if blocks.norms is None else blocks.norms[1:, 2:]
    last = PackedBlocks(blocks.records[1:, 2:], norms)
    own = None if equalizer is None else equalizer[1:]
    for a, b in zip(together, decode(last, _layout(keys, values, config), equalizer=own), strict=True):
        assert torch.equal(a[1:, :, 256:], b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["default", "paper", "eight_bit_head", "no_norm"])
def test_16_bit_models_get_the_fp32_result_rounded(variant: str, dtype: torch.dtype) -> None:
    config = VARIANTS[variant]
    keys, values = (x.to(dtype) for x in _kv())
    equalizer = _equalizer_of(keys, config)
    half = encode(keys, values, config, equalizer=equalizer)
    full = encode(keys.float(), values.float(), config, equalizer=equalizer)
    assert _same(half, full)
    exact = decode(full, _layout(keys.float(), values.float(), config), equalizer=equalizer)
    for a, b in zip(decode(half, _layout(keys, values, config), equalizer=equalizer), exact, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, b.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", ["key", "value", "both"])
def test_sides_of_16_bits_are_kept_bit_for_bit(side: str, dtype: torch.dtype) -> None:
    config = OscarConfig(key_bits=2 if side == "value" else 16, value_bits=2 if side == "key" else 16)
    integers = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    info = torch.iinfo(integers)
    generator = torch.Generator().manual_seed(0)
    # any finite bit pattern: huge, denormal and negative zero included
    raw = torch.randint(info.min, info.max, (2, 2, 2, 256, 48), generator=generator, dtype=integers).view(dtype)
    raw = torch.where(raw.isfinite(), raw, -0.0)
    keys, values = raw[0], raw[1]
    if side == "value":
        keys = _random(2, 2, 256, 48).to(dtype)
    if side == "key":
        values = _random(2, 2, 256, 48).to(dtype)
    blocks = encode(keys, values, config)
    assert (blocks.norms is None) == (side != "value")
    k, v = decode(blocks, _layout(keys, values, config))
    for kept, decoded, original in ((side != "value", k, keys), (side != "key", v, values)):
        if kept:
            assert torch.equal(decoded.view(integers), original.view(integers))
        else:
            assert decoded.isfinite().all()


def test_equalizer_of_ones_changes_nothing() -> None:
    keys, values = _kv()
    assert _same(
        encode(keys, values, OscarConfig()), encode(keys, values, OscarConfig(), equalizer=torch.ones(2, 2, 64))
    )


def test_only_whole_blocks_are_taken() -> None:
    keys, values = _kv(tokens=256)
    for k, v in ((keys[:, :, :200], values[:, :, :200]), (keys, values[:, :, :128]), (keys[:1], values)):
        with pytest.raises(ValueError, match="128"):
            encode(k, v, OscarConfig())


# ---- the published method


def _published(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups along the last dimension, fp64: asymmetric 2 bits with an integer zero point. Returns x^, s and z s."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    s = (high - low) / 3
    z = torch.round(-low / s)
    code = torch.clamp(torch.round(x / s) + z, 0, 3)
    return s * (code - z), s, z * s


def _check_against_published(ours: Tensor, x: Tensor) -> None:
    """Rotated, scaled groups: the same numbers up to the fp16 rounding of scale and center."""
    published, s, zero = _published(x)
    diff = (ours - published).abs()
    # ours = (q - 1.5) s + c with c = 1.5 s - z s, and s and c each rounded to within 2^-11
    rounding = 2.0**-11 * (1.5 * s + (1.5 * s - zero).abs()) * 1.01 + 2e-6 * x.abs().amax()
    same_code = diff < s / 2
    assert (diff <= rounding)[same_code].all()
    # a code may only tip over where the number is that close to the middle between two
    assert same_code.double().mean() > 0.99
    assert (diff <= s + rounding).all()
    to_middle = ((x / s - 0.5) - torch.round(x / s - 0.5)).abs() * s
    assert (to_middle <= 2 * rounding)[~same_code].all()


@pytest.mark.parametrize(("heads", "dim"), [(2, 128), (4, 64), (1, 96)])
def test_paper_preset_is_the_published_formula(hadamard: Hadamard, heads: int, dim: int) -> None:
    config = OscarConfig.paper()
    keys, values = _kv(1, heads, 256, dim, dim, seed=dim)
    blocks = encode(keys, values, config)
    k, v = (x.double() for x in decode(blocks, _layout(keys, values, config)))
    h = hadamard(dim)

    turned = keys.double() @ h
    norms = _norms(blocks)
    assert norms is not None
    norm = norms.double().flatten().view(1, 1, 256, 1)
    _check_against_published(_key_groups(k @ h / norm, 32), _key_groups(turned / norm, 32))
    _check_against_published(_value_groups(v @ h, 32), _value_groups(values.double() @ h, 32))

    # The published norm is the l2 length, exact; ours is the RMS in bf16. The keys are as good.
    length = turned.square().sum((1, 3), keepdim=True).sqrt()
    torch.testing.assert_close(norm * (heads * dim) ** 0.5, length, rtol=2.0**-8 * 1.001, atol=0)
    published = _published(_key_groups(turned / length, 32))[0] * _key_groups(length.expand_as(turned), 32)
    original = _key_groups(turned, 32)
    error, published_error = ((x - original).square().mean().item() for x in (_key_groups(k @ h, 32), published))
    # norms that are off by 2^-9 on average move a few codes either way
    assert abs(error / published_error - 1) < 0.02


# ---- numbers of any size


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.endswith("_16")])
@pytest.mark.parametrize("exponent", [-50, -20, -1, 3, 17, 50])
def test_powers_of_two_scale_through_exactly(variant: str, exponent: int) -> None:
    """No step knows the size of its numbers: 2^17 times larger keys and values decode to 2^17 times larger ones."""
    config = VARIANTS[variant]
    keys, values = _kv(1, 2, 128, 80, 64)
    factor = 2.0**exponent
    small = _round_trip(keys, values, config)
    large = _round_trip(keys * factor, values * factor, config)
    for a, b in zip(small, large, strict=True):
        assert torch.equal(a * factor, b)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("size", [1e5, 3e6, 1e15])
def test_bf16_beyond_fp16_stays_finite(variant: str, size: float) -> None:
    config = VARIANTS[variant]
    keys, values = ((x * size).bfloat16() for x in _kv(1, 2, 128))
    keys[0, 0, 5, 3] = 8 * size
    assert keys.abs().max() > 65504
    equalizer = _equalizer_of(keys, config)
    for decoded, original in zip(_round_trip(keys, values, config, equalizer), (keys, values), strict=True):
        assert decoded.isfinite().all()
        relative = (decoded.double() - original.double()).norm() / original.double().norm()
        assert relative < 0.6  # 2-bit codes are this coarse; what overflows would be off by 1 or more


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_beyond_1e30_stay_finite(variant: str) -> None:
    keys, values = (x.bfloat16() for x in _kv(1, 2, 128))
    decoded = _round_trip(keys, (values.float() * 1e30).bfloat16(), VARIANTS[variant])[1]
    assert decoded.isfinite().all()
    assert (decoded.double() / 1e30 - values.double()).norm() < 0.6 * values.double().norm()


def _degenerate() -> Iterator[tuple[str, Tensor]]:
    base = _random(1, 2, 128, 64, seed=9)
    yield "zero", torch.zeros_like(base)
    yield "constant", torch.full_like(base, 3.5)
    one_hot = torch.zeros_like(base)
    one_hot[..., 7] = 100.0
    yield "one-hot channel", one_hot
    one_hot = torch.zeros_like(base)
    one_hot[:, :, 70, 7] = 100.0
    yield "one number", one_hot
    channels = base.clone()
    channels[..., 3] = 0.0
    channels[..., 4] = -2.0
    channels[..., 5] *= 1e-41  # denormal
    channels[..., 6] *= 1e-44
    yield "constant and denormal channels", channels
    yield "denormal", base * 1e-40
    yield "smallest", torch.full_like(base, 1e-45)
    tokens = base.clone()
    tokens[:, :, 10] = 0.0
    tokens[:, 0, 11] = 0.0
    tokens[:, :, 12] *= 1e-42
    yield "zero and denormal tokens", tokens
    yield "alternating", torch.ones_like(base) * torch.tensor([1.0, -1.0]).repeat(32)


DEGENERATE = dict(_degenerate())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_numbers_stay_finite(hadamard: Hadamard, variant: str, case: str) -> None:
    config, x = VARIANTS[variant], DEGENERATE[case]
    equalizer = _equalizer_of(x, config)
    keys, values = _round_trip(x, x, config, equalizer)
    for decoded in (keys, values):
        assert decoded.isfinite().all()
        if case == "zero":
            assert (decoded == 0).all()
        # a grid of 2 bits over the range of a group is never off by more than the range, which is at most sqrt(D)
        # times the largest number after a rotation, and again as much on the way back
        assert decoded.abs().max() <= 64 * x.abs().max() + 1e-30
    if config.token_norm is not None and config.key_bits != 16:
        assert (keys[x.eq(0).all(-1).all(1, keepdim=True).expand(1, 2, 128)] == 0).all()  # tokens without anything


# ---- what is not finite


@pytest.mark.parametrize("variant", [name for name, c in VARIANTS.items() if c.key_bits != 16 and c.token_norm])
@pytest.mark.parametrize("token", [0, 1, 31, 45, 127])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_key_token_that_is_not_finite_spoils_only_itself(variant: str, token: int, bad: float) -> None:
    config = VARIANTS[variant]
    keys, values = _kv(1, 2, 256)
    spoiled = keys.clone()
    spoiled[0, 1, token, 17] = bad
    blocks = encode(spoiled, values, config)
    layout = _layout(keys, values, config)
    k, v = decode(blocks, layout)

    norms = _norms(blocks)
    assert norms is not None
    at = torch.zeros(norms.shape, dtype=torch.bool)
    at[0, 0, 0 if config.scale_scope == "all" else 1, token] = True
    assert torch.equal(norms.isnan(), at)
    hit = [0, 1] if config.scale_scope == "all" else [1]
    nan = torch.zeros(1, 2, 256, dtype=torch.bool)
    nan[0, hit, token] = True
    assert k[nan].isnan().all()
    assert k[~nan].isfinite().all()
    assert torch.equal(v, decode(encode(keys, values, config), layout)[1])  # values do not notice

    # The others have the very bits of a run in which the token is left out of the statistics. A run can leave out
    # its first token (a sink), so bring this one to the front: groups keep their members, and their ranges.
    group = config.key_group
    first = token // group * group
    own = [token, *(t for t in range(first, first + group) if t != token)]
    order = torch.tensor(own + [t for t in range(256) if not first <= t < first + group])
    without = torch.empty_like(keys)
    without[:, :, order] = decode(encode(keys[:, :, order], values[:, :, order], config, num_sinks=1), layout)[0]
    for h in hit:
        rest = torch.arange(256) != token
        assert torch.equal(k[0, h, rest], without[0, h, rest])
    if len(hit) == 1:
        assert torch.equal(k[0, 0], decode(encode(keys, values, config), layout)[0][0, 0])  # the other head


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_without_token_norm_a_spoiled_key_is_finite_and_harmless(bad: float) -> None:
    config = dataclasses.replace(VARIANTS["no_norm"], key_fit="minmax")
    keys, values = _kv(1, 2, 128)
    spoiled = keys.clone()
    spoiled[0, 1, 0, 17] = bad
    k = _round_trip(spoiled, values, config)[0]
    assert k.isfinite().all()
    without = _round_trip(keys, values, config, num_sinks=1)[0]
    assert torch.equal(k[0, 1, 1:], without[0, 1, 1:])
    assert torch.equal(k[0, 0], _round_trip(keys, values, config)[0][0, 0])


@pytest.mark.parametrize("variant", [name for name, c in VARIANTS.items() if c.value_bits != 16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_value_token_that_is_not_finite_spoils_only_itself(variant: str, bad: float) -> None:
    config = VARIANTS[variant]
    keys, values = _kv(1, 2, 256, value_dim=96)
    values[0, 1, 45] = 0.0  # a token without anything: the others have the bits of a run without it
    clean = encode(keys, values, config)
    layout = _layout(keys, values, config)
    k, v = decode(clean, layout)
    spoiled = values.clone()
    spoiled[0, 1, 45] = bad
    out_k, out_v = decode(encode(keys, spoiled, config), layout)
    assert not out_v[0, 1, 45].isfinite().any()
    assert torch.equal(out_k, k)
    rest = torch.ones(1, 2, 256, dtype=torch.bool)
    rest[0, 1, 45] = False
    assert torch.equal(out_v[rest], v[rest])
    # one bad number spoils at least its own group, and no other token
    spoiled = values.clone()
    spoiled[0, 1, 45, 50] = bad
    out_v = decode(encode(keys, spoiled, config), layout)[1]
    assert not out_v[0, 1, 45, 50].isfinite()
    assert torch.equal(out_v[rest], v[rest])


# ---- sinks


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("content", [0.0, 40.0, 1e4, 1e15, math.nan])
def test_sinks_count_for_no_statistic_of_the_keys(variant: str, content: float) -> None:
    """Whatever the first tokens hold, all others decode to the same bits."""
    config = VARIANTS[variant]
    keys, values = _kv(1, 2, 256)
    plain = _round_trip(keys, values, config, num_sinks=4)
    keys[:, :, :4] = content
    changed = _round_trip(keys, values, config, num_sinks=4)
    for a, b in zip(plain, changed, strict=True):
        assert torch.equal(a[:, :, 4:], b[:, :, 4:])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("content", [0.0, 40.0, 1e4, math.nan])
def test_sinks_cost_the_other_values_nothing(variant: str, content: float) -> None:
    config = VARIANTS[variant]
    keys, values = _kv(1, 2, 128)
    changed = values.clone()
    changed[:, :, :4] = content

    def error(x: Tensor) -> float:
        decoded = _round_trip(keys, x, config, num_sinks=4)[1]
        return (decoded - values)[:, :, 4:].norm().item()

    # another power of two may round a few of the smallest scales and centers otherwise, no more
    assert error(changed) <= 1.02 * error(values)
