"""Unpacking on the GPU against the codec on the CPU: the same numbers. Needs a CUDA GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oscar_kv.codec import PackedBlocks, encode
from oscar_kv.codec import dequantize_blocks as reference
from oscar_kv.config import OscarConfig
from oscar_kv.kernels.dequantize import _dequantize_blocks, dequantize_blocks
from oscar_kv.kernels.records import layout_key
from oscar_kv.pack import RecordLayout

DEFAULT = OscarConfig()
ROWS, HEADS, BLOCKS = 2, 3, 4
CASES = {
    "default": (DEFAULT, 128, 128),
    "paper": (OscarConfig.paper(), 128, 128),
    "quality": (OscarConfig.quality(), 128, 128),
    "four_bit": (OscarConfig.four_bit(), 128, 128),
    **{f"k{k}v{v}": (replace(DEFAULT, key_bits=k, value_bits=v), 64, 96)
       for k, v in ((2, 3), (3, 4), (4, 8), (8, 16), (16, 2), (16, 16))},
    **{f"group{g}-{m}": (replace(DEFAULT, key_group=g, value_group=g, metadata=m), 128, 256)
       for g, m in ((16, "float16"), (32, "bfloat16"), (64, "float8_e4m3"), (128, "float16"))},
    **{f"D{k}-{v}": (DEFAULT, k, v) for k, v in ((16, 32), (80, 80), (192, 128), (208, 112), (256, 256), (512, 512))},
    "norm per head": (replace(DEFAULT, scale_scope="head"), 128, 128),
    "no norm": (replace(DEFAULT, token_norm=None), 128, 128),
}  # fmt: skip


def _packed(
    config: OscarConfig, key_dim: int, value_dim: int, dtype: torch.dtype, *, finite: bool = False
) -> tuple[PackedBlocks, RecordLayout]:
    """Blocks of which one holds a key that is not finite, another such a value, unless all are to be finite."""
    generator = torch.Generator().manual_seed(key_dim + value_dim)
    keys = torch.randn(ROWS, HEADS, 128 * BLOCKS, key_dim, generator=generator)
    keys *= torch.randn(key_dim, generator=generator).exp()
    values = torch.randn(ROWS, HEADS, 128 * BLOCKS, value_dim, generator=generator) + 0.2
    if not finite:
        keys[0, 1, 200, 5] = torch.nan
        values[1, 2, 300, 3] = torch.inf
    return encode(keys.to(dtype), values.to(dtype), config), RecordLayout(config, key_dim, value_dim, dtype)


def _expected(blocks: PackedBlocks, layout: RecordLayout) -> tuple[Tensor, Tensor]:
    keys, values = reference(blocks, layout)
    norms = blocks.token_norms()
    keys = keys if norms is None else keys * norms.unsqueeze(-1)
    return keys.to(layout.dtype), values.to(layout.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_reference(name: str, dtype: torch.dtype) -> None:
    """All blocks, and some that lie between others as a range of a cache does."""
    packed, layout = _packed(*CASES[name], dtype)
    records, norms = packed.records.cuda(), None if packed.norms is None else packed.norms.cuda()
    for part in (slice(None), slice(1, 3), slice(3, 4)):
        some = PackedBlocks(packed.records[:, part], None if packed.norms is None else packed.norms[:, part])
        got = dequantize_blocks(records[:, part], None if norms is None else norms[:, part], layout)
        for own, expected in zip(got, _expected(some, layout), strict=True):
            torch.testing.assert_close(own.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_no_blocks_give_no_numbers() -> None:
    packed, layout = _packed(DEFAULT, 64, 64, torch.bfloat16)
    assert packed.norms is not None
    keys, values = dequantize_blocks(packed.records[:, :0].cuda(), packed.norms[:, :0].cuda(), layout)
    assert keys.shape == values.shape == (ROWS, HEADS, 0, 64)


@pytest.mark.gpu
def test_operator_is_well_formed() -> None:
    packed, layout = _packed(DEFAULT, 64, 64, torch.bfloat16, finite=True)
    assert packed.norms is not None
    torch.library.opcheck(_dequantize_blocks, (packed.records.cuda(), packed.norms.cuda(), layout_key(layout)))


def test_norms_must_be_there_if_and_only_if_keys_are_scaled() -> None:
    packed, layout = _packed(DEFAULT, 64, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="norms"):
        dequantize_blocks(packed.records, None, layout)
    raw = RecordLayout(replace(DEFAULT, key_bits=16), 64, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="norms"):
        dequantize_blocks(packed.records, packed.norms, raw)
