"""One line of a result: what was measured, on what, and how long it took."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from oscar_kv import results

BASELINES = {  # by op: what "oscar" is compared with
    "decode": ("sdpa-flash", "sdpa-cudnn"),
    "append": (),
    "encode": ("copy",),
}


@dataclass(frozen=True)
class Shape:
    """A problem: ``batch`` rows of ``context`` tokens each. Encoding has no queries, and so 0 of their heads."""

    batch: int
    context: int
    q_heads: int
    kv_heads: int
    head_dim: int = 128

    def __str__(self) -> str:
        heads = f"{self.q_heads}/{self.kv_heads}" if self.q_heads else f"{self.kv_heads}"
        return f"{self.batch} x {self.context}, heads {heads} of {self.head_dim}"


@dataclass(frozen=True)
class Measurement:
    """Time of one implementation of an op on one shape.

    Args:
        op: "decode", "append" (of one token per row, packing included, on average) or "encode".
        impl: "oscar", or what it is compared with.
        preset: Of the packed cache; empty where there is none.
        form: How queries were laid out for SDPA, "gqa" or "folded"; otherwise empty.
        batch: Rows.
        context: Tokens of each row.
        q_heads: Query heads.
        kv_heads: KV heads.
        head_dim: Of queries, keys and values.
        median_us: Median time of a call, in microseconds.
        p10_us: Its 10th percentile.
        p90_us: Its 90th percentile.
        bytes: That a call has to read and write.
        copy_gbps: What a large copy moved in the same run, GB/s read plus written.
    """

    op: str
    impl: str
    preset: str
    form: str
    batch: int
    context: int
    q_heads: int
    kv_heads: int
    head_dim: int
    median_us: float
    p10_us: float
    p90_us: float
    bytes: int
    copy_gbps: float

    @property
    def shape(self) -> Shape:
        return Shape(self.batch, self.context, self.q_heads, self.kv_heads, self.head_dim)

    @property
    def of_limit(self) -> float:
        """Fraction of the memory limit: the time in which a copy moves the same bytes, over the measured time."""
        return self.bytes / (self.copy_gbps * 1e3) / self.median_us


def speedup(measured: Measurement, run: list[Measurement]) -> float | None:
    """How many times faster than the fastest baseline on the same shape in the same run; None without one."""
    impls = BASELINES[measured.op]
    times = [m.median_us for m in run if m.op == measured.op and m.impl in impls and m.shape == measured.shape]
    return min(times) / measured.median_us if times else None


def append(path: Path, found: list[Measurement]) -> None:
    """Append measurements that this process made to a CSV file."""
    gpu = next(iter(results.gpus()), "")
    made = results.gpu_provenance()
    results.append_rows(path, [{"gpu": gpu, **_rounded(m), **made} for m in found])


def _rounded(m: Measurement) -> dict[str, object]:
    return {name: f"{x:.2f}" if isinstance(x, float) else x for name, x in asdict(m).items()}


def read_runs(path: Path) -> list[list[Measurement]]:
    """The measurements of a CSV file, by the run that made them: rows that differ in nothing else.

    Raises:
        ValueError: The file lacks a column, or a number is none.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    runs: dict[tuple[str, ...], list[Measurement]] = {}
    names = {field.name for field in fields(Measurement)} - {"copy_gbps"}  # which one run measures once
    for row in rows:
        run = tuple(value for name, value in row.items() if name not in names)
        runs.setdefault(run, []).append(_parsed(path, row))
    return list(runs.values())


def _parsed(path: Path, row: Mapping[str, str]) -> Measurement:
    types = {"str": str, "int": int, "float": float}  # annotations are strings here
    try:
        return Measurement(**{field.name: types[str(field.type)](row[field.name]) for field in fields(Measurement)})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of oscar-kv bench kernels: {error}") from error
