"""The bytes of a captured step's own memory, kernel by kernel: `memory_timeline(jit)`.

Protocol: tinygrad puts the buffers of a captured step that nothing outside holds into arenas, where they
share bytes if they are not alive at once. A buffer is alive from the kernel that writes it, without reading
it, to the last kernel that reads it. `at` has for each kernel in the order of the program its name and the
bytes that are alive while it runs; `arena_bytes` is what all of this takes, padding and gaps included.
Weights, inputs and results are not among them.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinygrad.engine.realize import get_call_outs_ins
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.errors import HookError


@dataclass(frozen=True)
class Moment:
    """A kernel, and the bytes that are alive while it runs."""
    name: str
    nbytes: int


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory of a captured step over time."""
    at: tuple[Moment, ...]
    arena_bytes: int

    @property
    def peak(self) -> Moment:
        """The first moment with most."""
        return max(self.at, key=lambda moment: moment.nbytes)


def memory_timeline(jit: Any) -> MemoryTimeline:
    """Returns the memory timeline of a TinyJit that has captured. Raises `HookError` of one that has not."""
    if getattr(jit, "captured", None) is None:
        raise HookError("a TinyJit that has captured nothing", "one that was called twice", "call it again")
    calls, ends = list(_calls(jit.captured._linear)), list[tuple[int, int, int]]()
    alive, arenas = dict[tuple[UOp, int, int], list[int]](), set[UOp]()
    for number, call in enumerate(calls):
        outs, ins = get_call_outs_ins(call)
        for place, given in enumerate(each for each in call.src[1:] if not each.is_bound_var):
            if given.op is not Ops.BITCAST or (view := given.contiguous_view()) is None: continue
            arenas.add(view[0])
            key = view[0], view[1], given.nbytes()
            if place in outs and place not in ins and key in alive:
                first, last = alive.pop(key)
                ends.append((first, last, key[2]))
            alive.setdefault(key, [number, number])[1] = number
    ends += [(first, last, key[2]) for key, (first, last) in alive.items()]
    sizes = [sum(size for first, last, size in ends if first <= at <= last) for at in range(len(calls))]
    moments = tuple(Moment(_name(call), size) for call, size in zip(calls, sizes, strict=True))
    return MemoryTimeline(moments, sum(arena.nbytes() for arena in arenas))


def _calls(linear: UOp) -> Iterator[UOp]:
    """The calls of a program, those of its graphs among them."""
    for call in linear.src:
        what = call.src[0]
        if what.op is Ops.CUSTOM_FUNCTION and what.arg == "graph": yield from _calls(what.src[0])
        else: yield call


def _name(call: UOp) -> str:
    what = call.src[0]
    if what.op is Ops.CUSTOM_FUNCTION: return str(what.arg).partition(":")[0]
    return what.arg.function_name if what.op is Ops.PROGRAM else what.op.name.lower()
