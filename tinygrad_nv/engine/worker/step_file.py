"""The file of captured steps (step_store.py), and the sources that it depends on.

Protocol: `dumps(steps, …)` makes a file's content, and `loads(data, target)` reads it: nothing of it is run.
It is data as bundles have it (bundle/plan.py), compressed: the length of the JSON, the JSON (programs, and
steps by name), and the code of programs.
"""
from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import lzma
import os
import struct
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from tinygrad.helpers import Target, disable_gc
from tinygrad.uop.ops import UOp

from tinygrad_nv import hooks
from tinygrad_nv.bundle.plan import MOST_BYTES as MOST_BYTES_OF_TENSOR
from tinygrad_nv.bundle.plan import ProgramTable, decode_step, encode_step, programs
from tinygrad_nv.errors import BundleError

# settings that change no kernel, or that are in the key by what they name
NEUTRAL = ("NV_CACHE_DIR", "NV_API_KEY", "NV_SCHEDULES", "NV_REPACK_CACHE", "NV_NVTX", "NV_DEBUG",
           "NV_PROGRAM_CACHE", "NV_STRICT", "NV_SPEC", "NV_DIST_TIMEOUT", "NV_DIST_TOKEN")
# folders of the package whose sources make no step
OTHER = ("server", "cli", "benchmarks", "explain", "host", "quantize", "emulator", "timing",
         "structured_output", "text", "page", "tales")
LENGTH = struct.Struct("<Q")
# limit: bytes of captured steps after decompression
MOST_BYTES = 1 << 30
MEMORY = 1 << 30        # bytes that decompression itself may take
FASTEST, SMALLEST = 0, 9 | lzma.PRESET_EXTREME


@functools.cache
def sources() -> str:
    """A hash of the package's sources that make steps, and of tinygrad's version."""
    made = hashlib.sha256(hooks.TINYGRAD_VERSION.encode())
    for package in ("tinygrad_nv", "tinygrad_nv.models"):
        for name, file in _files(str(resources.files(package))):
            made.update(f"{package}/{name}\0".encode())
            with open(file, "rb", buffering=0) as opened: made.update(opened.read())
    return made.hexdigest()


def _files(root: str) -> Iterator[tuple[str, str]]:
    """Sources below a directory, as names in it and paths. (Strings, not Paths: hundreds of files, of which
    every start reads all.)"""
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(each for each in inner if each not in OTHER)
        for file in sorted(files):
            path = f"{folder}/{file}"
            if file.endswith((".py", ".h", ".c")) or file == "shipped.json": yield path[len(root) + 1:], path


def loads(data: bytes, target: Target) -> dict[str, UOp]:
    """The steps of a file, for a device of this target; none of one that is damaged."""
    try:
        with disable_gc():      # which would look at every node that is made
            whole = lzma.LZMADecompressor(lzma.FORMAT_XZ, MEMORY).decompress(data, MOST_BYTES)
            length, = LENGTH.unpack_from(whole)
            found = json.loads(whole[LENGTH.size:LENGTH.size + length])
            made = programs(found["programs"], whole[LENGTH.size + length:], target, "steps", several=True)
            return {name: decode_step(step, made, lambda owner: MOST_BYTES_OF_TENSOR, name)
                    for name, step in found["steps"].items()}
    except (lzma.LZMAError, struct.error, EOFError, BundleError, AttributeError, TypeError, ValueError,
            KeyError, RecursionError): return {}


def dumps(steps: Mapping[str, UOp], preset: int) -> bytes:
    """A file's content, without steps that it has no words for."""
    table, made = ProgramTable(several=True), dict[str, Any]()
    for name, step in steps.items():
        with contextlib.suppress(BundleError, TypeError, KeyError): made[name] = encode_step(step, table)
    text = json.dumps({"programs": table.rows, "steps": made}, separators=(",", ":")).encode()
    return lzma.compress(LENGTH.pack(len(text)) + text + table.code, preset=preset)
