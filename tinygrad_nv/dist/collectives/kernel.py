"""A collective in the graph of a CPU: a kernel of one part, that calls the group's transport (csrc/group.h).

Protocol: `called(what, x, descriptor)` adds the kernel. The descriptor has all that the C function has to
know, so one kernel is compiled for all collectives. tinygrad runs it after the kernels that write its input
and before those that read its result: eager, in a TinyJit's graph and in captured steps. tinygrad's order
depends on the graph alone, so ranks with the same graph run the same collectives in the same order.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.patterns.program import Output, program
from tinygrad_nv.runtime.note import Note

_TYPES = "typedef unsigned char u8; typedef unsigned long long u;\n"
_CALL = "  ((int (*)(u, const u *, void *, const void *))words[0])(words[1], words + 2, {}, {});\n"


@dataclass(frozen=True)
class Collective:
    """A collective that makes a result of this shape and dtype; `name` is for people, `ranks` is the group's.
    A SEND makes a byte."""
    kind: str
    shape: tuple[int, ...]
    dtype: DType
    nbytes: int
    name: str
    ranks: str = ""


# what only sends has a byte as its result, by which its kernel is found in the graph
TEXTS = {name: f"{_TYPES}void {name}({arguments}) {{\n{_CALL.format(*used)}}}\n"
         for name, arguments, used in (
    ("collective", "u8 *out, const u8 *in, const u *words", ("out", "in")),
    ("collective_after", "u8 *out, const u8 *in, const u *words, const u8 *after", ("out", "in")),
    ("collective_send", "u8 *done, const u8 *in, const u *words", ("(void *)0", "in")),
    ("collective_recv", "u8 *out, const u *words", ("out", "(void *)0")))}


def call_kernel(what: Collective, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The kernel of a collective: `tensors` are its input, if it has one, the descriptor, and what has to be
    computed before, if anything."""
    other = "collective" if len(tensors) < 3 else "collective_after"
    entry = {"send": "collective_send", "recv": "collective_recv"}.get(what.kind, other)
    made = program(entry, TEXTS[entry], str(tensors[-1].device), [Output(what.shape, what.dtype)],
                   [each.uop for each in tensors], nbytes=what.nbytes, note=Note(what.kind, what.name))
    return (Tensor(made[0]),)
