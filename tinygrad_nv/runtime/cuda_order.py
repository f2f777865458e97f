"""Streams, events and captures of the CUDA driver.

Protocol: a capture is ours, not CUDA's: what is submitted to a captured stream becomes a node of a graph,
after the last nodes of its stream. CUDA's own capture would make the same nodes, but while it lasts it
forbids synchronising with anything of the context, and it gives a node no number to update it by. What
emulated.py refuses is refused here, in the same words.

A stream is `busy` once work was put into it that the stream of frees has not been made to wait for.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime import driver
from tinygrad_nv.runtime.driver import Node

if TYPE_CHECKING:
    from tinygrad_nv.runtime.cuda_graph import CUDAGraph


@dataclass(eq=False)
class Capture:
    """What streams record since `begin_capture`: a graph, and the last nodes of each stream in it."""
    origin: CUDAStream
    graph: CUDAGraph
    tails: dict[CUDAStream, tuple[Node, ...]] = field(default_factory=dict)
    ended: bool = False


@dataclass(eq=False)
class CUDAStream(driver.Stream):
    """`number` counts the device's streams, `handle` is a CUstream, `mark` an event for joining it. A stream
    of somebody else's (`external`) is not destroyed with the device."""
    owner: object
    number: int
    handle: Any
    mark: Any
    external: bool = False
    busy: bool = False
    capture: Capture | None = None


@dataclass(eq=False)
class CUDAEvent(driver.Event):
    """Where it was recorded last; in a capture, after which nodes."""
    handle: Any
    stream: CUDAStream | None = None
    capture: Capture | None = None
    nodes: tuple[Node, ...] = ()


def join_capture(event: CUDAEvent, into: CUDAStream) -> None:
    """Takes a stream into the capture of an event that it waits for; the event or the stream is in one."""
    capture = event.capture
    if capture is None:
        raise DriverError(f"captured stream {into.number} waits for an event from outside the capture",
                          "an event recorded in the same capture", "record it after begin_capture")
    if capture.ended:
        raise DriverError("a stream waits for an event of a capture that has ended",
                          "an event recorded since", "record the event again")
    if into.capture not in (None, capture):
        raise DriverError(f"stream {into.number} of one capture waits for an event of another",
                          "one capture", "end one before")
    if into.number == 0: stream_zero()
    into.capture = capture
    capture.tails[into] = tuple(dict.fromkeys((*capture.tails.get(into, ()), *event.nodes)))


def begin(into: CUDAStream, graph: CUDAGraph) -> None:
    """Begins a capture of a stream into a graph without nodes."""
    if into.number == 0: stream_zero()
    if into.capture is not None:
        raise DriverError(f"capture of stream {into.number} begins twice", "end_capture in between")
    into.capture = Capture(into, graph, {into: ()})


def end(into: CUDAStream) -> CUDAGraph:
    """Ends the capture that began in a stream: its graph, if all streams were joined."""
    if (capture := into.capture) is None or capture.origin is not into:
        raise DriverError(f"capture ends in stream {into.number}", "the stream it began in")
    capture.ended = True
    for each in capture.tails: each.capture = None
    joined = capture.graph.ancestors(capture.tails[into])
    for each, tail in capture.tails.items():
        if {node.number for node in tail} <= joined: continue
        raise DriverError(f"the capture ends with work in stream {each.number} that nothing waits for",
                          f"stream {into.number} waits for all streams of the capture",
                          f"record an event in stream {each.number} and wait for it in {into.number}")
    return capture.graph


def not_captured(stream: CUDAStream, what: str) -> None:
    if stream.capture is not None:
        raise DriverError(f"{what} in stream {stream.number}, which is captured",
                          "launches, copies within the device and fills", "do it before begin_capture")


def ran(event: CUDAEvent, what: str) -> None:
    """Raises where the host waits for, or takes time from, an event that does not run."""
    if event.stream is None: never_recorded(what)
    if event.capture is not None:
        raise DriverError(f"{what} an event of a capture", "an event that runs",
                          "launch the graph and synchronize with its stream")


def never_recorded(what: str) -> NoReturn:
    raise DriverError(f"{what} an event that was never recorded", "an event that record() was called with")


def stream_zero() -> NoReturn:
    raise DriverError("stream 0 is captured", "a stream made by stream()", "give the work a stream")
