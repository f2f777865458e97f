"""Legality of `quant_grouped_wgmma`: what it asks of a schedule."""
from __future__ import annotations

from tinygrad_nv.tile.grouped_gemm.wgmma import legality as grouped
from tinygrad_nv.tile.quant_gemm.wgmma import legality as quant
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedWgmma
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.quant_grouped.wgmma.plan import QuantGroupedPlan

MOST_TWICE = 112        # rows whose places ptxas keeps beside sums that are stored later


def problems(spec: QuantGroupedSpec, s: QuantGroupedWgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    if found := grouped.operands(spec.grouped): return found
    if not s.swap: return ["rows as the left operand, which is the matrix"]
    plan = QuantGroupedPlan.of(spec, s)
    out = grouped.of_plan(plan) or [*quant.of_stages(plan), *quant.registers(plan)]
    if plan.subtiles > plan.halves and plan.tokens > MOST_TWICE:
        out.append(f"{plan.tokens} rows of tiles that are stored in turns, at most {MOST_TWICE}")
    return out
