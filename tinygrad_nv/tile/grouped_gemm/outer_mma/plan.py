"""Plan of `grouped_outer_mma`, which follows from a spec and a schedule: the matmul of each group, yᵀ x over
its rows, what is legal, what is tried first, and what it takes."""
from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.gemm.cost import CostModel, Prediction
from tinygrad_nv.tile.gemm.mma import template as mma
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.grouped_gemm.cost import tiles_of_group
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedOuterMma
from tinygrad_nv.tile.limits import MOST
from tinygrad_nv.tile.template import GPU


@dataclass(frozen=True)
class RowOperand(Operand):
    """A matrix whose rows are summed over: MN-major, a single column too."""
    @property
    def major(self) -> Literal["K", "MN", ""]: return "MN"


@lru_cache(1024)
def matmul_of(spec: GroupedOuterSpec, rows: int) -> GemmSpec:
    """The matmuls of groups of so many rows. Where a group's rows begin, the kernel finds out."""
    y, x = (RowOperand(spec.dtype, 1, width, (0,)) for width in (spec.n, spec.k))
    return GemmSpec(spec.n, spec.k, rows, y, x, Result(spec.dtype, spec.k, 1, (spec.n * spec.k,)),
                    (spec.groups,))


def problems(spec: GroupedOuterSpec, s: GroupedOuterMma, arch: str) -> list[str]:
    """Why the template cannot have a schedule; empty when it can."""
    if spec.dtype == dtypes.float32:
        return ["operands of float32: mma.sync multiplies 16-bit floats here, tinygrad's kernels float32"]
    if s.splits > 1 or s.swap: return ["splits, or the transposed matmul"]
    out = mma.problems(matmul_of(spec, spec.rows), s.mma, arch)
    if (count := -(-spec.n // s.block_m) * -(-spec.k // s.block_n)) > MOST:
        out.append(f"{count} tiles of a group, at most {MOST}")
    return out


def candidates(spec: GroupedOuterSpec, gpu: GPU) -> list[GroupedOuterMma]:
    """Returns the candidates of a matmul."""
    matmul = matmul_of(spec, spec.rows)
    return [GroupedOuterMma(**asdict(each)) for each in mma.candidates(matmul, gpu)]


def cost(spec: GroupedOuterSpec, s: GroupedOuterMma, gpu: GPU) -> Prediction:
    """Returns the time of matmuls over the usual number of rows, one for each group; those without rows store
    zeros."""
    steps = max(1, round(tiles_of_group(spec.rows / spec.groups, s.block_k)))
    usual = matmul_of(spec, steps * s.block_k)
    return CostModel(usual, gpu_model_for(gpu.arch, gpu.sm_count)).predict(s.mma)
