"""Packing blocks on the GPU: what :mod:`oscar_kv.codec` does, in two launches, straight into the cache's records."""

from __future__ import annotations

import ctypes
import struct
from functools import cache

import torch
from torch import Tensor

from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.kernels.compile import architecture, kernel, launch
from oscar_kv.kernels.records import DTYPES, METADATA, aligned, check_norms, layout_key, layout_of, origin, shared_limit
from oscar_kv.pack import RecordLayout

NORMS = (None, "l2", "max", "mean_abs")
_NORM_TOKENS, _NORM_THREADS = 32, 256  # of a token_norms CTA
_MOST_CTAS = {128: 4, 256: 3, 512: 1}  # of a multiprocessor, by their threads: what was fastest on an H200
_STATIC_SHARED = 12288  # bytes of shared memory that the kernels use besides, at the largest head dimension


class Args(ctypes.Structure):
    """``struct Args`` of csrc/transform.cuh, field by field. Strides are in bytes, those of the norms in elements."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("key_row", "key_head", "value_row", "value_head")),
        *((name, ctypes.c_int) for name in ("key_token", "value_token")),
        *((name, ctypes.c_void_p) for name in ("starts", "counts", "places", "equalizer", "records")),
        *((name, ctypes.c_int64) for name in ("record_row", "record_block")),
        ("norms", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("norm_row", "norm_block")),
        *((name, ctypes.c_int) for name in ("heads", "num_sinks")),
        *((name, ctypes.c_void_p) for name in ("sink_keys", "sink_values")),
        *((name, ctypes.c_float) for name in ("exponent", "query_exponent")),
        ("query_power", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "tokens", "capacity", "residual_length")),
        *((name, ctypes.c_void_p) for name in ("tail_keys", "tail_values", "lengths", "totals", "num_blocks")),
        *((name, ctypes.c_void_p) for name in ("blocks_before", "arrived", "norms_done")),
    )


@cache
def defines(layout: RecordLayout, *, equalized: bool, arch: str) -> dict[str, int | str]:
    """Preprocessor definitions of csrc/encode.cuh."""
    config, offsets = layout.config, layout.offsets
    limit = shared_limit(arch) - _STATIC_SHARED
    equalized = equalized and config.key_bits != 16
    key_dim, value_dim = layout.key_dim, layout.value_dim
    keys, key_shared = _side("K", key_dim, config.key_bits, config.key_group, 8 * key_dim * equalized, limit)
    values, value_shared = _side("V", value_dim, config.value_bits, layout.value_group, 0, limit)
    widest, shared = max(key_dim, value_dim), max(key_shared, value_shared)
    threads = 128 if widest <= 64 else 256 if widest <= 128 else 512
    return {
        **keys,
        **values,
        "KFIT": int(config.key_fit == "lstsq"),
        "VFIT": int(config.value_fit == "lstsq"),
        "KSTEP": _float32(config.key_shrink / (2**config.key_bits - 1)),
        "VSTEP": _float32(config.value_shrink / (2**config.value_bits - 1)),
        "ROTK": int(config.rotate_keys),
        "ROTV": int(config.rotate_values),
        "DTYPE": DTYPES.index(layout.dtype),
        "META": METADATA.index(config.metadata),
        "NORM": 0 if config.key_bits == 16 else NORMS.index(config.token_norm),
        "SCOPE": int(config.scale_scope == "head"),
        "INTZERO": int(config.zero_point == "int"),
        "EQUAL": int(equalized),
        "THREADS": threads,
        "CTAS": max(1, min(_MOST_CTAS[threads], (shared_limit(arch) + 1024) // (shared + 2048))),
        "SHARED": shared,
        "RECORD": layout.record_bytes,
        **{name.upper(): offsets[name] for name in offsets if name != "key_codes"},
    }


def _side(side: str, dim: int, bits: int, group: int, extra: int, limit: int) -> tuple[dict[str, int | str], int]:
    """Definitions of the keys ("K") or values ("V"), and the shared memory that a CTA needs for them."""
    shape: dict[str, int | str] = {f"{side}D": dim, f"{side}BITS": bits, f"{side}GROUP": group}
    if bits == 16:
        return {**shape, f"{side}SLICE": dim}, 0
    unit = 16 if side == "K" else group
    for parts in range(1, dim // 16 + 1):  # all channels at a time, or the largest share that fits
        channels = dim // parts
        pitch = (channels + 31) // 32 * 32
        shared = BLOCK_TOKENS * dim // group * 16 + extra + BLOCK_TOKENS * pitch * 4
        if dim % parts == 0 and channels % unit == 0 and shared <= limit:
            return {**shape, f"{side}SLICE": channels}, shared
    raise NotImplementedError(f"head_dim {dim} in groups of {group} does not fit the shared memory of this GPU")


def _float32(x: float) -> str:
    """x rounded to float32, as a C literal."""
    return f"{struct.unpack('f', struct.pack('f', x))[0]:.9e}f"


def arguments(keys: Tensor, values: Tensor, **others: Tensor | float | None) -> Args:
    """Of the kernels, with these keys and values, and other fields by name (of tensors their addresses)."""
    args = Args(keys.data_ptr(), values.data_ptr(), *byte_strides(keys, values), heads=keys.shape[1])
    for name, value in others.items():
        setattr(args, name, value.data_ptr() if isinstance(value, Tensor) else value)
    return args


def destination(records: Tensor, norms: Tensor | None, first: int) -> dict[str, int]:
    """Fields of :class:`Args` that say where the records and norms of a layer are, which hold blocks from first on."""
    places = {"records": origin(records, first), "norms": origin(norms, first)}
    places.update(zip(("record_row", "record_block"), records.stride(), strict=False))
    if norms is not None:
        places.update(zip(("norm_row", "norm_block"), norms.stride(), strict=False))
    return places


def encode_blocks(
    keys: Tensor,
    values: Tensor,
    layout: RecordLayout,
    equalizer: Tensor | None,
    num_sinks: int,
    plan: Tensor,
    records: Tensor,
    norms: Tensor | None,
    first: int = 0,
) -> None:
    """Pack blocks of each row into its records. Nothing here needs the host to know the rows' lengths.

    Args:
        keys: (rows, heads, tokens, key_dim) in the model's dtype.
        values: (rows, heads, tokens, value_dim).
        layout: Of the records.
        equalizer: float32 (rows, heads, key_dim), or None.
        num_sinks: Tokens that a row's first block (place 0) leaves out of its statistics.
        plan: int32 (3, rows), contiguous. For each row: the token at which the first block to pack starts; the number
            of blocks, at most ``tokens // 128``; and which block of the row the first of them is.
        records: uint8 (rows, blocks, heads, record bytes), written.
        norms: bfloat16 (rows, blocks, 1 or heads, 128), written; None without token scaling.
        first: The block of each row that ``records`` and ``norms`` begin with.
    """
    check_norms(layout, norms)
    _encode_blocks(keys, values, equalizer, plan, records, norms, layout_key(layout), num_sinks, first)


@torch.library.custom_op("oscar_kv::encode_blocks", mutates_args=("records", "norms"))
def _encode_blocks(
    keys: Tensor,
    values: Tensor,
    equalizer: Tensor | None,
    plan: Tensor,
    records: Tensor,
    norms: Tensor | None,
    layout: str,
    num_sinks: int,
    first: int = 0,
) -> None:
    rows, heads, tokens = keys.shape[:3]
    most, device = tokens // BLOCK_TOKENS, keys.device
    if most == 0 or rows == 0:
        return
    flags = defines(layout_of(layout), equalized=equalizer is not None, arch=architecture(device))
    keys, values = aligned(keys), aligned(values)
    starts, counts, places = plan
    args = arguments(
        keys, values, starts=starts, counts=counts, places=places, equalizer=equalizer, num_sinks=num_sinks,
        **destination(records, norms, first),
    )  # fmt: skip
    if norms is not None:
        grid = (most * BLOCK_TOKENS // _NORM_TOKENS, norms.shape[2], rows)
        launch(kernel("encode.cu", "token_norms", flags, device), grid, _NORM_THREADS, 0, (bytes(args),), device)
    grid = (2 * heads, most, rows)
    threads, shared = int(flags["THREADS"]), int(flags["SHARED"])
    pack = kernel("encode.cu", "encode_blocks", flags, device)
    launch(pack, grid, threads, shared, (bytes(args),), device, dependent=norms is not None)


def start_rows(
    keys: Tensor,
    values: Tensor,
    layout: RecordLayout,
    plan: Tensor,
    sinks: tuple[Tensor, Tensor] | None,
    equalizer: Tensor | None,
    query_power: Tensor | None = None,
) -> None:
    """For rows whose first block is about to be packed: keep their sinks, and find their equalization vector.

    Args:
        keys: (rows, heads, tokens, key_dim), as for :func:`encode_blocks`.
        values: (rows, heads, tokens, value_dim).
        layout: Of the records.
        plan: int32 (3, rows), as for :func:`encode_blocks`.
        sinks: (rows, heads, num_sinks, dim) of keys and values, written; None without sinks.
        equalizer: float32 (rows, heads, key_dim), written; None without equalization.
        query_power: float64 (rows, heads, key_dim) sums of the squares of queries; None equalizes by keys alone.
    """
    _start_rows(keys, values, plan, *(sinks or (None, None)), equalizer, query_power, layout_key(layout))


@torch.library.custom_op("oscar_kv::start_rows", mutates_args=("sink_keys", "sink_values", "equalizer"))
def _start_rows(
    keys: Tensor,
    values: Tensor,
    plan: Tensor,
    sink_keys: Tensor | None,
    sink_values: Tensor | None,
    equalizer: Tensor | None,
    query_power: Tensor | None,
    layout: str,
) -> None:
    keys, values = aligned(keys), aligned(values)
    device, config = keys.device, layout_of(layout).config
    flags = defines(layout_of(layout), equalized=equalizer is not None, arch=architecture(device))
    starts, counts, places = plan
    args = arguments(
        keys, values, starts=starts, counts=counts, places=places, equalizer=equalizer, exponent=config.equalize,
        query_power=query_power, query_exponent=config.equalize_queries,
        sink_keys=sink_keys, sink_values=sink_values, num_sinks=0 if sink_keys is None else sink_keys.shape[2],
    )  # fmt: skip
    grid = (keys.shape[1], keys.shape[0])
    launch(kernel("encode.cu", "start_rows", flags, device), grid, _NORM_THREADS, 0, (bytes(args),), device)


for _operator in (_encode_blocks, _start_rows):
    _operator.register_fake(lambda *args: None)  # they write, and return nothing


def byte_strides(keys: Tensor, values: Tensor) -> tuple[int, ...]:
    """Of rows and heads of the keys and of the values, then of the tokens of both."""
    key, value = ([stride * x.itemsize for stride in x.stride()] for x in (keys, values))
    return (*key[:2], *value[:2], key[2], value[2])


def encode(
    keys: Tensor, values: Tensor, config: OscarConfig, *, equalizer: Tensor | None = None, num_sinks: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Pack whole blocks: the records and norms that ``codec.encode`` gives for these arguments."""
    batch, heads, tokens, key_dim = keys.shape
    if tokens % BLOCK_TOKENS or values.shape[:3] != keys.shape[:3]:
        raise ValueError(f"encode takes whole blocks of 128 tokens, not {tuple(keys.shape)} and {tuple(values.shape)}")
    layout = RecordLayout(config, key_dim, values.shape[-1], keys.dtype)
    blocks, device = tokens // BLOCK_TOKENS, keys.device
    records = torch.empty(batch, blocks, heads, layout.record_bytes, dtype=torch.uint8, device=device)
    norms = None
    if norm_heads := layout.norm_heads(heads):
        norms = torch.empty(batch, blocks, norm_heads, BLOCK_TOKENS, dtype=torch.bfloat16, device=device)
    plan = torch.tensor([[0], [blocks], [0]], dtype=torch.int32, device=device).repeat(1, batch)
    encode_blocks(keys, values, layout, equalizer, num_sinks, plan, records, norms)
    return records, norms


def representative(arch: str) -> list[tuple[str, str, str, dict[str, int | str]]]:
    """(title, source, kernel that uses dynamic shared memory, definitions) for the table of resources."""
    variants = (
        ("default", OscarConfig(), (128, 128, torch.bfloat16)),
        ("quality", OscarConfig.quality(), (128, 128, torch.bfloat16)),
        ("four_bit", OscarConfig.four_bit(), (128, 128, torch.bfloat16)),
        ("paper", OscarConfig.paper(), (128, 128, torch.bfloat16)),
        ("default, D 256", OscarConfig(), (256, 256, torch.bfloat16)),
    )
    return [
        (title, "encode.cu", "encode_blocks", defines(RecordLayout(config, *dims), equalized=True, arch=arch))
        for title, config, dims in variants
    ]
