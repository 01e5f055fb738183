"""What a row of a results table must say about how it was made, and CSV files of such rows."""

from __future__ import annotations

import csv
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import oscar_kv


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter here; those that are not installed are left out."""
    found = {"python": platform.python_version(), "oscar_kv": oscar_kv.__version__, "torch": torch.__version__}
    for package in ("transformers", "cuda-core"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def gpus() -> list[str]:
    """Names of the GPUs that torch sees."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def hardware() -> str:
    """The GPUs, or else the processor and its cores."""
    names = gpus()
    if names:
        return f"{len(names)} x {names[0]}"
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} cores"


def commit() -> str:
    """What OSCAR_KV_COMMIT says, or the commit of a checkout of this project, "-dirty" with changes, or nothing."""
    if given := os.environ.get("OSCAR_KV_COMMIT"):
        return given
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:  # no git
        return ""


def driver() -> str:
    """Version of the NVIDIA driver; empty where nvidia-smi does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.split("\n", 1)[0].strip()


def provenance() -> dict[str, str]:
    """Hardware, versions, commit, command and date (UTC) of a result that this process made."""
    installed = versions()
    return {
        "hardware": hardware(),
        **{name: installed.get(name, "") for name in ("oscar_kv", "torch", "transformers")},
        **_made(),
    }


def gpu_provenance() -> dict[str, str]:
    """Versions of what a kernel's time depends on, commit, command and date (UTC)."""
    installed = versions()
    return {
        "driver": driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cuda_core": installed.get("cuda-core", ""),
        "oscar_kv": oscar_kv.__version__,
        **_made(),
    }


def _command() -> str:
    program = Path(sys.argv[0])
    words = [program.name]
    if program.name == "__main__.py":  # python -m
        words = ["python", "-m", f"oscar_kv.{program.parent.name}"]
    return shlex.join([*words, *sys.argv[1:]])


def _made() -> dict[str, str]:
    return {
        "commit": commit(),
        "command": _command(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def check_columns(path: Path, columns: Sequence[str]) -> None:
    """See that rows with these columns can be appended to a CSV file, which may be empty or not there.

    Raises:
        ValueError: The file has other columns.
    """
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open(newline="", encoding="utf-8") as file:
        header = next(csv.reader(file))
    if header != list(columns):
        raise ValueError(f"{path} has the columns {', '.join(header)}, not {', '.join(columns)}")


def read_rows(path: Path | None, **columns: str) -> list[dict[str, str]]:
    """The rows of a CSV file, which need not be there, that have these values in these columns."""
    if path is None or not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if columns.items() <= row.items()]


def append_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Append rows with the same columns to a CSV file; a new file gets a header.

    Raises:
        ValueError: The file has other columns.
    """
    columns = list(rows[0])
    check_columns(path, columns)
    new = not path.exists() or path.stat().st_size == 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
