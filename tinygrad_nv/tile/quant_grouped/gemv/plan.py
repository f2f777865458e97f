"""What follows from a spec and a schedule of `quant_grouped_gemv`: the matmul of a tile, what is legal, what
is tried first, and what it takes."""
from __future__ import annotations

from functools import lru_cache

from tinygrad_nv.tile.grouped_gemm.gemv.plan import ROWS, matmul_of, usual_rows
from tinygrad_nv.tile.grouped_gemm.work import MOST_GROUPS, most_tiles
from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.quant_gemm.gemv import defaults, legality
from tinygrad_nv.tile.quant_gemm.gemv.plan import QuantGemvPlan
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedGemv
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.template import GPU


@lru_cache(1024)
def matrix_of(spec: QuantGroupedSpec, rows: int) -> QuantGemmSpec:
    """The matmul of a tile, whose rows are counted on the device."""
    return QuantGemmSpec(matmul_of(spec.grouped, rows), spec.type)


def plan_of(spec: QuantGroupedSpec, s: QuantGroupedGemv) -> QuantGemvPlan:
    """The plan of a tile."""
    return QuantGemvPlan.of(matrix_of(spec, s.rows), s.gemv)


def problems(spec: QuantGroupedSpec, s: QuantGroupedGemv, arch: str) -> list[str]:
    """Why the template cannot have a schedule; empty when it can."""
    if s.rows not in ROWS: return [f"tiles of {s.rows} rows, not {', '.join(map(str, ROWS))}"]
    out = legality.matrix_problems(matrix_of(spec, s.rows), s.gemv, arch)
    if spec.grouped.groups > MOST_GROUPS: out.append(f"{spec.grouped.groups} groups, at most {MOST_GROUPS}")
    if (count := most_tiles(spec.grouped, s.rows)) > MOST_GRID:
        out.append(f"{count} tiles, at most {MOST_GRID}")
    return out


def candidates(spec: QuantGroupedSpec, gpu: GPU) -> list[QuantGroupedGemv]:
    """Those of a matmul of so few rows."""
    return [QuantGroupedGemv.like(each, rows) for rows in usual_rows(spec.grouped)
            for each in defaults.candidates(matrix_of(spec, rows), gpu)]
