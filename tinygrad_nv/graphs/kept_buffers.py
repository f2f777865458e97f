"""Buffers that a recorded step creates and keeps, and those that it only uses.

Protocol: see capture.py, which finds with `find_kept` what live Tensors refer to after a recording, and
computes with `run_kept` what depends on no input.
"""
from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from tinygrad import Tensor, UOp
from tinygrad import tensor as tensors
from tinygrad.engine import realize
from tinygrad.uop.ops import Ops, buffers


def live_tensors() -> Iterator[tuple[weakref.ref[Tensor], Tensor]]:
    for ref in list(tensors.all_tensors):
        if (tensor := ref()) is not None: yield ref, tensor


def all_buffers() -> set[UOp]:
    """The UOps of all buffers that there are, also while other threads make some."""
    return {u for ref in buffers.keyrefs() if (u := ref()) is not None}


def buffers_of(uops: Any) -> set[UOp]:
    """All buffers reachable from these UOps."""
    sink = UOp.sink(*uops)
    return {u for u in sink.toposort() if u.op is Ops.BUFFER}


def buffers_in(linear: UOp) -> set[UOp]:
    """All buffers in the arguments of a schedule."""
    arguments = {a for call in linear.src for a in realize.get_call_arg_uops(call)}
    return {u for a in arguments for u in a.toposort() if u.op is Ops.BUFFER}


def find_kept(linear: UOp, existing: set[UOp], results: Iterable[Tensor] = ()) -> set[UOp]:
    """New buffers of a schedule that live Tensors refer to, other than the results."""
    fresh, own = buffers_in(linear) - existing - all_buffers(), {id(tensor) for tensor in results}
    return fresh & buffers_of(tensor.uop for _, tensor in live_tensors() if id(tensor) not in own)


def run_kept(linear: UOp, kept_buffers: set[UOp], existing: set[UOp],
              inputs: set[UOp]) -> tuple[UOp, set[UOp]]:
    """Executes the part of the schedule that computes kept buffers which depend neither on inputs nor on what
    the schedule writes, and are written once. Returns the rest of the schedule, and the other kept buffers.
    """
    if not kept_buffers: return linear, kept_buffers
    calls = [(call, *_reads_and_writes(call)) for call in linear.src]
    changing = inputs | {b for _, writes, _ in calls for b in writes if b in existing}
    once: set[int] = set()
    left = set()
    for buffer in kept_buffers:
        needed, mine = {buffer}, set()
        for k in reversed(range(len(calls))):
            call, writes, reads = calls[k]
            if needed.isdisjoint(writes): continue
            mine.add(k)
            needed |= writes | reads
            if call.src[0].op is Ops.PROGRAM and call.src[0].arg.vars: needed |= inputs
        changed = sum(buffer in writes for _, writes, _ in calls) > 1
        if not mine or changed or needed & changing: left.add(buffer)
        else: once |= mine
    chosen = tuple(call for k, (call, _, _) in enumerate(calls) if k in once)
    realize.run_linear(linear.replace(src=chosen), jit=True, update_stats=False)
    rest = tuple(call for k, (call, _, _) in enumerate(calls) if k not in once)
    return linear.replace(src=rest), left


def _reads_and_writes(call: UOp) -> tuple[set[UOp], set[UOp]]:
    """Buffers that a launch writes, and those that it reads."""
    outs, ins = realize.get_call_outs_ins(call)
    arguments = realize.get_call_arg_uops(call)
    def storage(positions: tuple[int, ...]) -> set[UOp]:
        return {u for k in positions for u in arguments[k].toposort() if u.op is Ops.BUFFER}
    return storage(outs), storage(ins)


def state_tensors(used: set[UOp]) -> tuple[tuple[weakref.ref[Tensor], UOp], ...]:
    """Live Tensors whose storage a schedule uses, with their current UOps."""
    return tuple((ref, tensor.uop) for ref, tensor in live_tensors()
                 if tensor.uop.has_buffer_identity() and tensor.uop.base in used)
