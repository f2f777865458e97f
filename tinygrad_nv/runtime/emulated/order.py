"""The order among the work of an emulated device, and conflicts of work that nothing orders.

Protocol: work runs here when it is submitted, so a wrong order has to be found from what orders it. A stream
is a `StreamHistory`: each piece of work takes its next position, a launch of a graph one for all its nodes.
Its `clock` says up to which position of other timelines work is done before what is submitted to it next:
what it waited for through events. `done` is up to where the host knows its work to be done, and so is ordered
before all that is submitted from now on.

Work is entered with its footprint. It conflicts with work of another timeline that is not ordered before it
and touches the same bytes, one of the two writing, and not both atomically. What is past `done` is forgotten,
and so is what later work of the same timeline covers. Nodes of a graph are compared with one another when
their footprints are not what they were at the launch before: at the first launch, after updates, and where
data decides which bytes are touched.

Later work in the same stream is ordered, unless it is a launch with `pdl`: `StreamHistory.ahead` are the
kernels that it may run beside until it has waited for them, which the emulator is told.
"""
from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from tinygrad_nv.ptx.emulator import Buffer
from tinygrad_nv.ptx.emulator.footprint import ANY_WRITE, WRITE, Footprint, Overlap, Runs
from tinygrad_nv.runtime.edges import Reduction
from tinygrad_nv.runtime.emulated.host import Owned

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
Clock = dict["StreamHistory", int]
Part = tuple[object, int, int, int]     # allocation, first byte, last byte + 1, flags


_turn = threading.RLock()  # finalizers free memory in the midst of anything


def _reset_after_fork() -> None:
    global _turn
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_reset_after_fork)


