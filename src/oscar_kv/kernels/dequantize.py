"""Unpacking blocks on the GPU: ``codec.dequantize_blocks`` in one launch, norms multiplied in, in the model's dtype."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.kernels.compile import kernel, launch
from oscar_kv.kernels.records import DTYPES, check_norms, layout_key, layout_of, record_defines
from oscar_kv.pack import RecordLayout


class Args(ctypes.Structure):
    """``struct Args`` of csrc/dequantize.cu, field by field."""

    _fields_ = (
        ("records", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("record_row", "record_block")),
        ("norms", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("norm_row", "norm_block")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
    )


@cache
def defines(layout: RecordLayout) -> dict[str, int | str]:
    """Preprocessor definitions of csrc/dequantize.cu.

    Raises:
        NotImplementedError: The model's numbers have 32 bits.
    """
    offsets = layout.offsets
    if layout.dtype.itemsize != 2:
        raise NotImplementedError(f"blocks are dequantized to 16 bits, not to {layout.dtype}")
    return {
        **record_defines(layout),
        "DTYPE": DTYPES.index(layout.dtype),
        "THREADS": 128 if max(layout.key_dim, layout.value_dim) <= 64 else 256,
        "RECORD": layout.record_bytes,
        **{name.upper(): offsets[name] for name in offsets if name != "key_codes"},
    }


def dequantize_blocks(records: Tensor, norms: Tensor | None, layout: RecordLayout) -> tuple[Tensor, Tensor]:
    """Keys, their norms multiplied in, and values, in the space in which they were quantized.

    Args:
        records: uint8 (rows, blocks, heads, record bytes).
        norms: bfloat16 (rows, blocks, 1 or heads, 128); None without token scaling.
        layout: Of the records, for a model of 16 bits.

    Returns:
        (rows, heads, 128 * blocks, key_dim) and (rows, heads, 128 * blocks, value_dim) in the model's dtype: what the
        reference gives, rounded.
    """
    check_norms(layout, norms)
    return _dequantize_blocks(records, norms, layout_key(layout))


@torch.library.custom_op("oscar_kv::dequantize_blocks", mutates_args=())
def _dequantize_blocks(records: Tensor, norms: Tensor | None, layout: str) -> tuple[Tensor, Tensor]:
    keys, values = _empty(records, norms, layout)
    rows, blocks, heads = records.shape[:3]
    if rows == 0 or blocks == 0:
        return keys, values
    device = records.device
    args = Args(
        records.data_ptr(),
        *records.stride()[:2],
        0 if norms is None else norms.data_ptr(),
        *((0, 0) if norms is None else norms.stride()[:2]),
        keys.data_ptr(),
        values.data_ptr(),
    )
    flags = defines(layout_of(layout))
    code = kernel("dequantize.cu", "dequantize_blocks", flags, device)
    launch(code, (2 * blocks, heads, rows), int(flags["THREADS"]), 0, (bytes(args),), device)
    return keys, values


@_dequantize_blocks.register_fake
def _empty(records: Tensor, norms: Tensor | None, layout: str) -> tuple[Tensor, Tensor]:
    rows, blocks, heads = records.shape[:3]
    shape, own = (rows, heads, BLOCK_TOKENS * blocks), layout_of(layout)
    keys, values = (records.new_empty(*shape, dim, dtype=own.dtype) for dim in (own.key_dim, own.value_dim))
    return keys, values


def representative(arch: str) -> list[tuple[str, str, str, dict[str, int | str]]]:
    """(title, source, kernel that uses dynamic shared memory, definitions) for the table of resources."""
    variants = (
        ("default", OscarConfig(), 128),
        ("quality", OscarConfig.quality(), 128),
        ("four_bit", OscarConfig.four_bit(), 128),
        ("paper", OscarConfig.paper(), 128),
        ("default, D 256", OscarConfig(), 256),
    )
    return [
        (title, "dequantize.cu", "", defines(RecordLayout(config, dim, dim, torch.bfloat16)))
        for title, config, dim in variants
    ]
