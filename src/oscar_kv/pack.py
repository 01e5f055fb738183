"""Step 4: THE byte layout of a packed block. The CPU path and every GPU kernel read these bytes.

A *record* holds what one KV head needs for one block of 128 tokens, as consecutive sections of bytes, each a
multiple of 16 long:

    key codes | key scales | key centers | units | value codes | value scales | value centers

Codes are stored in the order in which tensor cores want them (``mma.m16n8k16``, the A operand). A block is 8 token
tiles of 16 tokens and D/16 channel tiles of 16 channels. For keys a 16 x 16 tile has tokens as rows and channels as
columns, for values the other way round. In such a tile, lane l = 4 * gid + tid holds, in its 32-bit register r and
half h, the element

    row = gid + 8 * (r & 1)        column = 2 * tid + h + 8 * (r >> 1)

The 8 token tiles share words: a word keeps the codes of register r of one lane and one channel tile, token tile p at
bit ``bits * p`` of half h, so that masking a word leaves two codes in place as subnormal fp16 numbers. In words:

    bits  shape of the words                         bit of token tile p in half h
    1     (channel tile, lane, r >> 1)               16 * h + 2 * p + (r & 1)
    2     (channel tile, lane, r)                    16 * h + 2 * p
    4     (p >> 2, channel tile, lane, r)            16 * h + 4 * (p & 3)
    8     (p >> 1, channel tile, lane, r)            16 * h + 8 * (p & 1)

3-bit codes are a 2-bit plane (the low bits) followed by a 1-bit plane. Codes of 16 "bits" are the numbers themselves,
(token, channel) in row-major order in the model's dtype, neither rotated nor scaled.

Scales and centers are stored as the lanes read them as B operands: 16 channels (keys) or tokens (values) of a tile
in the order (tid, r >> 1, h). Keys: (token group, channel tile, tid, r >> 1, h). Values: (channel group, token tile,
tid, r >> 1, h). Units: two float32 powers of two, for the keys' and the values' scales and centers, and 8 zero bytes.

Token norms lie beside the records, since the heads may share them: 128 bfloat16 in the order (gid, p, r & 1), the
rows of the score tiles that a lane holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from oscar_kv.config import BLOCK_TOKENS, OscarConfig
from oscar_kv.quantize import METADATA_DTYPES

SECTIONS = ("key_codes", "key_scale", "key_center", "units", "value_codes", "value_scale", "value_center")
_TOKEN_TILES = BLOCK_TOKENS // 16
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}  # widths of the bit planes, low bits first


@dataclass(frozen=True)
class RecordLayout:
    """Sizes and offsets of the sections of a record.

    Args:
        config: Bits, groups and metadata dtype.
        key_dim: Key head dimension.
        value_dim: Value head dimension.
        dtype: The model's dtype, in which a side of 16 bits is stored.
    """

    config: OscarConfig
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @cached_property
    def metadata_dtype(self) -> torch.dtype:
        return METADATA_DTYPES[self.config.metadata]

    @cached_property
    def value_group(self) -> int:
        return self.config.resolve_value_group(self.value_dim)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of each section."""
        config, item = self.config, self.metadata_dtype.itemsize

        def codes(bits: int, dim: int) -> int:
            return BLOCK_TOKENS * dim * (self.dtype.itemsize * 8 if bits == 16 else bits) // 8

        key_params = 0 if config.key_bits == 16 else BLOCK_TOKENS // config.key_group * self.key_dim * item
        value_params = 0 if config.value_bits == 16 else BLOCK_TOKENS * (self.value_dim // self.value_group) * item
        sizes = (
            codes(config.key_bits, self.key_dim),
            key_params,
            key_params,
            16,
            codes(config.value_bits, self.value_dim),
            value_params,
            value_params,
        )
        return dict(zip(SECTIONS, sizes, strict=True))

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each section in the record."""
        return dict(zip(SECTIONS, accumulate(self.sizes.values(), initial=0), strict=False))

    @property
    def record_bytes(self) -> int:
        return sum(self.sizes.values())

    def norm_heads(self, heads: int) -> int:
        """Norms that are kept of a token, of so many KV heads: 0 where keys are not scaled by token, 1, or one each."""
        if self.config.token_norm is None or self.config.key_bits == 16:
            return 0
        return 1 if self.config.scale_scope == "all" else heads

    def join(self, sections: dict[str, Tensor]) -> Tensor:
        """Concatenate uint8 sections (..., bytes) to records (..., record_bytes)."""
        return torch.cat([sections[name] for name in SECTIONS], dim=-1)

    def split(self, records: Tensor) -> dict[str, Tensor]:
        """Inverse of :meth:`join`."""
        return dict(zip(SECTIONS, records.split(list(self.sizes.values()), dim=-1), strict=True))


def to_bytes(x: Tensor) -> Tensor:
    """The bytes of the last dimension: uint8 (..., n * itemsize)."""
    return x.contiguous().view(torch.uint8)


def from_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Inverse of :func:`to_bytes`. Copies, since a section may start at any byte of a strided record."""
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


def pack_codes(codes: Tensor, bits: int, *, tokens_are_rows: bool) -> Tensor:
    """Pack the codes of blocks in fragment order.

    Args:
        codes: uint8 (..., 128, D), each below ``2 ** bits``.
        bits: 2, 3, 4 or 8.
        tokens_are_rows: True for keys, False for values.

    Returns:
        uint8 (..., 128 * D * bits / 8).
    """
    tiles = _to_tiles(codes, tokens_are_rows)
    planes, shift = [], 0
    for width in _PLANES[bits]:
        planes.append(_pack_plane((tiles >> shift) & (2**width - 1), width))
        shift += width
    return torch.cat(planes, dim=-1)


def unpack_codes(packed: Tensor, bits: int, dim: int, *, tokens_are_rows: bool) -> Tensor:
    """Inverse of :func:`pack_codes`: uint8 (..., 128, dim)."""
    codes: Tensor | None = None
    shift, start = 0, 0
    for width in _PLANES[bits]:
        plane = packed[..., start : start + BLOCK_TOKENS * dim * width // 8]
        fields = torch.cat([(plane >> bit) & (2**width - 1) for bit in range(0, 8, width)], dim=-1)
        places = _places(width, dim, tokens_are_rows, packed.device)
        part = fields.gather(-1, places.expand(fields.shape)) << shift
        codes = part if codes is None else codes | part
        shift, start = shift + width, start + plane.shape[-1]
    assert codes is not None  # every width has a plane
    return codes.unflatten(-1, (BLOCK_TOKENS, dim))


def order_metadata(x: Tensor) -> Tensor:
    """(..., groups, n) with n channels or tokens in natural order -> (..., groups * n) as the lanes read them."""
    tiles = x.unflatten(-1, (-1, 2, 4, 2))  # (tile, r >> 1, tid, h)
    return tiles.transpose(-3, -2).flatten(-5)


def unorder_metadata(x: Tensor, groups: int) -> Tensor:
    """Inverse of :func:`order_metadata`."""
    tiles = x.unflatten(-1, (groups, -1, 4, 2, 2))  # (group, tile, tid, r >> 1, h)
    return tiles.transpose(-3, -2).flatten(-4)


def order_norms(x: Tensor) -> Tensor:
    """(..., 128) token norms in natural order -> as the lanes read them."""
    return x.unflatten(-1, (_TOKEN_TILES, 2, 8)).movedim(-1, -3).flatten(-3)


def unorder_norms(x: Tensor) -> Tensor:
    """Inverse of :func:`order_norms`."""
    return x.unflatten(-1, (8, _TOKEN_TILES, 2)).movedim(-3, -1).flatten(-3)


# Tiles: (..., p, r1, r0, gid, tid, h, channel tile) with r = 2 * r1 + r0


def _to_tiles(codes: Tensor, tokens_are_rows: bool) -> Tensor:
    tiles, n = codes.shape[-1] // 16, codes.ndim - 2
    if tokens_are_rows:  # row = token = (r0, gid), column = channel = (r1, tid, h)
        x = codes.unflatten(-1, (tiles, 2, 4, 2)).unflatten(-5, (_TOKEN_TILES, 2, 8))
        order = (0, 4, 1, 2, 5, 6, 3)  # from (p, r0, gid, tile, r1, tid, h)
    else:  # row = channel = (r0, gid), column = token = (r1, tid, h)
        x = codes.unflatten(-1, (tiles, 2, 8)).unflatten(-4, (_TOKEN_TILES, 2, 4, 2))
        order = (0, 1, 5, 6, 2, 3, 4)  # from (p, r1, tid, h, tile, r0, gid)
    return x.permute(*range(n), *(n + i for i in order))


def _pack_plane(tiles: Tensor, width: int) -> Tensor:
    """Tiles of codes below ``2 ** width`` -> uint8 words in the order of the module's table."""
    n = tiles.ndim - 7
    lead = tuple(range(n))
    p, r1, r0, gid, tid, h, tile = (n + i for i in range(7))
    x = tiles.to(torch.int32)
    if width == 1:  # r0 shares the word: bit 2 p + r0
        x = x.permute(*lead, tile, gid, tid, r1, p, r0, h)
        bit = 2 * torch.arange(8, device=x.device).view(8, 1, 1) + torch.arange(2, device=x.device).view(2, 1)
        shared = 3
    else:
        per_word = 16 // width
        x = x.unflatten(n, (_TOKEN_TILES // per_word, per_word))  # p -> (word, position)
        order = (0, 7, 4, 5, 2, 3, 1, 6)  # (word, tile, gid, tid, r1, r0, position, h)
        x = x.permute(*lead, *(n + i for i in order))
        bit = width * torch.arange(per_word, device=x.device).view(per_word, 1)
        shared = 2
    shift = bit + 16 * torch.arange(2, device=x.device)
    words = (x << shift.to(torch.int32)).flatten(-shared).sum(-1, dtype=torch.int32)  # disjoint bits: sum is "or"
    return to_bytes(words.flatten(n))


def _places(width: int, dim: int, tokens_are_rows: bool, device: torch.device) -> Tensor:
    """Where the codes of a block, token by token, lie among the fields of a plane: first those in the lowest bits.

    Token tile p is (word, byte, position): words are little-endian, and each half of one is two bytes.
    """
    tiles = dim // 16
    places = torch.arange(BLOCK_TOKENS * dim, device=device)
    if width == 1:  # r0 is in the byte
        x = places.view(4, 2, 1, tiles, 8, 4, 2, 2, 2)
        position, r0, word, tile, gid, tid, r1, h, byte = range(9)
    else:
        x = places.view(8 // width, width // 2, tiles, 8, 4, 2, 2, 2, 2)
        position, word, tile, gid, tid, r1, r0, h, byte = range(9)
    tokens = (word, byte, position, r0, gid) if tokens_are_rows else (word, byte, position, r1, tid, h)
    channels = (tile, r1, tid, h) if tokens_are_rows else (tile, r0, gid)
    return x.permute(*tokens, *channels).flatten()