def serial(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method of the emulated driver that threads call one after the other, on all devices: the emulator
    itself releases the interpreter's lock."""
    @functools.wraps(method)
    def call_in_turn(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with _turn: return method(self, *args, **kwargs)
    return call_in_turn


class Done(NamedTuple):
    """Footprint of work; `early`: it let the next begin before it had itself waited for those ahead."""
    footprint: Footprint
    early: bool = False

    def beside(self, ahead: tuple[Footprint, ...]) -> tuple[Footprint, ...]:
        """Returns, of a launch beside `ahead`, the kernels that a programmatic launch right after it runs
        beside."""
        return (self.footprint, *ahead) if self.early else (self.footprint,)


class PastAccess(NamedTuple):
    """Work that touched an allocation."""
    position: int
    what: str
    runs: Runs


@dataclass(eq=False)
class StreamHistory:
    """A stream's work in order."""
    number: int
    position: int = 0
    done: int = 0
    clock: Clock = field(default_factory=dict)
    # by allocation, then by bytes: the last work that touched just these
    log: dict[object, dict[bytes, PastAccess]] = field(default_factory=dict)
    owned: list[Owned] = field(default_factory=list)
    ahead: tuple[Footprint, ...] = ()

    def now(self) -> Clock:
        """The point after all that it holds."""
        return {**self.clock, self: self.position}

    def join(self, clock: Clock) -> None:
        """Orders what comes next after this point."""
        for other, position in clock.items(): self.clock[other] = max(position, self.clock.get(other, 0))

    def advance(self) -> tuple[Footprint, ...]:
        """The position of new work; returns the kernels that it may run beside if it is programmatic."""
        ordered = self.position <= max(self.done, self.clock.get(self, 0))
        ahead, self.ahead = () if ordered else self.ahead, ()
        self.position += 1
        return ahead

    def complete(self, position: int) -> list[str]:
        """The host knows that work up to a position is done; returns what is wrong with its memory."""
        self.done = max(self.done, position)
        if self.done == self.position: self.log.clear()
        completed = [each for each in self.owned if each.position <= self.done]
        self.owned = [each for each in self.owned if each.position > self.done]
        return [one for each in completed for one in each.complete()]

    def enter(self, footprint: Footprint, others: Iterable[StreamHistory]) -> list[str]:
        """Work at the present position touches these bytes; returns its conflicts."""
        found = [one for other in others if other is not self
                 for one in other._conflicts(footprint, self, max(other.done, self.clock.get(other, 0)))]
        for memory, runs in footprint.runs.items():
            self.log.setdefault(memory, {})[runs.key] = PastAccess(self.position, footprint.what, runs)
        return found

    def _conflicts(self, footprint: Footprint, into: StreamHistory, known: int) -> Iterator[str]:
        if self.position <= known: return
        for memory, runs in footprint.runs.items():
            unordered = [each for each in self.log.get(memory, {}).values() if each.position > known]
            # an event after the last will do
            for entry in sorted(unordered, key=lambda each: -each.position):
                if (overlap := runs.conflict(entry.runs)) is None: continue
                yield (f"order: {describe_overlap(memory, overlap, footprint.what, entry.what)}: "
                       f"record an event in stream {self.number} after {entry.what}, and let stream "
                       f"{into.number} wait for it "
                       f"before {footprint.what}")
                break


def footprint_of(what: str, *parts: Part) -> Footprint:
    """Returns the footprint of a copy or a fill."""
    runs: dict[object, Runs] = {}
    for memory, start, stop, flags in parts:
        if start == stop: continue
        made = Runs.of(start, stop, flags)
        runs[memory] = runs[memory].merge(made) if memory in runs else made
    return Footprint(what, runs)


ALLOCATES, FREES = "cudaMallocAsync", "cudaFreeAsync"   # work that others on the bytes come after, or before


def describe_overlap(memory: object, overlap: Overlap, what: str, other: str) -> str:
    """Returns two works that nothing orders, and the bytes, in words."""
    where = f"the {memory.nbytes} allocated at {memory.ptr:#x}" if isinstance(memory, Buffer) \
        else "page-locked memory"
    deed, before = _action(what, overlap.flags), _action(other, overlap.other)
    return (f"{what} {deed}, and {other} {before}, bytes {overlap.start} to "
            f"{overlap.stop - 1} of {where}, and nothing orders the two")


def _action(what: str, flags: int) -> str:
    if what.startswith((ALLOCATES, FREES)): return "allocates" if what.startswith(ALLOCATES) else "frees"
    if not flags & ANY_WRITE: return "reads"
    return "writes" if flags & WRITE else "updates"


class GraphOrder:
    """A graph's edges, and what its nodes touched when they were last compared."""

    def __init__(self, after: Sequence[Sequence[int]]) -> None:
        reduction = Reduction()
        self.direct = [reduction.add(numbers) for numbers in after]
        self.before = reduction.before
        self.compared: list[dict[int, bytes]] = [{}] * len(after)

    def compare(self, footprints: Sequence[Footprint]) -> list[str]:
        """Conflicts of nodes that no path of edges orders, where one is not what it was."""
        signatures = [footprint.signature() for footprint in footprints]
        changed = {number for number, each in enumerate(signatures) if each != self.compared[number]}
        if not changed: return []
        self.compared = signatures
        users: dict[object, list[tuple[int, Runs]]] = {}
        for number, footprint in enumerate(footprints):
            for memory, runs in footprint.runs.items(): users.setdefault(memory, []).append((number, runs))
        found: dict[tuple[int, int], str] = {}
        for memory, each in users.items():
            if not any(runs.all & ANY_WRITE for _, runs in each): continue
            for (a, mine), (b, other) in combinations(each, 2):
                if self.before[b] >> a & 1 or (a not in changed and b not in changed): continue
                if (a, b) in found or (overlap := mine.conflict(other)) is None: continue
                words = describe_overlap(memory, overlap, footprints[a].what, footprints[b].what)
                found[a, b] = f"order: {words}: add an edge from node {a} to node {b}"
        return list(found.values())
