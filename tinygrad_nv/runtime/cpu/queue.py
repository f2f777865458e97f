"""The four programs of tinygrad's queues on the CPU, made when a queue is first used.

Protocol: tinygrad 0.14 makes them, by way of its code generator and the compiler, whenever the device is
opened: a third of a second at every start, four compilations at the first. Only HCQ2=1 runs them.
`defer_program` is tinygrad's `do_to_program` as its CPU module sees it, and returns a `Deferred` in place of
a program; `deferring(theirs)` is tinygrad's CPUProgram, which takes one and makes the program once an
attribute of it is needed. """
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinygrad.device import TinyELF
from tinygrad.helpers import Context
from tinygrad.uop.ops import UOp


@dataclass(frozen=True)
class Deferred:
    """A program that is compiled when it is first needed."""
    make: Callable[[UOp, Any], UOp]
    sink: UOp
    renderer: Any

    def to_elf(self) -> Deferred: return self

    def make_program(self) -> TinyELF:
        """Returns the program, as tinygrad makes it when it opens the device."""
        with Context(EMULATED_DTYPES="", TRACK_MATCH_STATS=0):
            done: TinyELF = self.make(self.sink, self.renderer).to_elf()
        return done


def defer_program(theirs: Callable[[UOp, Any], UOp]) -> Callable[[UOp, Any], Deferred]:
    """Returns what takes the place of `do_to_program`."""
    return lambda sink, renderer: Deferred(theirs, sink, renderer)


def deferring(theirs: type) -> type:
    """The class to make programs of in place of `theirs`."""
    make: Callable[..., None] = vars(theirs)["__init__"]

    def init(self: Any, dev: Any, obj: TinyELF | Deferred) -> None:
        if isinstance(obj, Deferred): self.deferred = dev, obj
        else: make(self, dev, obj)

    def attribute(self: Any, name: str) -> Any:
        if (waiting := vars(self).pop("deferred", None)) is None: raise AttributeError(name)
        dev, obj = waiting
        make(self, dev, obj.make_program())
        return getattr(self, name)
    members = {"__init__": init, "__getattr__": attribute, "__module__": theirs.__module__}
    return type(theirs.__name__, (theirs,), members)
