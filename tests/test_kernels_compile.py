"""Compiling the CUDA sources, which needs NVRTC but no GPU, and the cache of what was compiled."""

from __future__ import annotations

import ctypes
import io
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from oscar_kv.config import OscarConfig
from oscar_kv.kernels import compile as nvrtc
from oscar_kv.kernels import decode, decode_launch, dequantize, encode, records
from oscar_kv.kernels.resources import MODULES, resource_usage
from oscar_kv.pack import RecordLayout

CSRC = Path(nvrtc.__file__).parent / "csrc"
DEFAULT = OscarConfig()
ODD = {  # what no preset does
    "3-bit, D 80": (replace(DEFAULT, key_bits=3, value_bits=3, scale_scope="head"), 80, 80, torch.float16),
    "8-bit, float32": (replace(DEFAULT, key_bits=8, value_bits=16, key_fit="lstsq"), 128, 64, torch.float32),
    "groups of 128": (replace(DEFAULT, key_fit="lstsq", key_group=128, value_group=128), 192, 128, torch.bfloat16),
    "16-bit keys": (replace(DEFAULT, key_bits=16, value_group=128, metadata="bfloat16"), 128, 384, torch.bfloat16),
    "no norm, D 512": (replace(DEFAULT, token_norm=None, key_group=16, value_group=16), 512, 512, torch.bfloat16),
    "unrotated": (replace(DEFAULT, rotate_keys=False, rotate_values=False, token_norm="max"), 16, 48, torch.bfloat16),
}  # fmt: skip
LAYOUT = RecordLayout(DEFAULT, 128, 128, torch.bfloat16)
FLAGS = {
    "encode": encode.defines(LAYOUT, equalized=True, arch="sm_80"),
    "dequantize": dequantize.defines(LAYOUT),
    "decode": decode.defines(LAYOUT, tiles=1, used=4, softcap=False, equalized=True),
}
needs_nvrtc = pytest.mark.skipif(
    not any(Path(path, "cuda", "core").is_dir() for path in sys.path), reason="cuda-core is not installed"
)


@needs_nvrtc
@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
@pytest.mark.parametrize("module", MODULES)
def test_every_kernel_compiles_without_spills(module: str, arch: str) -> None:
    variants = import_module(f"oscar_kv.kernels.{module}").representative(arch)
    if arch not in ("sm_80", "sm_90a"):  # the oldest way of copying, and the newest; the others share their code
        variants = [variant for variant in variants if variant[0] in ("default", "default, one launch")]
    assert variants
    for title, source, main, defines in variants:
        usage = resource_usage(nvrtc._compile(source, defines, arch))
        assert main in (*usage, ""), title
        for name, one in usage.items():
            # registers saved around a call, nothing of a loop; encode is faster with one CTA more and some in memory
            assert one.local <= (64 if source == "encode.cu" else 32), f"{name}, {title}"
            assert 0 < one.registers <= 255


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_reading_shared_blocks_spills_nothing(arch: str) -> None:
    for title, source, main, defines in decode.representative(arch)[:8]:
        usage = resource_usage(nvrtc._compile(source, {**defines, "PIECES": 1}, arch))[main]
        assert usage.local == 0, title


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
@pytest.mark.parametrize("name", ODD)
def test_unusual_configurations_compile(name: str, arch: str) -> None:
    layout = RecordLayout(*ODD[name])
    for equalized in (True, False)[: 1 + (name == "unrotated")]:
        code = nvrtc._compile("encode.cu", encode.defines(layout, equalized=equalized, arch=arch), arch)
        assert {"start_rows", "token_norms", "encode_blocks"} == set(resource_usage(code))
    if layout.dtype.itemsize == 2:
        code = nvrtc._compile("dequantize.cu", dequantize.defines(layout), arch)
        assert resource_usage(code)["dequantize_blocks"].local == 0
    else:
        with pytest.raises(NotImplementedError, match="float32"):
            dequantize.defines(layout)


@pytest.mark.parametrize("arch", nvrtc.ARCHITECTURES)
def test_shared_memory_suffices_for_every_head_dimension(arch: str) -> None:
    limit = {"sm_80": 163, "sm_90a": 227, "sm_100a": 227}.get(arch, 99) * 1024
    for dim in range(16, 513, 16):
        for group in (g for g in (16, 32, 64, 128) if dim % g == 0):
            config = replace(DEFAULT, key_group=group, value_group=group)
            defines = encode.defines(RecordLayout(config, dim, dim, torch.float32), equalized=True, arch=arch)
            assert int(defines["SHARED"]) < limit
            assert dim % int(defines["KSLICE"]) == int(defines["KSLICE"]) % 16 == 0
            assert dim % int(defines["VSLICE"]) == int(defines["VSLICE"]) % group == 0


