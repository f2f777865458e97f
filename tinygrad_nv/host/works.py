"""Pieces of work that streams and graphs hold: launches, copies, fills, calls of the host.

Protocol: `run(device, ahead)` does it now, and says what it touched, for the order among streams
(runtime/emulated/order.py), when everything is checked, and its predicted seconds. `ahead` are kernels that a
programmatic launch may run beside.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tinygrad_nv.host.device import Device
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.launches import Launch, LaunchReport, demangle, run_launch
from tinygrad_nv.host.memory import Allocation, HostPages, Kind
from tinygrad_nv.host.wire import BASE
from tinygrad_nv.ptx.emulator.footprint import READ, WRITE, Footprint
from tinygrad_nv.runtime.emulated.order import Done, Part, footprint_of

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
Beside = tuple[Footprint, ...]
ADDRESS = re.compile(r"bytes at (0x[0-9a-f]+)")


@dataclass(frozen=True)
class Ran:
    """Footprint of work, and how long a GPU takes for it: launches alone are predicted. `lent`: page-locked
    memory that it reads or, of a download, writes, until the host knows that it is done."""
    done: Done
    seconds: float = 0.0
    lent: tuple[tuple[HostPages, int, int, bool], ...] = ()


@dataclass(frozen=True)
class Kernel:
    """A launch."""
    launch: Launch

    def run(self, d: Device, ahead: Beside = ()) -> Ran:
        known, report = run_launch(d.emulator, self.launch, d.options, d.gpu.key, d.timings, ahead)
        what = f"launch {len(d.results.launches)} ({demangle(self.launch.kernel.name):.40})"
        d.results.launches.append(known)
        d.sticky = known.status         # told by the next call
        d.results.notes += find_freed(d, what, known)
        if report.printed: d.print(report.printed)
        runs = report.footprint.runs if report.footprint is not None else {}
        return Ran(Done(Footprint(what, runs), report.early), known.timing.seconds if known.timing else 0.0)


def find_freed(d: Device, what: str, launch: LaunchReport) -> list[str]:
    """Returns which of the addresses that a launch should not have touched are of memory that was freed."""
    outside = [at for each in launch.findings if each.kind == "out-of-bounds"
               for at in ADDRESS.findall(each.message)[:1]]
    said = {at: d.memory.describe(int(at, 16)) for at in outside}
    return [f"{what} uses {at}: {words}" for at, words in said.items() if words.endswith("freed")]


@dataclass(frozen=True)
class Rows:
    """Bytes in memory: `depth` planes of `height` rows of `width`; `pitch` from row to row, `plane` from
    plane to plane."""
    address: int
    width: int
    height: int = 1
    depth: int = 1
    pitch: int = 0
    plane: int = 0

    @property
    def nbytes(self) -> int:
        """From the first byte to the last."""
        if not self.width * self.height * self.depth: return 0
        return (self.depth - 1) * self.plane + (self.height - 1) * self.pitch + self.width

    def dense(self) -> Rows:
        """The same bytes in as few rows as there can be."""
        if self.pitch == self.width and (self.depth == 1 or self.plane == self.width * self.height):
            return Rows(self.address, self.width * self.height * self.depth)
        return self

    def __iter__(self) -> Iterator[int]:
        """Addresses of rows."""
        for i in range(self.depth):
            for j in range(self.height): yield self.address + i * self.plane + j * self.pitch


@dataclass(frozen=True)
class Copy:
    """From anywhere to anywhere, as cudaMemcpyKind says."""
    target: Rows
    source: Rows
    kind: int = DEFAULT

    def run(self, d: Device, ahead: Beside = ()) -> Ran:
        what = "a copy"
        if not self.target.nbytes: return Ran(Done(Footprint(what)))
        into, out = (d.memory.find(each.address, each.nbytes) for each in (self.target, self.source))
        self._check(into, out)
        target, source = self.target.dense(), self.source.dense()
        if target.width != source.width: target, source = self.target, self.source
        for to, at in zip(target, source, strict=True): copy(d, into, to, out, at, target.width)
        parts = [(rows, where, flags) for rows, where, flags in (
            (target, into, WRITE), (source, out, READ)) if where is not None]
        lent = tuple((where.pages, address - where.address, rows.width, flags == WRITE)
                     for rows, where, flags in parts for address in rows if where.pages is not None)
        return Ran(Done(footprint(d, what, parts)), lent=lent)

    def _check(self, into: Allocation | None, out: Allocation | None) -> None:
        """Raises `CudaError` where the direction is not that of the addresses."""
        if self.kind == DEFAULT: return
        wanted = self.kind in (HOST_TO_DEVICE, DEVICE_TO_DEVICE), self.kind in (DEVICE_TO_HOST,
                                                                                DEVICE_TO_DEVICE)
        for name, on_device, found in zip(("target", "source"), wanted, (into, out), strict=True):
            if on_device != (found is not None) and not (found is not None and found.kind != Kind.DEVICE):
                place = "device" if found is not None else "host"
                raise CudaError(Status.INVALID_VALUE,
                                f"the {name} of a copy of kind {self.kind} is {place} memory")


def copy(d: Device, into: Allocation | None, target: int, out: Allocation | None, source: int,
         nbytes: int) -> None:
    """One row. Raises `CudaError` for a bad address of the host's."""
    done = True
    if into is not None: done = _copy_in(d, into, target, out, source, nbytes)
    elif out is None: d.wire.write(target, d.wire.read(source, nbytes))
    elif out.own: done = d.wire.copy_out(target, source - BASE, nbytes)
    else:
        at = source - out.address
        d.wire.write(target, out.buffer.data[at:at + nbytes].tobytes())
    if not done: raise CudaError(Status.INVALID_VALUE, "the program cannot access the host's side of a copy")


