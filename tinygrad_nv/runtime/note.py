"""What is known of a kernel of ours besides its text, in tinygrad's graph.

Protocol: a `Note` is part of a call's body, in its KernelInfo, since the schedule keeps nothing else of a
call. patterns/program.py puts it there; explain() and timelines read it.
"""
from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from tinygrad.uop.ops import KernelInfo, Ops, UOp


@dataclass(frozen=True)
class Note:
    """What explain() tells of a kernel: whose it is, why it was chosen, what it computes and how."""
    template: str
    reason: str = ""
    spec: Hashable = None
    schedule: Hashable = None


@dataclass(frozen=True)
class ProgramKernel(KernelInfo):
    """KernelInfo of a kernel of ours. Its Estimates are upper bounds until patterns/finalize.py makes them
    exact."""
    note: Note | None = None


def note_of(body: UOp) -> Note | None:
    """The note in a call's body, None if the kernel is not ours."""
    if body.op is not Ops.PROGRAM: return None
    return body.src[0].arg.note if isinstance(body.src[0].arg, ProgramKernel) else None
