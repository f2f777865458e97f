"""A program as a kernel for a GPU: what cannot be, and the text.

Protocol: `problems(program, schedule, gpu)` says in words why there is no kernel, with the arithmetic;
`build` makes it. Both write the kernel, once for the same program: how much shared memory it needs is known
then.

`Emitter(kb, program, …).write()` writes operation by operation, each in the layout that assign.py gave its
result. `value(v, layout)` is a value in a layout, converted where it has another (convert.py); of a free
value it is computed in that layout. Operations are methods `do_<name>` of the parts of which this class is
made: values.py, memory.py, collective.py, sorting.py, dot.py, control.py, pipelines.py, specialised.py.
"""
from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tinygrad.dtype import dtypes

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.builder.core import SMEM_BYTES
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.language.gpu.assign import Assignment
from tinygrad_nv.tile.language.gpu.dots import FP8
from tinygrad_nv.tile.language.gpu.layout import absent
from tinygrad_nv.tile.language.gpu.memory import Memory
from tinygrad_nv.tile.language.gpu.pipelines import Depth
from tinygrad_nv.tile.language.gpu.produced import find_produced_loops, inner_loops
from tinygrad_nv.tile.language.gpu.sorting import Sorting
from tinygrad_nv.tile.language.gpu.specialised import PRODUCERS, Production, Specialised, alone, registers_of
from tinygrad_nv.tile.language.ir import Op, Program
from tinygrad_nv.tile.language.ranges import Ranges
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a")
MOST_WARPS = 32
MOST_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class _Written:
    kernel: TileKernel | None
    problems: tuple[str, ...]


def problems(program: Program, schedule: TileSchedule, gpu: GPU, pdl: bool = False) -> list[str]:
    """Why a program cannot be a kernel with a schedule on a GPU, in words; empty when it can."""
    return list(_write(_Key(program), schedule, gpu.arch, gpu.sm_count, pdl).problems)


def build(program: Program, schedule: TileSchedule, gpu: GPU, pdl: bool = False) -> TileKernel:
    """The kernel of a program without problems; parameters are its tensors in their order, then its rows
    where they are symbolic. `pdl`: on Hopper
    it may be launched before the kernel ahead of it has ended, for which it waits itself. Raises
    `ScheduleError` with the problems of one that has some."""
    made = _write(_Key(program), schedule, gpu.arch, gpu.sm_count, pdl)
    if made.kernel is None:
        raise ScheduleError("; ".join(made.problems), "a schedule that the GPU has room for",
                            "use smaller blocks, fewer stages, or another number of warps")
    return made.kernel


class _Key:
    """A program, equal to another of the same text."""

    def __init__(self, program: Program) -> None: self.program, self.text = program, str(program)
    def __hash__(self) -> int: return hash(self.text)
    def __eq__(self, other: object) -> bool: return isinstance(other, _Key) and other.text == self.text


@functools.lru_cache(256)
def _write(key: _Key, schedule: TileSchedule, arch: str, sm_count: int, pdl: bool = False) -> _Written:
    program = key.program
    if found := _before(program, schedule, arch): return _Written(None, tuple(found))
    assignment = Assignment(program, schedule.warp_count, schedule.vector_width, arch)
    loops = find_produced_loops(program, assignment, Depth(schedule.depth, MOST_WARPS), arch)
    if found := _find_crowded(program, assignment, registers_of(schedule.warp_count, bool(loops))):
        return _Written(None, tuple(found))
    refused: list[str] = []
    for most, production in _attempts(program, loops, sm_count):
        emitter = _emit_program(program, assignment, schedule, arch, most, production, pdl)
        found = _too_large(emitter, arch)
        if not found and production.ctas and not _alone(emitter, schedule, arch): continue
        if not found: return _Written(_kernel(emitter, pdl), ())
        refused = refused or found
    return _Written(None, tuple(refused))


def _attempts(program: Program, loops: dict[Op, list[Op]], sm_count: int) -> Iterator[tuple[int, Production]]:
    """Stages at most of loops that say how far ahead they may begin, which is as far as there is room; the
    schedule's are as it says. Of each, CTAs that go through programs first, and two stages around loops."""
    ahead = max((op.attributes["stages"] for op in program.body.walk()
                 if op.name == "for" and "pipe" not in op.attributes), default=0)
    nested = any(inner_loops(op, loops) for op in loops)
    ctas = sm_count if loops and sm_count < math.prod(program.grid) and _alike(program, loops) else 0
    for most in range(ahead + 1, 0, -1) if ahead else (1,):
        for outer in (2, 1) if nested else (1,):
            if ctas: yield most, Production(loops, outer, ctas)
            yield most, Production(loops, outer)


def _alike(program: Program, loops: dict[Op, list[Op]]) -> bool:
    """Whether loops are as long in all programs."""
    ranges = Ranges(program)
    bounds = [ranges.of(each) for op in loops for each in op.operands[:2]]
    return all(each.low == each.high for each in bounds)


