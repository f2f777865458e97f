"""The driver interface with the emulator as the device.

Protocol: `EmulatedDriver(arch, check)` is a `driver.Driver`. Work runs when it is submitted, which is an
order that streams allow, and a graph's nodes in an unkind one (graph.py); threads take turns. Findings wait
in their stream for the next call that synchronises with it, and are gone once raised. Times are of the
emulation. What work touches is kept, so that work which nothing orders is found (order.py); page-locked
memory is poison until it is known to be written (host.py). Devices that `reach` has made peers run their
work beside one another, and later: when the host waits for one of them (peers.py).

`check=False` leaves out the detection of races, wrong order, missing fences and uninitialised reads, and the
poison; bounds and alignment are checked always. Device 0 and device 1 are two drivers with memories of their
own, at addresses of their own where their ordinals differ.
"""
from __future__ import annotations

import contextlib
import threading
import time
from bisect import insort
from collections.abc import Generator, Iterator, Sequence
from typing import NoReturn

import numpy as np

from tinygrad_nv.errors import DriverError, KernelError
from tinygrad_nv.ptx.emulator import Buffer, Emulator, TensorMap
from tinygrad_nv.ptx.emulator.arguments import SHARED_LIMIT, SHARED_OF_SM, SM_COUNT, THREADS_OF_SM
from tinygrad_nv.ptx.emulator.footprint import READ, WRITE, Footprint
from tinygrad_nv.ptx.emulator.peers import Asked, Awaited, Passed, launching
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.ptx.gpcs import most_clusters
from tinygrad_nv.runtime import capture, driver
from tinygrad_nv.runtime.driver import (
    Copy,
    Launch,
    Properties,
    TensorMapSpec,
    Upload,
    Window,
    Work,
)
from tinygrad_nv.runtime.emulated.graph import EmulatedEvent, EmulatedGraph, EmulatedStream, EventMark
from tinygrad_nv.runtime.emulated.host import EmulatedHostMemory
from tinygrad_nv.runtime.emulated.module import EmulatedModule, describe_finding
from tinygrad_nv.runtime.emulated.moves import Moves
from tinygrad_nv.runtime.emulated.order import Clock, Done, serial
from tinygrad_nv.runtime.emulated.peers import PeerDevices, Steps
from tinygrad_nv.runtime.emulated.sharing import Sharing
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

