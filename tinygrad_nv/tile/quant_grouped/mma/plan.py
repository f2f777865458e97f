"""Plan of `quant_grouped_mma`, which follows from a spec and a schedule: the matmul of all tiles that there
may be, what is legal, and what is tried first."""
from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache

from tinygrad_nv.tile.grouped_gemm.mma.plan import matmul_of
from tinygrad_nv.tile.grouped_gemm.work import MOST_GROUPS, most_tiles
from tinygrad_nv.tile.limits import MOST
from tinygrad_nv.tile.quant_gemm.mma import plan as mma
from tinygrad_nv.tile.quant_gemm.mma.plan import QuantMmaPlan
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedMma
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.template import GPU


@lru_cache(1024)
def whole(spec: QuantGroupedSpec, s: QuantGroupedMma) -> QuantGemmSpec:
    """The matmul of all tiles."""
    one = spec.grouped
    return QuantGemmSpec(matmul_of(one, most_tiles(one, s.block_m) * s.block_m), spec.type)


def plan_of(spec: QuantGroupedSpec, s: QuantGroupedMma) -> QuantMmaPlan:
    """The plan of all tiles."""
    return QuantMmaPlan.of(whole(spec, s), s.mma)


def problems(spec: QuantGroupedSpec, s: QuantGroupedMma, arch: str) -> list[str]:
    """Why the template cannot have a schedule; empty when it can."""
    one = spec.grouped
    if s.splits > 1 or s.swap: return ["splits, or the transposed matmul"]
    out = mma.matrix_problems(whole(spec, s), s.mma, arch)
    if one.groups > MOST_GROUPS: out.append(f"{one.groups} groups, at most {MOST_GROUPS}")
    if (count := most_tiles(one, s.block_m) * -(-one.n // s.block_n)) > MOST:
        out.append(f"{count} tiles, at most {MOST}")
    return out


def candidates(spec: QuantGroupedSpec, gpu: GPU) -> list[QuantGroupedMma]:
    """Returns the candidates of a matmul."""
    made = mma.candidates(whole(spec, QuantGroupedMma()), gpu)
    return [QuantGroupedMma(**asdict(each)) for each in made if each.splits == 1]