def test_launches_are_those_that_were_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H200, with 4 queries of a KV head: warps, CTAs of a cluster and of a multiprocessor."""
    monkeypatch.setattr(decode_launch, "properties", lambda device: (132, 232448))
    monkeypatch.setattr(decode_launch, "architecture", lambda device: "sm_90a")
    fastest = {  # by (row, KV head) pairs and blocks of a row
        (8, 8): (8, 2, 2), (8, 16): (8, 4, 2), (8, 32): (8, 8, 2), (8, 128): (8, 8, 2),
        (8, 256): (16, 8, 1), (8, 512): None,
        (32, 256): None, (64, 8): (8, 2, 2), (64, 64): (8, 2, 2), (64, 128): (16, 2, 1), (64, 256): (16, 2, 1),
        (128, 32): (8, 1, 2), (192, 32): (8, 1, 2), (512, 8): (4, 1, 4), (512, 32): (4, 1, 4), (1024, 32): (4, 1, 4),
        (512, 128): None,
    }  # fmt: skip
    for (units, blocks), expected in fastest.items():
        chosen = decode_launch.short(LAYOUT, 4, units, blocks, torch.device("cpu"))
        assert (chosen and (chosen.warps, chosen.cluster, chosen.ctas)) == expected, (units, blocks)


@needs_nvrtc
@pytest.mark.parametrize(
    ("header", "fields", "flags"),
    [
        ("transform.cuh", encode.Args, FLAGS["encode"]),
        ("decode_args.cuh", decode.Args, FLAGS["decode"]),
        ("dequantize.cu", dequantize.Args, FLAGS["dequantize"]),
    ],
)
def test_arguments_lie_where_the_kernel_reads_them(
    header: str, fields: type[ctypes.Structure], flags: dict[str, int | str]
) -> None:
    from cuda.core import Program, ProgramOptions

    checks = [f"static_assert(sizeof(Args) == {ctypes.sizeof(fields)});"]
    for name, *_ in fields._fields_:
        at = getattr(fields, name)
        checks.append(f"static_assert(__builtin_offsetof(Args, {name}) == {at.offset});")
        checks.append(f"static_assert(sizeof(((Args*)0)->{name}) == {at.size});")
    options = ProgramOptions(
        arch="sm_80", include_path=str(CSRC), define_macro=[(name, str(value)) for name, value in flags.items()]
    )
    Program(f'#include "{header}"\n' + "\n".join(checks), "c++", options).compile("cubin")


@needs_nvrtc
def test_resource_usage_is_what_the_assembler_reports() -> None:
    from cuda.core import Program, ProgramOptions

    source = """
    extern "C" __global__ void spills(float* x, int i) { float y[100]; for (int j = 0; j < 100; j++) y[j] = x[j];
        __syncthreads(); x[i] = y[i]; }
    extern "C" __global__ void shares(float* x) { __shared__ float y[300]; y[threadIdx.x] = x[0]; __syncthreads();
        x[threadIdx.x] = y[threadIdx.x ^ 1]; }
    """
    log = io.StringIO()
    program = Program(source, "c++", ProgramOptions(arch="sm_80", ptxas_options=["-v"]))
    usage = resource_usage(bytes(program.compile("cubin", logs=log).code))
    reports = log.getvalue().split("Compiling entry function ")[1:]
    assert len(reports) == len(usage) == 2
    for report in reports:
        one = usage[report.split("'")[1]]
        numbers = [re.search(rf"(\d+) {what}", report) for what in ("registers", "bytes stack frame", "bytes smem")]
        assert [0 if n is None else int(n[1]) for n in numbers] == [one.registers, one.local, one.shared]
    with pytest.raises(ValueError, match="cubin"):
        resource_usage(b"nothing")


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple]:
    """What was compiled, with the cache in tmp_path / "cache" and a compiler that returns its arguments."""
    done: list[tuple] = []

    def fake(*args: object) -> bytes:
        done.append(args)
        return repr(args).encode()

    monkeypatch.setenv("OSCAR_KV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_compile", fake)
    monkeypatch.setattr(nvrtc, "_versions", lambda: "1")
    return done


def test_a_source_is_compiled_once(compilations: list[tuple], tmp_path: Path) -> None:
    first = nvrtc.cubin("encode.cu", {"A": 1, "B": "x"}, "sm_80")
    assert nvrtc.cubin("encode.cu", {"B": "x", "A": "1"}, "sm_80") == first
    assert len(compilations) == len(list((tmp_path / "cache").iterdir())) == 1


def test_whatever_changes_the_code_is_compiled_anew(compilations: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.cubin("encode.cu", {"A": 1}, "sm_80")
    nvrtc.cubin("encode.cu", {"A": 2}, "sm_80")
    nvrtc.cubin("encode.cu", {"A": 1, "B": 0}, "sm_80")
    nvrtc.cubin("encode.cu", {"A": 1}, "sm_86")
    nvrtc.cubin("flush.cu", {"A": 1}, "sm_80")
    monkeypatch.setattr(nvrtc, "_versions", lambda: "2")
    nvrtc.cubin("encode.cu", {"A": 1}, "sm_80")
    monkeypatch.setattr(nvrtc, "_sources", lambda: b"edited")
    nvrtc.cubin("encode.cu", {"A": 1}, "sm_80")
    assert len(compilations) == 7


@pytest.mark.parametrize("damage", [lambda x: b"", lambda x: x[:-3], lambda x: x[:40] + b"?" + x[41:]])
def test_damaged_files_are_replaced(compilations: list[tuple], tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    expected = nvrtc.cubin("encode.cu", {}, "sm_80")
    (file,) = (tmp_path / "cache").iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert nvrtc.cubin("encode.cu", {}, "sm_80") == expected
    assert file.read_bytes() == whole
    assert len(compilations) == 2


def test_temporary_directory_where_the_cache_cannot_be_written(
    compilations: list[tuple], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("OSCAR_KV_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    for _ in range(2):
        nvrtc.cubin("encode.cu", {}, "sm_80")
    assert len(compilations) == len(list((tmp_path / "tmp").rglob("*.cubin"))) == 1


def test_the_users_cache_is_the_default(
    compilations: list[tuple], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("OSCAR_KV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    nvrtc.cubin("encode.cu", {}, "sm_80")
    assert len(list((tmp_path / "xdg" / "oscar-kv" / "kernels").glob("*.cubin"))) == 1


def test_two_processes_at_once(tmp_path: Path) -> None:
    program = f"""
