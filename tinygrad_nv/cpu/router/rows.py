"""The order of slots whose experts are given (tile/router/spec.py) on a CPU: a counting sort, by one part."""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, kernel
from tinygrad_nv.cpu.router.kernel import MOST_EXPERTS
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.router.spec import GroupRowsSpec


class CPUGroupRows(CPUSchedule):
    """Nothing to choose."""
    template: ClassVar[str] = "group_rows"


def default(spec: GroupRowsSpec, target: CPU) -> CPUGroupRows:
    """The schedule."""
    return CPUGroupRows(target.isa)


def problems(spec: GroupRowsSpec, s: CPUGroupRows) -> list[str]:
    """Why slots cannot be sorted by a schedule; empty when they can."""
    out = [f"{s.parts} parts of a sort, 1 is needed"] * (s.parts != 1)
    return out + [f"{spec.experts} experts, at most {MOST_EXPERTS}"] * (spec.experts > MOST_EXPERTS)


def build(spec: GroupRowsSpec, s: CPUGroupRows) -> CPUKernel:
    """The kernel: order, offsets; experts; the number of tokens where it is symbolic."""
    count, there = spec.experts, f"m * {spec.k}ll" if spec.symbolic else str(spec.slots)
    body = f"""
  s32 next[{count}];
  for (s64 e = 0; e <= {count}; e++) offsets[e] = 0;
  for (s64 slot = 0; slot < {there}; slot++) if ((u32)experts[slot] < {count}u) offsets[experts[slot] + 1]++;
  for (s64 e = 0; e < {count}; e++) {{
    next[e] = offsets[e];
    offsets[e + 1] += offsets[e];
  }}
  s64 last = offsets[{count}];
  for (s64 slot = 0; slot < {spec.slots}; slot++) {{
    const u32 e = slot < {there} ? (u32)experts[slot] : {count}u;
    if (e < {count}u) order[next[e]++] = (s32)slot;
    else order[last++] = (s32)slot;
  }}"""
    return kernel(f"group_rows_{spec.slots}x{count}", s.isa, body, [("s32", "order"), ("s32", "offsets")],
                  [("s32", "experts")], ["m"] * spec.symbolic)
