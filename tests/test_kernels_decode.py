"""The decode kernel against the PyTorch reference on the same codes. Needs a CUDA GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from oscar_kv.attention import attend
from oscar_kv.codec import PackedBlocks, encode
from oscar_kv.config import OscarConfig
from oscar_kv.kernels import decode_launch
from oscar_kv.kernels.decode import decode_attention
from oscar_kv.pack import RecordLayout
from oscar_kv.shared import SharedBlocks
from oscar_kv.view import KVView

pytestmark = pytest.mark.gpu

# fp16 operands carry 11 bits: query * scale and probability * scale are rounded by 2^-12 RMS each, and so is the
# output. bfloat16 outputs alone differ by 2^-9 / sqrt(3) RMS.
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 2.5e-3}
CONFIG = OscarConfig()
PLAIN = replace(CONFIG, token_norm=None, rotate_keys=False, rotate_values=False, equalize=0.0)


@pytest.fixture(
    params=[(1, 0), (2, 0), (8, 0), (0, 132), (0, 2)], ids=["alone", "pair", "cluster", "long", "crowded"], autouse=True
)
def rows_are(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows in a CTA or a cluster each; or long rows that all multiprocessors share, or only two of them.

    So a warp gets one item at most, or many, of several rows and heads.
    """
    cluster, ctas = request.param
    most_shared = decode_launch.properties(torch.device("cuda"))[1]

    def short(layout: RecordLayout, columns: int, units: int, blocks: int, *args: Any) -> Any:
        if not cluster:
            return None
        warps = 2 if blocks < 2 * decode_launch.BUSY_ITEMS else 12
        shared = decode_launch.short_bytes(layout, columns, warps, cluster)
        return decode_launch.Short(warps, cluster, 1, shared)

    monkeypatch.setattr(decode_launch, "short", short)
    if ctas:
        monkeypatch.setattr(decode_launch, "properties", lambda device: (ctas, most_shared))


