"""gemv's schedules worth trying first: warps with some columns and steps each, side by side or along K."""
from __future__ import annotations

from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan, turns
from tinygrad_nv.tile.gemm.schedules import MOST_ROWS, Gemv
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU


def candidates(spec: GemmSpec, gpu: GPU) -> list[Gemv]:
    """None for many rows; split where the activations do not fit in half of the shared memory."""
    made, base = [], Gemv().columns(64)
    if turns(spec): base = base.swapped()
    elif spec.m > MOST_ROWS: return []
    plan = GemvPlan.of(spec, base)
    nbytes = plan.spec.m * spec.k * spec.a.dtype.itemsize
    base = base.split(-(-nbytes * 2 // SMEM_BYTES[gpu.arch]))
    for warps in (4, 8):
        for granules in (1, 2, 4, 8, 16, 32):
            for steps in (1, 2, 4):
                made.append(base.columns(granules * plan.granule).k(steps * plan.step).warps(warps))
    return made
