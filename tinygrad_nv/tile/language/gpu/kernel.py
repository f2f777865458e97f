"""A program as a kernel for a GPU: what cannot be, and the text.

Protocol: `problems(program, schedule, gpu)` says in words why there is no kernel, with the arithmetic;
`build` makes it. Both run `PASSES`, once for the same program: how much shared memory it needs is known when
it is written.

`Emitter(kb, program, …).write()` writes operation by operation, each in the layout that assign.py gave its
result. `value(v, layout)` is a value in a layout, converted where it has another (convert.py); of a free
value it is computed in that layout. Operations are methods `do_<name>` of the parts of which this class is
made: values.py, memory.py, collective.py, sorting.py, dot.py, control.py, pipelines.py, specialised.py.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.builder.core import SMEM_BYTES
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.language.gpu.assign import Assignment
from tinygrad_nv.tile.language.gpu.check import MOST_WARPS, check
from tinygrad_nv.tile.language.gpu.consumer import Flight
from tinygrad_nv.tile.language.gpu.memory import Memory
from tinygrad_nv.tile.language.gpu.pipelining import Attempt, Depth, list_attempts
from tinygrad_nv.tile.language.gpu.produced import find_produced_loops
from tinygrad_nv.tile.language.gpu.registers import (
    PRODUCERS,
    alone,
    count_registers,
    find_crowded,
    registers_of,
)
from tinygrad_nv.tile.language.gpu.show import (
    list_flights,
    show_layouts,
    show_pipelines,
    show_registers,
    show_roles,
)
from tinygrad_nv.tile.language.gpu.sides import exchange_sides
from tinygrad_nv.tile.language.gpu.sorting import Sorting
from tinygrad_nv.tile.language.gpu.specialised import Specialised
from tinygrad_nv.tile.language.ir import Op, Program, Value
from tinygrad_nv.tile.language.passes import Pass, keep_results, run_passes
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

FEW_WARPS = 4       # of a multiprocessor, one for each of its schedulers


def problems(program: Program, schedule: TileSchedule, gpu: GPU, pdl: bool = False) -> list[str]:
    """Why a program cannot be a kernel with a schedule on a GPU, in words; empty when it can."""
    return list(_write(_Key(program), schedule, gpu.arch, gpu.sm_count, pdl)[1])


def build(program: Program, schedule: TileSchedule, gpu: GPU, pdl: bool = False) -> TileKernel:
    """The kernel of a program without problems; parameters are its tensors in their order, then its rows
    where they are symbolic. `pdl`: on Hopper it may be launched before the kernel ahead of it has ended, for
    which it waits itself. Raises `ScheduleError` with the problems of one that has some."""
    made, refused = _write(_Key(program), schedule, gpu.arch, gpu.sm_count, pdl)
    if made is None:
        raise ScheduleError("; ".join(refused), "a schedule that the GPU has room for",
                            "use smaller blocks, fewer stages, or another number of warps")
    return made


class _Key:
    """A program, equal to another of the same text."""

    def __init__(self, program: Program) -> None: self.program, self.text = program, str(program)
    def __hash__(self) -> int: return hash(self.text)
    def __eq__(self, other: object) -> bool: return isinstance(other, _Key) and other.text == self.text


@dataclass(eq=False)
class Writing:
    """A program on its way to a kernel, and what the passes have made."""
    program: Program
    schedule: TileSchedule
    arch: str
    sm_count: int
    pdl: bool
    assignment: Assignment = field(init=False)
    loops: dict[Op, list[Op]] = field(init=False)       # that a producer fills, with their loads
    attempts: list[Attempt] = field(init=False)
    registers: dict[Value, tuple[Op, float]] = field(init=False)
    failed: list[str] = field(default_factory=list)     # attempts that there is no room for
    flights: Mapping[Op, Flight] = field(default_factory=dict)
    kernel: TileKernel | None = None

    @property
    def there(self) -> int:
        """Registers of a thread."""
        return registers_of(self.schedule.warp_count, bool(self.loops))


@keep_results(256)
def _write(key: _Key, schedule: TileSchedule, arch: str, sm_count: int,
           pdl: bool = False) -> tuple[TileKernel | None, Sequence[str]]:
    state = Writing(key.program, schedule, arch, sm_count, pdl)
    refused = run_passes(PASSES, state)
    return state.kernel, refused


def _show_limits(state: Writing) -> str:
    s = state.schedule
    return f"{state.arch}, {s.warp_count} warps, {s.depth} stages, vectors of {s.vector_width}"


def _assign(state: Writing) -> None:
    s = state.schedule
    state.program = exchange_sides(state.program, s.warp_count, state.arch)
    state.assignment = Assignment(state.program, s.warp_count, s.vector_width, state.arch)


def _find_roles(state: Writing) -> None:
    depth = Depth(state.schedule.depth, MOST_WARPS)
    state.loops = find_produced_loops(state.program, state.assignment, depth, state.arch)


def _plan_pipelines(state: Writing) -> None:
    state.attempts = list_attempts(state.program, state.assignment, state.loops, state.schedule.depth,
                                   state.sm_count)


def _count_registers(state: Writing) -> list[str]:
    state.registers = count_registers(state.program, state.assignment)
    return find_crowded(state.registers, 1 << state.assignment.thread_bits, state.there)


def _write_ptx(state: Writing) -> list[str]:
    """Writes the first attempt that there is room for; why there is none, of the first."""
    refused: list[str] = []
    for attempt in state.attempts:
        emitter = _emit_program(state, attempt)
        found = _too_large(emitter, state.arch)
        if not found and attempt.production.ctas and not _alone(emitter, state.schedule, state.arch): continue
        if not found:
            state.kernel, state.flights = _kernel(emitter, state.pdl), emitter.flights
            return []
        state.failed += found
        refused = refused or found
    return refused


def _show_ptx(state: Writing) -> str:
    assert state.kernel is not None
    remarks = [*(f"no room: {each}" for each in state.failed), *list_flights(state.program, state.flights)]
    return "".join(f"// {each}\n" for each in remarks) + state.kernel.ptx


PASSES: tuple[Pass[Writing], ...] = (
    Pass("check", "What no kernel can be is refused: dtypes, warps, tiles that are too large.",
         lambda state: check(state.program, state.schedule, state.arch),
         _show_limits),
    Pass("layout", "Each tile gets the threads and registers that hold its elements; each dot its unit.",
         _assign, lambda state: show_layouts(state.program, state.assignment)),
    Pass("roles", "Loops that TMA can fill get a producer warp; the others run the program.",
         _find_roles, lambda state: show_roles(state.program, state.schedule.warp_count, state.loops)),
    Pass("pipelining", "Loops get stages in shared memory, to which their operands are copied ahead.",
         _plan_pipelines, lambda state: show_pipelines(state.program, state.attempts)),
    Pass("registers", "Tiles are held against the registers that a thread has.",
         _count_registers, lambda state: show_registers(state.program, state.registers, state.there)),
    Pass("ptx", "Operations are written one by one, with the barriers between them, in the first stages "
         "that fit.", _write_ptx, _show_ptx))


def _alone(emitter: Emitter, schedule: TileSchedule, arch: str) -> bool:
    """Whether a multiprocessor has room for one CTA: with two, one stores while the other multiplies."""
    return alone(schedule.warp_count, emitter.kb.smem_bytes, SMEM_BYTES[arch])


def _emit_program(state: Writing, attempt: Attempt) -> Emitter:
    """The program, written by the plans of an attempt. Where no more warps would run at once if each had
    fewer registers, ptxas is told to save none: it would put loads behind what waits for others."""
    program, produced = state.program, bool(attempt.production.loops)
    warps = state.schedule.warp_count + PRODUCERS * produced
    cluster = (1, 1, program.cluster) if program.cluster > 1 else ()
    few = math.prod(program.grid) * warps <= FEW_WARPS * state.sm_count
    kb = Kernel(_name(program.name), arch=state.arch, threads=32 * warps, min_ctas=int(few or produced),
                cluster=cluster)
    emitter = Emitter(kb, program, state.assignment, attempt)
    emitter.pdl = emitter.ahead = state.pdl and kb.hopper
    emitter.write()
    return emitter


def _kernel(emitter: Emitter, pdl: bool) -> TileKernel:
    kb = emitter.kb
    grid = (emitter.ctas, 1, 1) if emitter.ctas else emitter.program.grid
    cluster = 1, 1, emitter.program.cluster
    return TileKernel(kb.name, kb.ptx(), grid, kb.threads[0], kb.dynamic_smem, cluster,
                      maps=tuple(emitter.maps), rows_of_cta=emitter.program.rows, pdl=pdl and kb.hopper)


def _name(name: str) -> str: return "".join(each if each.isalnum() or each == "_" else "_" for each in name)


def _too_large(emitter: Emitter, arch: str) -> list[str]:
    need, there = emitter.kb.smem_bytes, SMEM_BYTES[arch]
    if need <= there: return []
    return [f"{need} B of shared memory ({emitter.arena.describe()}): {arch} has {there}"]


class Emitter(Memory, Sorting, Specialised):
    """A kernel under construction."""

    def __init__(self, kb: Kernel, program: Program, assignment: Assignment, attempt: Attempt) -> None:
        super().__init__(kb, program, assignment)
        self.loop_plans, self.bound, self.partial, self.arrived = attempt.loops, {}, set(), []
        self.acrosses = sum(op.name == "across" for op in program.body.walk())
        self.prepare_dots()
        self.specialise(attempt.production)

    def write(self) -> None:
        """The kernel's text."""
        if self.filled and self.ahead: self.await_ahead()
        if self.filled: self.with_producer()
        else: self.region(self.program.body)
        if self.arena.copying: self.kb.cp_async_wait(0)
        if self.acrosses: self.kb.cluster_wait()    # shared memory is there as long as others read it
        self.arena.declare()
