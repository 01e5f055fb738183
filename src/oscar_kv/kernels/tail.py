"""The 16-bit tail on the device: appending tokens and packing full blocks without the host knowing any length.

What :meth:`oscar_kv.recent.TailStore.append` and ``commit`` do, so that a decode step can be a CUDA graph:

    append(...)    # the tail holds the new tokens, which its lengths do not count yet: attention may run
    flush(...)     # packs what is complete, moves the rest to the front, counts
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kv.kernels.compile import architecture, kernel, launch
from oscar_kv.kernels.encode import arguments, defines, destination
from oscar_kv.kernels.records import aligned, check_norms, layout_key, layout_of
from oscar_kv.pack import RecordLayout

_COUNTERS = ("lengths", "totals", "num_blocks", "blocks_before", "arrived", "norms_done")  # fields of the kernels


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
    fields = _fields(counters, tail_keys, tail_values, layout_of(layout))
    args = arguments(keys, values, tokens=keys.shape[2], **fields)
    device, flags = keys.device, _defines(layout, keys.device)
    grid = (keys.shape[2], keys.shape[0])
    code = kernel("flush.cu", "append", flags, device)
    launch(code, grid, int(flags["THREADS"]), 0, (bytes(args),), device, dependent=True)


def flush(
    tail: tuple[Tensor, Tensor],
    counters: Counters,
    layout: RecordLayout,
    records: Tensor,
    norms: Tensor | None,
    equalizer: Tensor | None,
    sinks: tuple[Tensor, Tensor] | None,
    query_power: Tensor | None = None,
    hold: int = 0,
    first: int = 0,
) -> None:
    """Pack the complete blocks of each row out of the tail, and move the rest to its front.

    Args:
        tail: As for :func:`append`, which comes first.
        counters: Of the rows, written.
        layout: Of the records.
        records: uint8 (rows, blocks, heads, record bytes), with room for the new blocks.
        norms: bfloat16 (rows, blocks, 1 or heads, 128), or None.
        equalizer: float32 (rows, heads, key_dim), or None where the configuration does not equalize.
        sinks: (rows, heads, num_sinks, dim) of keys and values, or None.
        query_power: float64 (rows, heads, key_dim), or None: see :func:`~oscar_kv.kernels.encode.start_rows`.
        hold: Tokens beyond ``residual_length`` that stay in the tail.
        first: The block of each row that ``records`` and ``norms`` begin with.
    """
    check_norms(layout, norms)
    _flush(
        *tail, counters.data, records, norms, equalizer, *(sinks or (None, None)), query_power, layout_key(layout),
        layout.config.residual_length + hold, first,
    )  # fmt: skip


_WRITTEN = ("tail_keys", "tail_values", "counters", "records", "norms", "equalizer", "sink_keys", "sink_values")


@torch.library.custom_op("oscar_kv::flush", mutates_args=_WRITTEN)
def _flush(
    tail_keys: Tensor,
    tail_values: Tensor,
    counters: Tensor,
    records: Tensor,
    norms: Tensor | None,
    equalizer: Tensor | None,
    sink_keys: Tensor | None,
    sink_values: Tensor | None,
    query_power: Tensor | None,
    layout: str,
    residual_length: int,
    first: int = 0,
) -> None:
    config, device = layout_of(layout).config, tail_keys.device
    args = arguments(
        tail_keys, tail_values, residual_length=residual_length,
        equalizer=equalizer, exponent=config.equalize, query_power=query_power,
        query_exponent=config.equalize_queries, sink_keys=sink_keys, sink_values=sink_values,
        num_sinks=0 if sink_keys is None else sink_keys.shape[2],
        **_fields(counters, tail_keys, tail_values, layout_of(layout)), **destination(records, norms, first),
    )  # fmt: skip
    flags = _defines(layout, device)
    rows, heads = tail_keys.shape[:2]
    grid = min(torch.cuda.get_device_properties(device).multi_processor_count, 2 * rows * heads)
    code, threads, shared = kernel("flush.cu", "flush", flags, device), int(flags["THREADS"]), int(flags["SHARED"])
    launch(code, grid, threads, shared, (bytes(args),), device, cooperative=True, dependent=True)


for _operator in (_append, _flush):
    _operator.register_fake(lambda *args: None)  # they write, and return nothing


def _fields(counters: Tensor, tail_keys: Tensor, tail_values: Tensor, layout: RecordLayout) -> dict[str, Tensor | int]:
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
