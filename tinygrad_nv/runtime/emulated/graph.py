"""Streams, events and graphs of the emulated driver.

Protocol: a graph runs its nodes in an unkind order that its edges allow (of those that are ready, the latest
added), so that a missing edge shows, and its nodes' footprints are compared.
"""
from __future__ import annotations

from bisect import insort
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tinygrad_nv.errors import DriverError
from tinygrad_nv.ptx.emulator.footprint import Footprint
from tinygrad_nv.ptx.emulator.peers import Asked, Point
from tinygrad_nv.ptx.emulator.report import Report
from tinygrad_nv.runtime import driver
from tinygrad_nv.runtime.capture import Capture
from tinygrad_nv.runtime.driver import Launch, Node, Work
from tinygrad_nv.runtime.edges import early
from tinygrad_nv.runtime.emulated.order import Clock, Done, GraphOrder, StreamHistory, serial
from tinygrad_nv.runtime.library_call import LibraryCall


@dataclass(eq=False)
class EmulatedStream(StreamHistory, driver.Stream):
    """Its findings not yet told, and the capture it is in."""
    findings: list[str] = field(default_factory=list)
    capture: Capture[EmulatedGraph] | None = None


@dataclass(eq=False)
class EventMark:
    """A point in a stream's work: what comes before it, and when it was passed."""
    point: Point = field(default_factory=Point)
    clock: Clock = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(eq=False)
class EmulatedEvent(driver.Event):
    """Event: where it was recorded, the last time; in a capture, after which nodes."""
    stream: EmulatedStream | None = None
    capture: Capture[EmulatedGraph] | None = None
    nodes: tuple[Node, ...] = ()
    mark: EventMark = field(default_factory=EventMark)


class GraphDevice(Protocol):
    """Device that runs a graph's nodes: `EmulatedDriver`."""
    check: bool

    def into(self, stream: driver.Stream | None) -> EmulatedStream: ...
    def run(self, work: Work, stream: EmulatedStream,
            ahead: tuple[Footprint, ...] = ()) -> Generator[Asked, Report | None, Done]: ...

    def play(self, steps: Generator[Asked, Report | None, None], at_once: bool = False) -> None: ...
    def enter(self, stream: EmulatedStream, footprint: Footprint) -> None: ...


class EmulatedGraph(driver.Graph):
    """Nodes in order of addition, each with the numbers of those it follows."""

    def __init__(self, device: GraphDevice) -> None:
        self.device = device
        self.works: list[Work] = []
        self.after: list[tuple[int, ...]] = []

    def add(self, work: Work, after: Sequence[Node] = ()) -> Node:
        for node in after:
            if not 0 <= node.number < len(self.works):
                raise DriverError(f"an edge from node {node.number}", f"a node of this graph: it has "
                                  f"{len(self.works)}", "add a node before those that follow it")
        self.works.append(work)
        self.after.append(tuple(sorted({node.number for node in after})))
        return Node(len(self.works) - 1)

    def ancestors(self, nodes: Sequence[Node]) -> set[int]:
        """Numbers of these nodes and of all that run before them."""
        seen: set[int] = set()
        left = [node.number for node in nodes]
        while left:
            if (number := left.pop()) in seen: continue
            seen.add(number)
            left += self.after[number]
        return seen

    def order(self) -> list[int]:
        """The order of execution: of the nodes that are ready, the latest added."""
        waits = [len(after) for after in self.after]
        followers: list[list[int]] = [[] for _ in waits]
        for number, after in enumerate(self.after):
            for before in after: followers[before].append(number)
        ready = [number for number, count in enumerate(waits) if not count]
        out = []
        while ready:
            out.append(number := ready.pop())
            for follower in followers[number]:
                waits[follower] -= 1
                if not waits[follower]: insort(ready, follower)
        return out

    def instantiate(self) -> EmulatedExecutable: return EmulatedExecutable(self)


class EmulatedExecutable(driver.Executable):
    """The graph's work as it was at instantiation, then as updated."""

    def __init__(self, graph: EmulatedGraph) -> None:
        self.device, self.works, self.order = graph.device, list(graph.works), graph.order()
        self.edges = GraphOrder(graph.after)
        self.kept = {number: work.holds() for number, work in enumerate(self.works)
                     if isinstance(work, LibraryCall)}
        self.launches = 0
        self.last: Clock = {}           # where it was launched last

    def update(self, node: Node, work: Work) -> None:
        if not 0 <= node.number < len(self.works):
            raise DriverError(f"no node {node.number} in the graph", f"one of 0 … {len(self.works) - 1}")
        before = self.works[node.number]
        if type(before) is not type(work):
            raise DriverError(f"node {node.number} is updated with a {type(work).__name__}",
                              f"a {type(before).__name__}, as it is", "instantiate another graph")
        if isinstance(before, Launch) and isinstance(work, Launch) and before.function != work.function:
            raise DriverError(f"node {node.number} is updated with kernel {work.function.name}",
                              f"{before.function.name}, as it is", "instantiate another graph")
        if isinstance(before, Launch) and isinstance(work, Launch) and before.window != work.window:
            raise DriverError(f"node {node.number} is updated with another access-policy window",
                              "the one it has", "instantiate another graph")
        self.works[node.number] = work
        if isinstance(work, LibraryCall): self.kept[node.number] = work.holds()

    @serial
    def launch(self, stream: driver.Stream | None = None) -> None:
        into = self.device.into(stream)
        if into.capture is not None:
            raise DriverError("a graph is launched into a stream that is captured", "a stream that runs",
                              "capture the graph's work itself")
        self.launches += 1
        calls = any(isinstance(work, LibraryCall) for work in self.works)
        self.device.play(self._launch_steps(into, list(self.works)), calls)

    def _launch_steps(self, into: EmulatedStream, works: list[Work]) -> Generator[Asked, Report | None, None]:
        into.join(self.last)            # launches of one executable graph do not overlap
        into.advance()
        self.last = into.now()
        if self.device.check: yield from self._checking_steps(into, works)
        else:
            for number in self.order: yield from self.device.run(works[number], into)

    def _checking_steps(self, into: EmulatedStream, works: list[Work]) -> Generator[Asked, Report | None,
                                                                                    None]:
        footprints = [Footprint("")] * len(works)
        # by node: what a programmatic launch right after it runs beside
        beside: dict[int, tuple[Footprint, ...]] = {}
        for number in self.order:
            work, before = works[number], self.edges.direct[number]
            ahead = beside[before[0]] if early(work, [works[each] for each in before]) else ()
            done = yield from self.device.run(work, into, ahead)
            beside[number] = done.beside(ahead)
            what, runs = f"{done.footprint.what} (node {number} of a graph)", done.footprint.runs
            footprints[number] = Footprint(what, runs)
        for footprint in footprints: self.device.enter(into, footprint)
        into.findings += self.edges.compare(footprints)
