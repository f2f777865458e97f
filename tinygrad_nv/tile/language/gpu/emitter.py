"""Writes a program as a kernel: operation by operation, each in the layout that assign.py gave its result.

Protocol: `Emitter(kb, program, …).write()`. `value(v, layout)` is a value in a layout, converted where it has
another (convert.py); of a free value it is computed in that layout. Operations are methods `do_<name>` of the
parts of which this class is made: values.py, memory.py, collective.py, sorting.py, dot.py, control.py,
pipelines.py, specialised.py.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.tile.language.gpu.assign import Assignment
from tinygrad_nv.tile.language.gpu.memory import Memory
from tinygrad_nv.tile.language.gpu.pipelines import Depth
from tinygrad_nv.tile.language.gpu.sorting import Sorting
from tinygrad_nv.tile.language.gpu.specialised import Production, Specialised
from tinygrad_nv.tile.language.ir import Program


class Emitter(Memory, Sorting, Specialised):
    """A kernel under construction."""

    def __init__(self, kb: Kernel, program: Program, assignment: Assignment, stages: Depth,
                 production: Production) -> None:
        super().__init__(kb, program, assignment)
        self.stages, self.bound, self.partial = stages, {}, set()
        self.prepare_dots()
        self.specialise(production)

    def write(self) -> None:
        """The kernel's text."""
        if self.filled: self.with_producer()
        else: self.region(self.program.body)
        if self.arena.copying: self.kb.cp_async_wait(0)
        self.arena.declare()

