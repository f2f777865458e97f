"""Counts of chosen tokens (tile/sampling/spec.py), in place.

Protocol: one part; each row adds to one number.
"""
from __future__ import annotations

from typing import ClassVar

from tinygrad_nv.cpu.kernel import CPUKernel, kernel
from tinygrad_nv.cpu.schedule import CPUSchedule
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.tile.sampling.spec import CountSpec


class CPUCount(CPUSchedule):
    """One part."""
    template: ClassVar[str] = "count"


def default(spec: CountSpec, target: CPU) -> CPUCount:
    """The schedule."""
    return CPUCount(target.isa)


def build(spec: CountSpec, schedule: CPUCount) -> CPUKernel:
    """The kernel: counts, slots of the rows, tokens."""
    body = f"""
  for (int r = 0; r < {spec.rows}; r++) {{
    const s32 slot = slots[r], token = tokens[r];
    if (slot >= 0 && slot < {spec.slots} && token >= 0 && token < {spec.size})
      counts[slot * {spec.size}LL + token] += 1.f;
  }}"""
    return kernel("count", schedule.isa, body, [("float", "counts")], [("s32", "slots"), ("s32", "tokens")])
