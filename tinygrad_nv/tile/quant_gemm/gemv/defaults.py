"""quant_gemv's schedules worth trying first."""
from __future__ import annotations

from tinygrad_nv.tile.gemm.schedules import MOST_ROWS
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.quant_gemm.gemv.plan import QuantGemvPlan
from tinygrad_nv.tile.quant_gemm.schedules import QuantGemv
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.template import GPU


def candidates(spec: QuantGemmSpec, gpu: GPU) -> list[QuantGemv]:
    """None for many rows; split where the activations do not fit in a third of the shared memory."""
    if spec.gemm.m > MOST_ROWS: return []
    made = []
    # from 5 rows on, two tiles share what is read of activations
    first = ((2, 2, 8), (1, 2, 8)) if spec.gemm.m > 4 else ((1, 2, 8), (2, 2, 8))
    for tiles, units, warps in (*first, (1, 1, 8), (1, 1, 4), (1, 1, 1)):
        base = QuantGemv().of(tiles, units).warps(warps)
        plan = QuantGemvPlan.of(spec, base)
        splits = -(-plan.smem_bytes * 3 // SMEM_BYTES[gpu.arch])
        made.append(base.split(min(splits, plan.iterations)))
    return made