import os, time
os.environ["OSCAR_KV_CACHE"] = {str(tmp_path)!r}
from oscar_kv.kernels import compile as nvrtc
nvrtc._versions = lambda: "1"
nvrtc._compile = lambda *args: (time.sleep(0.5), bytes(1000000))[1]
while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.01)
for _ in range(3): assert nvrtc.cubin("encode.cu", {{}}, "sm_80") == bytes(1000000)
"""
    processes = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    (tmp_path / "go").touch()
    assert [process.wait() for process in processes] == [0, 0]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".cubin"]


def test_without_cuda_core_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OSCAR_KV_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    nvrtc._versions.cache_clear()
    with pytest.raises(ImportError, match=re.escape("pip install 'oscar-kv[cuda]'")):
        nvrtc.cubin("encode.cu", {}, "sm_80")


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        *(((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 7), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a")),
        *(((10, 0), "sm_100a"), ((10, 3), "sm_100"), ((12, 0), "sm_120a"), ((12, 1), "sm_120")),
    ],
)
def test_architecture_of_a_device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], arch: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert nvrtc.architecture.__wrapped__(torch.device("cuda", 0)) == arch


def test_devices_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability in ((7, 5), (9, 4), (11, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=capability: own)
        with pytest.raises(NotImplementedError, match=rf"{capability[0]}\.{capability[1]}"):
            nvrtc.architecture.__wrapped__(torch.device("cuda", 0))
    with pytest.raises(NotImplementedError, match="cpu"):
        nvrtc.architecture.__wrapped__(torch.device("cpu"))


def test_shared_memory_of_a_kernel_only_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver keeps the last limit that it was told, and refuses launches above it."""
    driver = pytest.importorskip("cuda.bindings.driver")
    told: list[int] = []

    class Code:
        handle = 0

    code = Code()
    monkeypatch.setattr(
        driver, "cuKernelSetAttribute", lambda attribute, size, *which: (told.append(size), (driver.CUresult(0),))[1]
    )
    for size in (60_000, 50_000, 40_000, 60_000, 70_000, 60_000):
        nvrtc._allow_shared(code, size, 0)
        assert told[-1] >= size
    nvrtc._allow_shared(code, 50_000, 1)
    assert told == [60_000, 70_000, 50_000]


def test_layouts_survive_the_trip_through_a_string() -> None:
    for config, key_dim, value_dim, dtype in ODD.values():
        layout = RecordLayout(config, key_dim, value_dim, dtype)
        assert records.layout_of(records.layout_key(layout)) == layout
