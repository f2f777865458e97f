"""One launch of a kernel: what the interpreter in C gets, and what comes of it.

Protocol: a `Run` is made of a program, its arguments and an `Emulator`'s memory. `to_end` runs it. Among
peers (peers.py) `start` lets it take turns with those of other GPUs, until it ends; `finish` says what was
found.
"""
from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tinygrad_nv.ptx.emulator.arguments import SM_COUNT, Triple, entry_registers, resident_clusters
from tinygrad_nv.ptx.emulator.buffer import Buffer, Multicast
from tinygrad_nv.ptx.emulator.footprint import Footprint, Runs
from tinygrad_nv.ptx.emulator.native import (
    MOST_PEERS,
    TRACE,
    Counters,
    LaunchStruct,
    Library,
    MulticastStruct,
    Region,
    library,
)
from tinygrad_nv.ptx.emulator.program import Program
from tinygrad_nv.ptx.emulator.report import KINDS, NOTE, Finding, Report, Site, Stats
from tinygrad_nv.ptx.emulator.tapes import Tapes
from tinygrad_nv.ptx.emulator.trace import Trace, Tracer

SLICE = 4_000_000    # warp-instructions between looks at the keyboard at most: about half a second
FIRST_SLICE = 1 << 14
MOST_TAPED_BYTES = 1 << 29  # limit: bytes of steps and notes that are recorded to predict a time
LOOK_SECONDS = 0.1   # a slice that took less is followed by a larger one
MORE, DONE, STUCK, LIMIT = range(4)
LATE = "late"        # the seed that is no number
NAMES_BYTES = 100    # of the kernels ahead, in a finding's text


class Device(Protocol):
    """Operations that a launch asks of its `Emulator`."""
    arch: str
    check: bool
    exact: bool
    seed: int | str
    step_limit: int
    max_seconds: float | None
    max_memory: int | None
    resident: int
    buffers: dict[int, Buffer]
    multicasts: list[Multicast]
    waited: Callable[[], None]


@dataclass(frozen=True)
class Among:
    """A launch's place among peers: C's handle of them, the number of its GPU, where the shadow of a buffer
    is, and every buffer with the number of its GPU."""
    handle: int
    gpu: int
    pages: Callable[[Buffer], int]
    buffers: tuple[tuple[Buffer, int], ...]


