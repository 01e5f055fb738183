"""The transformers cache that all rivals share."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from oscar_kv.baselines.base import COMPONENTS, LayerShape, Method
from oscar_kv.baselines.store import Store
from oscar_kv.support import check_model


class BaselineLayer(CacheLayerMixin):
    """One packed layer of a :class:`BaselineCache`."""

    is_sliding = False
    is_croppable = False
    is_compileable = False
    supports_early_init = False

    def __init__(self, method: Method, config: PreTrainedConfig, index: int) -> None:
        # CacheLayerMixin.__init__ would set the properties ``keys`` and ``values``
        self.store: Store | None = None
        self.is_initialized = False
        self._method, self._config, self._index = method, config, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        heads, dims = key_states.shape[1], (key_states.shape[-1], value_states.shape[-1])
        shape = LayerShape(self._config, self._index, heads, *dims, key_states.dtype, key_states.device)
        codec = self._method.codec(shape)
        self.store = Store(self._method, codec, (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new tokens (batch, heads, q, head_dim).

        Returns:
            The whole history: packed tokens as they are read back, sinks, tail and the new ones exactly.
        """
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
        assert self.store is not None
        return self.store.append((key_states, value_states))

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The cached keys, packed ones dequantized: (batch, heads, tokens, key_dim). Made at each access."""
        return None if self.store is None else self.store.dense()[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The cached values, as :attr:`keys`."""
        return None if self.store is None else self.store.dense()[1]

    def get_seq_length(self) -> int:
        return 0 if self.store is None else self.store.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.store, self.is_initialized = None, False

    def offload(self) -> None:
        raise NotImplementedError("BaselineCache does not offload")

    def crop(self, tokens_to_remove: int) -> None:
        if self.store is not None and tokens_to_remove:
            self.store.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.store is not None:
            self.store.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self.reorder_cache(torch.arange(self.store.tail[0].shape[0]).repeat_interleave(repeats))


class BaselineCache(DynamicCache):
    """A transformers cache whose full-attention layers are packed by a rival method.

    What is packed is really held as codes and their metadata, and dequantized for the moment in which a layer's
    history is read, so any attention of transformers can be used. A pass reads as packed what was packed before it,
    and its own tokens as they are.

    Args:
        config: The model's configuration (``model.config``).
        method: What to pack and how.
        attention_mask: (batch, tokens) mask of the prompts, all ones. A batch needs it: the cache cannot see padding.

    Raises:
        NotImplementedError: Padding, an encoder-decoder model, latent attention, or what the method itself refuses.
        ValueError: The method is not calibrated.
    """

    def __init__(self, config: PreTrainedConfig, method: Method, *, attention_mask: Tensor | None = None) -> None:
        decoder = check_model(config)
        if attention_mask is not None and not attention_mask.all():
            raise NotImplementedError("the caches of rival methods do not support padding: use prompts of one length")
        method.check(decoder)
        self.method, self._batches = method, attention_mask is not None
        super().__init__(config=config)
        self.layers = [
            BaselineLayer(method, decoder, i) if type(layer) is DynamicLayer else layer
            for i, layer in enumerate(self.layers)
        ]

    @property
    def stores(self) -> list[Store]:
        """What the packed layers hold."""
        return [x.store for x in self.layers if isinstance(x, BaselineLayer) and x.store is not None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if key_states.shape[0] > 1 and not self._batches:
            raise ValueError(
                "a batch needs BaselineCache(attention_mask=...): all ones, since padding is not supported"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of every tensor that the cache holds, by component.

        ``codes``, ``scales_zeros`` and ``norms`` are the packed tokens; ``tail`` and ``sinks`` the 16-bit ones;
        ``state`` what else belongs to the sequences; ``other_layers`` the layers that are not packed; ``total`` the
        sum. What a method knows beforehand (random or calibrated rotations) belongs to the model and is not counted.
        """
        names = (*COMPONENTS.values(), "tail", "sinks", "state", "other_layers")
        total: Counter[str] = Counter(dict.fromkeys(names, 0))
        for store in self.stores:
            total.update(store.memory_bytes())
        for layer in self.layers:
            if not isinstance(layer, BaselineLayer):
                total["other_layers"] += sum(x.nbytes for x in vars(layer).values() if isinstance(x, Tensor))
        return {**total, "total": sum(total.values())}

    def bits_per_element(self) -> float:
        """Bits that the packed layers take per cached key and value number, everything that they hold included.

        Raises:
            ValueError: The cache is empty.
        """
        elements = sum(store.elements(store.length) for store in self.stores)
        if not elements:
            raise ValueError("the cache is empty: no packed layer holds a token")
        memory = self.memory_bytes()
        return 8 * (memory["total"] - memory["other_layers"]) / elements

    def packed_bits(self) -> float:
        """Bits per packed number: codes, scales, zeros and norms; NaN while nothing is packed."""
        elements = sum(store.elements(store.num_packed) for store in self.stores)
        memory = self.memory_bytes()
        return 8 * sum(memory[name] for name in set(COMPONENTS.values())) / elements if elements else float("nan")
