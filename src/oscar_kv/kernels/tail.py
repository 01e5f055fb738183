"""The 16-bit tail on the device: appending tokens and packing full blocks without the host knowing any length.

What :meth:`oscar_kv.recent.TailStore.append` and ``commit`` do, so that a decode step can be a CUDA graph:

    append(...)    # the tail holds the new tokens, which its lengths do not count yet: attention may run
    flush(...)     # packs what is complete, moves the rest to the front, counts: in one layer, or in all at the end
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv.kernels.compile import architecture, kernel, launch
from oscar_kv.kernels.encode import Args, arguments, defines, destination
from oscar_kv.kernels.records import aligned, check_norms, layout_key, layout_of
from oscar_kv.pack import RecordLayout

_COUNTERS = ("lengths", "totals", "num_blocks", "blocks_before", "arrived", "norms_done")  # fields of the kernels
_LAYERS = 15  # of a launch of flush, at most


class _Layers(ctypes.Structure):
    """``struct Layers`` of csrc/flush.cu."""

    _fields_ = (("of", Args * _LAYERS), ("count", ctypes.c_int))


@dataclass(frozen=True)
class Counters:
    """What a layer knows of its rows, on the device.

    Args:
        data: int32 (6, rows), contiguous.
    """

    data: Tensor

    @classmethod
    def zeros(cls, rows: int, device: torch.device) -> Counters:
        return cls(torch.zeros(len(_COUNTERS), rows, dtype=torch.int32, device=device))

    @property
    def lengths(self) -> Tensor:
        """int32 (rows): tokens in the tail, without those that were appended since the last flush."""
        return self.data[0]

    @property
    def num_blocks(self) -> Tensor:
        """int32 (rows): packed blocks."""
        return self.data[2]

    def set(self, lengths: list[int], num_blocks: list[int]) -> None:
        counts = torch.tensor([lengths, lengths, num_blocks], dtype=torch.int32)
        self.data[:3].copy_(counts.to(self.data.device))


def append(keys: Tensor, values: Tensor, tail: tuple[Tensor, Tensor], counters: Counters, layout: RecordLayout) -> None:
    """Add the tokens of a pass to every row's tail, after the tokens that ``counters.lengths`` counts.

    Args:
        keys: (rows, heads, q, key_dim).
        values: (rows, heads, q, value_dim).
        tail: Keys and values (rows, heads, capacity, dim), contiguous, written; they must have room.
        counters: Of the rows.
        layout: Of the records.
    """
    _append(keys, values, *tail, counters.data, layout_key(layout))


@torch.library.custom_op("oscar_kv::append", mutates_args=("tail_keys", "tail_values", "counters"))
def _append(
    keys: Tensor, values: Tensor, tail_keys: Tensor, tail_values: Tensor, counters: Tensor, layout: str
) -> None:
    keys, values = aligned(keys), aligned(values)
    fields = _fields(counters, tail_keys, tail_values)
    args = arguments(keys, values, tokens=keys.shape[2], **fields)
    device, flags = keys.device, _defines(layout, keys.device)
    grid = (keys.shape[2], keys.shape[0])
    code = kernel("flush.cu", "append", flags, device)
    launch(code, grid, int(flags["THREADS"]), 0, (bytes(args),), device, dependent=True)


@dataclass(frozen=True)
class TailLayer:
    """What :func:`flush` reads and writes of a layer.

    Args:
        tail: Keys and values, as for :func:`append`, which comes first.
        counters: Of the rows, written.
        records: uint8 (rows, blocks, heads, record bytes), with room for the new blocks.
        norms: bfloat16 (rows, blocks, 1 or heads, 128), or None.
        equalizer: float32 (rows, heads, key_dim), or None where the configuration does not equalize.
        sinks: (rows, heads, num_sinks, dim) of keys and values, or None.
        query_power: float64 (rows, heads, key_dim), or None: see :func:`~oscar_kv.kernels.encode.start_rows`.
        first: The block of each row that ``records`` and ``norms`` begin with.
    """

    tail: tuple[Tensor, Tensor]
    counters: Counters
    records: Tensor
    norms: Tensor | None
    equalizer: Tensor | None
    sinks: tuple[Tensor, Tensor] | None
    query_power: Tensor | None = None
    first: int = 0

    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of the operator's arguments."""
        written = *self.tail, self.counters.data, self.records, self.norms, self.equalizer, *(self.sinks or (None,) * 2)
        return *written, self.query_power


