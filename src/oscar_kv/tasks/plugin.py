"""What lmms-eval asks installed packages for: the name of a model type and where its class is."""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """The model type "oscar": ``lmms-eval --model oscar --model_args pretrained=...,cache=quality``."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest("oscar", simple_class_path="oscar_kv.tasks.media.OscarLMM")
