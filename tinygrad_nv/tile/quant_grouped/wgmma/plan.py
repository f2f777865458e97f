"""Plan of `quant_grouped_wgmma`, which follows from a spec and a schedule.

Protocol: that of grouped_gemm/wgmma/plan.py with `swap`, and of quant_gemm/wgmma/plan.py: rows of the
computed matmul are those of a quantised matrix, with an activation of two, columns are rows of a group. A
stage has boxes of gate and then of up; of both each consumer has the same rows.

`problems` is what the template asks of a schedule; `candidates` are tiles, each with as many stages as fit.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import ClassVar

from tinygrad_nv.tile.grouped_gemm.wgmma import plan as grouped_wgmma
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import DEPTHS, GroupedPlan
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.wgmma import plan as quant_wgmma
from tinygrad_nv.tile.quant_gemm.wgmma.plan import MatrixStages
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedWgmma
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.template import GPU


@dataclass(frozen=True)
class QuantGroupedPlan(MatrixStages, GroupedPlan):
    """See above. `quant` is of one matrix, `stack` of all."""
    schedule: QuantGroupedWgmma
    quant: QuantGemmSpec
    stack: QuantGroupedSpec
    MOST_BOXES: ClassVar[int] = 2
    MOST_ROWS: ClassVar[int] = 384      # boxes have tiles of 16 of them
    MOST_SWAPPED: ClassVar[int] = 160

    @staticmethod
    @lru_cache(1024)
    def of(stack: QuantGroupedSpec, s: QuantGroupedWgmma) -> QuantGroupedPlan:
        """The plan."""
        made = GroupedPlan.of(stack.grouped, s)
        return QuantGroupedPlan(made.spec, s, made.a, made.b, made.grouped, stack.matrix, stack)

    @property
    def halves(self) -> int: return self.grouped.halves

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return self.matrix_bytes + self.b.nbytes


MOST_TWICE = 112        # rows whose places ptxas keeps beside sums that are stored later


def problems(spec: QuantGroupedSpec, s: QuantGroupedWgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    if found := grouped_wgmma.operands(spec.grouped): return found
    if not s.swap: return ["rows as the left operand, which is the matrix"]
    plan = QuantGroupedPlan.of(spec, s)
    out = grouped_wgmma.of_plan(plan) or [*quant_wgmma.of_stages(plan), *quant_wgmma.registers(plan)]
    if plan.subtiles > plan.halves and plan.tokens > MOST_TWICE:
        out.append(f"{plan.tokens} rows of tiles that are stored in turns, at most {MOST_TWICE}")
    return out


# columns of matrices, warps, most rows of a group that registers have room for
TILES = ((384, 16, 96), (256, 12, 160), (192, 16, 128), (128, 12, 256))
ROWS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)


def candidates(spec: QuantGroupedSpec, gpu: GPU) -> list[QuantGroupedWgmma]:
    """The tiles, each with as many stages as fit; none where there is no wgmma."""
    made, tiles = [], TILES if gpu.arch == "sm_90a" else ()
    for (columns, warps, most), rows, block_k in product(tiles, ROWS, (128, 64)):
        if rows <= most:
            base = QuantGroupedWgmma().block(columns, rows).k(block_k).warps(warps)
            depths = [base.stages(depth) for depth in DEPTHS]
            made.append(next((s for s in depths if not problems(spec, s, gpu.arch)), depths[-1]))
    return made
