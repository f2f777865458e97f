"""Tiles of `quant_grouped_wgmma` worth trying: as many rows as a group has, up to what registers hold."""
from __future__ import annotations

from itertools import product

from tinygrad_nv.tile.grouped_gemm.wgmma.defaults import DEPTHS
from tinygrad_nv.tile.quant_grouped.schedules import QuantGroupedWgmma
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec
from tinygrad_nv.tile.quant_grouped.wgmma.legality import problems
from tinygrad_nv.tile.template import GPU

# columns of matrices, warps, most rows of a group that registers have room for
TILES = ((384, 16, 96), (256, 12, 160), (192, 16, 128), (128, 12, 256))
ROWS = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)


def candidates(spec: QuantGroupedSpec, gpu: GPU) -> list[QuantGroupedWgmma]:
    """The tiles, each with as many stages as fit; none where there is no wgmma."""
    made, tiles = [], TILES if gpu.arch == "sm_90a" else ()
    for (columns, warps, most), rows, block_k in product(tiles, ROWS, (128, 64)):
        if rows <= most:
            base = QuantGroupedWgmma().block(columns, rows).k(block_k).warps(warps)
            rings = [base.stages(depth) for depth in DEPTHS]
            made.append(next((s for s in rings if not problems(spec, s, gpu.arch)), rings[-1]))
    return made
