"""Metadata of our kernels in tinygrad's graph, beside their text.

Protocol: a `ProgramKernel` is the KernelInfo of a call's body, since the schedule keeps nothing else of a
call; compile workers get it and give it back. patterns/program.py puts it there. Its `note` is for explain()
and timelines, its `aux` for the program that launches the kernel: tinygrad with upstream.patch hands `aux` on
to the program's TinyELF, and hooks/devices.py does without the patch.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from tinygrad.uop.ops import KernelInfo, Ops, UOp

from tinygrad_nv.tile.launch import PLAIN, LaunchConfig


class Communicates:
    """A spec of what moves bytes between devices. `by_peers`: a kernel does, not a library."""
    by_peers = False

    @property
    def traffic(self) -> tuple[str, int, int]:
        """The collective, bytes as NCCL counts them (all of an all-reduce, one rank's of an all-gather), and
        the number of ranks."""
        raise NotImplementedError


@dataclass(frozen=True)
class Note:
    """Note for explain() on a kernel: whose it is, why it was chosen, what it computes and how."""
    template: str
    reason: str = ""
    spec: Hashable = None
    schedule: Hashable = None


class KeptNote:
    """A `Note` that was kept as plain data: `make` gives its spec and schedule when they are asked for."""

    def __init__(self, template: str, reason: str, make: Callable[[], tuple[Any, Any]]) -> None:
        self.template, self.reason, self._make = template, reason, make

    @functools.cached_property
    def _spec_and_schedule(self) -> tuple[Any, Any]: return self._make()

    @property
    def spec(self) -> Any:
        """Spec, as a `Note` has it."""
        return self._spec_and_schedule[0]

    @property
    def schedule(self) -> Any:
        """Schedule, as a `Note` has it."""
        return self._spec_and_schedule[1]


@dataclass(frozen=True)
class ProgramKernel(KernelInfo):
    """KernelInfo of a kernel of ours, which is launched as `aux` says. Its Estimates are upper bounds until
    patterns/program.py's `finalize` makes them exact."""
    note: Note | KeptNote | None = None
    aux: LaunchConfig = PLAIN


def note_of(body: UOp) -> Note | KeptNote | None:
    """The note in a call's body, None if the kernel is not ours."""
    if body.op is not Ops.PROGRAM: return None
    return body.src[0].arg.note if isinstance(body.src[0].arg, ProgramKernel) else None
