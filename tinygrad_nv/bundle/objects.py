"""Object files of a CPU's kernels in a bundle: what is checked before tinygrad loads one.

Protocol: `require_object(code)` raises `BundleError` unless an object's sections lie inside of it, and the
memory of their code and data is no more than it has. tinygrad's loader trusts sizes, alignments and
addresses, and runs what is no ELF as it is. What the instructions do is not looked at.
"""
from __future__ import annotations

import struct

from tinygrad_nv.errors import BundleError

ELF64 = b"\x7fELF\x02\x01"
HEADER, SECTION = struct.Struct("<16sHHIQQQIHHHHHH"), struct.Struct("<IIQQQQIIQQ")
PROGBITS, NOBITS = 1, 8
MOST_ALIGNMENT = 4096


def require_object(code: bytes) -> None:
    """Raises `BundleError` for code that is no ELF object of 64 bits, or not a whole one."""
    if len(code) < HEADER.size or not code.startswith(ELF64):
        raise _object_error("begins with no header of 64 bits")
    _, _, _, _, _, _, table, _, _, _, _, each, count, _ = HEADER.unpack_from(code)
    if each != SECTION.size or not count or table + count * each > len(code):
        raise _object_error("has sections behind its end")
    whole, sections = 0, SECTION.iter_unpack(code[table:table + count * each])
    for _, kind, _, address, offset, size, _, _, align, _ in sections:
        if kind != NOBITS and offset + size > len(code): raise _object_error("has a section behind its end")
        if kind != PROGBITS: continue
        if address or align > MOST_ALIGNMENT:
            raise _object_error(f"has a section at {address}, aligned to {align}")
        whole += -whole % max(align, 1) + size
    if whole > len(code): raise _object_error(f"has {whole} bytes in memory")


def _object_error(why: str) -> BundleError:
    return BundleError(f"its code {why}", "an object file of ELF, as compilers of C write")
