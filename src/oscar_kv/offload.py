"""Packed blocks in host memory: one layer's are on the GPU while it computes, and the next layer's on their way."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from oscar_kv.blocks import BlockStore
from oscar_kv.codec import PackedBlocks
from oscar_kv.shared import SharedBlocks


@dataclass
class _Copy:
    """All packed blocks of a store, as they were at a version of it, on its device."""

    store: BlockStore
    version: int
    blocks: PackedBlocks


class Offload:
    """Brings the blocks of the layers of a cache to their device one after the other, a layer ahead.

    Copies run on a stream of their own, from page-locked memory. At most two layers have one: the memory of the copy
    before is free then, and a new one begins after all work that was queued before it.
    """

    def __init__(self) -> None:
        self.stores: list[BlockStore] = []  # in the order in which they are read
        self._ahead: _Copy | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def add(self, store: BlockStore) -> None:
        """The next layer of the cache.

        Raises:
            NotImplementedError: Neither a CPU nor a CUDA device.
        """
        if store.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"offload from a {store.device.type} device")
        self.stores.append(store)

    def clear(self) -> None:
        self.stores, self._ahead = [], None

    def fetch(self, store: BlockStore) -> tuple[SharedBlocks, PackedBlocks]:
        """The packed blocks of a store on its device: shared ones, and those that follow.

        On a CPU that is where they are. What is fetched may be used until another store's is.
        """
        if store.device.type == "cpu":
            return store.shared, PackedBlocks(store.records, store.norms)
        ready, self._ahead = self._ahead, None
        if ready is None or ready.store is not store or ready.version != store.version:
            ready = None  # its memory is free
            ready = self._copy(store)
        torch.cuda.current_stream(store.device).wait_stream(self._stream(store.device))
        following = self.stores[(self.stores.index(store) + 1) % len(self.stores)]
        if following is not store and following.device.type == "cuda" and max(following.num_blocks):
            self._ahead = self._copy(following)
        return SharedBlocks(), ready.blocks

    def _copy(self, store: BlockStore) -> _Copy:
        """Start to copy all blocks of a store to its device."""
        stream = self._stream(store.device)
        stream.wait_stream(torch.cuda.current_stream(store.device))
        with torch.cuda.stream(stream):
            blocks = PackedBlocks(*store.room(max(store.num_blocks), on_host=False))
            for row, count in enumerate(store.num_blocks):  # each of which is a piece of memory
                parts = (part.part(slice(row, row + 1), slice(None)) for part in store.packed(0, count))
                blocks.part(slice(row, row + 1), slice(None)).fill(parts, non_blocking=True)
        return _Copy(store, store.version, blocks)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def __deepcopy__(self, memo: dict[int, Any]) -> Offload:
        other = Offload()  # streams cannot be copied, and a copy under way belongs to one cache
        memo[id(self)] = other
        other.stores = copy.deepcopy(self.stores, memo)
        return other
