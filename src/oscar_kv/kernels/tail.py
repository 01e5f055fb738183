"""The 16-bit tail on the device: appending tokens and packing full blocks without the host knowing any length.

What :meth:`oscar_kv.layer.LayerState.append` and ``commit`` do, for decoding in a CUDA graph:

    append(tail, keys, values)            # tail.totals counts the new tokens now: attention may run
    flush(tail, layout, ...)              # packs what is complete, and moves the rest to the front
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from oscar_kv.kernels.compile import kernel, launch
from oscar_kv.kernels.encode import DTYPES, aligned, byte_strides, encode_blocks
from oscar_kv.pack import RecordLayout

_THREADS = 256


@dataclass(frozen=True)
class Tail:
    """Tensors of a tail, all of which the kernels write.

    Args:
        keys: (rows, heads, capacity, key_dim), contiguous.
        values: (rows, heads, capacity, value_dim), contiguous.
        lengths: int32 (rows): tokens in the tail.
        totals: int32 (rows): and those of the newest pass, between append and flush.
        num_blocks: int32 (rows): packed blocks.
        plan: int32 (3, rows): starts, counts and places of the blocks that a flush packs.
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor
    totals: Tensor
    num_blocks: Tensor
    plan: Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, capacity: int, layout: RecordLayout, device: torch.device) -> Tail:
        """A tail without tokens; ``capacity`` is at least residual_length - 1 plus the most tokens of a pass."""
        keys, values = (
            torch.zeros(rows, heads, capacity, dim, dtype=layout.dtype, device=device)
            for dim in (layout.key_dim, layout.value_dim)
        )
        counts = torch.zeros(6, rows, dtype=torch.int32, device=device)
        return cls(keys, values, counts[0], counts[1], counts[2], counts[3:])


