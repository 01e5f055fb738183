"""Compile the CUDA sources in ``csrc`` for the GPU at hand, once per configuration, and launch their kernels.

NVRTC compiles in seconds and needs no CUDA toolkit; the result is kept on disk. ``python -m oscar_kv.kernels.compile``
prints what each kernel takes of a multiprocessor, which needs no GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
_BY_CAPABILITY = {  # an "a" architecture runs on its own capability only, the others on later minor versions too
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 7): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_100",
    (12, 0): "sm_120a",
    (12, 1): "sm_120",
}
_CSRC = Path(__file__).parent / "csrc"
# these round each operation as the CPU does: no contraction to fused multiply-add
_EXACT = ("dequantize.cu", "encode.cu", "flush.cu")
_STATIC_SHARED = 48 * 1024  # what a kernel may use without asking for more
_ATTRIBUTE_SHARED = "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES"
_BEFORE_HOPPER = ("sm_80", "sm_86", "sm_89")
_LEGACY_STREAM = 1  # a handle of the default stream that says so

Defines = Mapping[str, int | str]
Argument = Tensor | bytes | int | float | None

_kernels: dict[tuple[Any, ...], Any] = {}
_allowed: dict[tuple[Any, int], int] = {}  # bytes of dynamic shared memory, by kernel and device
_lock = threading.RLock()


def _cuda_core() -> Any:
    try:
        import cuda.core
    except ImportError as error:
        raise ImportError("GPU kernels need cuda-core and NVRTC: pip install 'oscar-kv[cuda]'") from error
    return cuda.core


@cache
def _versions() -> str:
    """What else the machine code depends on: versions of NVRTC and cuda-core."""
    core = _cuda_core()
    from cuda.bindings import nvrtc

    return f"nvrtc {nvrtc.nvrtcVersion()[1:]} cuda-core {core.__version__}"


@cache
def _sources() -> bytes:
    """Digest of all files in csrc."""
    digest = hashlib.sha256()
    for path in sorted(_CSRC.glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.digest()


@cache
def architecture(device: torch.device) -> str:
    """The architecture to compile for on this device.

    Raises:
        NotImplementedError: The device is no NVIDIA GPU of compute capability 8.0, 8.6, 8.7, 8.9, 9.0, 10 or 12.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        raise NotImplementedError(f"the kernels run on NVIDIA GPUs, not on {device}")
    capability = torch.cuda.get_device_capability(device)
    if capability not in _BY_CAPABILITY:
        known = ", ".join(f"{major}.{minor}" for major, minor in _BY_CAPABILITY)
        raise NotImplementedError(f"compute capability {capability[0]}.{capability[1]} is not one of {known}")
    return _BY_CAPABILITY[capability]


def most_cluster(arch: str) -> int:
    """CTAs that a cluster can have on any GPU of an architecture; 1 where there are none."""
    return 1 if arch in _BEFORE_HOPPER else 8


def cubin(source: str, defines: Defines, arch: str) -> bytes:
    """Machine code of a source: from the disk cache, or compiled and put there.

    Args:
        source: Name of a file in csrc.
        defines: Preprocessor definitions.
        arch: One of :data:`ARCHITECTURES`, or another that NVRTC knows.

    Raises:
        ImportError: cuda-core is not installed.
    """
    options = f"{arch} {source in _EXACT} {sorted((k, str(v)) for k, v in defines.items())}"
    key = hashlib.sha256(b"\0".join((_sources(), source.encode(), options.encode(), _versions().encode()))).hexdigest()
    path = _cache_directory() / f"{Path(source).stem}-{arch}-{key[:32]}.cubin"
    stored = path.read_bytes() if path.is_file() else b""
    digest, code = stored[:32], stored[32:]
    if not code or hashlib.sha256(code).digest() != digest:  # not there yet, or damaged
        code = _compile(source, defines, arch)
        with suppress(OSError):  # a full disk only costs time
            _write(path, hashlib.sha256(code).digest() + code)
    return code


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, also where several processes do this."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


def _compile(source: str, defines: Defines, arch: str) -> bytes:
    core = _cuda_core()
    options = core.ProgramOptions(
        name=source,
        arch=arch,
        std="c++17",
        fma=source not in _EXACT,
        define_macro=[(name, str(value)) for name, value in defines.items()],
        include_path=str(_CSRC),
    )
    program = core.Program((_CSRC / source).read_text(encoding="utf-8"), "c++", options)
    return bytes(program.compile("cubin").code)


