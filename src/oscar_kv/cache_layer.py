"""A packed layer as transformers' caches have layers: what the model hands over, and what its attention gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from oscar_kv import unpacked
from oscar_kv.config import OscarConfig
from oscar_kv.layer import LayerState
from oscar_kv.offload import Offload
from oscar_kv.padding import Padding
from oscar_kv.recent import Recent
from oscar_kv.timeline import Timeline
from oscar_kv.view import KVView

ATTENTION_NAME = "oscar"
HANDOFF = "_oscar_layer"  # attribute of the returned keys by which the attention function finds the layer
SHARED = "_oscar_view"  # attribute of the returned keys for the layers that attend to them, too
SWITCHED = "make a new OscarCache after set_attn_implementation()"


@dataclass(frozen=True)
class Common:
    """What the layers of a cache have in common.

    Args:
        config: The quantization.
        packed: Whether the model's attention reads packed bytes.
        max_length: Columns to allocate for at once, or None.
        shares_keys: Whether some layers attend to another layer's keys.
        timeline: Which token stands where.
        padding: Where the padding is, for attentions that do not tell.
        host: Brings packed blocks from host memory, or None.
    """

    config: OscarConfig
    packed: bool
    max_length: int | None
    shares_keys: bool
    timeline: Timeline
    padding: Padding
    host: Offload | None


class OscarLayer(CacheLayerMixin):
    """One packed layer of an :class:`OscarCache`."""

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False
    stored_apart = ("state", "pending", "_common")  # from the states that a linear attention has beside them

    def __init__(self, common: Common) -> None:
        # CacheLayerMixin.__init__ would set the properties ``keys`` and ``values``
        self.is_initialized = False
        self.record_past = False
        self.state: LayerState | None = None
        self.pending: tuple[Tensor, Tensor] | None = None  # handed over, not yet taken by the attention function
        self._common = common

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        own = self._common
        self.state = LayerState(own.config, own.timeline, key_states, value_states, own.max_length, own.host)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take new keys and values (batch, heads, q, head_dim).

        Returns:
            Packed mode: the new ones, by which the attention function "oscar" finds this layer. Otherwise the whole
            history (batch, heads, columns, head_dim), packed tokens dequantized.
        """
        state = self._state_for(key_states, value_states)
        if self._common.packed:
            self.pending = (key_states, value_states)
            key_states = key_states.view_as(key_states)  # a tensor of our own to mark
            setattr(key_states, HANDOFF, self)
            return key_states, value_states
        valid = self._common.padding.columns(state.columns, state.batch, key_states.shape[2], state.device)
        recent = state.append(key_states, value_states, valid)
        history = state.dense(recent)
        if max(state.num_blocks) == 0 and state.timeline.column_of_slot is None:  # views of the tail, which moves on
            history = (history[0].clone(), history[1].clone())
        self._commit(state, recent)
        return history

    def take(self, valid: Tensor | None) -> tuple[LayerState, Recent]:
        """For the attention function: append what :meth:`update` handed over. Follow with :meth:`commit`."""
        if self.pending is None or self.state is None:
            raise NotImplementedError(
                f"a model that attends twice to a layer's keys is not supported by attention '{ATTENTION_NAME}'; "
                "use 'sdpa'"
            )
        keys, values = self.pending
        self.pending = None
        return self.state, self.state.append(keys, values, valid)

    def share(self, keys: Tensor, view: KVView) -> None:
        """Where other layers attend to these keys, mark them with what this pass may attend to."""
        if self._common.shares_keys:
            setattr(keys, SHARED, view.snapshot())

    def commit(self, recent: Recent, query: Tensor) -> None:
        if self.state is not None:
            self._commit(self.state, recent, query)

    def _commit(self, state: LayerState, recent: Recent, query: Tensor | None = None) -> None:
        state.recording = self.record_past
        state.commit(recent, query)

    @property
    def counts_on_device(self) -> bool:
        """Whether a decode step of this layer can be a CUDA graph."""
        return self.state is not None and self.state.counters is not None

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        if self.state is None:
            raise ValueError("the layer is empty")
        return self.state.device

    @property
    def observes_queries(self) -> bool:
        """Whether a row has no packed block yet, and the equalizer wants to see its queries."""
        state = self.state
        return state is not None and state.query_power is not None and min(state.num_blocks) == 0

    def advance(self, columns: int) -> None:
        """Count what a replayed CUDA graph does on the device."""
        if self.state is not None:
            self.state.advance(columns)

    def _state_for(self, keys: Tensor, values: Tensor) -> LayerState:
        if self.pending is not None:
            raise RuntimeError(f"the keys of the last pass were not read by attention '{ATTENTION_NAME}'; {SWITCHED}")
        if self.state is None:
            self.lazy_initialization(keys, values)
        state = self.state
        assert state is not None
        state.check(keys, values)
        return state

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The cached keys, packed ones dequantized: (batch, heads, columns, key_dim). A copy, made at each access."""
        return None if self.state is None else self._dense()[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The cached values, as :attr:`keys`."""
        return None if self.state is None else self._dense()[1]

    def _dense(self) -> tuple[Tensor, Tensor]:
        state = self.state
        assert state is not None
        used = max(state.tail_lengths)
        tail = Recent(state.tail_keys[:, :, :used], state.tail_values[:, :, :used], state.tail_lengths, 0)
        keys, values = state.dense(tail)
        return keys.clone(), values.clone()

    def get_seq_length(self) -> int:
        return 0 if self.state is None else self.state.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1 if self._common.max_length is None else self._common.max_length

    def activate_past_recording(self) -> None:
        """Keep enough tokens in 16 bit to take back up to 128 of them."""
        self.record_past = True

    def reset(self) -> None:
        self.state, self.pending, self.is_initialized = None, None, False

    def offload(self) -> None:
        raise NotImplementedError("layers of an OscarCache are not moved: use OscarCache(..., offload=True)")

    def adopt(self, state: LayerState | None) -> None:
        """Hold these tokens; the layer is empty."""
        self.state, self.is_initialized = state, state is not None
        if state is not None:
            self.record_past |= state.recording
            state.offload = self._common.host
            if state.offload is not None:
                state.offload.add(state)

    def fork(self, common: Common) -> OscarLayer:
        """The same tokens as a layer of another cache."""
        layer: OscarLayer = unpacked.copied(self)
        layer._common = common
        layer.state = None if self.state is None else self.state.fork(common.timeline, common.host)
        return layer

    def crop(self, tokens_to_remove: int) -> None:
        if self.state is not None and tokens_to_remove:
            self.state.crop(-tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.reorder_cache(torch.arange(self.state.batch).repeat_interleave(repeats))


class OscarHybridLayer(OscarLayer, LinearAttentionAndFullAttentionLayer):
    """A packed layer that also has the states of a linear attention (Falcon-H1, Zamba)."""

    device = None  # type: ignore[assignment]  # set by the states, and that of the tokens
    is_croppable = False  # a state knows no earlier one

    def __init__(self, common: Common, number_of_states: int) -> None:
        OscarLayer.__init__(self, common)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if args:  # keys and values
            OscarLayer.lazy_initialization(self, *args)
        else:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def activate_past_recording(self) -> None:
        self.record_past = True

    def reset(self) -> None:
        OscarLayer.reset(self)
        LinearAttentionLayer.__init__(self, self.number_of_states)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        OscarLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        LinearAttentionLayer.crop(self, tokens_to_remove)
        OscarLayer.crop(self, tokens_to_remove)
