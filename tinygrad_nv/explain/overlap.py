"""Overlap: kernels of a schedule that run beside a collective, as they neither need it nor are needed by it.

Protocol: `describe_overlap` says it of a collective, `beside(calls, number)` are the numbers of a schedule's
calls. What a call writes is what its body stores to; calls that touch the same memory, one of them writing,
follow one another, as in a graph of the driver. """
from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Protocol

from tinygrad import Device
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.explain.levels import seconds
from tinygrad_nv.runtime.driver import Driver
from tinygrad_nv.runtime.note import Communicates
from tinygrad_nv.runtime.observe.forecast import forecast


class Kernel(Protocol):
    """Facts that are known of a call (`KernelRecord`)."""
    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def spec(self) -> Hashable: ...
    @property
    def flops(self) -> int: ...
    @property
    def bytes(self) -> int: ...


def describe_overlap(calls: Sequence[UOp], kernels: Sequence[Kernel], number: int) -> str:
    """The kernels beside a collective in words, with the time that they are predicted to take."""
    others = [i for i in beside(calls, number) if not isinstance(kernels[i].spec, Communicates)]
    names = Counter(" ".join(kernels[i].name.split()) for i in others)
    words = ", ".join(name + (f" × {times}" if times > 1 else "") for name, times in names.items())
    taken = [forecast_seconds(calls[i], kernels[i]) for i in others]
    if not taken or None in taken: return words or "nothing"
    return f"{words} ({seconds(sum(filter(None, taken)))})"


def forecast_seconds(call: UOp, kernel: Kernel) -> float | None:
    """Seconds that a kernel on a GPU is predicted to take; None of one without figures."""
    driver = getattr(Device[kernel.device], "driver", None)
    if not isinstance(driver, Driver): return None
    found = forecast(call.src[0], kernel.flops, kernel.bytes, driver.properties)
    return None if found is None else found.seconds


def beside(calls: Sequence[UOp], number: int) -> list[int]:
    """Numbers of the calls that no edge orders with that one."""
    before: list[int] = []      # for each call those that it follows, one bit each
    writer: dict[UOp, int] = {}                 # of memory, the last
    readers: dict[UOp, list[int]] = {}          # and those since
    for i, call in enumerate(calls):
        follows, writes, used = set[int](), outputs_of(call), _memories(call.src[1:])
        for memory in used:
            if memory in writer: follows.add(writer[memory])
            if memory in writes: follows.update(readers.get(memory, ()))
        for memory in used:
            if memory in writes: writer[memory], readers[memory] = i, []
            else: readers.setdefault(memory, []).append(i)
        bits = 0
        for each in follows - {i}: bits |= before[each] | 1 << each
        before.append(bits)
    return [i for i in range(len(calls)) if i != number and not before[i] >> number & 1
            and not before[number] >> i & 1]


def outputs_of(call: UOp) -> set[UOp]:
    """The memory that a call writes."""
    body, arguments = call.src[0], call.src[1:]
    if body.op not in (Ops.SINK, Ops.PROGRAM): return set(_memories(arguments[:1]))
    slots = {root.arg.slot for store in body.toposort() if store.op is Ops.STORE
             for root in store.src[0].toposort() if root.op is Ops.PARAM}
    return set(_memories([each for slot, each in enumerate(arguments) if slot in slots]))


def _memories(arguments: Sequence[UOp]) -> list[UOp]:
    """Returns what arguments are memory of; variables are of none."""
    return [each.base for each in arguments if not each.is_bound_var]
