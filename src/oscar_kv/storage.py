"""Nested dictionaries of tensors and plain values as one safetensors file."""

from __future__ import annotations

import json
import os
import tempfile
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_KIND = "oscar_kv.cache"
_TENSOR = "tensor"  # the key of a dictionary that stands for a tensor, and names it


def write(path: str | PathLike[str], state: dict[str, Any]) -> None:
    """Write a file, whole or not at all.

    Args:
        path: Where to.
        state: Tensors, numbers, strings, None, lists of these, and dictionaries with string keys.
    """
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_split(state, "", tensors))
    target = Path(path)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        made = Path(folder) / target.name
        save_file(tensors, made, {"kind": _KIND, "state": plain})
        os.replace(made, target)


def read(path: str | PathLike[str], device: torch.device | str) -> dict[str, Any]:
    """What :func:`write` wrote, with its tensors on a device.

    Raises:
        ValueError: The file is damaged, or something else.
    """
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != _KIND:
                raise ValueError(f"{path} is no stored cache, but a file of kind {metadata.get('kind')}")
            state: dict[str, Any] = _join(json.loads(metadata["state"]), file)
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise ValueError(f"{path} is no stored cache, or damaged: {error}") from error
    return state


def _split(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The value without its tensors, which go into ``tensors``."""
    if isinstance(value, Tensor):
        tensors[name] = value.contiguous()
        return {_TENSOR: name}
    if isinstance(value, dict):
        return {key: _split(x, f"{name}.{key}" if name else key, tensors) for key, x in value.items()}
    return value


def _join(value: Any, file: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if list(value) == [_TENSOR]:
        return file.get_tensor(value[_TENSOR])
    return {key: _join(x, file) for key, x in value.items()}