class Args(ctypes.Structure):
    """``struct Args`` of csrc/tail.cu, field by field. Strides are in bytes."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("key_row", "key_head", "value_row", "value_head")),
        *((name, ctypes.c_int) for name in ("key_token", "value_token")),
        *((name, ctypes.c_void_p) for name in ("tail_keys", "tail_values", "lengths", "totals", "num_blocks", "plan")),
        *((name, ctypes.c_void_p) for name in ("sink_keys", "sink_values", "equalizer")),
        *((name, ctypes.c_int) for name in ("rows", "heads", "tokens", "capacity", "residual_length", "num_sinks")),
        ("exponent", ctypes.c_float),
    )


@cache
def defines(key_dim: int, value_dim: int, dtype: torch.dtype, key_group: int) -> dict[str, int | str]:
    """Preprocessor definitions of csrc/tail.cu."""
    shape = {"KD": key_dim, "VD": value_dim, "DTYPE": DTYPES.index(dtype), "KGROUP": key_group}
    return {**shape, "THREADS": _THREADS}


def _run(
    name: str, grid: tuple[int, ...], keys: Tensor, values: Tensor, key_group: int, **others: Tensor | float | None
) -> None:
    """Launch a kernel of csrc/tail.cu on keys and values, with other fields of its arguments by name."""
    args = Args(keys.data_ptr(), values.data_ptr(), *byte_strides(keys, values))
    args.rows, args.heads, args.tokens = keys.shape[:3]
    for field, value in others.items():
        setattr(args, field, value.data_ptr() if isinstance(value, Tensor) else value)
    flags = defines(keys.shape[-1], values.shape[-1], keys.dtype, key_group)
    launch(kernel("tail.cu", name, flags, keys.device), grid, _THREADS, 0, (bytes(args),), keys.device)


def append(tail: Tail, keys: Tensor, values: Tensor) -> None:
    """Add the tokens of a pass to every row, at ``lengths``; ``totals`` becomes the lengths with them.

    Args:
        tail: Has room for them.
        keys: (rows, heads, q, key_dim).
        values: (rows, heads, q, value_dim).
    """
    _append(keys, values, tail.keys, tail.values, tail.lengths, tail.totals)


@torch.library.custom_op("oscar_kv::append", mutates_args=("tail_keys", "tail_values", "totals"))
def _append(
    keys: Tensor, values: Tensor, tail_keys: Tensor, tail_values: Tensor, lengths: Tensor, totals: Tensor
) -> None:
    keys, values = aligned(keys), aligned(values)
    tensors = {"tail_keys": tail_keys, "tail_values": tail_values, "lengths": lengths, "totals": totals}
    _run("append", (keys.shape[2], keys.shape[0]), keys, values, 128, capacity=tail_keys.shape[2], **tensors)


def start_rows(
    keys: Tensor,
    values: Tensor,
    layout: RecordLayout,
    plan: Tensor,
    sinks: tuple[Tensor, Tensor] | None,
    equalizer: Tensor | None,
) -> None:
    """For rows whose first block is about to be packed: keep their sinks, and find their equalization vector.

    Args:
        keys: (rows, heads, tokens, key_dim), as for :func:`~oscar_kv.kernels.encode.encode_blocks`.
        values: (rows, heads, tokens, value_dim).
        layout: Of the records.
        plan: int32 (3, rows), contiguous: starts, counts and places of the blocks.
        sinks: (rows, heads, num_sinks, dim) of keys and values, written; None without sinks.
        equalizer: float32 (rows, heads, key_dim), written; None without equalization.
    """
    config = layout.config
    _start_rows(keys, values, plan, *(sinks or (None, None)), equalizer, config.equalize, config.key_group)


@torch.library.custom_op("oscar_kv::start_rows", mutates_args=("sink_keys", "sink_values", "equalizer"))
def _start_rows(
    keys: Tensor,
    values: Tensor,
    plan: Tensor,
    sink_keys: Tensor | None,
    sink_values: Tensor | None,
    equalizer: Tensor | None,
    exponent: float,
    key_group: int,
) -> None:
    keys, values = aligned(keys), aligned(values)
    tensors = {"plan": plan, "sink_keys": sink_keys, "sink_values": sink_values, "equalizer": equalizer}
    num_sinks = 0 if sink_keys is None else sink_keys.shape[2]
    grid = (keys.shape[1], keys.shape[0])
    _run("start_rows", grid, keys, values, key_group, num_sinks=num_sinks, exponent=exponent, **tensors)


def flush(
    tail: Tail,
    layout: RecordLayout,
    records: Tensor,
    norms: Tensor | None,
    equalizer: Tensor | None,
    sinks: tuple[Tensor, Tensor] | None,
) -> None:
    """Pack the complete blocks of each row out of the tail, and move the rest to its front.

    Args:
        tail: After :func:`append`.
        layout: Of the records.
        records: uint8 (rows, blocks, heads, record bytes), with room for the new blocks.
        norms: bfloat16 (rows, blocks, 1 or heads, 128), or None.
        equalizer: float32 (rows, heads, key_dim), or None.
        sinks: (rows, heads, num_sinks, dim) of keys and values, or None.
    """
    _plan(tail.keys, tail.values, tail.lengths, tail.totals, tail.num_blocks, tail.plan, layout.config.residual_length)
    start_rows(tail.keys, tail.values, layout, tail.plan, sinks, equalizer)
    starts, counts, places = tail.plan.unbind()
    num_sinks = 0 if sinks is None else sinks[0].shape[2]
    encode_blocks(tail.keys, tail.values, layout, equalizer, num_sinks, starts, counts, places, records, norms)
    _move(tail.keys, tail.values, tail.lengths, tail.plan)


@torch.library.custom_op("oscar_kv::plan_flush", mutates_args=("lengths", "totals", "num_blocks", "plan"))
def _plan(
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    totals: Tensor,
    num_blocks: Tensor,
    plan: Tensor,
    residual_length: int,
) -> None:
    tensors = {"lengths": lengths, "totals": totals, "num_blocks": num_blocks, "plan": plan}
    _run("plan_flush", (1,), keys, values, 128, residual_length=residual_length, **tensors)


@torch.library.custom_op("oscar_kv::flush_tail", mutates_args=("keys", "values"))
def _move(keys: Tensor, values: Tensor, lengths: Tensor, plan: Tensor) -> None:
    tensors = {"tail_keys": keys, "tail_values": values, "lengths": lengths, "plan": plan}
    _run("flush_tail", (keys.shape[1], keys.shape[0]), keys, values, 128, capacity=keys.shape[2], **tensors)


for _operator in (_append, _start_rows, _plan, _move):
    _operator.register_fake(lambda *args: None)  # they write, and return nothing


def representative(arch: str) -> list[tuple[str, str, str, dict[str, int | str]]]:
    """(title, source, kernel that uses dynamic shared memory, definitions) for the table of resources."""
    return [("default", "tail.cu", "", defines(128, 128, torch.bfloat16, 32))]