def _alone(emitter: Emitter, schedule: TileSchedule, arch: str) -> bool:
    """Whether a multiprocessor has room for one CTA: with two, one stores while the other multiplies."""
    return alone(schedule.warp_count, emitter.kb.smem_bytes, SMEM_BYTES[arch])


def _emit_program(program: Program, assignment: Assignment, schedule: TileSchedule, arch: str, most: int,
             production: Production, pdl: bool) -> Emitter:
    """The program, written with at most so many stages of loops that say how far ahead they may begin."""
    warps = schedule.warp_count + (PRODUCERS if production.loops else 0)
    cluster = (1, 1, program.cluster) if program.cluster > 1 else ()
    kb = Kernel(_name(program.name), arch=arch, threads=32 * warps, min_ctas=int(bool(production.loops)),
                cluster=cluster)
    emitter = Emitter(kb, program, assignment, Depth(schedule.depth, most), production)
    emitter.pdl = emitter.ahead = pdl and kb.hopper
    emitter.write()
    return emitter


def _kernel(emitter: Emitter, pdl: bool) -> TileKernel:
    kb = emitter.kb
    grid = (emitter.ctas, 1, 1) if emitter.ctas else emitter.program.grid
    cluster = 1, 1, emitter.program.cluster
    return TileKernel(kb.name, kb.ptx(), grid, kb.threads[0], kb.dynamic_smem, cluster,
                      maps=tuple(emitter.maps), rows_of_cta=emitter.program.rows, pdl=pdl and kb.hopper)


def _name(name: str) -> str: return "".join(each if each.isalnum() or each == "_" else "_" for each in name)


def _before(program: Program, schedule: TileSchedule, arch: str) -> list[str]:
    """Returns the problems that need no text."""
    out = []
    if arch not in ARCHITECTURES: return [f"{arch} is not {', '.join(ARCHITECTURES)}"]
    if program.cluster > 1 and arch != "sm_90a": out.append(f"a cluster of {program.cluster} on {arch}")
    warps = schedule.warp_count
    if warps & warps - 1 or warps > MOST_WARPS:
        out.append(f"{warps} warps: a kernel has 1, 2, 4, 8, 16 or {MOST_WARPS}")
    if schedule.vector_width & schedule.vector_width - 1:
        out.append(f"vectors of {schedule.vector_width} elements: a power of two is one access")
    kinds = {each.dtype for op in program.body.walk() for each in op.results}
    kinds |= {each.dtype for each in program.tensors}
    if arch < "sm_89" and any(each in FP8 for each in kinds):
        out.append(f"8-bit floats: conversions begin with sm_89, this is {arch}")
    for op in program.body.walk():
        for each in op.results:
            if math.prod(each.shape) > MOST_ELEMENTS:
                out.append(f"{_at(op)}a tile {each.type} of {math.prod(each.shape)} elements: "
                           f"there are at most {MOST_ELEMENTS}")
    return out


def _at(op: Op) -> str: return f"{op.line}: " if op.line else ""


def _find_crowded(program: Program, assignment: Assignment, there: int) -> list[str]:
    """Tiles that do not fit in a thread's registers."""
    out = []
    for op in program.body.walk():
        for each in op.results:
            if not each.shape or each in assignment.free or assignment.aside(each): continue
            nbytes = 1 if each.dtype == dtypes.bool else max(each.dtype.itemsize, 2)
            count = absent(assignment.layout(each), each.shape).count(False) * nbytes / 4
            if count > there:
                out.append(f"{_at(op)}a tile {each.type} takes {count:.0f} registers of each of "
                           f"{1 << assignment.thread_bits} threads: there are {there}")
    return list(dict.fromkeys(out))


def _too_large(emitter: Emitter, arch: str) -> list[str]:
    need, there = emitter.kb.smem_bytes, SMEM_BYTES[arch]
    if need <= there: return []
    return [f"{need} B of shared memory ({emitter.arena.describe()}): {arch} has {there}"]


class Emitter(Memory, Sorting, Specialised):
    """A kernel under construction."""

    def __init__(self, kb: Kernel, program: Program, assignment: Assignment, stages: Depth,
                 production: Production) -> None:
        super().__init__(kb, program, assignment)
        self.stages, self.bound, self.partial, self.arrived = stages, {}, set(), []
        self.acrosses = sum(op.name == "across" for op in program.body.walk())
        self.prepare_dots()
        self.specialise(production)

    def write(self) -> None:
        """The kernel's text."""
        if self.filled and self.ahead: self.await_ahead()
        if self.filled: self.with_producer()
        else: self.region(self.program.body)
        if self.arena.copying: self.kb.cp_async_wait(0)
        if self.acrosses: self.kb.cluster_wait()    # shared memory is there as long as others read it
        self.arena.declare()
