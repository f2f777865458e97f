"""The pass that counts registers: those of a thread in each role, and those that each tile takes."""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.language.gpu.assign import Assignment
from tinygrad_nv.tile.language.gpu.check import place_of
from tinygrad_nv.tile.language.gpu.layout import absent
from tinygrad_nv.tile.language.ir import Op, Program, Value

PRODUCERS = 4           # warps
PRODUCER_REGISTERS, MOST_REGISTERS = 40, 240
MOST_OF_THREAD, FILE = 255, 65536       # registers of a thread, and of a multiprocessor


def count_registers(program: Program, assignment: Assignment) -> dict[Value, tuple[Op, float]]:
    """Registers of a thread that each tile takes, and the operation that makes it."""
    made = dict[Value, tuple[Op, float]]()
    for op in program.body.walk():
        for each in op.results:
            if not each.shape or each in assignment.free or assignment.aside(each): continue
            nbytes = 1 if each.dtype == dtypes.bool else max(each.dtype.itemsize, 2)
            made[each] = op, absent(assignment.layout(each), each.shape).count(False) * nbytes / 4
    return made


def find_crowded(counts: dict[Value, tuple[Op, float]], threads: int, there: int) -> list[str]:
    """Tiles that do not fit in a thread's registers."""
    return list(dict.fromkeys(
        f"{place_of(op)}a tile {each.type} takes {count:.0f} registers of each of {threads} threads: "
        f"there are {there}" for each, (op, count) in counts.items() if count > there))


def registers_of(warps: int, produced: bool) -> int:
    """Registers that a thread of a program's warps has."""
    if produced and (many := register_counts(warps)[1]): return many
    return min(FILE // (32 * (warps + PRODUCERS * produced)) // 8 * 8, MOST_OF_THREAD)


def register_counts(warps: int) -> tuple[int, int]:
    """Registers of the producer's threads and of the others; 0 of these where all have enough."""
    groups = -(-warps // 4)
    each = min(FILE // (128 * (groups + 1)) // 8 * 8, MOST_OF_THREAD)
    if each >= MOST_REGISTERS: return 0, 0
    left = each * (groups + 1) - PRODUCER_REGISTERS
    return PRODUCER_REGISTERS, min(left // groups // 8 * 8, MOST_REGISTERS)


def alone(warps: int, ring_bytes: int, there: int) -> bool:
    """Whether a multiprocessor has room for one CTA of a program with a producer."""
    return bool(register_counts(warps)[1]) or 2 * ring_bytes > there
