"""``oscar-kv env``."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from oscar_kv import kernels, results


def env() -> None:
    """Versions, GPUs, and which attention over packed keys runs here."""
    table = Table(show_header=False)
    for name, found in results.versions().items():
        table.add_row(name, found)
    table.add_row("GPUs", ", ".join(results.gpus()) or "none")
    reason = kernels.missing(torch.device("cuda", 0) if results.gpus() else torch.device("cpu"))
    table.add_row("attention", "CUDA kernels" if reason is None else f"PyTorch reference ({reason})")
    Console().print(table)