class Run:
    """One launch: what C reads and writes, kept alive. `packed` are the program's ops and their lists.
    Without `contents` nothing is said of memory that was never written, without `count` the report has no
    counters."""

    def __init__(self, emu: Device, packed: tuple[bytes, Any], program: Program,
                 shape: tuple[Triple, Triple, Triple], shared: int, parameters: bytes, text: str,
                 trace: Trace | bool | None = None, footprint: bool = False,
                 ahead: Sequence[Footprint] | None = None, tapes: Tapes | None = None,
                 among: Among | None = None, contents: bool = True, count: bool = True) -> None:
        self.tapes, self.count, self.began = tapes, count, time.perf_counter()
        self.waited, self.max_seconds = emu.waited, emu.max_seconds
        self.library: Library = library()
        self.program, self.programmatic = program, ahead is not None
        self.text, self.shape, self.shared = text, shape, shared
        self.ops, self.lists = packed
        places = [(each, 0) for each in emu.buffers.values()] if among is None else among.buffers
        ordered = sorted(((b, gpu) for b, gpu in places if b.nbytes), key=lambda each: each[0].ptr)
        self.buffers = [buffer for buffer, _ in ordered]
        self.regions = (Region * (len(ordered) + 1))(*(
            Region(b.ptr, b.nbytes, _address(b.data),
                   None if b.valid is None or not contents else _address(b.valid),
                   None if among is None else among.pages(b), gpu=gpu, outside=b.outside)
            for b, gpu in ordered))
        self.flight = self._flight(ahead or ())
        self.multicasts = (MulticastStruct * (len(emu.multicasts) + 1))(*(
            MulticastStruct(each.ptr, each.nbytes, (ctypes.c_uint64 * MOST_PEERS)(*each.members),
                            len(each.members)) for each in emu.multicasts))
        self.footprint = Footprint(f"kernel {program.name}") if footprint and emu.check else None
        self.counters = (Counters * (len(program.opcodes) + 1))()
        self.tracer = Tracer(program, self.ops, self.library, text, trace)
        grid, block, cluster = shape
        seed = 0 if isinstance(emu.seed, str) else emu.seed & (1 << 64) - 1
        self.launch = LaunchStruct(
            self.ops, self.lists.ctypes.data, program.constants, parameters, self.regions, self.counters,
            len(program.ops), len(program.opcodes), len(program.constants), program.register_bytes,
            len(parameters),
            len(self.buffers), (ctypes.c_int32 * 32)(*program.specials()), (ctypes.c_uint32 * 3)(*grid),
            (ctypes.c_uint32 * 3)(*block), (ctypes.c_uint32 * 3)(*cluster), shared, program.static_bytes,
            program.dynamic_align, program.local_bytes, SM_COUNT[int(emu.arch[3:5])], int(emu.arch[3:5]),
            emu.check, emu.exact,
            program.uses_wgmma, entry_registers(program.function),
            min(emu.resident, resident_clusters(emu.arch, block, cluster, shared)),
            program.narrow, program.remote, seed, (tapes and tapes.limit) or emu.step_limit,
            (1 << 63) - 1 if emu.max_memory is None else emu.max_memory,
            emu.seed == LATE,
            TRACE(self.tracer.call), self.tracer.cta, self.tracer.warps, self.footprint is not None,
            ahead is not None, _names(ahead or ()), None if tapes is None else tapes.numbers.ctypes.data,
            *((0, 0, 0, False, 0) if tapes is None else
              (len(tapes.numbers), len(tapes.clusters), tapes.brief, tapes.idle, tapes.readers)),
            *((None, 0) if among is None else (among.handle, among.gpu)), program.name.encode(),
            ctypes.addressof(self.multicasts), len(emu.multicasts))
        self.limit = b"the launch's limit"
        self.totals: Any = None
        self.steps = 0
        self.machine = ctypes.c_void_p()

    def _flight(self, ahead: Sequence[Footprint]) -> dict[object, np.ndarray]:
        """For each buffer that the kernels ahead touch, the flags of its bytes; given to its region."""
        flight: dict[object, np.ndarray] = {}
        for each in ahead:
            for memory, runs in each.runs.items():
                if not isinstance(memory, Buffer): continue
                runs.paint(flight.setdefault(memory, np.zeros(memory.nbytes, np.uint8)))
        for buffer, region in zip(self.buffers, self.regions, strict=False) if flight else ():
            if buffer in flight: region.flight = flight[buffer].ctypes.data
        return flight

    def to_end(self) -> Report:
        """Runs to the end, looking up now and then so that Ctrl-C works, and whenever it has waited for
        another process."""
        self.start()
        state, count = MORE, FIRST_SLICE
        ended, since = 0, time.thread_time()
        try:
            while state == MORE:
                begun = time.thread_time()
                state = self.library.c.machine_run(self.machine, ctypes.c_uint64(count))
                self.waited()
                now = time.thread_time()
                count = min(2 * count, SLICE) if now - begun < LOOK_SECONDS else max(count // 2, 1)
                if ended != (ended := self.library.c.machine_ended(self.machine)): since = now
                if state == MORE and (passed := self._limit_passed(now - since)):
                    self.limit, state = passed, LIMIT
        except BaseException:
            self.abandon()
            raise
        return self.finish(state)

    def _limit_passed(self, seconds: float) -> bytes:
        """The limit that a launch has passed of which no CTA has ended for so many seconds; empty: none."""
        if self.tapes is not None and self.library.c.machine_taped_bytes(self.machine) > MOST_TAPED_BYTES:
            return b"the most that are recorded"
        if self.max_seconds is None or seconds <= self.max_seconds: return b""
        return b"and no CTA has ended for %g s of computing" % self.max_seconds

    def start(self) -> None:
        """Its machine; among peers it takes turns from now on."""
        self.machine = ctypes.c_void_p(self.library.c.machine_new(ctypes.byref(self.launch)))
        self.tracer.machine = self.machine

    def abandon(self) -> None:
        """Nothing more is asked of it."""
        self.library.c.machine_free(self.machine)

    def finish(self, state: int) -> Report:
        """Returns what was found and counted, once it has ended."""
        c, machine = self.library.c, self.machine
        try:
            if state == LIMIT: c.machine_report_running(machine, self.limit)
            found = c.machine_findings(machine)
            findings = [self.finding(found[i]) for i in range(c.machine_finding_count(machine))]
            totals = c.machine_totals(machine).contents
            self.totals = (totals.global_read, totals.global_written, totals.l2, totals.shared,
                           totals.asynchronous)
            self.steps, held = c.machine_steps(machine), c.machine_held(machine)
            printed = c.machine_printed(machine).decode(errors="replace")
            if self.footprint is not None: self._collect(self.footprint.runs)
            if self.tapes is not None and state != LIMIT: self.tapes.read(self.library, machine)
        finally: self.abandon()
        self.tracer.finish()
        notes = [finding for finding in findings if finding.kind == NOTE]
        stats = self.stats() if self.count else Stats()
        return Report([finding for finding in findings if finding.kind != NOTE], stats,
                      time.perf_counter() - self.began, self.footprint, self.programmatic and not held, notes,
                      printed=printed)

    def _collect(self, into: dict[object, Runs]) -> None:
        for buffer, region in zip(self.buffers, self.regions, strict=False):
            if region.touched: into[buffer] = self._runs(region)

    def _runs(self, region: Region, room: int = 64) -> Runs:
        bounds, flags = (ctypes.c_int64 * (room + 1))(), (ctypes.c_uint8 * room)()
        count = self.library.c.footprint_runs(ctypes.byref(region), bounds, flags, ctypes.c_int64(room))
        if count > room: return self._runs(region, count)
        return Runs(np.array(bounds[:count + 1], np.int64), np.array(flags[:count], np.uint8))

    @staticmethod
    def finding(found: Any) -> Finding:
        """From C's words to a `Finding`."""
        pairs = [(found.cta, found.thread), (found.other_cta, found.other_thread)]
        known = [pair for pair in pairs if pair[0] >= 0]
        return Finding((*KINDS, NOTE)[found.kind], found.text.decode(errors="replace"), found.line,
                       tuple(dict.fromkeys(cta for cta, _ in known)),
                       tuple(dict.fromkeys(thread for _, thread in known)), found.count)

    def stats(self) -> Stats:
        """The counters."""
        program = self.program
        counted = zip(program.opcodes, program.lines, self.counters, strict=False)
        sites = tuple(Site(opcode, line, c.warps, c.threads, c.passes, c.conflicts, c.sectors, c.requests,
                           c.flops) for opcode, line, c in counted if c.warps)
        return Stats(sites, self.steps, *self.totals)


def _address(array: np.ndarray) -> int:
    """Returns where an array's bytes are: the same as array.ctypes.data, which takes several times as
    long."""
    return int(array.__array_interface__["data"][0])


def _names(ahead: Sequence[Footprint]) -> bytes:
    """Returns the names of the kernels ahead, for a finding's text."""
    names = " or ".join(dict.fromkeys(each.what for each in ahead)).encode()
    return names if len(names) <= NAMES_BYTES else names[:NAMES_BYTES] + b"..."
