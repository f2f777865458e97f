"""Plan of `quant_grouped_gemv`, which follows from a spec and a schedule: the matmul of a tile, what is
legal, and what is tried first."""
from __future__ import annotations

from functools import lru_cache

from tinygrad_nv.tile.grouped_gemm.gemv.plan import ROWS, matmul_of, usual_rows
from tinygrad_nv.tile.grouped_gemm.work import MOST_GROUPS, most_tiles
from tinygrad_nv.tile.limits import MOST_GRID, SMEM_BYTES
from tinygrad_nv.tile.quant_gemm.gemv import plan as gemv
from tinygrad_nv.tile.quant_gemm.gemv.plan import REGISTERS, QuantGemvPlan
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedGemv
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.template import GPU

ADDRESSES = 8       # registers of a tile
SHAPES = ((2, 1, 4), (1, 2, 4), (1, 1, 4), (2, 2, 4), (1, 2, 8), (1, 1, 1))     # tiles, units, warps


@lru_cache(1024)
def matrix_of(spec: QuantGroupedSpec, rows: int) -> QuantGemmSpec:
    """The matmul of a tile, whose rows are counted on the device."""
    return QuantGemmSpec(matmul_of(spec.grouped, rows), spec.type)


def plan_of(spec: QuantGroupedSpec, s: QuantGroupedGemv) -> QuantGemvPlan:
    """The plan of a tile."""
    return QuantGemvPlan.of(matrix_of(spec, s.rows), s.gemv)


def ctas_an_sm(plan: QuantGemvPlan) -> int:
    """For how many ptxas is to leave registers: tiles beyond two take `ADDRESSES` more than the plan knows
    of, where with fewer ptxas 13.0 spills up to 78 bytes."""
    more = ADDRESSES * max(0, plan.schedule.tiles * plan.spec.parts - 2)
    return max(1, min(REGISTERS // (-(-(plan.registers + more) // 8) * 8), 1024) // plan.threads)


def problems(spec: QuantGroupedSpec, s: QuantGroupedGemv, arch: str) -> list[str]:
    """Why the template cannot have a schedule; empty when it can."""
    if s.rows not in ROWS: return [f"tiles of {s.rows} rows, not {', '.join(map(str, ROWS))}"]
    out = gemv.matrix_problems(matrix_of(spec, s.rows), s.gemv, arch)
    if spec.grouped.groups > MOST_GROUPS: out.append(f"{spec.grouped.groups} groups, at most {MOST_GROUPS}")
    if (count := most_tiles(spec.grouped, s.rows)) > MOST_GRID:
        out.append(f"{count} tiles, at most {MOST_GRID}")
    return out


def candidates(spec: QuantGroupedSpec, gpu: GPU) -> list[QuantGroupedGemv]:
    """Small CTAs, of which an SM has many: each begins with what it waits for. Split where the activations do
    not fit in a third of the shared memory."""
    made = []
    for rows in usual_rows(spec.grouped):
        for tiles, units, warps in SHAPES:
            base = QuantGroupedGemv().by(rows).of(tiles, units).warps(warps)
            plan = plan_of(spec, base)
            splits = -(-plan.smem_bytes * 3 // SMEM_BYTES[gpu.arch])
            made.append(base.split(min(splits, plan.iterations)))
    return made
