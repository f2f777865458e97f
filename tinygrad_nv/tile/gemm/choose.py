"""Which schedule a product gets, or why none.

Protocol: `choose` takes the winner that the schedule database has, else what the cost model says
(analytic.py). None means that no template takes the product, and `why_not` says why in words for a reader.
"""
from __future__ import annotations

from tinygrad.helpers import BEAM

from tinygrad_nv.tile import database
from tinygrad_nv.tile.clock import Clock
from tinygrad_nv.tile.gemm.analytic import analytic
from tinygrad_nv.tile.gemm.defaults import starts
from tinygrad_nv.tile.gemm.legality import problems
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.schedule import Schedule


def choose(spec: GemmSpec, arch: str, sm_count: int = 0, clock: Clock | None = None) -> Schedule | None:
    """The schedule for a product on a GPU with `sm_count` SMs (0: as the architecture's first has); None
    when there is none. With BEAM=N candidates are tried, on the GPU of `clock`, or counted by the
    emulator."""
    if (known := database.lookup(spec, arch)) is not None: return known
    chosen = analytic(spec, arch, sm_count)
    if chosen is None or BEAM.value < 1: return chosen
    from tinygrad_nv.tile.gemm.tune import search  # the emulator is loaded by those who try
    return search(spec, arch, BEAM.value, sm_count, clock) or chosen


def why_not(spec: GemmSpec, arch: str) -> str:
    """Why `choose` finds nothing: what each template says of the schedule it likes best; "" when it does."""
    if analytic(spec, arch) is not None: return ""
    if arch not in SMEM_BYTES: return problems(Schedule(), spec, arch)[0]
    said: dict[str, list[str]] = {}
    for s in (*starts(spec, arch), Schedule().using("gemv")):
        found = problems(s, spec, arch)
        if s.template not in said or len(found) < len(said[s.template]): said[s.template] = found
    return "; ".join(f"{template}: {', '.join(found)}" for template, found in said.items())
