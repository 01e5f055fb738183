"""One decoding step of a model as a CUDA graph, replayed while the cache grows."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oscar_kv import kernels
from oscar_kv.cache import OscarCache
from oscar_kv.cache_layer import ATTENTION_NAME, OscarLayer
from oscar_kv.integrations.transformers import CACHE_ARGUMENT
from oscar_kv.recent import pack_together


class DecodeGraph:
    """Decodes one token per row by replaying a CUDA graph: no kernel of the step waits for Python.

    The graph is captured when each row has a packed block; steps before that are not replayed, and neither is the first
    one, nor the first after rows were rearranged. It appends the new token to each layer's tail, attends, and packs a
    block when one is complete; how long the rows are is read on the device, so one graph serves the whole generation.
    Other passes through the same cache (a further turn's prompt, say) may come between calls.

    Args:
        model: Runs attention "oscar", see :func:`oscar_kv.enable`.
        cache: Holds the prompt already; made with ``max_length``, which a graph cannot exceed.

    Raises:
        ValueError: The cache is empty or has no ``max_length``.
        NotImplementedError: No kernels here, another attention, or layers that the cache does not pack.

    Example:
        >>> cache = oscar_kv.OscarCache(model.config, max_length=4096)  # doctest: +SKIP
        >>> logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1]  # doctest: +SKIP
        >>> step = oscar_kv.DecodeGraph(model, cache)  # doctest: +SKIP
        >>> for _ in range(100):  # doctest: +SKIP
        ...     logits = step(logits.argmax(-1, keepdim=True))
    """

    def __init__(self, model: PreTrainedModel, cache: OscarCache) -> None:
        self.model, self.cache = model, cache
        _check(cache)
        device = cache.packed_layers[0].device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._epoch, self._warm = -1, -1  # of the cache at the capture, and at the step before it
        self._ids = torch.zeros(len(cache.timeline.lengths), 1, dtype=torch.long, device=device)
        self._positions = torch.zeros_like(self._ids)
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Decode one token of each row.

        Args:
            input_ids: int64 (batch, 1).
            position_ids: int64 (batch, 1); by default the number of tokens that each row has, without padding.

        Returns:
            Logits (batch, vocabulary) of the next token; the next call overwrites them.

        Raises:
            ValueError: Another batch size than the cache's, or ``max_length`` is reached.
        """
        cache = self.cache
        _check(cache)
        lengths = cache.timeline.lengths
        if input_ids.shape != (len(lengths), 1):
            raise ValueError(f"one token for each of {len(lengths)} rows, not {tuple(input_ids.shape)}")
        if cache.get_seq_length() == cache.max_length:
            raise ValueError(f"the cache is full: max_length is {cache.max_length}")
        if self._graph is None or self._epoch != cache.epoch:
            self._ids = torch.empty_like(input_ids, device=self._ids.device)
            self._positions = torch.empty_like(self._ids)
        self._ids.copy_(input_ids)
        where = torch.tensor(lengths).unsqueeze(1) if position_ids is None else position_ids
        self._positions.copy_(where)
        layers, new = cache.packed_layers, cache.epoch not in (self._epoch, self._warm)
        if new or any(layer.observes_queries for layer in layers):
            # compiles what the step needs; and what the first block's queries are like is found out in Python
            self._warm = cache.epoch
            return self._forward(cache)
        cache.timeline.extend(cache.timeline.columns, len(lengths), 1, None)  # the layers find it done
        if self._graph is None or self._epoch != cache.epoch:
            self._capture()  # which counts for the host, and does nothing on the device yet
        else:
            for layer in layers:
                layer.advance(1)
        assert self._graph is not None
        assert self._logits is not None
        self._graph.replay()
        return self._logits

    def _capture(self) -> None:
        self._graph, self._epoch = torch.cuda.CUDAGraph(), self.cache.epoch
        device = self._ids.device
        with torch.cuda.device(device), torch.cuda.graph(self._graph, stream=torch.cuda.Stream(device)):
            self._logits = self._forward(self.cache)

    def _forward(self, cache: OscarCache) -> Tensor:
        kwargs = {CACHE_ARGUMENT: cache, "position_ids": self._positions, "use_cache": True}
        with pack_together([layer.state for layer in cache.packed_layers if layer.state is not None]):
            logits: Tensor = self.model(self._ids, **kwargs).logits
        return logits[:, -1]


def _check(cache: OscarCache) -> None:
    """Refuse a cache whose step cannot be replayed."""
    layers = cache.packed_layers
    if not cache.packed:
        raise NotImplementedError(f"a CUDA graph needs attention '{ATTENTION_NAME}': use oscar_kv.enable(model)")
    if kinds := sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not OscarLayer}):
        raise NotImplementedError(f"a CUDA graph cannot hold layers that are not packed: {', '.join(kinds)}")
    if cache.max_length is None:
        raise ValueError("a CUDA graph needs a cache that does not move: OscarCache(..., max_length=...)")
    if cache.host is not None:
        raise NotImplementedError("a CUDA graph cannot wait for blocks in host memory: the cache has offload=True")
    if not cache.timeline.lengths:
        raise ValueError("the cache is empty: run the prompt through the model first")
    if len(devices := {layer.device for layer in layers}) > 1:
        raise NotImplementedError(f"a CUDA graph runs on one device, but the layers are on {len(devices)}")
    if any(layer.record_past for layer in layers):
        raise NotImplementedError("a CUDA graph cannot take tokens back: the cache records for that")
    for layer in layers:
        if not layer.counts_on_device:
            reason = kernels.missing(layer.device) or f"no decode kernel for {cache.oscar_config}"
            raise NotImplementedError(f"a CUDA graph needs the CUDA kernels: {reason}")
