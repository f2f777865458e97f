"""Streams and events of a program: what orders work, what is captured, and predicted time.

Protocol: `submit` runs work at once, in the order of the calls, and enters what it touched, so that work of
two streams which nothing orders is found (`order.py` of the emulated driver). The default stream orders with
all streams that were not made non-blocking, as CUDA's legacy default stream does. A stream between begin and
end of a capture adds nodes to a graph instead. `seconds` of a stream is when, in predicted time, what it
holds is done.
"""
from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tinygrad_nv.host.device import Device
from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.graphs import Executable, Graph, Node
from tinygrad_nv.host.works import Kernel, Ran, Work
from tinygrad_nv.ptx.emulator.footprint import Footprint
from tinygrad_nv.runtime.emulated.host import Owned
from tinygrad_nv.runtime.emulated.order import Clock, StreamHistory

LEGACY, PER_THREAD = 1, 2       # cudaStreamLegacy, cudaStreamPerThread
NON_BLOCKING = 1                # a flag


@dataclass(eq=False)
class Capture:
    """A graph that streams add to: `tails` are the nodes that the next of each comes after."""
    graph: Graph
    origin: Stream
    tails: dict[Stream, tuple[Node, ...]] = field(default_factory=dict)
    broken: bool = False


@dataclass(eq=False)
class Stream:
    """A stream. The default one is blocking, too, and waits for all others that are."""
    flags: int = 0
    priority: int = 0
    seconds: float = 0.0
    history: StreamHistory = field(default_factory=lambda: StreamHistory(0))
    capture: Capture | None = None

    @property
    def blocking(self) -> bool: return not self.flags & NON_BLOCKING


@dataclass(eq=False)
class Event:
    """An event. `at`: when its stream was there, in predicted seconds or by the host's clock; None: not
    recorded."""
    flags: int = 0
    at: float | None = None
    clock: Clock = field(default_factory=dict)
    capture: Capture | None = None
    nodes: tuple[Node, ...] = ()


