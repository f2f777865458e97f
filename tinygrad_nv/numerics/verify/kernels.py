"""Each kernel of a run by itself, for those that look at what it reads and writes.

Protocol: `EachKernel.execute` is a function for `hooks.add_execute`. A captured graph runs kernel by kernel,
with the same arguments and results; a program is given to `kernel`, anything else runs as it is and is told
to `other` with what it wrote. Candidates that are timed are not looked at. `Places` says which arguments of a
kernel are results and operands.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

from tinygrad.device import Buffer
from tinygrad.dtype import DType
from tinygrad.engine import realize
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import hooks

Place: TypeAlias = tuple[int, DType]


@dataclass(frozen=True)
class Places:
    """Arguments of a kernel by their place."""
    results: tuple[Place, ...]
    operands: tuple[Place, ...]


class EachKernel(ABC):
    """Executes calls one by one."""

    def __init__(self) -> None: self._places: dict[UOp, Places] = {}

    def execute(self, call: UOp, ctx: realize.ExecContext, run: hooks.Run) -> hooks.Seconds:
        """In the place of each call."""
        body = call.src[0]
        if not ctx.cache or self.has_ended: return run(call, ctx)
        if body.op is Ops.CUSTOM_FUNCTION and body.arg == "graph":
            realize.get_graph_runtime(body, ctx.input_uops)     # tinygrad asks it for its counts afterwards
            seconds = [s for node in body.src[0].src for s in self.execute(node, ctx, run)]
            return [None if None in seconds else sum(s for s in seconds if s is not None)]
        if body.op is Ops.PROGRAM: return self.kernel(call, ctx, run)
        seconds = run(call, ctx)
        outs, _ = realize.get_call_outs_ins(call)
        for bufs in arguments(call, ctx) if outs else (): self.other([bufs[i] for i in outs])
        return seconds

    @property
    def has_ended(self) -> bool:
        """Whether nothing is looked at any more."""
        return False

    @abstractmethod
    def kernel(self, call: UOp, ctx: realize.ExecContext, run: hooks.Run) -> hooks.Seconds:
        """A kernel, on each of its devices."""

    @abstractmethod
    def other(self, written: list[Buffer]) -> None:
        """Takes note of buffers that a copy or a function of another kind has written."""

    def places(self, call: UOp) -> Places:
        """Returns the places of a kernel's arguments: kept by its program, as the call would keep its
        buffers."""
        if (found := self._places.get(call.src[0])) is None:
            info, given = call.src[0].arg, realize.get_call_arg_uops(call)
            found = self._places[call.src[0]] = Places(*(tuple((i, given[i].dtype) for i in each)
                                                         for each in (info.outs, info.ins)))
        return found


def arguments(call: UOp, ctx: realize.ExecContext) -> list[list[Buffer]]:
    """The buffers of a call, for each of its devices."""
    return [bufs for bufs, _ in realize.unwrap_multi(call, realize.resolve_params(call, ctx.input_uops))]
