"""Decode attention on the GPU: queries are rotated, attend to blocks, sinks and tail, and partials are merged."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from oscar_kv.kernels import decode_launch as rule
from oscar_kv.kernels.compile import kernel, launch, most_cluster
from oscar_kv.kernels.records import layout_key, layout_of, origin, record_defines, shared_limit
from oscar_kv.pack import RecordLayout

_POINTERS, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int


class Args(ctypes.Structure):
    """``struct Args`` of csrc/decode.cu, field by field. Strides of records and norms are in bytes."""

    _fields_ = (
        ("q", _POINTERS),
        *((name, _LONG) for name in ("q_row", "q_head", "q_tok")),
        ("records", _POINTERS),
        *((name, _LONG) for name in ("rec_row", "rec_block")),
        ("norms", _POINTERS),
        *((name, _LONG) for name in ("norm_row", "norm_block")),
        ("table", _POINTERS),
        ("table_row", _LONG),
        ("pieces", _POINTERS),
        *((name, _POINTERS) for name in ("num_blocks", "tail_len", "equalizer")),
        *((name, _POINTERS) for name in ("sink_k", "sink_v", "tail_k", "tail_v")),
        *((name, _LONG) for name in ("tail_row_k", "tail_head_k", "tail_row_v", "tail_head_v")),
        *((name, _POINTERS) for name in ("out", "sink_logits", "rotated", "part_o", "part_ml")),
        *(
            (name, _INT)
            for name in ("batch", "heads", "group", "q_len", "passes", "num_sinks", "warps", "fresh", "first")
        ),
        *((name, ctypes.c_float) for name in ("scaling", "softcap")),
    )


@cache
def defines(
    layout: RecordLayout, *, tiles: int, used: int, softcap: bool, equalized: bool, pieces: bool = False
) -> dict[str, int | str]:
    """Preprocessor definitions of csrc/decode.cu and csrc/decode_short.cu, but for those of the launch."""
    config = layout.config
    return {
        **record_defines(layout),
        "BF16": int(layout.dtype == torch.bfloat16),
        "EQUAL": int(equalized),
        "ROTK": int(config.rotate_keys),
        "ROTV": int(config.rotate_values),
        "SOFTCAP": int(softcap),
        "PIECES": int(pieces),
        "NT": tiles,
        "QCOLS": used,
    }


def decode_attention(
    query: Tensor,
    layout: RecordLayout,
    records: Tensor,
    norms: Tensor | None,
    num_blocks: Tensor,
    tail: tuple[Tensor, Tensor],
    tail_lengths: Tensor,
    *,
    scaling: float,
    fresh: int = 0,
    table: Tensor | None = None,
    equalizer: Tensor | None = None,
    sinks: tuple[Tensor, Tensor] | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    first: int = 0,
    pieces: Tensor | None = None,
) -> Tensor:
    """Causal attention of the newest tokens over everything cached; sums are fp32 and in a fixed order.

    Args:
        query: (rows, query heads, q, key_dim) bf16 or fp16; they belong to the last q tokens of the tail.
        layout: Of the records.
        records: uint8 (rows, blocks, heads, record bytes), or with a table (pages, heads, record bytes).
        norms: bfloat16 (rows, blocks, 1 or heads, 128), or (pages, 1 or heads, 128); None without token scaling.
        num_blocks: int32 (rows): packed blocks.
        tail: Keys and values (rows, heads, capacity, head_dim), the newest tokens included.
        tail_lengths: int32 (rows): tokens in the tail, but for the ``fresh`` newest ones.
        scaling: Factor on the scores.
        fresh: Tokens of the tail that ``tail_lengths`` does not count yet, the same number in each row.
        table: int32 (rows, blocks): the page of each block.
        equalizer: float32 (rows, heads, key_dim).
        sinks: Keys and values (rows, heads, num_sinks, head_dim) of the first tokens.
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        sink_logits: (query heads,) learned sinks.
        first: The block of each row that ``records`` and ``norms`` begin with.
        pieces: Where the blocks before that are, int64 (pieces, 5): :attr:`oscar_kv.shared.SharedBlocks.table`.

    Returns:
        (rows, q, query heads, value_dim).
    """
    return _decode_attention(
        query, records, norms, table, num_blocks, tail_lengths, equalizer, *(sinks or (None, None)), *tail,
        None if sink_logits is None else sink_logits.float(), layout_key(layout), scaling, softcap or 0.0, fresh,
        first, pieces,
    )  # fmt: skip


@torch.library.custom_op("oscar_kv::decode_attention", mutates_args=())
def _decode_attention(
    query: Tensor,
    records: Tensor,
    norms: Tensor | None,
    table: Tensor | None,
    num_blocks: Tensor,
    tail_lengths: Tensor,
    equalizer: Tensor | None,
    sink_keys: Tensor | None,
    sink_values: Tensor | None,
    tail_keys: Tensor,
    tail_values: Tensor,
    sink_logits: Tensor | None,
    key: str,
    scaling: float,
    softcap: float,
    fresh: int,
    first: int = 0,
    pieces: Tensor | None = None,
) -> Tensor:
    layout, device = layout_of(key), query.device
    batch, q_heads, q_len, _ = query.shape
    heads = tail_keys.shape[1]
    columns = q_heads // heads * q_len
    multiprocessors, shared = rule.properties(device)
    shape = rule.shape_of(layout, columns, batch, shared)
    if shape is None:
        raise NotImplementedError(rule.unsupported(layout, columns, batch, device))
    tiles, used, warps = shape
    passes = -(-columns // (8 * tiles))
    units, blocks = batch * heads * passes, first + (records if table is None else table).shape[1]
    warps = rule.fewer_warps(layout, warps, units * blocks, multiprocessors)
    paged = table is not None
    out = query.new_empty(batch, q_len, q_heads, layout.value_dim)
    args = Args(
        query.data_ptr(), *query.stride()[:3],
        origin(records, first), 0 if paged else records.stride(0), records.stride(-3),
        origin(norms, first),
        *((0, 0) if norms is None else (0 if paged else 2 * norms.stride(0), 2 * norms.stride(-3))),
        _address(table), 0 if table is None else table.stride(0), _address(pieces),
        *(_address(x) for x in (num_blocks, tail_lengths, equalizer, sink_keys, sink_values, tail_keys, tail_values)),
        *tail_keys.stride()[:2], *tail_values.stride()[:2], *(_address(x) for x in (out, sink_logits)), 0, 0, 0,
        batch, heads, q_heads // heads, q_len, passes, 0 if sink_keys is None else sink_keys.shape[2],
        warps * multiprocessors, fresh, first, scaling, softcap,
    )  # fmt: skip
    has = {"softcap": softcap != 0.0, "equalized": equalizer is not None, "pieces": pieces is not None}
    flags = defines(layout, tiles=tiles, used=used, **has)
    short = rule.short(layout, columns, units, blocks, device)
    if short is not None:
        code = kernel("decode_short.cu", "decode_short", {**flags, **short.flags}, device)
        grid, block = units * short.cluster, 32 * short.warps
        launch(code, grid, block, short.shared, (bytes(args),), device, dependent=True, cluster=short.cluster)
        return out
    slots = units + warps * multiprocessors
    tasks = units * tiles * used
    merge = rule.merge_warps(tasks, layout.value_dim, multiprocessors)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    rotated = scratch(units, rule.query_bytes(layout, tiles * used), dtype=torch.uint8)
    part_o, part_ml = scratch(slots, tiles * used, layout.value_dim), scratch(slots, tiles * used, 2)
    args.rotated, args.part_o, args.part_ml = (x.data_ptr() for x in (rotated, part_o, part_ml))
    stage = rule.stage_bytes(layout, rule.query_bytes(layout, tiles * used))
    for name, grid, block, memory in (
        ("rotate_queries", units, 32, 0),
        ("decode", multiprocessors, 32 * warps, warps * stage + rule.row_bytes(batch)),
        ("combine", -(-tasks * merge // max(merge, 8)), 32 * max(merge, 8), 0),
    ):
        code = kernel("decode.cu", name, {**flags, "WARPS": warps, "MERGE": merge}, device)
        launch(code, grid, block, memory, (bytes(args),), device, dependent=True)
    return out


@_decode_attention.register_fake
def _(query: Tensor, *args: Any) -> Tensor:
    tail_values: Tensor = args[9]
    batch, q_heads, q_len, _ = query.shape
    return query.new_empty(batch, q_len, q_heads, tail_values.shape[-1])


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def representative(arch: str) -> list[tuple[str, str, str, dict[str, int | str]]]:
    """(title, source, kernel that uses dynamic shared memory, definitions) for the table of resources."""
    from oscar_kv.config import OscarConfig

    variants = (
        ("default", OscarConfig(), (128, 128), 4),
        ("paper", OscarConfig.paper(), (128, 128), 4),
        ("quality", OscarConfig.quality(), (128, 128), 4),
        ("four_bit", OscarConfig.four_bit(), (128, 128), 4),
        ("default, 16 columns", OscarConfig(), (128, 128), 16),
        ("default, D 256", OscarConfig(), (256, 256), 8),
        ("default, D 80", OscarConfig(), (80, 80), 1),
    )
    rows = []
    for title, config, dims, columns in variants:
        layout = RecordLayout(config, *dims, torch.bfloat16)
        shape = rule.shape_of(layout, columns, 1, shared_limit(arch))
        if shape is not None:
            tiles, used, warps = shape
            flags = defines(layout, tiles=tiles, used=used, softcap=False, equalized=config.equalize > 0)
            rows.append((title, "decode.cu", "decode", {**flags, "WARPS": warps, "MERGE": 8}))
            one = rule.Short(3, most_cluster(arch), rule.most_warps(layout, tiles) // 3, 0)
            rows.append((f"{title}, one launch", "decode_short.cu", "decode_short", {**flags, **one.flags}))
    return rows
