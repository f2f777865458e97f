"""The interpreter of csrc/ as a shared library: compiled once, kept by content, called through ctypes.

Protocol: `library()` gives the loaded library, compiled with the C compiler of `toolchain.py` when its
sources, the compiler or the processor are new. `Library.handler(name)` is the address of `op_<name>`.
"""
from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from tinygrad_nv.ptx.emulator.lowering import SHARED_BASE
from tinygrad_nv.toolchain import build_shared_library

SOURCES = Path(__file__).parent / "csrc"
# no fast-math and no contraction: PTX says how each instruction rounds
FLAGS = ("-O2", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno",
         "-fno-strict-aliasing", "-fno-sanitize=all", "-g0", f"-DSHARED_BASE={SHARED_BASE}")
TRACE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)
MOST_PEERS = 16
u8, u32, i32, u64, i64 = ctypes.c_uint8, ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int64


class Region(ctypes.Structure):
    """core.h: Region."""
    _fields_ = (("base", u64), ("size", u64), ("data", ctypes.c_void_p), ("valid", ctypes.c_void_p),
                ("pages", ctypes.c_void_p), ("cta", ctypes.c_void_p), ("touched", ctypes.c_void_p),
                ("low", u64), ("high", u64), ("flight", ctypes.c_void_p), ("gpu", i32),
                ("outside", i32))


class Counters(ctypes.Structure):
    """core.h: Counter."""
    _fields_ = tuple((name, u64) for name in
                     ("warps", "threads", "conflicts", "passes", "sectors", "requests", "flops"))


class Totals(ctypes.Structure):
    """core.h: Totals."""
    _fields_ = tuple((name, u64) for name in
                     ("global_read", "global_written", "l2", "shared", "asynchronous"))


class FoundHere(ctypes.Structure):
    """core.h: Finding."""
    _fields_ = (*((name, i32) for name in
                  ("kind", "line", "other", "cta", "other_cta", "thread", "other_thread", "count")),
                ("address", u64), ("text", ctypes.c_char * 256))


class LaunchStruct(ctypes.Structure):
    """core.h: Launch."""
    _fields_ = (
        ("ops", ctypes.c_char_p), ("lists", ctypes.c_void_p), ("constants", ctypes.c_char_p),
        ("parameters", ctypes.c_char_p), ("regions", ctypes.POINTER(Region)),
        ("counters", ctypes.POINTER(Counters)), ("op_count", i32), ("source_count", i32),
        ("constant_bytes", i32), ("register_bytes", i32), ("parameter_bytes", i32), ("region_count", i32),
        ("specials", i32 * 32), ("grid", u32 * 3), ("block", u32 * 3), ("cluster", u32 * 3),
        ("shared_bytes", u32), ("static_bytes", u32), ("dynamic_align", u32), ("local_bytes", u32),
        ("sm_count", u32),
        ("arch", i32), ("check", i32), ("exact", i32), ("uses_wgmma", i32), ("registers", i32),
        ("resident", i32), ("narrow", i32), ("remote", i32), ("seed", u64), ("step_limit", u64),
        ("most_held", i64),
        ("late", i32), ("trace", TRACE),
        ("trace_cta", i64), ("trace_warps", u64), ("footprint", i32), ("pdl", i32),
        ("ahead", ctypes.c_char_p), ("taped", ctypes.c_void_p), ("taped_count", i32), ("whole", i32),
        ("brief", u64), ("idle", i32), ("readers", u32), ("peers", ctypes.c_void_p), ("gpu", i32),
        ("name", ctypes.c_char_p), ("multicasts", ctypes.c_void_p), ("multicast_count", i32))


class MulticastStruct(ctypes.Structure):
    """core.h: Multicast."""
    _fields_ = (("base", u64), ("size", u64), ("members", u64 * MOST_PEERS), ("count", i32))


class TapeStruct(ctypes.Structure):
    """tape.c: Tape."""
    _fields_ = (("steps", ctypes.c_void_p), ("notes", ctypes.c_void_p), ("step_count", u64),
                ("note_count", u64), ("step_room", u64), ("note_room", u64), ("noted", u64),
                ("passes", u64), ("cluster", i32), ("rank", i32), ("cta", i32), ("warp", i32),
                ("brief", i32))


RESULTS = {"machine_new": ctypes.c_void_p, "machine_run": ctypes.c_int, "machine_free": None,
           "machine_report_running": None, "machine_findings": ctypes.POINTER(FoundHere),
           "machine_finding_count": i32, "machine_totals": ctypes.POINTER(Totals), "machine_steps": u64,
           "machine_taped_bytes": u64, "machine_ended": u32, "machine_held": ctypes.c_bool,
           "machine_printed": ctypes.c_char_p, "machine_tape_count": i32, "machine_draws": i32,
           "machine_tape": ctypes.POINTER(TapeStruct), "footprint_runs": i64,
           "peers_new": ctypes.c_void_p, "peers_pages": ctypes.c_void_p, "peers_run": i32,
           "peers_note": i32, "peers_learn": None, "peers_free": None,
           "warp_registers": ctypes.c_void_p, "warp_id": i32, "warp_number": i32}


class Library:
    """The loaded library, and addresses of its handlers."""

    def __init__(self, path: Path) -> None:
        self.c = ctypes.CDLL(str(path))
        for name, result in RESULTS.items(): getattr(self.c, name).restype = result
        self.handlers: dict[str, int] = {}

    def handler(self, name: str) -> int:
        """The address of a handler. A name that no C function has is our own mistake."""
        if name not in self.handlers:
            address = ctypes.cast(getattr(self.c, f"op_{name}"), ctypes.c_void_p).value
            assert address is not None
            self.handlers[name] = address
        return self.handlers[name]


@functools.cache
def library() -> Library:
    """The interpreter, compiled when it has to be (about 20 s with the ziglang wheel). Raises
    `ToolchainError` when there is no compiler or it fails."""
    return Library(build_shared_library(SOURCES, "emulator.c", FLAGS, "emulator", "the emulator", ("-lm",)))
