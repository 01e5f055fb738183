"""attend against a naive fp64 softmax over decoded keys and values, sinks and recent tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from oscar_kv import reference
from oscar_kv.attention import attend
from oscar_kv.codec import PackedBlocks, decode, encode
from oscar_kv.config import OscarConfig
from oscar_kv.pack import RecordLayout
from oscar_kv.reference import is_hidden
from oscar_kv.scale import channel_equalizer
from oscar_kv.view import KVView

# Scores and sums are fp32: a few hundred additions of numbers of size 1, weighted to 1 in the end
TOLERANCE = 2e-5

VARIANTS = {
    "default": OscarConfig(),
    "quality": OscarConfig.quality(),
    "four_bit": OscarConfig.four_bit(),
    "paper": OscarConfig.paper(),
    "eight_bit_head": OscarConfig(key_bits=8, value_bits=8, scale_scope="head", token_norm="max", metadata="bfloat16"),
    "no_norm": OscarConfig(token_norm=None, equalize=0.0),
    "no_rotation": OscarConfig(rotate_keys=False, rotate_values=False),
    "keys_16": OscarConfig(key_bits=16, value_bits=3),
    "values_16": OscarConfig(key_bits=4, value_bits=16),
    "all_16": OscarConfig(key_bits=16, value_bits=16),
}


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Case:
    """A view, and the keys and values that its rows stand for: fp64 (heads, length, head_dim) each."""

    view: KVView
    keys: list[Tensor]
    values: list[Tensor]

    def row(self, b: int) -> KVView:
        v, at = self.view, slice(b, b + 1)
        blocks = None
        if v.blocks is not None:
            blocks = PackedBlocks(v.blocks.records[at], None if v.blocks.norms is None else v.blocks.norms[at])
        return dataclasses.replace(
            v,
            blocks=blocks,
            num_blocks=v.num_blocks[at],
            equalizer=None if v.equalizer is None else v.equalizer[at],
            sinks=None if v.sinks is None else (v.sinks[0][at], v.sinks[1][at]),
            recent=(v.recent[0][at], v.recent[1][at]),
            recent_lengths=v.recent_lengths[at],
            columns=None if v.columns is None else v.columns[at],
        )


def _case(
    num_blocks: list[int],
    lengths: list[int],
    *,
    config: OscarConfig = VARIANTS["default"],
    heads: int = 2,
    key_dim: int = 64,
    value_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    nan_keys: dict[int, int] | None = None,
    garbage: float = math.nan,
    seed: int = 0,
) -> Case:
    """Rows of these numbers of blocks and tokens. Whatever no row owns is 0xFF bytes and ``garbage``.

    ``nan_keys``: row -> slot of a key that is NaN.
    """
    batch = len(lengths)
    used = max(num_blocks)
    recent_len = max(n - 128 * nb for n, nb in zip(lengths, num_blocks, strict=True))
    layout = RecordLayout(config, key_dim, value_dim, dtype)
    # packed numbers are decoded as they are, not rounded to the model's dtype
    exact = RecordLayout(config, key_dim, value_dim, torch.float32 if 16 not in (config.key_bits, config.value_bits)
                         else dtype)  # fmt: skip
    quantized, sinks = config.key_bits != 16, config.num_sinks
    norm_heads = 1 if config.scale_scope == "all" else heads
    records = torch.full((batch, used + 1, heads, layout.record_bytes), 255, dtype=torch.uint8)
    norms = None
    if config.token_norm and quantized:
        norms = torch.full((batch, used + 1, norm_heads, 128), 0xFFFF - 2**16, dtype=torch.int16).view(torch.bfloat16)
        assert norms.isnan().all()
    equalizer = torch.full((batch, heads, key_dim), garbage) if config.equalize and quantized else None
    sink_keys = torch.full((batch, heads, sinks, key_dim), garbage, dtype=dtype)
    sink_values = torch.full((batch, heads, sinks, value_dim), garbage, dtype=dtype)
    recent_keys = torch.full((batch, heads, recent_len, key_dim), garbage, dtype=dtype)
    recent_values = torch.full((batch, heads, recent_len, value_dim), garbage, dtype=dtype)
    all_keys, all_values = [], []
    for b, (nb, length) in enumerate(zip(num_blocks, lengths, strict=True)):
        keys = _random(heads, length, key_dim, seed=seed + 10 * b) * 2 ** _random(1, length, 1, seed=seed + 10 * b + 1)
        keys[..., ::9] += 3
        values = _random(heads, length, value_dim, seed=seed + 10 * b + 2)
        if nan_keys and b in nan_keys:
            keys[:, nan_keys[b]] = math.nan
        keys, values = keys.to(dtype), values.to(dtype)
        true_keys, true_values = keys.double(), values.double()
        if nb:
            k, v = keys[None, :, : 128 * nb], values[None, :, : 128 * nb]
            own = None
            if equalizer is not None:
                own = channel_equalizer(k[:, :, :128].float(), config.equalize, config.key_group, sinks)
                equalizer[b] = own[0]
            blocks = encode(k, v, config, equalizer=own, num_sinks=sinks)
            records[b, :nb] = blocks.records[0]
            if norms is not None and blocks.norms is not None:
                norms[b, :nb] = blocks.norms[0]
            decoded_keys, decoded_values = decode(blocks, exact, equalizer=own)
            true_keys[:, sinks : 128 * nb] = decoded_keys[0, :, sinks:].double()
            true_values[:, sinks : 128 * nb] = decoded_values[0, :, sinks:].double()
            sink_keys[b], sink_values[b] = k[0, :, :sinks], v[0, :, :sinks]
        elif equalizer is not None:
            equalizer[b] = 0.0  # as a layer leaves it before the first block
        recent_keys[b, :, : length - 128 * nb] = keys[:, 128 * nb :]
        recent_values[b, :, : length - 128 * nb] = values[:, 128 * nb :]
        all_keys.append(true_keys)
        all_values.append(true_values)
    view = KVView(
        layout,
        PackedBlocks(records, norms) if used else None,
        torch.tensor(num_blocks, dtype=torch.int32),
        equalizer,
        (sink_keys, sink_values) if sinks and used else None,
        (recent_keys, recent_values),
        torch.tensor([n - 128 * blocks for n, blocks in zip(lengths, num_blocks, strict=True)], dtype=torch.int32),
        max(num_blocks),
    )
    return Case(view, all_keys, all_values)


def _naive(
    query: Tensor,
    case: Case,
    *,
    scaling: float,
    mask: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    causal: bool = True,
    columns: list[Tensor] | None = None,
) -> Tensor:
    """The textbook formula, one row and head at a time, in fp64."""
    batch, query_heads, q_len, _ = query.shape
    out = []
    for b in range(batch):
        keys, values = case.keys[b], case.values[b]
        length, group = keys.shape[1], query_heads // keys.shape[0]
        for h in range(query_heads):
            scores = query[b, h].double() @ keys[h // group].T * scaling
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            if mask is not None:
                own = mask[b % mask.shape[0], h % mask.shape[1]]
                own = own[:, columns[b]] if columns is not None else own[:, :length]
                if own.dtype == torch.bool:
                    scores = scores.masked_fill(~own, -math.inf)
                else:
                    hidden = own.double() < torch.finfo(own.dtype).min / 2
                    scores = (scores + own.double()).masked_fill(hidden, -math.inf)
            elif causal:
                own = torch.arange(length) <= length - q_len + torch.arange(q_len).unsqueeze(1)
                scores = scores.masked_fill(~own, -math.inf)
            if sink_logits is not None:
                scores = torch.cat((scores, sink_logits[h].double().expand(q_len, 1)), dim=1)
            weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[:, :length]  # nothing to attend to: 0
            out.append(weights @ values[h // group])
    return torch.stack(out).view(batch, query_heads, q_len, -1)


def _check(query: Tensor, case: Case, **kwargs: Any) -> None:
    columns = kwargs.pop("columns", None)
    kwargs.setdefault("scaling", query.shape[-1] ** -0.5)
    out = attend(query, case.view, **kwargs)
    truth = _naive(query, case, columns=columns, **kwargs)
    assert out.dtype == query.dtype
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("q_len", [1, 2, 5, 8, 130])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_different_length(variant: str, q_len: int) -> None:
    """One row without a block, one whose recent tokens are the queries only, one with a long tail."""
    case = _case([0, 3, 1], [q_len + 7, 384 + q_len, 128 + q_len + 90], config=VARIANTS[variant])
    _check(_random(3, 4, q_len, 64, seed=99), case)


@pytest.mark.parametrize("group", [1, 2, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("heads", [1, 3])
def test_grouped_queries(group: int, heads: int) -> None:
    case = _case([2, 1], [290, 200], heads=heads, key_dim=32, value_dim=16)
    _check(_random(2, heads * group, 3, 32, seed=99), case)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (64, 96)])
@pytest.mark.parametrize("variant", ["default", "keys_16", "values_16", "eight_bit_head"])
def test_head_dims(variant: str, key_dim: int, value_dim: int) -> None:
    case = _case([1, 2], [140, 300], config=VARIANTS[variant], key_dim=key_dim, value_dim=value_dim)
    _check(_random(2, 4, 2, key_dim, seed=99), case)


@pytest.mark.parametrize("q_len", [1, 2, 5, 8, 130])
@pytest.mark.parametrize("length", [130, 200])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"causal": False}], ids=["plain", "softcap", "full"])
def test_nothing_packed(q_len: int, length: int, extra: dict[str, Any]) -> None:
    case = _case([0, 0], [length, length], key_dim=80, value_dim=48)
    _check(_random(2, 4, q_len, 80, seed=99), case, **extra)


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"causal": False}], ids=["plain", "softcap", "full"])
def test_nothing_packed_and_rows_of_different_length(q_len: int, extra: dict[str, Any]) -> None:
    """Row b has ``lengths[b]`` tokens, also where no mask says so; what lies beyond them is arbitrary."""
    case = _case([0, 0, 0], [9, 40, 23], garbage=5.0)
    case.view.columns = torch.arange(40).repeat(3, 1)
    _check(_random(3, 4, q_len, 64, seed=99), case, **extra)


@pytest.mark.parametrize("blocks", [[0, 3, 1], [0, 0, 0]], ids=["packed", "nothing-packed"])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}], ids=["plain", "softcap"])
@pytest.mark.parametrize("shape", ["(b,1)", "(1,1)", "(b,h)"])
@pytest.mark.parametrize("kind", ["bool", "float", "min"])
def test_masks(blocks: list[int], kind: str, shape: str, extra: dict[str, Any]) -> None:
    lengths = [128 * nb + n for nb, n in zip(blocks, (20, 33, 90), strict=True)]
    case = _case(blocks, lengths, garbage=math.nan if max(blocks) else 5.0)
    rows, heads = {"(b,1)": (3, 1), "(1,1)": (1, 1), "(b,h)": (3, 4)}[shape]
    allowed = torch.rand(rows, heads, 5, max(lengths), generator=torch.Generator().manual_seed(7)) < 0.6
    allowed[..., 0] = True  # no query without a token
    if kind == "bool":
        mask = allowed
    else:
        bias = 3 * _random(rows, heads, 5, max(lengths), seed=8)
        mask = torch.where(allowed, bias, -torch.inf if kind == "float" else torch.finfo(torch.float32).min)
    _check(_random(3, 4, 5, 64, seed=99), case, mask=mask, **extra)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("blocks", [[1, 0, 2], [0, 0, 0]], ids=["packed", "nothing-packed"])
def test_columns_say_where_a_slot_is_in_the_mask(kind: str, blocks: list[int]) -> None:
    """Rows with padding on the left, in the middle and on the right of 400 columns."""
    width = 400
    lengths = [128 * nb + n for nb, n in zip(blocks, (30, 50, 20), strict=True)]
    case = _case(blocks, lengths, garbage=math.nan if max(blocks) else 5.0)
    left = torch.arange(width - lengths[0], width)
    holes = torch.randperm(width, generator=torch.Generator().manual_seed(1))[: lengths[1]].sort().values
    right = torch.arange(lengths[2])
    own = [left, holes, right]
    columns = torch.full((3, max(lengths) + 5), 10**6)  # beyond a row's length: anything
    for b, x in enumerate(own):
        columns[b, : lengths[b]] = x
    case.view.columns = columns
    allowed = torch.rand(3, 1, 4, width, generator=torch.Generator().manual_seed(7)) < 0.7
    for b, x in enumerate(own):
        allowed[b, :, :, x[0]] = True
    mask = allowed if kind == "bool" else torch.where(allowed, _random(3, 1, 4, width, seed=8), -torch.inf)
    _check(_random(3, 4, 4, 64, seed=99), case, mask=mask, columns=own)


@pytest.mark.parametrize("blocks", [[0, 3, 1], [0, 0, 0]], ids=["packed", "nothing-packed"])
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("scaling", [1.0, 0.01])
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_scaling_softcap_and_sink_logits(
    blocks: list[int], q_len: int, scaling: float, softcap: float | None, sinks: bool
) -> None:
    length = 20 if not max(blocks) else 0
    case = _case(blocks, [128 * nb + max(n, q_len) for nb, n in zip(blocks, (length,) * 3, strict=True)])
    logits = torch.tensor([-2.0, 0.0, 3.0, 20.0]) if sinks else None
    query = _random(3, 4, q_len, 64, seed=99) / 8
    _check(query, case, scaling=scaling, softcap=softcap, sink_logits=logits)


@pytest.mark.parametrize("causal", [True, False])
def test_not_causal(causal: bool) -> None:
    case = _case([0, 2, 1], [12, 270, 140])
    _check(_random(3, 4, 9, 64, seed=99), case, causal=causal)


def test_plain_mask_is_only_a_hint() -> None:
    case = _case([0, 2, 1], [12, 270, 140])
    mask = torch.ones(3, 1, 4, 270, dtype=torch.bool)
    for b, n in enumerate((12, 270, 140)):
        mask[b, 0] = torch.arange(270) <= n - 4 + torch.arange(4).unsqueeze(1)
    query = _random(3, 4, 4, 64, seed=99)
    with_hint = attend(query, case.view, scaling=0.125, mask=mask, plain_mask=True)
    truth = _naive(query, case, scaling=0.125)
    torch.testing.assert_close(with_hint.double(), truth, rtol=0, atol=TOLERANCE)


def test_scores_far_apart() -> None:
    """Scores of many thousands: the running maximum keeps every exponent finite, whatever order they come in."""
    case = _case([2, 3], [290, 390], key_dim=32)
    query = 1e4 * _random(2, 4, 3, 32, seed=99)
    out = attend(query, case.view, scaling=1.0)
    truth = _naive(query, case, scaling=1.0)
    assert out.isfinite().all()
    # the largest score stands out by far, unless two are within fp32 rounding of each other
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=1e-2)


@pytest.mark.parametrize("variant", ["default", "eight_bit_head", "no_norm", "no_rotation", "all_16"])
@pytest.mark.parametrize(("key_chunk", "query_chunk"), [(128, 1), (256, 3), (384, 256)])
def test_chunk_sizes_do_not_matter(
    monkeypatch: pytest.MonkeyPatch, variant: str, key_chunk: int, query_chunk: int
) -> None:
    case = _case([0, 5, 3, 8], [200, 640 + 9, 384 + 150, 1024 + 7], config=VARIANTS[variant], key_dim=32, value_dim=32)
    query = _random(4, 4, 7, 32, seed=99)
    whole = attend(query, case.view, scaling=0.2)
    monkeypatch.setattr(reference, "_KEY_CHUNK", key_chunk)
    monkeypatch.setattr(reference, "_QUERY_CHUNK", query_chunk)
    chunked = attend(query, case.view, scaling=0.2)
    # the same sums in another order
    torch.testing.assert_close(chunked, whole, rtol=0, atol=TOLERANCE)


def test_chunks_with_mask_columns_softcap_and_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_KEY_CHUNK", 128)
    monkeypatch.setattr(reference, "_QUERY_CHUNK", 2)
    lengths = [140, 384 + 140, 256 + 5]
    case = _case([0, 3, 2], lengths)
    own = [torch.arange(600 - n, 600) for n in lengths]
    case.view.columns = torch.zeros(3, 600, dtype=torch.int64)
    for b, x in enumerate(own):
        case.view.columns[b, : lengths[b]] = x
    mask = torch.rand(3, 4, 5, 600, generator=torch.Generator().manual_seed(7)) < 0.5
    logits = torch.tensor([-2.0, 0.0, 3.0, 1.0])
    _check(_random(3, 4, 5, 64, seed=99), case, mask=mask, columns=own, softcap=5.0, sink_logits=logits)


def test_more_than_one_chunk_as_shipped() -> None:
    """Past the real limits: 10 blocks and 300 queries."""
    case = _case([10], [1280 + 310], heads=1, key_dim=16, value_dim=16)
    _check(_random(1, 1, 300, 16, seed=99), case)


@pytest.mark.parametrize("extra", [{}, {"sink_logits": torch.zeros(4)}], ids=["plain", "sink-logits"])
def test_query_without_anything_to_attend_to_gives_zero(extra: dict[str, Any]) -> None:
    """A padding query."""
    case = _case([2, 1], [270, 150])
    mask = torch.ones(2, 1, 3, 270, dtype=torch.bool)
    mask[1, :, 1] = False
    query = _random(2, 4, 3, 64, seed=99)
    out = attend(query, case.view, scaling=0.1, mask=mask, **extra)
    assert (out[1, :, 1] == 0).all()
    _check(query, case, mask=mask, **extra)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("blocks", [[2, 0], [0, 0]], ids=["packed", "nothing-packed"])
@pytest.mark.parametrize("masked", [False, True])
def test_16_bit_models(dtype: torch.dtype, blocks: list[int], masked: bool) -> None:
    lengths = [128 * nb + 30 for nb in blocks]
    case = _case(blocks, lengths, dtype=dtype, garbage=1.0)
    query = _random(2, 4, 3, 64, seed=99).to(dtype)
    mask = None
    if masked:
        hidden = torch.rand(2, 1, 3, max(lengths), generator=torch.Generator().manual_seed(7)) < 0.4
        hidden[..., 0] = False
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
    out = attend(query, case.view, scaling=0.125, mask=mask)
    truth = _naive(query, case, scaling=0.125, mask=mask)
    assert out.dtype == dtype
    # with packed tokens only the output is rounded; torch's own attention also rounds its weights
    half_ulp = torch.finfo(dtype).eps / 2
    bound = half_ulp * truth.abs() + TOLERANCE if max(blocks) else 4 * half_ulp * (truth.abs() + 1)
    assert ((out.double() - truth).abs() <= bound).all()


def test_is_hidden() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        lowest = torch.finfo(dtype).min
        mask = torch.tensor([0.0, 5.0, -1e4, -math.inf, lowest, 0.75 * lowest], dtype=dtype)
        assert is_hidden(mask).tolist() == [False, False, False, True, True, True]


# ---- what must not leak


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_do_not_depend_on_each_other(variant: str) -> None:
    """A row alone gives what it gives in a batch, however many unused blocks (0xFF bytes) and NaN lie next to it."""
    case = _case([0, 4, 1], [50, 512 + 60, 128 + 99], config=VARIANTS[variant])
    query = _random(3, 4, 5, 64, seed=99)
    together = attend(query, case.view, scaling=0.125)
    assert together.isfinite().all()
    for b in range(3):
        alone = attend(query[b : b + 1], case.row(b), scaling=0.125)
        torch.testing.assert_close(alone, together[b : b + 1], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("mask", [False, True])
def test_whatever_lies_beyond_a_row_is_ignored(garbage: float, mask: bool) -> None:
    lengths = [50, 512 + 60, 128 + 99]
    case = _case([0, 4, 1], lengths, garbage=garbage)
    kwargs = {"mask": torch.ones(3, 1, 5, 572, dtype=torch.bool)} if mask else {}
    _check(_random(3, 4, 5, 64, seed=99), case, **kwargs)


def test_causal_mask_hides_later_values_that_are_huge() -> None:
    case = _case([1], [128 + 8])
    case.view.recent[1][:, :, 5:] = 1e30
    case.values[0][:, 133:] = 1e30
    out = attend(_random(1, 4, 8, 64, seed=99), case.view, scaling=0.125)
    assert (out[:, :, :5].abs() < 10).all()
    assert (out[:, :, 5:].abs() > 1e20).all()


@pytest.mark.parametrize("slot", [0, 3, 4, 200, 256, 262])
@pytest.mark.parametrize("extra", [{}, {"softcap": 3.0}], ids=["plain", "softcap"])
def test_nan_key_reaches_only_queries_that_may_attend_to_it(slot: int, extra: dict[str, Any]) -> None:
    """In a sink (slot 0, 3), packed (4, 200) and in the tail (256, 262); causal and masked.

    (Where nothing is packed torch's own attention runs, which adds its mask to the NaN.)
    """
    blocks, length = 2, 266
    case = _case([blocks, blocks], [length, length], nan_keys={1: slot})
    query = _random(2, 4, 6, 64, seed=99)
    out = attend(query, case.view, scaling=0.125, **extra)
    sees = torch.arange(length - 6, length) >= slot
    assert out[1][:, sees].isnan().all()
    clean = _case([blocks, blocks], [length, length])
    truth = _naive(query, clean, scaling=0.125, **extra)
    torch.testing.assert_close(out[0].double(), truth[0], rtol=0, atol=TOLERANCE)
    assert out[1][:, ~sees].isfinite().all()

    mask = torch.ones(2, 1, 6, length, dtype=torch.bool)
    mask[1, :, ::2, slot] = False
    for m in (mask, torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)):
        out = attend(query, case.view, scaling=0.125, mask=m, **extra)
        assert out[1, :, 1::2].isnan().all()
        assert out[1, :, ::2].isfinite().all()
        assert out[0].isfinite().all()
