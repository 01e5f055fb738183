"""How decode attention is launched: which kernel, how many warps and CTAs, and the shared memory that they need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from oscar_kv.kernels.compile import architecture, most_cluster
from oscar_kv.pack import RecordLayout

MAX_COLUMNS = 64  # queries times heads of a group; every 16 of them read the cache once more
BUSY_ITEMS, _IDLE_ITEMS = 32, 4  # that a warp takes at most in one launch, if the GPU is full or not
_SPARE = 1024  # bytes of shared memory that the driver takes from a CTA
_LARGE, _FEW_BLOCKS = 12_000, 8  # bytes of a record; blocks per warp


def unsupported(layout: RecordLayout, columns: int, batch: int, device: torch.device) -> str | None:
    """Why the kernel cannot take these; ``columns`` is the number of queries times the heads of a group."""
    if layout.dtype not in (torch.bfloat16, torch.float16):
        return f"decode attention has no kernel for {layout.dtype}"
    if 16 in (layout.config.key_bits, layout.config.value_bits):
        return "decode attention has no kernel for sides of 16 bits"
    if columns <= MAX_COLUMNS and shape_of(layout, columns, batch, properties(device)[1]) is None:
        return f"a record of {layout.record_bytes} bytes does not fit the shared memory of {device}"
    return None


def query_bytes(layout: RecordLayout, columns: int) -> int:
    """Rotated queries of a pass, and the factors that undo their scaling."""
    return 2 * layout.key_dim * columns + 16


def stage_bytes(layout: RecordLayout, extra: int) -> int:
    """Shared memory of one warp: a record, its norms, ``extra`` bytes, and two barriers (16)."""
    norms = 256 if layout.config.token_norm is not None else 0
    return _aligned(layout.record_bytes + norms + extra) + 16


def _aligned(size: int) -> int:
    return (size + 127) // 128 * 128


def _tiles(columns: int) -> tuple[int, int]:
    """Column tiles of a pass, and columns in use per tile."""
    return 1 if columns <= 8 else 2, 8 if columns > 4 else 4 if columns > 2 else columns


def most_warps(layout: RecordLayout, tiles: int) -> int:
    """Warps of a multiprocessor that have registers for outputs and scores."""
    registers = tiles * (layout.value_dim // 4 + 32)
    return 16 if registers <= 72 else 8 if registers <= 150 else 4


@cache
def shape_of(layout: RecordLayout, columns: int, batch: int, shared: int) -> tuple[int, int, int] | None:
    """Column tiles of a pass, columns in use per tile, and warps per CTA; None where not even one warp fits."""
    tiles, used = _tiles(columns)
    fit = (shared - _SPARE - row_bytes(batch)) // stage_bytes(layout, query_bytes(layout, tiles * used))
    return (tiles, used, min(most_warps(layout, tiles), fit)) if fit > 0 else None


def fewer_warps(layout: RecordLayout, warps: int, blocks: int, multiprocessors: int) -> int:
    """Of a CTA, for so many blocks of all units: where each warp has few large ones, more ask for too much at once."""
    few = layout.record_bytes > _LARGE and blocks < _FEW_BLOCKS * warps * multiprocessors
    return min(warps, 12) if few else warps


@dataclass(frozen=True)
class Short:
    """Launch of csrc/decode_short.cu: warps of a CTA, CTAs of a cluster and of a multiprocessor, shared memory."""

    warps: int
    cluster: int
    ctas: int
    shared: int

    @property
    def flags(self) -> dict[str, int | str]:
        return {"WARPS": self.warps, "CLUSTER": self.cluster, "CTAS": self.ctas}


@cache
def short(layout: RecordLayout, columns: int, units: int, blocks: int, device: torch.device) -> Short | None:
    """How clusters attend to units of at most so many blocks; None where these are too many, or do not fit.

    One cluster does all of a unit, so what a warp may get is bounded: lengths that differ are not evened out. The rule
    is what was fastest on an H200 (benchmarks/kernels.md).
    """
    multiprocessors, shared = properties(device)
    most = most_warps(layout, _tiles(columns)[0])  # of a multiprocessor
    while most and short_bytes(layout, columns, most, 1) + _SPARE > shared:
        most -= 1
    if most < 1:
        return None
    share = most // -(-units // multiprocessors)
    warps, cluster = share if share >= 3 else min(most, 4), 1
    if units <= multiprocessors:
        while cluster < most_cluster(architecture(device)) and cluster * (most // 4) < blocks:
            if 2 * cluster * units > multiprocessors * (1.0 if cluster == 1 else 0.75):
                break
            cluster *= 2
        few = 4 if 2 * cluster * units > multiprocessors else 2  # blocks of a warp for which half the warps do
        if few * cluster * (most // 2) >= blocks:
            warps = max(1, most // 2)
    while short_bytes(layout, columns, warps, cluster) + _SPARE > shared:
        warps -= 1
    busy = units * cluster >= 0.6 * multiprocessors
    items = blocks + layout.config.residual_length // 16
    if items > (BUSY_ITEMS if busy else _IDLE_ITEMS) * cluster * warps:
        return None
    needed = short_bytes(layout, columns, warps, cluster)
    return Short(warps, cluster, max(1, min(most // warps, shared // (needed + _SPARE))), needed)


def short_bytes(layout: RecordLayout, columns: int, warps: int, cluster: int) -> int:
    """Shared memory of a CTA: stages (partials in the end), queries, maxima and sums, and the cluster's part."""
    tiles, used = _tiles(columns)
    count, spans = tiles * used, -(-layout.value_dim // 128)
    joint = cluster * -(-count // cluster) * 32 * (8 + 16 * spans) if cluster > 1 else 0
    of_warp = max(stage_bytes(layout, 0), _aligned(4 * count * layout.value_dim) + 16) + 8 * count
    return warps * of_warp + _aligned(query_bytes(layout, count)) + joint


def merge_warps(columns: int, value_dim: int, multiprocessors: int) -> int:
    """Warps that share the partials of a column: the fewer columns, the more partials has each."""
    return 32 if columns <= multiprocessors and value_dim <= 256 else 8 if columns < 8 * multiprocessors else 1


def row_bytes(batch: int) -> int:
    return 12 * batch + 4


@cache
def properties(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a CTA may ask for."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
