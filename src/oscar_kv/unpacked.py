"""Layers or parts of layers that are not packed (windows, states of linear attention): bytes, copies and state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_LAZY = {"device", "dtype"}  # attributes that a layer may get with its first tokens


def held_bytes(layer: Any) -> int:
    """Bytes of the tensors of a layer, which may keep them in dictionaries."""
    return sum(x.nbytes for x in _tensors(vars(layer)))


def holds_tokens(layer: Any) -> bool:
    """Whether a layer has keys and values, or the state of a linear attention."""
    return vars(layer).get("keys") is not None or any(getattr(layer, "has_previous_state", {}).values())


def copied(layer: Any) -> Any:
    """A layer of its own that holds the same."""
    other = copy.copy(layer)
    vars(other).update({name: _clone(value) for name, value in vars(layer).items()})
    return other


def state_dict(layer: Any) -> dict[str, Any]:
    """What a layer holds, as tensors, plain values and dictionaries of them.

    Raises:
        NotImplementedError: It holds something else.
    """
    values = {name: value for name, value in vars(layer).items() if not isinstance(value, torch.device)}
    try:
        plain = {name: _plain(x) for name, x in values.items() if name not in getattr(layer, "stored_apart", ())}
        return {"kind": type(layer).__name__, "values": plain}
    except TypeError as error:
        raise NotImplementedError(f"state_dict of a cache with a {type(layer).__name__}, which holds {error}") from None


def from_state_dict(fresh: Any, state: dict[str, Any]) -> Any:
    """A layer as ``fresh``, which is empty, that holds what :func:`state_dict` gave.

    Raises:
        ValueError: It was another kind of layer.
    """
    kind, stored = type(fresh).__name__, state["values"]
    unknown = sorted(set(stored) - set(vars(fresh)) - _LAZY)
    if state["kind"] != kind or unknown:
        raise ValueError(f"the stored layer is a {state['kind']} with {', '.join(stored)}, this model's a {kind}")
    layer = copy.copy(fresh)
    for name, value in stored.items():
        if isinstance(value, dict):
            value = {int(key): _clone(x) for key, x in value.items()}
        vars(layer)[name] = getattr(torch, value) if name == "dtype" and value is not None else _clone(value)
    vars(layer)["device"] = next(_tensors(stored)).device
    return layer


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for x in value.values():
            yield from _tensors(x)


def _clone(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clone(x) for key, x in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def _plain(value: Any) -> Any:
    """Raises TypeError for what is neither a tensor nor a plain value."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return {str(key): _plain(x) for key, x in value.items()}
    if value is not None and not isinstance(value, (Tensor, bool, int)):
        raise TypeError(f"a {type(value).__name__}")
    return _clone(value)
