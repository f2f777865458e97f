"""The file of captured steps (step_store.py), and the sources that it depends on."""
from __future__ import annotations

import functools
import hashlib
import io
import lzma
import os
import pickle
from collections.abc import Iterator
from importlib import resources

from tinygrad.uop.ops import UOp

from tinygrad_nv import hooks

# settings that change no kernel, or that are in the key by what they name
NEUTRAL = ("NV_CACHE_DIR", "NV_API_KEY", "NV_SCHEDULES", "NV_REPACK_CACHE", "NV_NVTX", "NV_DEBUG",
           "NV_PROGRAM_CACHE", "NV_STRICT", "NV_SPEC", "NV_DIST_TIMEOUT", "NV_DIST_TOKEN")
# folders of the package whose sources make no step
OTHER = ("server", "cli", "benchmarks", "explain", "host", "quantize", "emulator", "timing",
         "structured_output", "text", "page", "tales")
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


def loads(data: bytes) -> dict[str, UOp]:
    """The steps of a file; none of one that is damaged."""
    try: return pickle.loads(lzma.decompress(data))
    except (lzma.LZMAError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError,
            ValueError, IndexError): return {}


def dumps(steps: dict[str, UOp], preset: int) -> bytes:
    """A file's content."""
    into = io.BytesIO()
    pickle.Pickler(into, protocol=pickle.HIGHEST_PROTOCOL).dump(steps)
    return lzma.compress(into.getbuffer(), preset=preset)
