"""Modules that only an extra brings."""

from __future__ import annotations

import importlib
from types import ModuleType


def import_extra(module: str, extra: str) -> ModuleType:
    """Import a module that one of our extras brings.

    Raises:
        ImportError: It is not there; the message says which extra to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module.split('.')[0]} is missing: pip install 'oscar-kv[{extra}]'") from error
