"""What kernels take of a multiprocessor (registers, shared and local memory), read from the machine code, no GPU."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module

from rich.console import Console
from rich.table import Table

from oscar_kv.kernels.compile import ARCHITECTURES, cubin

MODULES = ("decode", "dequantize", "encode", "tail")  # each has a function representative
_REGISTERS, _FRAME = 0x2F, 0x11  # attributes in .nv.info: one number for each kernel
_ONE_VALUE = 4  # format of an attribute with data


@dataclass(frozen=True)
class Usage:
    """Of one kernel: registers and bytes of local memory (spills) per thread, bytes of static shared memory per CTA."""

    registers: int
    local: int
    shared: int


def resource_usage(code: bytes) -> dict[str, Usage]:
    """Usage of each kernel in a cubin, which is an ELF file, by kernel name.

    Raises:
        ValueError: This is no cubin.
    """
    if code[:4] != b"\x7fELF":
        raise ValueError("not a cubin")
    sections = dict(_sections(code))
    names = _symbol_names(code, sections)
    found: dict[int, dict[int, int]] = {_REGISTERS: {}, _FRAME: {}}
    for attribute, data in _attributes(code[sections[".nv.info"][0] :][: sections[".nv.info"][1]]):
        if attribute in found:
            symbol, value = struct.unpack("<II", data)
            found[attribute][symbol] = value
    return {
        names[symbol]: Usage(
            registers, found[_FRAME].get(symbol, 0), sections.get(f".nv.shared.{names[symbol]}", (0, 0))[1]
        )
        for symbol, registers in found[_REGISTERS].items()
    }


def _sections(code: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, (offset, size)) of the sections."""
    (table,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", code, table + i * size) for i in range(count)]
    for name, *_, offset, length in headers:
        yield _text(code, headers[names_index][4] + name), (offset, length)


def _symbol_names(code: bytes, sections: dict[str, tuple[int, int]]) -> list[str]:
    offset, length = sections[".symtab"]
    strings = sections[".strtab"][0]
    return [_text(code, strings + struct.unpack_from("<I", code, at)[0]) for at in range(offset, offset + length, 24)]


def _text(code: bytes, start: int) -> str:
    return code[start : code.index(b"\0", start)].decode()


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, data) of those that have data: each is a format, an attribute and two bytes of size or value."""
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == _ONE_VALUE:
            yield attribute, info[at : at + size]
            at += size


def print_table() -> None:
    """Usage of the representative variants of every kernel on every architecture."""
    table = Table("kernel", "variant", "architecture", "registers", "local", "shared", "dynamic")
    for module in MODULES:
        for arch in ARCHITECTURES:
            for title, source, main, defines in import_module(f"oscar_kv.kernels.{module}").representative(arch):
                for name, usage in sorted(resource_usage(cubin(source, defines, arch)).items()):
                    dynamic = defines.get("SHARED", 0) if name == main else 0
                    numbers = (usage.registers, usage.local, usage.shared, dynamic)
                    table.add_row(name, title, arch, *(str(number) for number in numbers))
    Console().print(table)
