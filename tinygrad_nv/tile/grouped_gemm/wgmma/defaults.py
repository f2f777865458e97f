"""Tiles of grouped matmuls worth trying: many rows a group as in gemm/wgmma, few rows as columns of wgmma."""
from __future__ import annotations

from tinygrad_nv.tile.grouped_gemm.schedules import GroupedWgmma
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.wgmma.legality import problems
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import ROW_BYTES
from tinygrad_nv.tile.template import GPU

# rows, columns, warps, ping-pong, swapped
TILES = (
    (128, 256, 12, False, False), (64, 256, 12, True, False), (128, 128, 12, True, False),
    (64, 128, 12, True, False), (256, 128, 12, False, False), (64, 128, 8, False, False),
    *((256, tokens, 12, False, True) for tokens in (8, 16, 24, 32, 48, 64, 96, 128)),
    *((128, tokens, 12, False, True) for tokens in (8, 16, 24, 32, 48, 64, 96, 128, 160, 192)))
DEPTHS = range(8, 1, -1)


def candidates(spec: GroupedGemmSpec, gpu: GPU) -> list[GroupedWgmma]:
    """The tiles, each with as many stages as fit; none where there is no wgmma."""
    if gpu.arch != "sm_90a": return []
    made = []
    for m, n, warps, pingpong, swap in TILES:
        schedule = GroupedWgmma().block(m, n).k(ROW_BYTES // spec.dtype.itemsize).warps(warps)
        if pingpong: schedule = schedule.pingpong()
        if swap: schedule = schedule.swapped()
        rings = [schedule.stages(depth) for depth in DEPTHS]
        made.append(next((s for s in rings if not problems(spec, s, gpu.arch)), rings[-1]))
    return made
