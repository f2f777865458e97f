"""The pass that refuses programs of which no kernel can be, before any is written."""
from __future__ import annotations

import math

from tinygrad_nv.tile.language.gpu.dots import FP8
from tinygrad_nv.tile.language.ir import Op, Program
from tinygrad_nv.tile.language.schedule import TileSchedule

ARCHITECTURES = ("sm_80", "sm_89", "sm_90a")
MOST_WARPS = 32
MOST_ELEMENTS = 1 << 20


def check(program: Program, schedule: TileSchedule, arch: str) -> list[str]:
    """Why there is no kernel, in words."""
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
                out.append(f"{place_of(op)}a tile {each.type} of {math.prod(each.shape)} elements: "
                           f"there are at most {MOST_ELEMENTS}")
    return out


def place_of(op: Op) -> str:
    """Returns where an operation was written, ahead of words about it."""
    return f"{op.line}: " if op.line else ""