def flush(layers: Sequence[TailLayer], layout: RecordLayout, hold: int = 0) -> None:
    """Pack the complete blocks of each row out of the tail, and move the rest to its front.

    Args:
        layers: With the same rows and heads; each row is as long, and has as many packed blocks, in all of them. A
            launch takes 15.
        layout: Of the records.
        hold: Tokens beyond ``residual_length`` that stay in the tail.
    """
    for start in range(0, len(layers), _LAYERS):
        some = layers[start : start + _LAYERS]
        for layer in some:
            check_norms(layout, layer.norms)
        columns = (list(column) for column in zip(*(layer.tensors() for layer in some), strict=True))
        firsts = [layer.first for layer in some]
        _flush(*columns, firsts, layout_key(layout), layout.config.residual_length + hold)


_WRITTEN = ("tail_keys", "tail_values", "counters", "records", "norms", "equalizer", "sink_keys", "sink_values")


@torch.library.custom_op("oscar_kv::flush", mutates_args=_WRITTEN)
def _flush(
    tail_keys: Sequence[Tensor],
    tail_values: Sequence[Tensor],
    counters: Sequence[Tensor],
    records: Sequence[Tensor],
    norms: Sequence[Tensor | None],
    equalizer: Sequence[Tensor | None],
    sink_keys: Sequence[Tensor | None],
    sink_values: Sequence[Tensor | None],
    query_power: Sequence[Tensor | None],
    firsts: Sequence[int],
    layout: str,
    residual_length: int,
) -> None:
    config, device = layout_of(layout).config, tail_keys[0].device
    layers = _Layers(count=len(firsts))
    for i, first in enumerate(firsts):
        sinks = sink_keys[i]
        layers.of[i] = arguments(
            tail_keys[i], tail_values[i], residual_length=residual_length,
            equalizer=equalizer[i], exponent=config.equalize, query_power=query_power[i],
            query_exponent=config.equalize_queries, sink_keys=sinks, sink_values=sink_values[i],
            num_sinks=0 if sinks is None else sinks.shape[2],
            **_fields(counters[i], tail_keys[i], tail_values[i]), **destination(records[i], norms[i], first),
        )  # fmt: skip
    flags = _defines(layout, device)
    rows, heads = tail_keys[0].shape[:2]
    grid = min(torch.cuda.get_device_properties(device).multi_processor_count, 2 * len(firsts) * rows * heads)
    code, threads, shared = kernel("flush.cu", "flush", flags, device), int(flags["THREADS"]), int(flags["SHARED"])
    launch(code, grid, threads, shared, (bytes(layers),), device, cooperative=True, dependent=True)


for _operator in (_append, _flush):
    _operator.register_fake(lambda *args: None)  # they write, and return nothing


def _fields(counters: Tensor, tail_keys: Tensor, tail_values: Tensor) -> dict[str, Tensor | int]:
    """Fields of the kernels' arguments that describe the tail."""
    return {
        **dict(zip(_COUNTERS, counters, strict=True)),
        "tail_keys": tail_keys,
        "tail_values": tail_values,
        "capacity": tail_keys.shape[2],
        "rows": tail_keys.shape[0],
    }


def _defines(layout: str, device: torch.device) -> dict[str, int | str]:
    config = layout_of(layout).config
    return defines(layout_of(layout), equalized=config.equalize > 0, arch=architecture(device))


def representative(arch: str) -> list[tuple[str, str, str, dict[str, int | str]]]:
    """(title, source, kernel that uses dynamic shared memory, definitions) for the table of resources."""
    from oscar_kv.kernels import encode

    return [(title, "flush.cu", "flush", flags) for title, _, _, flags in encode.representative(arch)]
