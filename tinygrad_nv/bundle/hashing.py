"""The hash of a part of a bundle: SHA-256 over the SHA-256 of each of its chunks of 8 MiB.

Protocol: `digest(data)` is that hash, `ChunkHash` makes it of chunks in order. Several threads hash the
chunks of a large part at a time: hashlib computes without the interpreter's lock.
"""
from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

CHUNK = 8 << 20
THREADS = min(8, os.cpu_count() or 1)


def digest(data: bytes | memoryview) -> bytes:
    """The 32 bytes of a part's hash."""
    return digest_of(len(data), lambda start, end: data[start:end])


def digest_of(nbytes: int, chunk: Callable[[int, int], bytes | memoryview],
              progress: Callable[[int], None] = lambda nbytes: None) -> bytes:
    """The hash of `nbytes` bytes, of which `chunk(start, end)` gives some, in any thread. `progress` is told
    of the bytes of each chunk."""
    def hash_chunk(start: int) -> bytes:
        end = min(start + CHUNK, nbytes)
        made = hashlib.sha256(chunk(start, end)).digest()
        progress(end - start)
        return made
    starts = range(0, nbytes, CHUNK)
    if len(starts) < 2: return hashlib.sha256(b"".join(map(hash_chunk, starts))).digest()
    with ThreadPoolExecutor(THREADS) as threads:
        return hashlib.sha256(b"".join(threads.map(hash_chunk, starts))).digest()
