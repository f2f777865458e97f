"""The driver interface with the emulator as the device.

Protocol: `EmulatedDriver(arch, check)` is a `driver.Driver`. Work runs when it is submitted, which is an
order that streams allow, and a graph's nodes in an unkind one (graph.py); threads take turns.
Findings wait in their stream for the next call that synchronises with it, and are gone once raised. Times are
of the emulation. What work touches is kept, so that work which nothing orders is found (order.py);
page-locked memory is poison until it is known to be written (host.py).

`check=False` leaves out the detection of races, wrong order, missing fences and uninitialised reads, and the
poison; bounds and alignment are checked always. Device 0 and device 1 are two drivers with memories of their
own.
"""
from __future__ import annotations

import contextlib
import threading
import time
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np

from tinygrad_nv.errors import DriverError, KernelError
from tinygrad_nv.ptx.emulator import Buffer, Emulator, TensorMap
from tinygrad_nv.ptx.emulator.arguments import SHARED_LIMIT, SHARED_OF_SM, SM_COUNT, THREADS_OF_SM
from tinygrad_nv.ptx.emulator.footprint import READ, WRITE, Footprint
from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.runtime import capture, driver
from tinygrad_nv.runtime.driver import (
    Copy,
    Download,
    Launch,
    Properties,
    TensorMapSpec,
    Upload,
    Window,
    Work,
)
from tinygrad_nv.runtime.emulated.graph import EmulatedEvent, EmulatedGraph, EmulatedStream
from tinygrad_nv.runtime.emulated.host import EmulatedHostMemory, Owned, host_memory
from tinygrad_nv.runtime.emulated.module import EmulatedModule, described
from tinygrad_nv.runtime.emulated.order import Clock, Done, Part, serial, touched
from tinygrad_nv.runtime.library_call import LibraryCall

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a")
STATIC_SHARED_LIMIT = 48 << 10
L2_BYTES = {80: 40 << 20, 89: 96 << 20, 90: 50 << 20}          # A100, L40, H100
WINDOW_LIMIT = 128 << 20
MEMORY_BYTES = {80: 80 << 30, 89: 48 << 30, 90: 80 << 30}
CURRENT = threading.local()                                     # device: the thread's, for other libraries
SHOWN = 3                                                       # findings in an error's text


