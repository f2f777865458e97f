"""Texts of what the passes of a GPU have made. Values have the names of the program's text."""
from __future__ import annotations

from collections.abc import Mapping, Sequence

from tinygrad_nv.table import align_columns
from tinygrad_nv.tile.language.gpu.assign import Assignment
from tinygrad_nv.tile.language.gpu.consumer import Flight
from tinygrad_nv.tile.language.gpu.dots import DotPlan
from tinygrad_nv.tile.language.gpu.layout import NONE, Layout, extents
from tinygrad_nv.tile.language.gpu.pipelining import Attempt
from tinygrad_nv.tile.language.gpu.registers import PRODUCERS, register_counts
from tinygrad_nv.tile.language.ir import Op, Program, Value, name_values

AXES = "ijklmn"


def show_layouts(program: Program, assignment: Assignment) -> str:
    """Returns which bits of an element's place registers, lanes and warps stand for: j0-2 are the lowest
    three of the second axis."""
    names, rows, free, staged = name_values(program), [], [], []
    for op in program.body.walk():
        for each in op.results:
            if not each.shape: continue
            if each in assignment.free: free.append(names[each])
            elif assignment.aside(each): staged.append(names[each])
            else: rows.append((names[each], str(each.type), _maker(op),
                               *_bits(assignment.layout(each), each.shape)))
    head = ("value", "type", "made by", "registers", "lanes", "warps")
    lines = align_columns([head, *rows]) if rows else []
    plans = [(names[op.result], f"{plan.kind} {plan.m}x{plan.n}x{plan.k}", _warps(plan))
             for op, plan in assignment.plans.items()]
    if plans: lines += ["", *align_columns([("dot", "by", "warps"), *plans])]
    if staged: lines += ["", f"in shared memory, for dots: {' '.join(staged)}"]
    if free: lines += ["", f"computed where they are used: {' '.join(free)}"]
    return "\n".join(lines)


def _maker(op: Op) -> str:
    """The operation that makes a value."""
    return f"{op.name} {op.attributes['fn']}" if "fn" in op.attributes else op.name


def _warps(plan: DotPlan) -> str: return f"{plan.warps_m} x {plan.warps_n}" if plan.kind != "fma" else "all"


def _bits(layout: Layout, shape: tuple[int, ...]) -> tuple[str, str, str]:
    """The bits of registers, lanes and warps."""
    lanes, warps = layout.threads[:5], layout.threads[5:]
    return _words(layout.registers, shape), _words(lanes, shape), _words(warps, shape)


def _words(bits: Sequence[int], shape: tuple[int, ...]) -> str:
    """Bits as runs along an axis; - stands for one that makes no difference."""
    of, runs = extents(shape), list[tuple[str, int, int]]()
    for bit in bits:
        axis = next((a for a in range(len(shape)) if bit in of.of_axis(a)), -1)
        name, place = ("-", 0) if bit == NONE else (AXES[axis], bit - of.first[axis])
        if runs and runs[-1][0] == name and (bit == NONE or runs[-1][2] + 1 == place):
            runs[-1] = name, runs[-1][1], place
        else: runs.append((name, place, place))
    return " ".join(name if name == "-" else f"{name}{first}" + f"-{last}" * (last > first)
                    for name, first, last in runs) or "-"


def show_roles(program: Program, warps: int, loops: Mapping[Op, Sequence[Op]]) -> str:
    """Returns which warps do what."""
    if not loops: return f"warps 0-{warps - 1}  the program" if warps > 1 else "warp 0  the program"
    few, many = register_counts(warps)
    names = name_values(program)
    loads = " ".join(names[each.result] for found in loops.values() for each in found)
    rows = [(f"warps 0-{warps - 1}", "the program", *[f"{many} registers a thread"] * bool(many)),
            (f"warp {warps}", f"copies of {loads} by TMA", *[f"{few} registers a thread"] * bool(few)),
            (f"warps {warps + 1}-{warps + PRODUCERS - 1}", "nothing", *[""] * bool(few))]
    return "\n".join(align_columns(rows))


def show_pipelines(program: Program, attempts: Sequence[Attempt]) -> str:
    """Returns what loops load ahead, of the first attempt; of others what differs."""
    names, (first, *others) = name_values(program), attempts
    if not first.loops: return "no loop loads operands of dots ahead"
    rows = [("loop", "loads", "by", "stages", "ahead", "in flight")]
    for op, plan in first.loops.items():
        loads, flying = (" ".join(names[each.result] for each in ops) for ops in (plan.loads, plan.flying))
        rows.append((f"for {names[op.regions[0].arguments[0]]}", loads, plan.by, str(plan.stages),
                     str(plan.ahead), "see ptx" if plan.by == "TMA" else flying or "-"))
    lines = [*_walks(first), *align_columns(rows, numbers=(3, 4))]
    if others: lines += ["", f"where that has no room: {'; '.join(map(_stages, others))}"]
    return "\n".join(lines)


def _walks(attempt: Attempt) -> list[str]:
    ctas = attempt.production.ctas
    return [f"{ctas} CTAs go through the programs"] if ctas else []


def _stages(attempt: Attempt) -> str:
    return ", ".join(["x".join(str(plan.stages) for plan in attempt.loops.values()) + " stages",
                      *_walks(attempt)])


def list_flights(program: Program, flights: Mapping[Op, Flight]) -> list[str]:
    """Returns a line for each loop of a producer whose products are in flight across iterations."""
    names, made = name_values(program), []
    for op, flight in flights.items():
        words = [f"{' '.join(names[each.result] for each in dots)} {when}" for dots, when in (
            (flight.late, "waited for in the next"), (flight.early, "issued in the one before")) if dots]
        if words: made.append(f"for {names[op.regions[0].arguments[0]]}: {', '.join(words)} iteration")
    return made


def show_registers(program: Program, counts: Mapping[Value, tuple[Op, float]], there: int) -> str:
    """Returns the registers of each tile, the most first."""
    names = name_values(program)
    rows = [(names[value], str(value.type), _maker(op), f"{count:g}")
            for value, (op, count) in sorted(counts.items(), key=lambda each: -each[1][1])]
    table = align_columns([("value", "type", "made by", "registers"), *rows], numbers=(3,)) if rows else []
    return "\n".join([f"{there} registers a thread", "", *table])
