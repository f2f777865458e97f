"""Programs that are scheduled, and not run: their buffers, and when these are alive.

Protocol: inside `recording()` what is realized is scheduled as for a TinyJit, and nothing runs: tensors get
buffers without memory. `schedule_graph(program)` is what a captured step of the same function would be: the
calls in order, and the arenas into which tinygrad's memory planner puts the buffers that no live tensor
holds. So the bytes are those of the step itself, on any device that can be scheduled for.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tinygrad import Tensor
from tinygrad.schedule.memory import memory_plan_rewrite
from tinygrad.tensor import all_tensors
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.graphs.capture import ScheduleRecorder
from tinygrad_nv.hooks import threads


@contextlib.contextmanager
def recording() -> Iterator[list[UOp]]:
    """The calls of all that is realized inside, none of which runs."""
    with threads.LOWERING, ScheduleRecorder() as made: yield made.calls


@dataclass(frozen=True)
class Scheduled:
    """A program. `alive` has, of each buffer that the planner places, the numbers of the first and the last
    call that it is in; `held` are the buffers of live tensors; `arenas` bytes by device."""
    calls: tuple[UOp, ...]
    alive: dict[UOp, tuple[int, int]]
    held: frozenset[UOp]
    arenas: dict[str, int]

    def peak(self, device: str) -> tuple[int, list[UOp]]:
        """Returns the most bytes of a device's buffers that are alive during a call, and which these are."""
        change = [0] * (len(self.calls) + 1)
        own = {each: span for each, span in self.alive.items() if each.device == device}
        for each, (first, last) in own.items():
            change[first] += each.nbytes()
            change[last + 1] -= each.nbytes()
        now, most, at = 0, 0, -1
        for number, step in enumerate(change):
            now += step
            if now > most: most, at = now, number
        return most, [each for each, (first, last) in own.items() if first <= at <= last]


def schedule_graph(program: Callable[[], Any]) -> Scheduled:
    """Schedules a function that realizes tensors, captured now. What it returns is a result: it is held."""
    with recording() as calls: returned = program()
    held = frozenset(_buffers(_live()))
    del returned
    planned = memory_plan_rewrite(UOp(Ops.LINEAR, src=tuple(calls)), set(held))
    alive, own = dict[UOp, tuple[int, int]](), set[UOp]()
    for number, call in enumerate(calls):
        for each in _buffers(call.src[1:]):
            if each in held: own.add(each)
            else: alive[each] = alive.get(each, (number, number))[0], number
    arenas = dict[str, int]()
    known = held | alive.keys()
    for each in dict.fromkeys(_buffers(call.src[1:] for call in planned.src)):
        if each not in known: arenas[str(each.device)] = arenas.get(str(each.device), 0) + each.nbytes()
    return Scheduled(tuple(calls), alive, frozenset(own), arenas)


def buffers_of(tensors: Iterable[Tensor]) -> Iterator[UOp]:
    """Yields the buffers that tensors are in."""
    return _buffers(each.uop for each in tensors)


def buffers_in(call: UOp) -> set[UOp]:
    """Returns the buffers that a call reads and writes."""
    return set(_buffers(call.src[1:]))


def _live() -> Iterator[UOp]:
    for reference in list(all_tensors):
        if (tensor := reference()) is not None: yield tensor.uop


def _buffers(nodes: Iterable[Any]) -> Iterator[UOp]:
    """The buffers that nodes, or nodes of nodes, are made of."""
    for node in nodes:
        if isinstance(node, UOp): yield from (each for each in node.toposort() if each.op is Ops.BUFFER)
        else: yield from _buffers(node)
