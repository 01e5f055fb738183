"""Bytes and bits of a cache, ours, a rival's or transformers' own, now and at another length."""

from __future__ import annotations

import math

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from oscar_kv.baselines.cache import BaselineCache
from oscar_kv.baselines.peers import MeasuredQuantizedCache
from oscar_kv.cache import OscarCache
from oscar_kv.config import BLOCK_TOKENS

PACKED = ("codes", "scales_zeros", "norms")  # components that grow with the packed tokens
_RIVALS = (BaselineCache, MeasuredQuantizedCache)


def memory_bytes(cache: Cache) -> dict[str, int]:
    """Bytes of every tensor that a cache holds, by component, and their "total".

    For an OscarCache or the cache of a rival the components are those of its ``memory_bytes``. Of any other cache,
    "tokens" are the layers that keep their whole history and "other_layers" the rest.
    """
    if isinstance(cache, (OscarCache, *_RIVALS)):
        return cache.memory_bytes()
    sizes = {"tokens": 0, "other_layers": 0}
    for layer in cache.layers:
        name = "tokens" if type(layer) is DynamicLayer else "other_layers"
        sizes[name] += sum(x.nbytes for x in vars(layer).values() if isinstance(x, Tensor))
    return {**sizes, "total": sum(sizes.values())}


def bits_per_element(cache: Cache) -> float:
    """Bits per cached key and value number of the layers that keep their whole history."""
    if isinstance(cache, (OscarCache, *_RIVALS)):
        return cache.bits_per_element()
    layers = [layer for layer in cache.layers if type(layer) is DynamicLayer]
    tensors = [x for layer in layers for x in (layer.keys, layer.values) if x is not None]
    return 8 * sum(x.nbytes for x in tensors) / sum(x.numel() for x in tensors)


def packed_bits(cache: Cache) -> float:
    """Bits per packed key and value number: codes, scales, zeros and norms, without tail and sinks.

    NaN while nothing is packed; of a cache that does not pack, its bits per element.
    """
    if isinstance(cache, _RIVALS):
        return cache.packed_bits()
    if not isinstance(cache, OscarCache):
        return bits_per_element(cache)
    states = [layer.state for layer in cache.packed_layers if layer.state is not None]
    elements = sum(
        BLOCK_TOKENS * sum(s.num_blocks) * s.records.shape[2] * (s.layout.key_dim + s.layout.value_dim) for s in states
    )
    sizes = cache.memory_bytes()
    return 8 * sum(sizes[name] for name in PACKED) / elements if elements else math.nan


def bytes_at(cache: Cache, tokens: int) -> dict[str, int]:
    """What :func:`memory_bytes` would give if the cache held this many tokens per row: computed, not measured.

    Packed bytes (or those of 16-bit tokens) grow with the tokens; the tail is full, sinks and equalizer stay. Nothing
    is reserved, as with ``max_length=tokens``. Layers with a window or a state of fixed size are taken to be full.

    Raises:
        ValueError: No block is packed yet, so that a block's size is unknown.
        NotImplementedError: The cache is a rival's.
    """
    if isinstance(cache, _RIVALS):
        raise NotImplementedError(f"bytes of a {type(cache).__name__} at another length")
    sizes = memory_bytes(cache)
    if isinstance(cache, OscarCache):
        state = next((layer.state for layer in cache.packed_layers), None)
        if state is None or min(state.num_blocks) == 0:
            raise ValueError("no block is packed yet: run more tokens first")
        held_back = cache.oscar_config.residual_length - BLOCK_TOKENS
        blocks = state.batch * (max(0, tokens - held_back) // BLOCK_TOKENS)
        for name in PACKED:
            sizes[name] = sizes[name] * blocks // sum(state.num_blocks)
        sizes["reserved"] = 0
        states = [layer.state for layer in cache.packed_layers if layer.state is not None]
        row = sum(
            s.batch * s.records.shape[2] * (s.layout.key_dim + s.layout.value_dim) * s.layout.dtype.itemsize
            for s in states
        )
        sizes["tail"] = row * cache.oscar_config.residual_length
    else:
        sizes["tokens"] = sizes["tokens"] * tokens // cache.get_seq_length()
    return {**sizes, "total": sum(size for name, size in sizes.items() if name != "total")}


def packed_span(cache: Cache) -> tuple[int, int]:
    """The columns [first, stop) that every packing layer and row holds packed, for rows without padding.

    Raises:
        ValueError: The cache packs nothing.
    """
    spans: list[tuple[int, int]] = []
    if isinstance(cache, OscarCache):
        states = [layer.state for layer in cache.packed_layers if layer.state is not None]
        spans = [(s.config.num_sinks, BLOCK_TOKENS * min(s.num_blocks)) for s in states]
    elif isinstance(cache, BaselineCache):
        sinks = [(s.sinks[0].shape[2], s.num_packed) for s in cache.stores]
        spans = [(first, first + count) for first, count in sinks]
    elif isinstance(cache, MeasuredQuantizedCache):
        spans = [(0, cache.packed_length())]
    if not spans:
        raise ValueError(f"a {type(cache).__name__} of this model has no packed layer")
    return max(first for first, _ in spans), min(stop for _, stop in spans)
