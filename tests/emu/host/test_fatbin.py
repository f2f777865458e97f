"""Fat binaries: what is in them, however it is compressed."""
from __future__ import annotations

import ctypes
import ctypes.util

import pytest

from tests.support.host.host_program import SCALE, fat_binary
from tinygrad_nv.errors import PTXError
from tinygrad_nv.host import fatbin, modules
from tinygrad_nv.host.fatbin import LZ4, PTX, ZSTD, Entry, entries
from tinygrad_nv.host.modules import choose_ptx


def zstd(data: bytes) -> bytes:
    """As nvcc compresses it."""
    library = ctypes.CDLL(ctypes.util.find_library("zstd"))
    out = ctypes.create_string_buffer(len(data) + 1024)
    for name in ("ZSTD_compress", "ZSTD_compressBound"): getattr(library, name).restype = ctypes.c_size_t
    size = library.ZSTD_compress(out, ctypes.c_size_t(len(out)), data, ctypes.c_size_t(len(data)), 3)
    return out.raw[:size]


def lz4(data: bytes) -> bytes:
    """Sequences of bytes as they are, and a copy where the last eight come again."""
    out, plain, at = b"", b"", 0
    while at < len(data):
        found = data.rfind(data[at:at + 8], max(0, at - 65535), at) if at + 20 < len(data) else -1
        if found < 0:
            plain += data[at:at + 1]
            at += 1
            continue
        count = 8
        while at + count < len(data) - 12 and data[found + count] == data[at + count]: count += 1
        out += _sequence(plain, count) + (at - found).to_bytes(2, "little") + _more(count - 4)
        plain, at = b"", at + count
    return out + _sequence(plain, 4)


def _sequence(plain: bytes, count: int) -> bytes:
    return bytes([min(len(plain), 15) << 4 | min(count - 4, 15)]) + _more(len(plain)) + plain


def _more(length: int) -> bytes:
    if length < 15: return b""
    return b"\xff" * ((length - 15) // 255) + bytes([(length - 15) % 255])


@pytest.mark.parametrize(("flags", "packed"), [(0, None), (LZ4, lz4), (ZSTD, zstd)])
def test_an_entry_is_read(flags: int, packed):
    text = SCALE + "// " + "a" * 70000 + SCALE
    found, other = entries(fat_binary(text, SCALE, flags=flags, packed=packed))
    assert (found, other) == (Entry(PTX, 90, text), Entry(PTX, 90, SCALE))


def test_of_several_texts_the_newest_that_the_gpu_runs_is_chosen():
    texts = {target: SCALE.replace("sm_90", target) for target in ("sm_80", "sm_90", "sm_90a", "sm_100a")}
    every = fat_binary(*texts.values())
    assert choose_ptx(every, "sm_90a") == texts["sm_90a"]
    assert choose_ptx(every, "sm_89") == texts["sm_80"]
    assert choose_ptx(SCALE.encode() + b"\0", "sm_90a") == SCALE


@pytest.mark.parametrize(("version", "ptxas", "lowered"), [
    ("9.5", (13, 0), "9.0"), ("8.0", (13, 0), "8.0"), ("9.1", (12, 8), "8.7"), ("9.5", None, "9.5")])
def test_a_version_that_ptxas_does_not_know_is_lowered(version: str, ptxas: tuple[int, int] | None,
                                                       lowered: str,
                                                       monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(modules, "release", lambda: ptxas)
    made = SCALE.replace(".version 8.0", f".version {version}")
    assert modules.lower_version(made) == SCALE.replace(".version 8.0", f".version {lowered}")


@pytest.mark.parametrize("packed", [b"\x10a\xff\xff", b"\xf0" + b"\xff" * 9])
def test_what_is_not_lz4_is_refused(packed: bytes):
    with pytest.raises(PTXError, match="not LZ4"): fatbin.lz4(packed, 100)
