"""Templates of CPUs that are programs of the tile language (tile/programs.py).

Protocol: `make_family(name, programs)`. A schedule is blocks, and in how many parts the grid is computed.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tinygrad_nv.cpu import expression
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule, check_parts
from tinygrad_nv.tile.launch import Integer
from tinygrad_nv.tile.programs import PART_ELEMENTS, Blocks, TileProgram, make_schedule
from tinygrad_nv.tile.template import Family, Template


@dataclass(frozen=True)
class CPUProgramSchedule(Blocks, CPUSchedule):
    """Blocks of a program."""

    def words(self) -> list[str]: return [*CPUSchedule.words(self), *self.block_words()]


def make_family(name: str, programs: Sequence[TileProgram], determinism_class: str) -> Family:
    """The family of programs on a CPU."""
    own = tuple(_template(each) for each in programs if "cpu" in each.kinds)
    return Family(name, own, determinism_class=determinism_class)


def _template(program: TileProgram) -> Template[Any, Any, CPU]:
    schedule = make_schedule(CPUProgramSchedule, program.name)

    def problems(spec: Any, s: CPUProgramSchedule, target: CPU) -> Sequence[str]:
        if s.isa != target.isa: return [f"for {s.isa}, here is {target.isa}"]
        found = [*check_parts(s), *program.refuse(spec, s.blocks, "cpu"), *["clusters"] * (s.cluster > 1)]
        own = [blocks for blocks, _ in program.cut(spec, target)]
        if program.fixed and s.blocks not in own: found.append(f"{s} is not one of {own[0]}")
        found += [each for root in program.expressions(spec) for each in expression.problems(root)]
        from tinygrad_nv.cpu.language import kernel
        return found or [each for _, one in program.launches(spec, s.blocks)
                         for each in kernel.problems(one, s.isa)]

    def build(spec: Any, s: CPUProgramSchedule, target: CPU, integers: tuple[Integer, ...] = ()) -> Any:
        from tinygrad_nv.cpu.language import kernel
        assert not integers, "programs take the rows alone"
        return program.build(spec, s.blocks, lambda _, one: kernel.build(one, s.isa, parts=s.parts,
                                                                         by_columns=True))

    def candidates(spec: Any, target: CPU) -> Sequence[CPUProgramSchedule]:
        made = []
        for blocks, _ in program.cut(spec, target):
            most = min(math.prod(program.grid(spec, blocks)), program.elements(spec) // PART_ELEMENTS)
            made.append(schedule(isa=target.isa, parts=max(1, min(target.threads, most)), **vars(blocks)))
        return made
    return Template(program.name, program.spec, schedule, problems, candidates, build)
