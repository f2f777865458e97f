"""Captures of both drivers: the work recorded in streams becomes a graph; calls that a graph cannot hold
raise.

Protocol: a capture is a graph and the last nodes of each stream in it. What is submitted to a captured stream
becomes a node after the last ones of its stream; a stream joins by waiting for an event of the capture. A
stream has a `number` and the `capture` it is in; an event has the `stream` and, in a capture, the `capture`
and the `nodes` after which it was recorded.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.driver import Node


class Recording(Protocol):
    """A graph that a capture can be checked in."""

    def ancestors(self, nodes: Sequence[Node]) -> set[int]:
        """Numbers of these nodes and of all that run before them."""


G = TypeVar("G", bound=Recording)


class Captured(Protocol[G]):
    """A stream."""
    number: int
    capture: Capture[G] | None


class Recorded(Protocol[G]):
    """An event; `stream` is None before it is recorded."""
    @property
    def stream(self) -> Any: ...
    capture: Capture[G] | None
    nodes: tuple[Node, ...]


@dataclass(eq=False)
class Capture(Generic[G]):
    """Graph that streams record since `begin_capture`, and the last nodes of each stream in it."""
    origin: Captured[G]
    graph: G
    tails: dict[Captured[G], tuple[Node, ...]] = field(default_factory=dict)
    ended: bool = False


def begin(into: Captured[G], graph: G) -> None:
    """Begins a capture of a stream into a graph without nodes."""
    if into.number == 0: _stream_zero()
    if into.capture is not None:
        raise DriverError(f"capture of stream {into.number} begins twice", "end_capture in between")
    into.capture = Capture(into, graph, {into: ()})


def join(event: Recorded[G], into: Captured[G]) -> None:
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
    if into.number == 0: _stream_zero()
    into.capture = capture
    capture.tails[into] = tuple(dict.fromkeys((*capture.tails.get(into, ()), *event.nodes)))


def end(into: Captured[G]) -> G:
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


def not_captured(stream: Captured[G], what: str) -> None:
    """Raises where a captured stream is to do what no graph holds."""
    if stream.capture is not None:
        raise DriverError(f"{what} in stream {stream.number}, which is captured",
                          "launches, copies within the device and fills", "do it before begin_capture")


def check_recorded(event: Recorded[G], what: str) -> None:
    """Raises for an event that was never recorded."""
    if event.stream is None:
        raise DriverError(f"{what} an event that was never recorded",
                          "an event that record() was called with")


def ran(event: Recorded[G], what: str) -> None:
    """Raises where the host waits for, or takes time from, an event that does not run."""
    check_recorded(event, what)
    if event.capture is not None:
        raise DriverError(f"{what} an event of a capture", "an event that runs",
                          "launch the graph and synchronize with its stream")


def _stream_zero() -> NoReturn:
    raise DriverError("stream 0 is captured", "a stream made by stream()", "give the work a stream")
