"""What all kernels are told of records, and of the tensors that they read and write."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cache

import torch
from torch import Tensor

from oscar_kv.config import OscarConfig
from oscar_kv.pack import RecordLayout

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
METADATA = ("float16", "bfloat16", "float8_e4m3")
_SHARED_KIB = {"sm_80": 163, "sm_90a": 227, "sm_100a": 227, "sm_100": 227}  # what a CTA can have
_SMALLEST_SHARED_KIB = 99  # of the other architectures


def layout_key(layout: RecordLayout) -> str:
    """The layout as a string, since custom ops take plain values only."""
    dtype = str(layout.dtype).removeprefix("torch.")
    return json.dumps([asdict(layout.config), layout.key_dim, layout.value_dim, dtype])


@cache
def layout_of(key: str) -> RecordLayout:
    """Inverse of :func:`layout_key`."""
    config, key_dim, value_dim, dtype = json.loads(key)
    return RecordLayout(OscarConfig(**config), key_dim, value_dim, getattr(torch, dtype))


def record_defines(layout: RecordLayout) -> dict[str, int | str]:
    """Preprocessor definitions that say what a record holds, for the kernels that read it."""
    config = layout.config
    return {
        "KD": layout.key_dim,
        "VD": layout.value_dim,
        "KBITS": config.key_bits,
        "VBITS": config.value_bits,
        "KGROUP": config.key_group,
        "VGROUP": layout.value_group,
        "META": METADATA.index(config.metadata),
        "NORM": layout.norm_heads(2),  # 0 none, 1 shared by the heads, 2 one per head
    }


def shared_limit(arch: str) -> int:
    """Bytes of shared memory that a CTA can have."""
    return _SHARED_KIB.get(arch, _SMALLEST_SHARED_KIB) * 1024


def check_norms(layout: RecordLayout, norms: Tensor | None) -> None:
    """Raise ValueError where norms are missing or unused."""
    if (norms is None) != (layout.norm_heads(1) == 0):
        raise ValueError("norms are needed where keys are scaled by token, and only there")


def origin(x: Tensor | None, first: int) -> int:
    """The address that block 0 would have in x (rows, blocks, ...) which holds blocks from ``first`` on; 0 for None."""
    return 0 if x is None else x.data_ptr() - first * x.stride(1) * x.itemsize


def aligned(x: Tensor) -> Tensor:
    """x, copied if its tokens are not contiguous runs of 16-byte pieces."""
    steps = (x.data_ptr(), *(stride * x.itemsize for stride in x.stride()[:-1]))
    fits = x.stride(-1) == 1 and all(step % 16 == 0 for step in steps)
    return x if fits else x.clone(memory_format=torch.contiguous_format)