def properties(arch: str) -> Properties:
    """The device that `arch` stands for: A100, L40 or H100."""
    number = int(arch[3:5])
    return Properties(f"emulated {arch}", arch, SM_COUNT[number], STATIC_SHARED_LIMIT, SHARED_LIMIT[number],
                      SHARED_OF_SM[number], L2_BYTES[number], MEMORY_BYTES[number], THREADS_OF_SM[number],
                      persisting_l2_limit=L2_BYTES[number] * 3 // 4, window_limit=WINDOW_LIMIT)


# **** the device ****

class EmulatedDriver(driver.Driver):
    """An emulated GPU of architecture sm_80, sm_89 or sm_90a."""
    emulated = True

    def __init__(self, arch: str = "sm_90a", check: bool = True, seed: int = 0,
                 step_limit: int = 10**9) -> None:
        if arch not in ARCHITECTURES:
            raise DriverError(f"no emulated device {arch!r}", f"one of {', '.join(ARCHITECTURES)}")
        self.properties = properties(arch)
        self.emulator = Emulator(arch=arch, check=check, seed=seed, step_limit=step_limit)
        self.buffers: dict[int, Buffer] = {}
        self.addresses: list[int] = []  # sorted
        self.used_bytes = 0
        self.set_aside_bytes = 0        # of L2
        self.check = check
        self.streams = [EmulatedStream(0)]
        self.linked = [self]            # devices that share work with this one

    # memory

    @serial
    def alloc(self, nbytes: int) -> int:
        if nbytes <= 0: raise DriverError(f"an allocation of {nbytes} bytes", "a size above 0")
        if self.used_bytes + nbytes > self.properties.memory_bytes:
            raise MemoryError(f"{nbytes} bytes asked for, {self.used_bytes} in use of the "
                              f"{self.properties.memory_bytes} that the {self.properties.name} device has")
        buffer = self.emulator.alloc(nbytes)
        self.buffers[buffer.ptr] = buffer
        insort(self.addresses, buffer.ptr)
        self.used_bytes += nbytes
        return buffer.ptr

    @serial
    def free(self, address: int) -> None:
        if (buffer := self.buffers.pop(address, None)) is None:
            raise DriverError(f"address {address:#x} is freed", "what alloc returned and is not freed yet")
        self.addresses.remove(address)
        self.used_bytes -= buffer.nbytes
        self.emulator.free(buffer)
        for each in self.timelines(): each.log.pop(buffer, None)

    def memory(self) -> tuple[int, int]:
        return self.properties.memory_bytes - self.used_bytes, self.properties.memory_bytes

    def host(self, nbytes: int) -> driver.HostMemory: return EmulatedHostMemory(nbytes)

    def _place(self, address: int, nbytes: int, what: str) -> tuple[Buffer, slice]:
        """The allocation that holds these bytes, and where in it."""
        at = bisect_right(self.addresses, address) - 1
        if at >= 0:
            buffer = self.buffers[self.addresses[at]]
            first = address - buffer.ptr
            if first + nbytes <= buffer.nbytes: return buffer, slice(first, first + nbytes)
        raise DriverError(f"{what} of {nbytes} bytes at {address:#x}", "bytes inside one allocation")

    def _write(self, address: int, data: np.ndarray | int, valid: np.ndarray | int, nbytes: int,
               what: str) -> Part:
        buffer, where = self._place(address, nbytes, what)
        buffer.data[where] = data
        if buffer.valid is not None: buffer.valid[where] = valid
        return buffer, where.start, where.stop, WRITE

    @serial
    def copy_in(self, address: int, source: memoryview, stream: driver.Stream | None = None) -> None:
        into, what = self.into(stream), "a copy from the host"
        capture.not_captured(into, what)
        into.advance()
        data = np.frombuffer(source, np.uint8)
        self.enter(into, self._touched(what, self._write(address, data, 1, source.nbytes, what)))

    @serial
    def copy_out(self, target: memoryview, address: int, stream: driver.Stream | None = None) -> None:
        into, what = self.into(stream), "a copy to the host"
        self.synchronize(into)
        into.advance()
        buffer, where = self._place(address, target.nbytes, what)
        np.frombuffer(target, np.uint8)[:] = buffer.data[where]
        self.enter(into, self._touched(what, (buffer, where.start, where.stop, READ)))
        self.synchronize(into)

    @serial
    def copy_peer(self, work: Copy, source: driver.Driver, stream: driver.Stream | None = None) -> None:
        if not isinstance(source, EmulatedDriver):
            raise DriverError(f"a copy from a {type(source).__name__}", "another emulated device")
        into, theirs, what = self.into(stream), source.streams[0], "a copy from another device"
        capture.not_captured(into, what)
        if source not in self.linked: self.linked.append(source)
        if self not in source.linked: source.linked.append(self)
        into.join(theirs.now())
        into.advance()
        self.enter(into, self._copy(work, source, what))
        theirs.join(into.now())

    def reach(self, other: driver.Driver) -> bool:
        """False: each emulated device has memory of its own, and kernels see no other."""
        return other is self

    def set_persisting_l2(self, nbytes: int) -> None:
        limit = self.properties.persisting_l2_limit
        if not 0 <= nbytes <= limit:
            raise DriverError(f"{nbytes} bytes of L2 to set aside", f"0 to {limit} on this device")
        self.set_aside_bytes = nbytes

    def _check_window(self, window: Window) -> None:
        limit = self.properties.window_limit
        if not 0 < window.nbytes <= limit:
            raise DriverError(f"a window of {window.nbytes} bytes", f"1 to {limit} on this device")
        if not 0 <= window.hit_ratio <= 1:
            raise DriverError(f"a window with hit ratio {window.hit_ratio:g}", "0 to 1")
        self._place(window.address, window.nbytes, "a window")
        if not self.set_aside_bytes:
            raise DriverError("a launch with a window, and no L2 is set aside for it",
                              "set_persisting_l2 before the launch", "launch without a window")

    def _copy(self, work: Copy, source: EmulatedDriver, what: str) -> Footprint:
        buffer, where = source._place(work.source, work.nbytes, what)
        valid = 1 if buffer.valid is None else buffer.valid[where]
        written = self._write(work.target, buffer.data[where], valid, work.nbytes, what)
        return self._touched(what, (buffer, where.start, where.stop, READ), written)

    def _upload(self, work: Upload, stream: EmulatedStream, what: str) -> Footprint:
        memory, stop = host_memory(work.source), work.offset + work.nbytes
        data = memory.bytes(work.offset, stop)
        written = self._write(work.target, data, 1, work.nbytes, what)
        told = f"{what} of {work.nbytes} bytes in stream {stream.number}"
        if self.check: self._lend(stream, Owned(memory, stream.position, work.offset, data, False, told))
        return self._touched(what, written, (memory, work.offset, stop, READ))

    def _download(self, work: Download, stream: EmulatedStream, what: str) -> Footprint:
        memory, stop = host_memory(work.target), work.offset + work.nbytes
        buffer, where = self._place(work.source, work.nbytes, what)
        data = buffer.data[where].copy()
        if self.check: self._lend(stream, Owned(memory, stream.position, work.offset, data, True, what))
        else: memory.array(work.offset, stop)[:] = data
        read = buffer, where.start, where.stop, READ
        return self._touched(what, read, (memory, work.offset, stop, WRITE))

    def _lend(self, stream: EmulatedStream, owned: Owned) -> None:
        stream.findings += owned.memory.lend(owned)
        stream.owned.append(owned)

    # code

    def most_clusters(self, size: int) -> int:
        driver.check_cluster(size, self.properties.arch)
        return most_clusters(size, self.properties.sm_count)

    @serial
    def load(self, image: bytes) -> driver.Module: return EmulatedModule(image, self.emulator)

    @serial
    def submit(self, work: Work, stream: driver.Stream | None = None) -> None:
        into = self.into(stream)
        if (recorded := into.capture) is not None:
            recorded.tails[into] = (recorded.graph.add(work, recorded.tails[into]),)
            return
        ahead = into.advance()
        done = self.run(work, into, ahead)
        if isinstance(work, Launch): into.ahead = done.beside(ahead)
        self.enter(into, done.footprint)

    def run(self, work: Work, stream: EmulatedStream, ahead: tuple[Footprint, ...] = ()) -> Done:
        """Does it now, a launch with pdl beside the kernels `ahead`; what a kernel does wrong is kept with
        the stream."""
        if isinstance(work, Launch): return self._launch(work, stream, ahead)
        if isinstance(work, Copy): return Done(self._copy(work, self, "a copy"))
        if isinstance(work, LibraryCall): return Done(self._library_call(work, stream))
        if isinstance(work, Upload): return Done(self._upload(work, stream, "an upload"))
        if isinstance(work, Download): return Done(self._download(work, stream, "a download"))
        return Done(self._touched("a fill", self._write(work.target, work.value, 1, work.nbytes, "a fill")))

    def _library_call(self, work: LibraryCall, stream: EmulatedStream) -> Footprint:
        given = [*((READ, *each) for each in work.reads), *((WRITE, *each) for each in work.writes)]
        parts = [(self._place(address, nbytes, work.what), flags) for flags, address, nbytes in given]
        with self.inside(): work.enqueue(stream.number)
        for (buffer, where), flags in parts:
            if flags == WRITE and buffer.valid is not None: buffer.valid[where] = 1
        return self._touched(work.what, *((buffer, where.start, where.stop, flags)
                                          for (buffer, where), flags in parts))

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        before, CURRENT.device = getattr(CURRENT, "device", None), self
        try: yield
        finally: CURRENT.device = before

    def memory_at(self, address: int, nbytes: int, what: str) -> np.ndarray:
        """The bytes there, for what stands for another library."""
        buffer, where = self._place(address, nbytes, what)
        return buffer.data[where]

    def _touched(self, what: str, *parts: Part) -> Footprint:
        return touched(what, *parts) if self.check else Footprint(what)

    def timelines(self) -> list[EmulatedStream]:
        """All streams whose work may touch this device's memory."""
        return [stream for device in self.linked for stream in device.streams]

    def enter(self, stream: EmulatedStream, footprint: Footprint) -> None:
        """The stream's last work touched these bytes: what that conflicts with is kept with the stream."""
        if not self.check: return
        found = stream.enter(footprint, self.timelines())
        stream.findings += [one for one in found if one not in stream.findings]

    def _launch(self, work: Launch, stream: EmulatedStream, ahead: tuple[Footprint, ...]) -> Done:
        module = work.function.handle
        if not isinstance(module, EmulatedModule) or not module.loaded:
            raise DriverError(f"kernel {work.function.name} is launched",
                              "a function of a module that is loaded on this device")
        if work.pdl and int(self.properties.arch[3:5]) < 90:
            raise DriverError(f"programmatic dependent launch on {self.properties.arch}", "sm_90 or later",
                              "launch without pdl")
        if work.window is not None: self._check_window(work.window)
        report = self.emulator.launch(module.text, work.grid, work.block, work.args, entry=work.function.name,
                                      cluster=work.cluster, dynamic_smem=work.dynamic_smem,
                                      footprint=self.check, ahead=ahead if work.pdl else None)
        stream.findings += [described(work, module, finding) for finding in report.findings]
        return Done(report.footprint or Footprint(f"kernel {work.function.name}"), report.early)

    # order

    def into(self, stream: driver.Stream | None) -> EmulatedStream:
        """The stream that is meant."""
        if stream is None:
            if self.beside is not None: self.wait_beside()
            return self.streams[0]
        assert isinstance(stream, EmulatedStream)
        if self.streams[stream.number] is not stream:
            raise DriverError("a stream of another device", f"one of the {self.properties.name} device")
        return stream

    @serial
    def stream(self) -> EmulatedStream:
        self.streams.append(EmulatedStream(len(self.streams)))
        return self.streams[-1]

    @property
    def stream_0(self) -> EmulatedStream: return self.streams[0]

    def event(self) -> EmulatedEvent: return EmulatedEvent()

    @serial
    def record(self, event: driver.Event, stream: driver.Stream | None = None) -> None:
        assert isinstance(event, EmulatedEvent)
        event.stream = into = self.into(stream)
        event.capture, event.seconds = into.capture, time.perf_counter()
        event.nodes = into.capture.tails[into] if into.capture is not None else ()
        event.clock = into.now()

    @serial
    def wait(self, event: driver.Event, stream: driver.Stream | None = None) -> None:
        assert isinstance(event, EmulatedEvent)
        into = self.into(stream)
        capture.recorded(event, "a stream waits for")
        if event.capture is not None or into.capture is not None: capture.join(event, into)
        else: into.join(event.clock)

    @serial
    def wait_for(self, event: driver.Event) -> None:
        assert isinstance(event, EmulatedEvent)
        capture.ran(event, "the host waits for")
        assert event.stream is not None
        capture.not_captured(event.stream, "synchronisation")
        self._told([event.stream], event.clock)

    def elapsed_ms(self, start: driver.Event, end: driver.Event) -> float:
        assert isinstance(start, EmulatedEvent)
        assert isinstance(end, EmulatedEvent)
        for event in (start, end): capture.ran(event, "time is taken from")
        return (end.seconds - start.seconds) * 1e3

    @serial
    def synchronize(self, stream: driver.Stream | None = None) -> None:
        streams = self.streams if stream is None else [self.into(stream)]
        for each in streams: capture.not_captured(each, "synchronisation")
        self._told(streams, *(each.now() for each in streams))

    @staticmethod
    def _told(streams: Sequence[EmulatedStream], *clocks: Clock) -> None:
        """The host knows these points to have come to pass; raises what these streams have found."""
        found = [one for each in streams for one in each.findings]
        for clock in clocks:
            for each, position in clock.items(): found += each.complete(position)
        for each in streams: each.findings.clear()
        if found: _raise(found)

    # graphs

    def graph(self) -> EmulatedGraph: return EmulatedGraph(self)

    def begin_capture(self, stream: driver.Stream) -> None: capture.begin(self.into(stream), self.graph())

    def end_capture(self, stream: driver.Stream) -> EmulatedGraph: return capture.end(self.into(stream))

    # tensor maps

    def tensor_map(self, spec: TensorMapSpec) -> bytes:
        dims, strides, box = spec.dims[::-1], spec.strides[::-1], spec.box[::-1]
        steps = spec.element_strides[::-1] or (1,) * len(dims)
        return TensorMap.tiled(spec.address, box, spec.swizzle, dims, strides, spec.dtype, steps,
                               spec.interleave, spec.l2_promotion, spec.fill).encode()


def _raise(found: list[str]) -> NoReturn:
    more = f"\nand {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    told = "\n".join(found[:SHOWN]) + more
    if all(": instruction-limit: " in each for each in found):
        raise KernelError(told, "a launch that ends within the limit",
                          "make the problem smaller, or raise EMU_STEP_LIMIT; mend a loop that has no end")
    raise KernelError(told, "kernels in which the emulator finds nothing",
                      "correct what is named; EMU_CHECK=0 runs without race, order and initialisation checks")