class Streams:
    """All streams of a process, and the work that they give to its device."""

    def __init__(self, device: Device) -> None:
        self.device, self.results, self.check = device, device.results, device.options.check
        self.default = Stream()
        self.others: list[Stream] = []
        self.per_thread: dict[int, Stream] = {}

    def make_stream(self, flags: int, priority: int) -> Stream:
        self.others.append(Stream(flags, priority, 0.0, StreamHistory(len(self.others) + 1)))
        return self.others[-1]

    def __iter__(self) -> Iterator[Stream]:
        yield self.default
        yield from self.others

    def of_thread(self, thread: int) -> Stream:
        """The default stream of a thread, where the program is compiled to have one each."""
        if thread not in self.per_thread: self.per_thread[thread] = self.make_stream(0, 0)
        return self.per_thread[thread]

    def join_default(self, stream: Stream) -> None:
        """Orders what the semantics of the default stream order before the next work of a stream."""
        if not stream.blocking: return
        for each in self if stream is self.default else (self.default,):
            if each is stream or not each.blocking: continue
            stream.history.join(each.history.now())
            stream.seconds = max(stream.seconds, each.seconds)

    # **** work ****

    def submit(self, work: Work, stream: Stream) -> None:
        """Runs work, or captures it. Raises `CudaError`."""
        if (found := stream.capture) is not None:
            found.tails[stream] = (found.graph.add(work, found.tails[stream]),)
            return
        self.join_default(stream)
        ahead = stream.history.advance()
        ran = work.run(self.device, ahead)
        if isinstance(work, Kernel): stream.history.ahead = ran.done.beside(ahead)
        stream.seconds += ran.seconds
        self._lend(stream, ran)
        self._enter(stream, [ran.done.footprint])

    def launch(self, graph: Executable, stream: Stream) -> None:
        """Runs an instantiated graph, as one piece of the stream's work."""
        self.join_default(stream)
        stream.history.join(graph.last)         # runs of one do not overlap
        stream.history.advance()
        graph.last = stream.history.now()
        footprints: list[Footprint] = []
        beside: list[tuple[Footprint, ...]] = []
        ends: list[float] = []
        for number, work in enumerate(graph.works):
            before = graph.after[number]
            ahead = beside[before[0]] if graph.early(number) else ()
            ran = work.run(self.device, ahead)
            beside.append(ran.done.beside(ahead))
            ends.append(max((ends[each] for each in before), default=stream.seconds) + ran.seconds)
            what = f"{ran.done.footprint.what} (node {number} of a graph)"
            footprints.append(Footprint(what, ran.done.footprint.runs))
            self._lend(stream, ran)
        stream.seconds = max(ends, default=stream.seconds)
        self._enter(stream, footprints)
        if self.check: self.results.order += graph.order.compare(footprints)

    def _enter(self, stream: Stream, footprints: Iterable[Footprint]) -> None:
        """The last work of a stream touched these bytes: conflicts with unordered work are told."""
        if not self.check: return
        histories = [each.history for each in self]
        for footprint in footprints: self.results.order += stream.history.enter(footprint, histories)

    def _lend(self, stream: Stream, ran: Ran) -> None:
        """Page-locked memory of a copy belongs to it: what it brings is poison until a call that waits for
        it, what it reads must not change before (runtime/emulated/host.py)."""
        for pages, offset, nbytes, download in ran.lent:
            data, number = pages.array(offset, offset + nbytes).copy(), stream.history.number
            what = f"a copy of {nbytes} bytes in stream {number}"
            owned = Owned(pages, stream.history.position, offset, data, download, what)
            self.results.order += pages.lend(owned)
            stream.history.owned.append(owned)

    def forget(self, memory: object) -> None:
        """Memory that is freed needs no order any more."""
        for each in self: each.history.log.pop(memory, None)

    # **** the host waits ****

    def complete(self, stream: Stream | None) -> None:
        """Notes that the host knows that a stream, or None: everything, is done. Raises `CudaError` for one
        that is captured."""
        if stream is not None and stream.capture is not None:
            stream.capture.broken = True
            raise CudaError(Status.STREAM_CAPTURE_UNSUPPORTED, "a stream that is captured is waited for")
        if stream is not None: self.join_default(stream)
        for each in self if stream is None else (stream,):
            if each.capture is None: self._reach(each.history.now())

    def _reach(self, clock: Clock) -> None:
        for history, position in clock.items(): self.results.order += history.complete(position)

    # **** events ****

    def record(self, event: Event, stream: Stream) -> None:
        event.capture = stream.capture
        if stream.capture is not None:
            event.nodes = stream.capture.tails[stream]
            return
        self.join_default(stream)
        event.clock = stream.history.now()
        event.at = stream.seconds if self.device.options.time else time.perf_counter()

    def wait(self, stream: Stream, event: Event) -> None:
        """Orders what comes next in a stream after the event."""
        if event.capture is not None or stream.capture is not None: return _join(stream, event)
        stream.history.join(event.clock)
        if event.at is not None and self.device.options.time: stream.seconds = max(stream.seconds, event.at)

    def wait_for(self, event: Event) -> None:
        """The host waits. Raises `CudaError` for an event of a capture."""
        if event.capture is not None: raise CudaError(Status.CAPTURED_EVENT)
        self._reach(event.clock)

    # **** capture ****

    def begin_capture(self, stream: Stream, graph: Graph | None = None, after: tuple[Node, ...] = ()) -> None:
        if stream is self.default:
            raise CudaError(Status.STREAM_CAPTURE_UNSUPPORTED, "the default stream cannot be captured")
        if stream.capture is not None: raise CudaError(Status.ILLEGAL_STATE, "the stream is captured already")
        stream.capture = Capture(graph or Graph(), stream, {stream: after})


def end_capture(stream: Stream) -> Graph:
    """The graph. Raises `CudaError` where a stream joined and was not waited for, or a call broke the
    capture."""
    found = stream.capture
    if found is None: raise CudaError(Status.ILLEGAL_STATE, "the stream is not captured")
    if found.origin is not stream: raise CudaError(Status.STREAM_CAPTURE_UNMATCHED)
    for each in found.tails: each.capture = None
    if found.broken: raise CudaError(Status.STREAM_CAPTURE_INVALIDATED)
    joined = found.graph.before(found.tails[stream])
    if {node for tails in found.tails.values() for node in tails} - joined:
        raise CudaError(Status.STREAM_CAPTURE_UNJOINED,
                        "a stream that joined the capture is not waited for by the one where it began")
    return found.graph


def _join(stream: Stream, event: Event) -> None:
    """A stream that waits for an event of a capture takes part in it."""
    if event.capture is None:
        if event.at is None: return     # one that was never recorded
        raise CudaError(Status.STREAM_CAPTURE_ISOLATION,
                        "a stream that is captured waits for an event from outside of the capture")
    if stream.capture not in (None, event.capture): raise CudaError(Status.STREAM_CAPTURE_MERGE)
    stream.capture = event.capture
    before = stream.capture.tails.get(stream, ())
    stream.capture.tails[stream] = tuple(dict.fromkeys((*before, *event.nodes)))
