"""gemv's schedules worth trying first: warps with some columns and steps each, side by side or along K."""
from __future__ import annotations

from math import log2

from tinygrad_nv.tile.gemm.gemv.plan import GemvPlan, turns
from tinygrad_nv.tile.gemm.schedules import MOST_ROWS, Gemv
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.template import GPU

COLUMNS = 64        # of a CTA, at best: each reads the activations again, and SMs should have equally many
LONG = 1024         # of K, above which each warp is to have two iterations
LEAST_COLUMNS = 4   # below which that is half of what it reads


def candidates(spec: GemmSpec, gpu: GPU) -> list[Gemv]:
    """None for many rows; split where the activations do not fit in half of the shared memory. Where K is
    long enough, each warp has an iteration to load while it multiplies another."""
    made, base = [], Gemv().columns(64)
    if turns(spec): base = base.swap_operands()
    elif spec.m > MOST_ROWS: return []
    plan = GemvPlan.of(spec, base)
    nbytes = plan.spec.m * spec.k * spec.a.dtype.itemsize
    base = base.split(-(-nbytes * 2 // SMEM_BYTES[gpu.arch]))
    widths = [plan.granule << i for i in range(6) if plan.granule << i >= LEAST_COLUMNS]
    for warps in (8, 4):
        for columns in sorted(widths, key=lambda columns: abs(log2(columns / COLUMNS))):
            for steps in (1, 2, 4):
                made.append(base.columns(columns).k(steps * plan.step).warps(warps))
    if plan.spec.k < LONG: return made
    busy = [s for s in made if 2 * GemvPlan.of(spec, s).warps_k * s.block_k * s.splits <= plan.spec.k]
    return busy or made