def case(
    config: OscarConfig = CONFIG,
    *,
    blocks: tuple[int, ...] = (9, 3),
    tails: tuple[int, ...] = (40, 127),
    heads: int = 2,
    group: int = 4,
    dims: tuple[int, int] = (128, 128),
    q_len: int = 1,
    dtype: torch.dtype = torch.float16,
) -> dict[str, Any]:
    """Random tokens of rows with these lengths, packed by the reference; what lies beyond a length is NaN."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch, (key_dim, value_dim), capacity = len(blocks), dims, max(tails) + 5
    layout = RecordLayout(config, key_dim, value_dim, dtype)
    equalizer = 0.5 + torch.rand(batch, heads, key_dim, generator=generator) if config.equalize else None
    most = max(*blocks, 1)
    keys, values = normal(batch, heads, 128 * most, key_dim), normal(batch, heads, 128 * most, value_dim)
    packed = encode(keys, values, config, equalizer=equalizer)
    for row, count in enumerate(blocks):
        packed.records[row, count:] = 0xFF
        if packed.norms is not None:
            packed.norms[row, count:] = torch.nan
    sinks = None
    if config.num_sinks:
        sinks = (normal(batch, heads, config.num_sinks, key_dim), normal(batch, heads, config.num_sinks, value_dim))
    tail = (normal(batch, heads, capacity, key_dim), normal(batch, heads, capacity, value_dim))
    for row, length in enumerate(tails):
        for x in tail:
            x[row, :, length:] = torch.nan
    query = normal(batch, heads * group, q_len, key_dim)
    return {
        "query": query,
        "layout": layout,
        "packed": packed,
        "equalizer": equalizer,
        "sinks": sinks,
        "tail": tail,
        "blocks": torch.tensor(blocks),
        "tails": torch.tensor(tails),
    }


def on_gpu(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(on_gpu(item) for item in x)
    return x.cuda() if isinstance(x, Tensor) else x


def run(c: dict[str, Any], **kwargs: Any) -> Tensor:
    kwargs = {"scaling": c["query"].shape[-1] ** -0.5, **{k: on_gpu(v) for k, v in kwargs.items()}}
    return decode_attention(
        c["query"].cuda(),
        c["layout"],
        c["packed"].records.cuda(),
        on_gpu(c["packed"].norms),
        c["blocks"].int().cuda(),
        on_gpu(c["tail"]),
        c["tails"].int().cuda(),
        equalizer=on_gpu(c["equalizer"]),
        sinks=on_gpu(c["sinks"]),
        **kwargs,
    ).cpu()


def reference(c: dict[str, Any], **kwargs: Any) -> Tensor:
    kwargs.setdefault("scaling", c["query"].shape[-1] ** -0.5)
    packed: PackedBlocks = c["packed"]
    blocks, tails = c["blocks"].int(), c["tails"].int()
    most = int(blocks.max())
    view = KVView(c["layout"], packed, blocks, c["equalizer"], c["sinks"], c["tail"], tails, most)
    return attend(c["query"].float(), view, **kwargs).transpose(1, 2)


def check(c: dict[str, Any], **kwargs: Any) -> None:
    got, expected = run(c, **kwargs).float(), reference(c, **kwargs)
    assert got.isfinite().all()
    error = ((got - expected).norm() / expected.norm()).item()
    dim = c["query"].shape[-1]
    sharper = max(1.0, kwargs.get("scaling", 0.0) * dim**0.5)  # a score's error grows with the score
    assert error < sharper * TOLERANCE[c["layout"].dtype], error


def test_batches_in_any_order() -> None:
    """A launch of few rows takes no shared memory from the kernel that a launch of many had, and needs again."""
    for rows in (4, 1, 4, 2, 4):
        check(case(blocks=(9, 3, 5, 2)[:rows], tails=(40, 127, 0, 16)[:rows]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key_bits", [2, 3, 4, 8])
@pytest.mark.parametrize("value_bits", [2, 3, 4, 8])
def test_bits(key_bits: Any, value_bits: Any, dtype: torch.dtype) -> None:
    check(case(replace(CONFIG, key_bits=key_bits, value_bits=value_bits), dtype=dtype))


@pytest.mark.parametrize("metadata", ["float16", "bfloat16", "float8_e4m3"])
@pytest.mark.parametrize(("key_group", "value_group"), [(16, 16), (32, 32), (32, 64), (64, 128), (128, 64)])
def test_groups_and_metadata(key_group: int, value_group: int, metadata: Any) -> None:
    check(case(replace(CONFIG, key_group=key_group, value_group=value_group, metadata=metadata)))


@pytest.mark.parametrize(
    "dims", [(64, 64), (80, 80), (96, 96), (192, 128), (128, 64), (256, 256), (16, 16), (512, 512)]
)
def test_head_dims(dims: tuple[int, int]) -> None:
    check(case(dims=dims))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_query_groups(group: int) -> None:
    check(case(group=group))


@pytest.mark.parametrize("q_len", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_several_queries_see_no_newer_token(q_len: int, group: int) -> None:
    check(case(q_len=q_len, group=group))


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        OscarConfig.paper(),
        OscarConfig.quality(),
        OscarConfig.four_bit(),
        replace(CONFIG, scale_scope="head"),
        replace(CONFIG, num_sinks=0),
        replace(CONFIG, num_sinks=37),
        replace(CONFIG, rotate_values=False),
    ],
)
def test_methods(config: OscarConfig) -> None:
    check(case(config))


def test_options_of_attention() -> None:
    c = case()
    check(c, scaling=0.3)
    check(c, softcap=2.0)
    check(c, sink_logits=torch.linspace(-2, 3, 8))


@pytest.mark.parametrize(
    ("blocks", "tails"),
    [
        ((0, 4), (7, 1)),  # a row without blocks
        ((1,), (1,)),
        ((300,), (127,)),
        ((5, 0, 31, 2, 64), (1, 128, 15, 16, 17)),
        ((2,) * 40, tuple(range(1, 41))),  # more rows than lanes
    ],
)
def test_lengths(blocks: tuple[int, ...], tails: tuple[int, ...]) -> None:
    check(case(blocks=blocks, tails=tails))


def test_an_empty_row_gives_zeros() -> None:
    c = case(blocks=(3, 0), tails=(5, 0))
    got = run(c)
    assert (got[1] == 0).all()
    expected = reference(c)
    assert (got[0].float() - expected[0]).norm() / expected[0].norm() < TOLERANCE[torch.float16]


def test_pages_in_any_order() -> None:
    c = case(blocks=(6, 4), tails=(9, 20))
    expected = run(c)
    packed: PackedBlocks = c["packed"]
    assert packed.norms is not None
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    pool = torch.empty_like(packed.records.flatten(0, 1))
    norms = torch.empty_like(packed.norms.flatten(0, 1))
    pool[order], norms[order] = packed.records.flatten(0, 1), packed.norms.flatten(0, 1)
    paged = {**c, "packed": PackedBlocks(pool, norms)}
    got = run(paged, table=order.view(2, 6).int())
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "config", [CONFIG, PLAIN, replace(CONFIG, scale_scope="head")], ids=["default", "plain", "head"]
)
@pytest.mark.parametrize("cuts", [(2,), (1, 2, 4), (1, 4)])
def test_shared_blocks_in_pieces(cuts: tuple[int, ...], config: OscarConfig) -> None:
    """The first blocks in pieces elsewhere, the second of them one that both rows have: the bits of one tensor."""
    c = case(config, blocks=(6, 4), tails=(9, 20))
    packed: PackedBlocks = c["packed"]
    for x in (packed.records, packed.norms):
        if x is not None:
            x[1, cuts[0] : cuts[-1]] = x[0, cuts[0] : cuts[-1]]
    expected = run(c)
    shared = SharedBlocks()
    for i, (start, stop) in enumerate(pairwise((0, *cuts))):
        rows = slice(0, 1) if i else slice(None)
        piece = packed.part(rows, slice(start, stop))
        shared = shared.followed_by(PackedBlocks(piece.records.cuda(), on_gpu(piece.norms)))
    rest = {**c, "packed": packed.part(slice(None), slice(shared.count, None))}
    got = run(rest, first=shared.count, pieces=shared.table)
    assert torch.equal(got, expected)


def test_the_same_inputs_give_the_same_bits() -> None:
    c = case(blocks=(40, 33), tails=(100, 3), heads=8)
    first = run(c)
    assert all(torch.equal(run(c), first) for _ in range(5))


def test_rows_do_not_depend_on_each_other_beyond_rounding() -> None:
    c = case(blocks=(40, 33), tails=(100, 3))
    alone = {**c, "blocks": torch.tensor([40, 0]), "tails": torch.tensor([100, 1])}
    torch.testing.assert_close(run(alone)[0], run(c)[0], rtol=2e-3, atol=2e-4)


def test_a_nan_key_stays_in_its_own_head() -> None:
    c = case(replace(CONFIG, scale_scope="head"), blocks=(3, 3), tails=(5, 5))
    clean = run(c)
    c["packed"].norms[0, 1, 0, 17] = torch.nan
    got = run(c)
    assert got[0, :, :4].isnan().all()
    assert torch.equal(got[0, :, 4:], clean[0, :, 4:])
    assert torch.equal(got[1], clean[1])


def test_a_cuda_graph_follows_growing_lengths() -> None:
    c = case(blocks=(9, 9), tails=(40, 127))
    blocks, tails = c["blocks"].int().cuda(), c["tails"].int().cuda()
    arguments = (c["query"].cuda(), c["layout"], c["packed"].records.cuda(), c["packed"].norms.cuda())
    options = {"scaling": 0.1, "equalizer": c["equalizer"].cuda(), "sinks": on_gpu(c["sinks"])}
    tail = on_gpu(c["tail"])
    decode_attention(*arguments, blocks, tail, tails, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*arguments, blocks, tail, tails, **options)
    for new_blocks, new_tails in (((1, 2), (1, 3)), ((3, 0), (16, 17)), ((9, 7), (40, 127))):
        blocks.copy_(torch.tensor(new_blocks))
        tails.copy_(torch.tensor(new_tails))
        graph.replay()
        eager = decode_attention(*arguments, blocks, tail, tails, **options)
        assert torch.equal(out, eager)


def test_the_operator_is_registered_well() -> None:
    c = case(blocks=(2, 1), tails=(3, 4))
    layout = c["layout"]
    from oscar_kv.kernels.records import layout_key

    arguments = (
        c["query"], c["packed"].records, c["packed"].norms, None, c["blocks"].int(), c["tails"].int(), c["equalizer"],
        *c["sinks"], *c["tail"], None, layout_key(layout), 0.1, 0.0, 0,
    )  # fmt: skip
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.oscar_kv.decode_attention, on_gpu(arguments), test_utils=checks)
