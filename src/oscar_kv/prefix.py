"""What the layers of a cache hold as tensors and plain values, to store a prompt and to go on with it elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from oscar_kv import unpacked
from oscar_kv.codec import PackedBlocks
from oscar_kv.config import OscarConfig
from oscar_kv.layer import LayerState
from oscar_kv.offload import Offload
from oscar_kv.timeline import Timeline

FORMAT = 4
_MODEL = ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window")
_ANY_SIZE = {"records": 1, "norms": 1, "tail_keys": 2, "tail_values": 2}  # the dimension that depends on the length


def identity(decoder: PreTrainedConfig, config: OscarConfig, layers: Sequence[Any]) -> dict[str, Any]:
    """What a stored cache must have in common with the one that takes it over."""
    kinds = ["packed" if hasattr(layer, "state") else type(layer).__name__ for layer in layers]
    own = {"format": FORMAT, "config": _plain(config), "num_layers": len(layers), "layer_kinds": kinds}
    return own | {name: _of_layers(decoder, name) for name in _MODEL}


def _plain(config: OscarConfig) -> dict[str, Any]:
    """As JSON would give it back."""
    return asdict(config) | {"layers": {str(i): own for i, own in config.layers.items()}}


def _of_layers(decoder: PreTrainedConfig, name: str) -> Any:
    """A field of a model's configuration; a list where the layers differ in it."""
    values = [getattr(layer, name, None) for layer in decoder.per_layer_config]
    return values[0] if all(value == values[0] for value in values) else values


def config_of(state: dict[str, Any]) -> OscarConfig:
    """The quantization of a stored cache.

    Raises:
        ValueError: It is of another format.
    """
    check(state, {"format": FORMAT})
    try:
        return OscarConfig(**state["config"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"the stored configuration is not one of this version: {error}") from error


def check(state: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ValueError where a stored cache is not what :func:`identity` says."""
    for name, value in wanted.items():
        if state.get(name) != value:
            raise ValueError(f"stored cache has {name} {state.get(name)}, this one {value}")


def state_of_layers(layers: Sequence[Any]) -> dict[str, Any]:
    """States of the packed layers, and of the others.

    Raises:
        NotImplementedError: A layer that is not packed holds what cannot be stored.
    """
    packed: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for i, layer in enumerate(layers):
        if getattr(layer, "state", None) is not None:
            packed[str(i)] = state_of(layer.state)
        if unpacked.holds_tokens(layer):
            others[str(i)] = unpacked.state_dict(layer)
    return {"layers": packed, "other_layers": others}


def state_of(layer: LayerState) -> dict[str, Any]:
    """The tensors of a packed layer without unused room, as copies, and its counts."""
    blocks = PackedBlocks(*layer.room(max(layer.num_blocks), on_host=layer.records.device.type == "cpu"))
    blocks.fill(layer.packed(0, max(layer.num_blocks)))
    tensors = {name: x.clone() for name, x in layer.tensors().items() if name not in ("records", "norms")}
    counts = {"num_blocks": list(layer.num_blocks), "tail_lengths": list(layer.tail_lengths)}
    rest = {"columns": layer.columns, "recording": layer.recording}
    return {"records": blocks.records, "norms": blocks.norms, **tensors, **counts, **rest}


def layer_from(
    state: dict[str, Any],
    config: OscarConfig,
    timeline: Timeline,
    max_length: int | None = None,
    offload: Offload | None = None,
) -> LayerState:
    """Inverse of :func:`state_of`.

    Raises:
        ValueError: It does not fit into ``max_length``, or its parts do not fit together.
    """
    if max_length is not None and state["columns"] > max_length:
        raise ValueError(f"the stored cache has {state['columns']} columns, more than max_length {max_length}")
    layer = LayerState(config, timeline, state["tail_keys"], state["tail_values"], max_length, offload)
    _check_tensors(layer, state)
    layer.reserve(state["records"].shape[1])
    for name in layer.tensors():
        if name not in ("records", "norms"):
            setattr(layer, name, state[name].clone())
    PackedBlocks(layer.records, layer.norms).fill([PackedBlocks(state["records"], state["norms"])])
    layer.take_counts(state["num_blocks"], state["tail_lengths"])
    layer.columns, layer.recording = state["columns"], state["recording"]
    return layer


def _check_tensors(layer: LayerState, state: dict[str, Any]) -> None:
    """Refuse tensors that an empty layer of this kind would not have, and counts that they do not bear out."""
    for name, own in layer.tensors().items():
        stored, shape = state.get(name), list(own.shape)
        if isinstance(stored, Tensor) and name in _ANY_SIZE and stored.ndim == own.ndim:
            shape[_ANY_SIZE[name]] = stored.shape[_ANY_SIZE[name]]
        if not isinstance(stored, Tensor) or list(stored.shape) != shape or stored.dtype != own.dtype:
            found = f"{stored.dtype} {list(stored.shape)}" if isinstance(stored, Tensor) else "missing"
            raise ValueError(f"stored {name} should be {own.dtype} {shape}, but is {found}")
    for counts, name in (("num_blocks", "records"), ("tail_lengths", "tail_keys")):
        size = state[name].shape[_ANY_SIZE[name]]
        if len(state[counts]) != layer.batch or not all(0 <= count <= size for count in state[counts]):
            raise ValueError(f"stored {counts} {state[counts]} do not fit {name} of {size}")
