"""Plan of `grouped_mma`, which follows from a spec and a schedule: the matmul whose rows are those of all
tiles that there may be, what is legal, what is tried first, and what it takes."""
from __future__ import annotations

from dataclasses import asdict, replace
from functools import lru_cache

from tinygrad_nv.tile.gemm.cost import CostModel, Prediction
from tinygrad_nv.tile.gemm.mma import template as mma
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.grouped_gemm.cost import active, tiles
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedMma, GroupedTransposedMma
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, TransposedGroupedSpec
from tinygrad_nv.tile.grouped_gemm.work import MOST_GROUPS, most_tiles
from tinygrad_nv.tile.limits import MOST
from tinygrad_nv.tile.template import GPU


@lru_cache(1024)
def matmul_of(spec: GroupedGemmSpec, rows: int, matrices: int = 0) -> GemmSpec:
    """A matmul of so many rows; of so many matrices, for the cost model."""
    batch = (matrices,) if matrices else ()
    a, b, out = ((each,) * len(batch) for each in (rows * spec.k, spec.n * spec.k, rows * spec.columns))
    across, along = (1, spec.n) if spec.transposed else (spec.k, 1)
    return GemmSpec(rows, spec.columns, spec.k, Operand(spec.dtype, spec.k, 1, a),
                    Operand(spec.dtype, across, along, b), Result(spec.dtype, spec.columns, 1, out), batch,
                    parts=spec.halves, part=spec.columns * across * (spec.halves - 1))


def whole(spec: GroupedGemmSpec, s: GroupedMma) -> GemmSpec:
    """The matmul of all tiles."""
    return matmul_of(spec, most_tiles(spec, s.block_m) * s.block_m)


def problems(spec: GroupedGemmSpec, s: GroupedMma, arch: str) -> list[str]:
    """Why the template cannot have a schedule; empty when it can."""
    if s.splits > 1 or s.swap: return ["splits, or the transposed matmul"]
    out = mma.problems(whole(spec, s), s.mma, arch)
    if spec.groups > MOST_GROUPS: out.append(f"{spec.groups} groups, at most {MOST_GROUPS}")
    if (count := most_tiles(spec, s.block_m) * -(-spec.n // s.block_n)) > MOST:
        out.append(f"{count} tiles, at most {MOST}")
    return out


def candidates(spec: GroupedGemmSpec, gpu: GPU) -> list[GroupedMma]:
    """Returns the candidates of a matmul."""
    return [GroupedMma(**asdict(each)) for each in mma.candidates(whole(spec, GroupedMma()), gpu)]


def candidates_transposed(spec: TransposedGroupedSpec, gpu: GPU) -> list[GroupedTransposedMma]:
    """Returns the candidates for matrices (K, N)."""
    return [GroupedTransposedMma(**asdict(each)) for each in candidates(spec, gpu)]


def cost(spec: GroupedGemmSpec, s: GroupedMma, gpu: GPU) -> Prediction:
    """Returns the time of matmuls of the usual number of rows, one for each group that has rows."""
    some = active(spec)
    rows = max(1, round(tiles(spec, s.block_m) / some)) * s.block_m
    one = matmul_of(spec, rows, max(1, round(some)))
    made = CostModel(one, gpu_model_for(gpu.arch, gpu.sm_count)).predict(s.mma)
    return replace(made, seconds=made.seconds * some / one.matrices)