def _cache_directory() -> Path:
    """Where machine code is kept: $OSCAR_KV_CACHE, or the user's cache, or else the temporary directory."""
    own = os.environ.get("OSCAR_KV_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    wanted = Path(own) if own else base / "oscar-kv" / "kernels"
    with suppress(OSError):
        wanted.mkdir(parents=True, exist_ok=True)
        if os.access(wanted, os.W_OK | os.X_OK):
            return wanted
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "")
    fallback = Path(tempfile.gettempdir()) / f"oscar-kv-kernels-{user}"
    fallback.mkdir(mode=0o700, exist_ok=True)
    return fallback


def kernel(source: str, name: str, defines: Defines, device: torch.device) -> Any:
    """A kernel of a source, loaded on a device: once per device and set of definitions, and not in a graph capture."""
    key = (source, name, device, frozenset(defines.items()))
    with _lock:
        if key not in _kernels:
            with torch.cuda.device(device):
                code = cubin(source, defines, architecture(device))
                _kernels[key] = _cuda_core().ObjectCode.from_cubin(code, name=source).get_kernel(name)
        return _kernels[key]


def launch(
    kernel: Any,
    grid: int | tuple[int, ...],
    block: int,
    shared_bytes: int,
    args: Sequence[Argument],
    device: torch.device,
    *,
    dependent: bool = False,
    cooperative: bool = False,
    cluster: int = 1,
) -> None:
    """Start a kernel on PyTorch's current stream of the device.

    Args:
        kernel: From :func:`kernel`.
        grid: CTAs, in up to three dimensions.
        block: Threads of a CTA.
        shared_bytes: Dynamic shared memory of a CTA.
        args: Tensors pass their address, None a null pointer, ints 8 bytes (of which an ``int`` parameter takes the
            low 4), floats a ``float`` and bytes a struct by value.
        device: Where the tensors are.
        dependent: Start before the previous kernel has ended, where the GPU can; the kernel waits by itself
            (``griddepcontrol.wait``).
        cooperative: Refuse a grid whose CTAs cannot all run at once.
        cluster: Consecutive CTAs that run together and share their shared memory; more than 1 from sm_90 on.

    Raises:
        RuntimeError: The driver refused the launch.
    """
    from cuda.bindings import driver

    x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
    values = [_argument(arg) for arg in args]
    addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    parameters = ctypes.addressof(addresses)
    with torch.cuda.device(device):
        _allow_shared(kernel, shared_bytes, torch.cuda.current_device())
        function = driver.CUfunction(int(kernel.handle))
        stream = driver.CUstream(torch.cuda.current_stream(device).cuda_stream or _LEGACY_STREAM)
        dependent = dependent and architecture(device) not in _BEFORE_HOPPER
        if not (dependent or cooperative or cluster > 1):
            _check(driver.cuLaunchKernel(function, x, y, z, block, 1, 1, shared_bytes, stream, parameters, 0))
            return
        with _lock:
            config = _config(x, y, z, block, shared_bytes, dependent, cooperative, cluster)
            config.hStream = stream
            _check(driver.cuLaunchKernelEx(config, function, parameters, 0))


@cache
def _config(
    x: int, y: int, z: int, block: int, shared_bytes: int, dependent: bool, cooperative: bool, cluster: int
) -> Any:
    """Of a launch; kept, since making one takes longer than the launch. Only its stream changes."""
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    kinds = driver.CUlaunchAttributeID
    attributes = []
    if dependent:
        overlap = driver.CUlaunchAttribute()
        overlap.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        attributes.append(overlap)
    if cooperative:
        whole = driver.CUlaunchAttribute()
        whole.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        whole.value.cooperative = 1
        attributes.append(whole)
    if cluster > 1:
        size = driver.CUlaunchAttribute()
        size.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = cluster, 1, 1
        attributes.append(size)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _argument(arg: Argument) -> Any:
    if isinstance(arg, Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, bytes):
        return ctypes.create_string_buffer(arg, len(arg))
    return ctypes.c_float(arg) if isinstance(arg, float) else ctypes.c_int64(arg or 0)


def _allow_shared(kernel: Any, shared_bytes: int, device: int) -> None:
    """Let a kernel have so much dynamic shared memory, and never less than before: the next launch may need it."""
    from cuda.bindings import driver

    with _lock:
        if shared_bytes > _allowed.get((kernel, device), _STATIC_SHARED):
            attribute = getattr(driver.CUfunction_attribute, _ATTRIBUTE_SHARED)
            _check(driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, device))
            _allowed[kernel, device] = shared_bytes


def _check(result: tuple[Any, ...]) -> None:
    if int(result[0]) != 0:
        raise RuntimeError(f"CUDA driver: {result[0].name}")


if __name__ == "__main__":
    from oscar_kv.kernels.resources import print_table

    print_table()
