"""CUDA kernels, compiled by NVRTC at first use. Nothing here imports the reference that they are tested against."""

from __future__ import annotations

import warnings
from functools import cache

import torch


@cache
def missing(device: torch.device) -> str | None:
    """Why the kernels cannot run on this device; None where they can."""
    if device.type != "cuda":
        return f"no kernels for {device.type} devices"
    from oscar_kv.kernels.compile import architecture

    try:
        import cuda.bindings.nvrtc
        import cuda.core  # noqa: F401

        architecture(device)
    except ImportError:
        return "cuda-core is not installed: pip install 'oscar-kv[cuda]'"
    except NotImplementedError as error:
        return str(error)
    return None


@cache
def usable(device: torch.device) -> bool:
    """Whether the kernels can run on this device. Warns once about a GPU that has to use the reference."""
    reason = missing(device)
    if reason is not None and device.type == "cuda":
        warnings.warn(f"oscar-kv runs its slow PyTorch reference on {device}: {reason}", stacklevel=2)
    return reason is None


@cache
def warn_unsupported(reason: str) -> None:
    """Say once that the reference runs instead of a kernel."""
    warnings.warn(f"oscar-kv runs its slow PyTorch reference: {reason}", stacklevel=3)