def _copy_in(d: Device, into: Allocation, target: int, out: Allocation | None, source: int,
             nbytes: int) -> bool:
    at, done = target - into.address, True
    valid: int | np.ndarray = 1
    if out is not None:
        begin = source - out.address
        into.buffer.data[at:at + nbytes] = out.buffer.data[begin:begin + nbytes]
        if out.buffer.valid is not None: valid = out.buffer.valid[begin:begin + nbytes]
    elif into.own: done = d.wire.copy_in(target - BASE, source, nbytes)
    else: into.buffer.data[at:at + nbytes] = np.frombuffer(d.wire.read(source, nbytes), np.uint8)
    if into.buffer.valid is not None: into.buffer.valid[at:at + nbytes] = valid
    return done


@dataclass(frozen=True)
class Fill:
    """A pattern of 1, 2 or 4 bytes, over and over."""
    target: Rows
    pattern: bytes

    def run(self, d: Device, ahead: Beside = ()) -> Ran:
        what, target = "a fill", self.target.dense()
        if not target.nbytes: return Ran(Done(Footprint(what)))
        into = d.memory.find(target.address, target.nbytes)
        if into is None:
            raise CudaError(Status.INVALID_VALUE, f"a fill of host memory at {target.address:#x}")
        row = np.tile(np.frombuffer(self.pattern, np.uint8), target.width // len(self.pattern)) \
            if len(set(self.pattern)) > 1 else self.pattern[0]
        for address in target:
            where = slice(address - into.address, address - into.address + target.width)
            into.buffer.data[where] = row
            if into.buffer.valid is not None: into.buffer.valid[where] = 1
        return Ran(Done(footprint(d, what, [(target, into, WRITE)])))


@dataclass(frozen=True)
class HostCall:
    """A function of the program."""
    function: int
    arguments: tuple[int, ...]

    def run(self, d: Device, ahead: Beside = ()) -> Ran:
        d.wire.run(self.function, *self.arguments)
        return Ran(Done(Footprint("a host function")))


@dataclass(frozen=True)
class Nothing:
    """Work that does nothing: a node that only joins others."""

    def run(self, d: Device, ahead: Beside = ()) -> Ran: return Ran(Done(Footprint("nothing")))


@dataclass(frozen=True)
class Lifetime:
    """Moment where an allocation's life begins or ends in a stream's order: `what` is ALLOCATES or FREES."""
    memory: Allocation
    what: str

    def run(self, d: Device, ahead: Beside = ()) -> Ran:
        whole = Rows(self.memory.address, self.memory.nbytes)
        return Ran(Done(footprint(d, self.what, [(whole, self.memory, WRITE)])))


Work = Kernel | Copy | Fill | HostCall | Lifetime | Nothing


def footprint(d: Device, what: str, parts: list[tuple[Rows, Allocation, int]]) -> Footprint:
    """Returns what rows of allocations were touched, when that is checked."""
    if not d.options.check: return Footprint(what)
    found: list[Part] = []
    for rows, where, flags in parts:
        for address in rows:
            at = address - where.address
            found.append((where.buffer, at, at + rows.width, flags))
    return footprint_of(what, *found)
