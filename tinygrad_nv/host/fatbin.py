"""The PTX in what nvcc puts into a program.

Protocol: `ptx_of(image)` gives the PTX texts of an image: a fat binary, whose entries may be compressed with
LZ4 or zstd, or PTX text itself. `entries(image)` says what else is there. Layout: a header of 16 bytes
(magic, version, bytes of the header, bytes of what follows), then entries, each a header with kind, sizes,
architecture and flags, and its payload.
"""
from __future__ import annotations

import ctypes
import ctypes.util
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tinygrad_nv.errors import PTXError, ToolchainError

WRAPPER, HEADER, ELF = 0x466243B1, 0xBA55ED50, b"\x7fELF"
HEADER_BYTES = 16
PTX, CUBIN = 1, 2
LZ4, ZSTD = 0x2000, 0x8000      # flags
ENTRY = struct.Struct("<HHIIIIIIIIIQQQ")


@dataclass(frozen=True)
class Entry:
    """One of a fat binary's: PTX, or machine code of an architecture (90: sm_90)."""
    kind: int
    arch: int
    text: str = ""


def size_of(header: bytes) -> int:
    """Bytes of a fat binary that begins so."""
    magic, _, header_bytes, rest = struct.unpack_from("<IHHQ", header)
    if magic != HEADER:
        raise PTXError(f"a device image that begins with {magic:#010x}", 0, "a fat binary, or PTX text")
    return int(header_bytes + rest)


def entries(image: bytes) -> Iterator[Entry]:
    """All entries of a fat binary."""
    at, end = struct.unpack_from("<IHH", image)[2], size_of(image)
    while at < end:
        kind, _, header, stored, _, packed, _, _, arch, _, _, flags, _, plain = ENTRY.unpack_from(image, at)
        payload = image[at + header:at + header + (packed or stored)]
        if kind == PTX:
            if flags & ZSTD: payload = zstd(payload, plain)
            elif flags & LZ4: payload = lz4(payload, plain)
            yield Entry(kind, arch, payload.rstrip(b"\0").decode())
        else: yield Entry(kind, arch)
        at += header + stored


def zstd(data: bytes, size: int) -> bytes:
    """Decompressed by the system's libzstd."""
    name = ctypes.util.find_library("zstd")
    if name is None:
        raise ToolchainError("the program's PTX is compressed with zstd, and libzstd is not there",
                             "libzstd.so.1, which package managers of Linux bring",
                             "install libzstd, or compile with nvcc -compress-mode=none")
    library = ctypes.CDLL(name)
    library.ZSTD_decompress.restype = ctypes.c_size_t
    out = ctypes.create_string_buffer(size)
    if library.ZSTD_decompress(out, ctypes.c_size_t(size), data, ctypes.c_size_t(len(data))) != size:
        raise PTXError("PTX of the program that libzstd does not decompress", 0, "a whole fat binary")
    return out.raw


def lz4(data: bytes, size: int) -> bytes:
    """An LZ4 block decompressed: pieces of bytes as they are, each followed by a copy of earlier ones."""
    out, at = bytearray(), 0

    def length(short: int) -> int:
        nonlocal at
        if short < 15: return short
        while at < len(data):
            short += data[at]
            at += 1
            if data[at - 1] != 255: break
        return short

    while at < len(data):
        token = data[at]
        at += 1
        count = length(token >> 4)
        out += data[at:at + count]
        at += count
        if at >= len(data): break
        distance = int.from_bytes(data[at:at + 2], "little")
        at += 2
        count = length(token & 15) + 4
        begin = len(out) - distance
        if not 0 < distance <= len(out): break
        piece = bytes(out[begin:begin + count])
        out += (piece * (count // max(len(piece), 1) + 1))[:count]
    if len(out) != size: raise PTXError("PTX of the program that is not LZ4", 0, "a whole fat binary")
    return bytes(out)
