"""The C of csrc/ as a shared library: compiled once, kept by content, called through ctypes.

Protocol: `library()` gives the loaded library, compiled with the C compiler of `toolchain.py` when its
sources, the compiler or the processor are new. `GroupStruct` is csrc/group.h's `Group`, `Call` its `Call`.
"""
from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from tinygrad import dtypes
from tinygrad.dtype import DType

from tinygrad_nv.toolchain import build_shared_library

SOURCES = Path(__file__).parent.parent / "csrc"
# no contraction: sums are those that reduce.c says
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off",
         "-fno-sanitize=all", "-g0")
MOST_RANKS = 64
u64 = ctypes.c_uint64

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send", "recv")
OPS = ("sum", "max", "min")
TYPES: tuple[DType, ...] = (
    dtypes.float32, dtypes.float64, dtypes.bfloat16, dtypes.float16, dtypes.int8, dtypes.uint8,
    dtypes.int16, dtypes.uint16, dtypes.int32, dtypes.uint32, dtypes.int64, dtypes.uint64)
OK, MISMATCH, LATE, ABORTED, FAILED = range(5)


def count_bytes(kind: str, nbytes: int, ranks: int) -> tuple[int, int]:
    """Bytes that a collective reads and writes on a rank; `nbytes` as `Call.count` counts: of the whole
    buffer of all_reduce, broadcast, send and recv, of one rank's part otherwise."""
    reads = {"recv": 0, "reduce_scatter": ranks, "all_to_all": ranks}.get(kind, 1)
    writes = {"send": 0, "all_gather": ranks, "all_to_all": ranks}.get(kind, 1)
    return nbytes * reads, nbytes * writes


class Call(ctypes.Structure):
    """csrc/group.h: Call."""
    _fields_ = tuple((name, u64) for name in ("kind", "count", "type", "op", "peer", "tag"))


class GroupStruct(ctypes.Structure):
    """csrc/group.h: Group."""
    _fields_ = (("run", ctypes.c_void_p), ("rank", u64), ("size", u64), ("begun", u64), ("ended", u64),
                ("current", Call), ("since", u64), ("status", u64), ("culprit", u64), ("theirs", Call),
                ("abort", u64), ("timeout_ns", u64), ("looks", u64),
                ("shared", ctypes.c_void_p), ("slot_bytes", u64),
                ("sent", u64 * MOST_RANKS), ("received", u64 * MOST_RANKS), ("phase", u64), ("mpi", u64 * 64),
                ("room", ctypes.c_void_p), ("room_bytes", u64))


class Library:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        self.c.shared_bytes.restype = self.c.group_bytes.restype = u64
        assert self.c.group_bytes() == ctypes.sizeof(GroupStruct)

    def address(self, name: str) -> int:
        """Returns the address of a function."""
        found = ctypes.cast(getattr(self.c, name), ctypes.c_void_p).value
        assert found is not None
        return found


@functools.cache
def library() -> Library:
    """The library, compiled when it has to be (about 1 s). Raises `ToolchainError` when there is no compiler
    or it fails."""
    return Library(build_shared_library(SOURCES, "group.c", FLAGS, "dist", "the transports"))
