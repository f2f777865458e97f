"""Tiles of grouped matmuls worth trying: many rows a group as in gemm/wgmma, few rows as columns of wgmma."""
from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tinygrad_nv.tile.grouped_gemm.schedules import (
    GroupedScaledWgmma,
    GroupedTransposedWgmma,
    GroupedWgmma,
)
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, ScaledGroupedGemmSpec, TransposedGroupedSpec
from tinygrad_nv.tile.grouped_gemm.wgmma.legality import problems
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import ROW_BYTES
from tinygrad_nv.tile.template import GPU

Tile = tuple[int, int, int, bool, bool]     # rows, columns, warps, ping-pong, swapped
# those that an H100 took less for than for others of the same prediction come first
TILES: tuple[Tile, ...] = (
    *((128, tokens, 12, True, True) for tokens in (8, 16, 24, 32, 48, 64)), (256, 96, 12, False, True),
    (128, 256, 12, False, False), (64, 256, 12, True, False), (128, 128, 12, True, False),
    (64, 128, 12, True, False), (256, 128, 12, False, False), (64, 128, 8, False, False),
    *((256, tokens, 12, False, True) for tokens in (8, 16, 24, 32, 48, 64, 128)),
    *((128, tokens, 12, False, True) for tokens in (8, 16, 24, 32, 48, 64, 96, 128, 160, 192)))
SCALED_TILES: tuple[Tile, ...] = (
    (128, 128, 12, False, False), (64, 128, 12, True, False), (64, 128, 8, False, False),
    *((rows, tokens, 12, rows == 64, True) for rows in (256, 128, 64) for tokens in (8, 16, 24, 32, 48, 64)),
    *((128, tokens, 12, True, True) for tokens in (8, 16, 24, 32, 48, 64)))
DEPTHS = range(8, 1, -1)


S = TypeVar("S", bound=GroupedWgmma)


def candidates(spec: GroupedGemmSpec, gpu: GPU) -> list[GroupedWgmma]:
    """The tiles, each with as many stages as fit; none where there is no wgmma."""
    return _deepest(GroupedWgmma(), TILES, spec, gpu.arch)


def candidates_transposed(spec: TransposedGroupedSpec, gpu: GPU) -> list[GroupedTransposedWgmma]:
    """Returns the candidates for matrices (K, N)."""
    return _deepest(GroupedTransposedWgmma(), TILES, spec, gpu.arch)


def candidates_with_scales(spec: ScaledGroupedGemmSpec, gpu: GPU) -> list[GroupedScaledWgmma]:
    """Returns the candidates for operands with scales."""
    return _deepest(GroupedScaledWgmma(), SCALED_TILES, spec, gpu.arch)


def _deepest(kind: S, tiles: Sequence[Tile], spec: GroupedGemmSpec, arch: str) -> list[S]:
    made = []
    for m, n, warps, pingpong, swap in tiles if arch == "sm_90a" else ():
        schedule = kind.block(m, n).k(ROW_BYTES // spec.dtype.itemsize).warps(warps)
        if pingpong: schedule = schedule.pingpong()
        if swap: schedule = schedule.swap_operands()
        depths = [schedule.stages(depth) for depth in DEPTHS]
        made.append(next((s for s in depths if not problems(spec, s, arch)), depths[-1]))
    return made
