"""Tiles of `quant_grouped_wgmma` worth trying: as many rows as a group has, up to what sums leave room for."""
from __future__ import annotations

from tinygrad_nv.tile.grouped_gemm.wgmma.defaults import DEPTHS
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedWgmma
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.quant_grouped.wgmma.legality import problems
from tinygrad_nv.tile.template import GPU

# columns of matrices, rows of a group
TILES = (*((256, rows) for rows in (8, 16, 32, 48, 64, 96, 128)),
         *((128, rows) for rows in (8, 16, 32, 48, 64, 96, 128, 192)))


def candidates(spec: QuantGroupedSpec, gpu: GPU) -> list[QuantGroupedWgmma]:
    """The tiles, each with as many stages as fit; none where there is no wgmma."""
    made = []
    for columns, rows in TILES if gpu.arch == "sm_90a" else ():
        base = QuantGroupedWgmma().block(columns, rows).warps(12)
        rings = [base.stages(depth) for depth in DEPTHS]
        made.append(next((s for s in rings if not problems(spec, s, gpu.arch)), rings[-1]))
    return made