class EmulatedDriver(Moves, Sharing, driver.Driver):
    """An emulated GPU of architecture sm_80, sm_89 or sm_90a. Of several that see each other's memory, each
    has another `ordinal`, and the seed of the first says how they take turns."""
    emulated = True

    def __init__(self, arch: str = "sm_90a", check: bool = True, seed: int = 0,
                 step_limit: int = 10**9, ordinal: int = 0) -> None:
        if arch not in ARCHITECTURES:
            raise DriverError(f"no emulated device {arch!r}", f"one of {', '.join(ARCHITECTURES)}")
        self.properties = properties(arch)
        self.emulator = Emulator(arch=arch, check=check, seed=seed, step_limit=step_limit, ordinal=ordinal)
        self.peers = PeerDevices(self)
        self.buffers: dict[int, Buffer] = {}
        self.held: dict[int, Buffer] = {}   # those that were not given back
        self.addresses: list[int] = []  # sorted
        self.used_bytes = 0
        self.set_aside_bytes = 0        # of L2
        self.check = check
        self.streams = [EmulatedStream(0)]
        self.linked = [self]            # devices that share work with this one
        self.shared: dict[int, tuple[int, bool]] = {}

    # memory

    @serial
    def alloc(self, nbytes: int) -> int:
        if nbytes <= 0: raise DriverError(f"an allocation of {nbytes} bytes", "a size above 0")
        if self.used_bytes + nbytes > self.properties.memory_bytes:
            raise MemoryError(f"{nbytes} bytes asked for, {self.used_bytes} in use of the "
                              f"{self.properties.memory_bytes} that the {self.properties.name} device has")
        buffer = self.emulator.alloc(nbytes)
        self.buffers[buffer.ptr] = self.held[buffer.ptr] = buffer
        insort(self.addresses, buffer.ptr)
        self.used_bytes += nbytes
        return buffer.ptr

    @serial
    def free(self, address: int) -> None:
        if (buffer := self.held.pop(address, None)) is None:
            raise DriverError(f"address {address:#x} is freed", "what alloc returned and is not freed yet")
        self.used_bytes -= buffer.nbytes
        self.play(self._free_steps(buffer))

    def _free_steps(self, buffer: Buffer) -> Steps:
        self.addresses.remove(buffer.ptr)
        del self.buffers[buffer.ptr]
        self.emulator.free(buffer)
        for each in self.timelines(): each.log.pop(buffer, None)
        yield from ()

    def memory(self) -> tuple[int, int]:
        return self.properties.memory_bytes - self.used_bytes, self.properties.memory_bytes

    def host(self, nbytes: int) -> driver.HostMemory: return EmulatedHostMemory(nbytes, self.finish)

    @serial
    def copy_in(self, address: int, source: memoryview, stream: driver.Stream | None = None) -> None:
        into, what = self.into(stream), "a copy from the host"
        capture.not_captured(into, what)
        data = np.frombuffer(source, np.uint8)
        if self.among_peers: data = data.copy()
        self.play(self._copy_in_steps(address, data, into, what))

    def _copy_in_steps(self, address: int, data: np.ndarray, into: EmulatedStream, what: str) -> Steps:
        into.advance()
        part = self._write(address, data, 1, data.nbytes, what)
        yield from self.by_kernel(Upload(address, EmulatedHostMemory(1), 0, data.nbytes), what, into)
        self.enter(into, self._footprint(what, part))

    @serial
    def copy_out(self, target: memoryview, address: int, stream: driver.Stream | None = None) -> None:
        into, what = self.into(stream), "a copy to the host"
        self.synchronize(into)
        into.advance()
        buffer, where = self._place(address, target.nbytes, what)
        np.frombuffer(target, np.uint8)[:] = buffer.data[where]
        self.enter(into, self._footprint(what, (buffer, where.start, where.stop, READ)))
        self.synchronize(into)

    @serial
    def copy_peer(self, work: Copy, source: driver.Driver, stream: driver.Stream | None = None) -> None:
        if not isinstance(source, EmulatedDriver):
            raise DriverError(f"a copy from a {type(source).__name__}", "another emulated device")
        into, theirs = self.into(stream), source.streams[0]
        capture.not_captured(into, "a copy from another device")
        if source not in self.linked: self.linked.append(source)
        if self not in source.linked: source.linked.append(self)
        apart = source.peers is not self.peers
        if apart: source.peers.flush()
        begins, ends = EventMark(), EventMark()
        source.play(source._record_steps(begins, theirs))
        self.play(self._copy_peer_steps(work, source, into, begins, ends), at_once=apart)
        source.play(source._wait_steps(ends, theirs))

    def _copy_peer_steps(self, work: Copy, source: EmulatedDriver, into: EmulatedStream, begins: EventMark,
                     ends: EventMark) -> Steps:
        yield from self._wait_steps(begins, into)
        into.advance()
        done = yield from self.move_bytes(work, into, source)
        self.enter(into, Footprint("a copy from another device", done.footprint.runs))
        yield from self._record_steps(ends, into)

    @serial
    def reach(self, other: driver.Driver) -> bool:
        """From now on work of the two runs beside one another, when something waits for it (peers.py). False
        where they are of two architectures, or of one ordinal, whose addresses are the same, or have memory
        of other processes."""
        if not isinstance(other, EmulatedDriver) or other.properties.arch != self.properties.arch:
            return False
        if other is not self and (self.shared or other.shared): return False
        if other.peers is not self.peers and not self.peers.disjoint(other.peers): return other is self
        self.peers.join(other.peers)
        return True

    @property
    def among_peers(self) -> bool: return len(self.peers.devices) > 1

    def play(self, steps: Steps, at_once: bool = False) -> None:
        """Does work of this device, or keeps it for when it runs beside that of peers."""
        self.peers.do(self, steps, at_once)

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
        self.play(self._submit_steps(work, into), isinstance(work, LibraryCall))

    def _submit_steps(self, work: Work, into: EmulatedStream) -> Steps:
        ahead = into.advance()
        done = yield from self.run(work, into, ahead)
        if isinstance(work, Launch): into.ahead = done.beside(ahead)
        self.enter(into, done.footprint)

    def run(self, work: Work, stream: EmulatedStream,
            ahead: tuple[Footprint, ...] = ()) -> Generator[Asked, Report | None, Done]:
        """Does it, a launch with pdl beside the kernels `ahead`; what a kernel does wrong is kept with the
        stream."""
        if isinstance(work, Launch): return (yield from self._launch(work, stream, ahead))
        if isinstance(work, LibraryCall): return Done(self._library_call(work, stream))
        return (yield from self.move_bytes(work, stream))

    def _library_call(self, work: LibraryCall, stream: EmulatedStream) -> Footprint:
        given = [*((READ, *each) for each in work.reads), *((WRITE, *each) for each in work.writes)]
        parts = [(self._place(address, nbytes, work.what), flags) for flags, address, nbytes in given]
        with self.inside(): work.enqueue(stream.number)
        for (buffer, where), flags in parts:
            if flags == WRITE and buffer.valid is not None: buffer.valid[where] = 1
        return self._footprint(work.what, *((buffer, where.start, where.stop, flags)
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

    def timelines(self) -> list[EmulatedStream]:
        """All streams whose work may touch this device's memory, and whose order nothing else finds wrong."""
        return [stream for device in self.linked if device is self or device.peers is not self.peers
                for stream in device.streams]

    def enter(self, stream: EmulatedStream, footprint: Footprint) -> None:
        """The stream's last work touched these bytes: what that conflicts with is kept with the stream."""
        if not self.check: return
        found = stream.enter(footprint, self.timelines())
        stream.findings += [one for one in found if one not in stream.findings]

    def _launch(self, work: Launch, stream: EmulatedStream,
                ahead: tuple[Footprint, ...]) -> Generator[Asked, Report | None, Done]:
        module = work.function.handle
        if not isinstance(module, EmulatedModule) or not module.loaded:
            raise DriverError(f"kernel {work.function.name} is launched",
                              "a function of a module that is loaded on this device")
        if work.pdl and int(self.properties.arch[3:5]) < 90:
            raise DriverError(f"programmatic dependent launch on {self.properties.arch}", "sm_90 or later",
                              "launch without pdl")
        if work.window is not None: self._check_window(work.window)
        report = yield launching(self.emulator, module.text, work.grid, work.block, work.args,
                                 work.function.name, work.cluster, work.dynamic_smem, footprint=self.check,
                                 ahead=ahead if work.pdl else None, count=False)
        assert report is not None
        on = f" on GPU {self.emulator.ordinal}" if self.among_peers else ""
        stream.findings += [describe_finding(work, module, finding, on) for finding in report.findings]
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
        event.capture, event.mark = into.capture, EventMark()
        event.nodes = into.capture.tails[into] if into.capture is not None else ()
        if into.capture is None: self.play(self._record_steps(event.mark, into))

    def _record_steps(self, mark: EventMark, into: EmulatedStream) -> Steps:
        mark.seconds, mark.clock = time.perf_counter(), into.now()
        yield Passed(mark.point)

    @serial
    def wait(self, event: driver.Event, stream: driver.Stream | None = None) -> None:
        assert isinstance(event, EmulatedEvent)
        into = self.into(stream)
        capture.check_recorded(event, "a stream waits for")
        if event.capture is not None or into.capture is not None: capture.join(event, into)
        else: self.play(self._wait_steps(event.mark, into))

    def _wait_steps(self, mark: EventMark, into: EmulatedStream) -> Steps:
        yield Awaited(mark.point)
        into.join(mark.clock)

    @serial
    def wait_for(self, event: driver.Event) -> None:
        assert isinstance(event, EmulatedEvent)
        capture.ran(event, "the host waits for")
        assert event.stream is not None
        capture.not_captured(event.stream, "synchronisation")
        self.peers.flush()
        self._host_synced([event.stream], event.mark.clock)

    def has_passed(self, event: driver.Event) -> bool:
        self.finish()
        return True

    def finish(self) -> None:
        """Does what is kept. Without peers nothing is, and no turn is waited for: a watchdog asks, too, while
        a launch waits for other processes."""
        if self.among_peers: self._flush()

    @serial
    def _flush(self) -> None: self.peers.flush()

    def ms_between(self, start: driver.Event, end: driver.Event) -> float:
        assert isinstance(start, EmulatedEvent)
        assert isinstance(end, EmulatedEvent)
        for event in (start, end): capture.ran(event, "time is taken from")
        self.peers.flush()
        return (end.mark.seconds - start.mark.seconds) * 1e3

    @serial
    def synchronize(self, stream: driver.Stream | None = None) -> None:
        streams = self.streams if stream is None else [self.into(stream)]
        for each in streams: capture.not_captured(each, "synchronisation")
        self.peers.flush()
        self._host_synced(streams, *(each.now() for each in streams))

    @staticmethod
    def _host_synced(streams: Sequence[EmulatedStream], *clocks: Clock) -> None:
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
        if spec.lower:
            channels, pixels = spec.box
            return TensorMap.im2col(spec.address, spec.lower[::-1], spec.upper[::-1], channels, pixels,
                                    spec.swizzle, dims, strides, spec.dtype, steps, spec.interleave,
                                    spec.l2_promotion, spec.fill).encode()
        return TensorMap.of_tiles(spec.address, box, spec.swizzle, dims, strides, spec.dtype, steps,
                               spec.interleave, spec.l2_promotion, spec.fill).encode()


def _raise(found: list[str]) -> NoReturn:
    more = f"\nand {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    told = "\n".join(found[:SHOWN]) + more
    if all(": instruction-limit: " in each for each in found):
        raise KernelError(told, "a launch that ends within the limit",
                          "make the problem smaller, or raise EMU_STEP_LIMIT; mend a loop that has no end")
    raise KernelError(told, "kernels in which the emulator finds nothing",
                      "correct what is named; EMU_CHECK=0 runs without race, order and initialisation checks")
