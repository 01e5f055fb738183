"""OscarCache: the transformers cache whose full-attention layers are packed. The only home of cache state."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

from oscar_kv import prefix, storage, unpacked
from oscar_kv.cache_layer import ATTENTION_NAME, SWITCHED, Common, OscarHybridLayer, OscarLayer
from oscar_kv.config import OscarConfig
from oscar_kv.layer import LayerState
from oscar_kv.offload import Offload
from oscar_kv.padding import Padding
from oscar_kv.support import (
    check_model,
    cross_attention,
    has_recurrent_state,
    head_dims,
    plain_layers,
    shares_keys,
)
from oscar_kv.timeline import Timeline


class OscarCache(DynamicCache):
    """A transformers cache that keeps full-attention layers in 2 bits (OScaR, arXiv 2605.19660).

    The first tokens and the newest ones stay in 16 bit, all others are packed in blocks of 128 tokens. Sliding-window,
    linear-attention and shared layers stay as transformers makes them.

    When the model runs attention "oscar" (``model.set_attn_implementation("oscar")`` or :func:`oscar_kv.enable`), the
    packed bytes are read as they are. With any other attention each layer's history is dequantized for the moment
    that it is used in; that is slower, and saves the same memory.

    Args:
        config: The model's configuration (``model.config``).
        oscar_config: What to quantize and how; the default is :class:`~oscar_kv.OscarConfig`.
        max_length: Allocate for this many tokens, padding included, at once; None lets the cache grow.
        attention_mask: (batch, columns) padding mask of the prompts, 0 for padding. Only needed for a batch without
            attention "oscar", which cannot tell the cache; further columns count as tokens.
        offload: Keep the packed blocks in host memory. A layer's are on the GPU while it computes, and the next
            layer's are copied meanwhile.

    Raises:
        NotImplementedError: Encoder-decoder models, multi-head latent attention, a head dimension that is no
            multiple of 16.
        ValueError: ``max_length`` or ``attention_mask`` is malformed, or ``oscar_config`` has settings for a layer that
            is not packed.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        oscar_config: OscarConfig | None = None,
        *,
        max_length: int | None = None,
        attention_mask: Tensor | None = None,
        offload: bool = False,
    ) -> None:
        decoder = check_model(config)
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length must be positive, not {max_length}")
        self.oscar_config = OscarConfig() if oscar_config is None else oscar_config
        self.max_length = max_length
        self._config, self._decoder = config, decoder
        self.packed = decoder._attn_implementation == ATTENTION_NAME
        self.timeline = Timeline(max_length)
        self.epoch = 0  # how often the tensors have been replaced
        self.padding = Padding(attention_mask)
        self.host = Offload() if offload else None
        self.shares_keys = shares_keys(decoder)
        self._cross_attention = cross_attention(decoder)
        if offload and self.shares_keys:
            raise NotImplementedError("offload for a model whose layers share keys and values")
        layers = [self._layer(i, layer) for i, layer in enumerate(plain_layers(config))]
        super().__init__(config=config)
        self.layers = layers
        if strange := sorted(set(self.oscar_config.layers) - set(self.packed_indices)):
            raise ValueError(f"the configuration has settings for layers that are not packed: {strange}")
        if not self.packed_layers:
            kinds = ", ".join(sorted({type(layer).__name__ for layer in self.layers}))
            warnings.warn(f"nothing to quantize: no layer keeps its whole history (only {kinds})", stacklevel=2)

    def _layer(self, index: int, plain: Any) -> Any:
        """The layer in the place of one of transformers: a packed one where that keeps its whole history."""
        if type(plain) not in (DynamicLayer, LinearAttentionAndFullAttentionLayer) or index in self._cross_attention:
            return plain
        common = self._common(index)
        common.config.check_head_dim(*head_dims(self._decoder, index))
        return OscarLayer(common) if type(plain) is DynamicLayer else OscarHybridLayer(common, plain.number_of_states)

    def _common(self, index: int) -> Common:
        own = (self.oscar_config.for_layer(index), self.packed, self.max_length, self.shares_keys)
        return Common(*own, self.timeline, self.padding, self.host)

    @property
    def packed_indices(self) -> list[int]:
        """The numbers of the layers that this cache packs."""
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, OscarLayer)]

    @property
    def packed_layers(self) -> list[OscarLayer]:
        """The layers that this cache packs."""
        return [layer for layer in self.layers if isinstance(layer, OscarLayer)]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx >= len(self.layers):
            raise ValueError(f"the cache was made for {len(self.layers)} layers, not for layer {layer_idx}")
        if self.packed and self._decoder._attn_implementation != ATTENTION_NAME:
            now = self._decoder._attn_implementation
            raise RuntimeError(f"the model ran attention '{ATTENTION_NAME}' and now runs '{now}'; {SWITCHED}")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reset(self) -> None:
        """Forget all tokens, and the padding of their prompts."""
        fresh = DynamicCache(config=self._config).layers  # before 5.24 a sliding layer's reset keeps its length
        for i, layer in enumerate(self.layers):
            if isinstance(layer, OscarLayer):
                layer.reset()
            else:
                self.layers[i] = fresh[i]
        self.timeline.clear()
        self.padding.mask = None
        if self.host is not None:
            self.host.clear()
        self.epoch += 1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (transformers passes a number that is not positive).

        Raises:
            ValueError: A positive number, or more tokens than there are, or tokens that only exist packed.
        """
        if tokens_to_remove > 0 or -tokens_to_remove > self.get_seq_length():
            raise ValueError(f"crop takes minus the number of tokens to remove, not {tokens_to_remove}")
        if tokens_to_remove and any(has_recurrent_state(layer) for layer in self.layers):
            raise ValueError("the state of a linear-attention layer cannot be rolled back")
        states = self._states()
        shared = [state.first for state in states]
        for state in states:
            state.check_crop(-tokens_to_remove)
        growing = [layer for i, layer in enumerate(self.layers) if i not in self._cross_attention]
        # the other layers first: they refuse before anything has changed
        for layer in sorted(growing, key=lambda layer: type(layer) is OscarLayer):
            layer.crop(tokens_to_remove)  # type: ignore[union-attr]
        if states and tokens_to_remove:
            self.timeline.crop(-tokens_to_remove)
        self.epoch += shared != [state.first for state in states]  # blocks that were shared have moved

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row ``beam_idx[i]`` was."""
        self._select(beam_idx)
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, in this order; anything that indexes a tensor's first dimension."""
        if self._batch():
            self.reorder_cache(torch.arange(self._batch())[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.reorder_cache(torch.arange(self._batch()).repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        if self._batch():
            self.padding.select(rows, self._batch())
            self.timeline.select(rows)
            self.epoch += 1

    def fork(self) -> OscarCache:
        """A cache that holds the same tokens and goes its own way, such as one of many continuations of one prompt.

        The blocks that are packed when it is made are shared, and never copied: what a fork takes is its tail of
        newest tokens, and what it packs itself. A batch shares the blocks that all of its rows have.

        Raises:
            RuntimeError: A pass is under way.

        Example:
            >>> model(prompt, past_key_values=cache)  # doctest: +SKIP
            >>> answers = [model.generate(q, past_key_values=cache.fork()) for q in questions]  # doctest: +SKIP
        """
        if any(layer.pending is not None for layer in self.packed_layers):
            raise RuntimeError("a cache cannot be forked in the middle of a pass")
        other = copy.copy(self)
        other.timeline, other.padding = self.timeline.copy(), Padding(self.padding.mask)
        other.host = None if self.host is None else Offload()
        other.layers = [
            layer.fork(other._common(i)) if isinstance(layer, OscarLayer) else unpacked.copied(layer)
            for i, layer in enumerate(self.layers)
        ]
        self.epoch += 1  # blocks have become shared ones
        return other

    def _states(self) -> list[LayerState]:
        return [layer.state for layer in self.packed_layers if layer.state is not None]

    def _batch(self) -> int:
        states = self._states()
        return states[0].batch if states else 0

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of every tensor that the cache holds, by component.

        ``codes``, ``scales_zeros`` and ``norms`` are the packed tokens; ``tail`` and ``sinks`` the 16-bit ones;
        ``equalizer`` the channel vectors; ``reserved`` room for tokens to come; ``index`` where padded rows stand;
        ``other_layers`` the layers that are not packed; ``total`` the sum.
        """
        total: Counter[str] = Counter(
            dict.fromkeys(
                ("codes", "scales_zeros", "norms", "tail", "sinks", "equalizer", "reserved", "index", "other_layers"), 0
            )
        )
        for state in self._states():
            total.update(state.memory_bytes())
        total["index"] += self.timeline.nbytes + (0 if self.padding.mask is None else self.padding.mask.nbytes)
        total["other_layers"] += sum(unpacked.held_bytes(layer) for layer in self.layers)
        return {**total, "total": sum(total.values())}

    def bits_per_element(self) -> float:
        """Bits that the packed layers take per cached key and value number, everything that they hold included.

        Raises:
            ValueError: No packed layer holds a token.
        """
        tokens, elements = sum(self.timeline.lengths), 0
        for state in self._states():
            elements += tokens * state.records.shape[2] * (state.layout.key_dim + state.layout.value_dim)
        if not elements:
            raise ValueError("the cache is empty: no packed layer holds a token")
        memory = self.memory_bytes()
        return 8 * (memory["total"] - memory["other_layers"]) / elements

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on later, as tensors and plain values: ``torch.save`` writes it.

        Raises:
            NotImplementedError: The cache has a layer that is not packed and cannot be stored.
        """
        common = {"timeline": self.timeline.state_dict(), "padding": self.padding.mask}
        return self._identity() | common | prefix.state_of_layers(self.layers)

    def _identity(self) -> dict[str, Any]:
        return prefix.identity(self._decoder, self.oscar_config, self.layers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, in a cache made for the same model and configuration.

        Raises:
            ValueError: Another format, configuration or model, or more than ``max_length``: nothing has changed then.
        """
        prefix.check(state, self._identity())
        host = None if self.host is None else Offload()
        states = {
            int(i): prefix.layer_from(stored, self.oscar_config.for_layer(int(i)), self.timeline, self.max_length, host)
            for i, stored in state["layers"].items()
        }
        fresh = [self._layer(i, layer) for i, layer in enumerate(plain_layers(self._config))]
        others = {int(i): unpacked.from_state_dict(fresh[int(i)], x) for i, x in state["other_layers"].items()}
        self.reset()
        self.timeline.load_state_dict(state["timeline"])
        self.padding.mask = state["padding"]
        for i, layer in enumerate(self.layers):
            self.layers[i] = layer = others.get(i, layer)
            if isinstance(layer, OscarLayer):
                layer.adopt(states.get(i))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the cache to a safetensors file, from which :meth:`load` makes it again: a stored prompt.

        Raises:
            NotImplementedError: The cache has a layer that is not packed and cannot be stored.
        """
        storage.write(path, self.state_dict())

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        config: PreTrainedConfig,
        oscar_config: OscarConfig | None = None,
        *,
        device: torch.device | str = "cpu",
        max_length: int | None = None,
        offload: bool = False,
    ) -> OscarCache:
        """A cache from the file that :meth:`save` wrote.

        Args:
            path: The file.
            config: The configuration of the model that it goes on with. Its weights are not compared.
            oscar_config: Which quantization the file must have; None takes any.
            device: Where the model computes.
            max_length: As for :class:`OscarCache`.
            offload: As for :class:`OscarCache`.

        Raises:
            ValueError: The file is damaged, or its format, quantization or model are others.
            FileNotFoundError: There is no such file.

        Example:
            >>> cache.save("prompt.safetensors")  # doctest: +SKIP
            >>> cache = OscarCache.load("prompt.safetensors", model.config, device=model.device)  # doctest: +SKIP
        """
        state = storage.read(path, device)
        if oscar_config is None:
            oscar_config = prefix.config_of(state)
        cache = cls(config, oscar_config, max_length=max_length, offload=offload)
        cache.load_state_dict(state)
        return cache


def packed_layers(config: PreTrainedConfig) -> list[int]:
    """The layers of a model that an :class:`OscarCache` packs.

    Raises:
        NotImplementedError: The architecture is not supported.
    """
    return OscarCache(config).packed_indices
