"""wgmma's tiles worth trying first: 128×256 and 256×128 with two consumers, and 128×128 in turns, are what
CUTLASS, DeepGEMM and FlashAttention's matmuls use on Hopper."""
from __future__ import annotations

import functools

from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.template import GPU

# rows, columns, warps, ping-pong, swapped; 128 bytes of K
# those for few rows first: of tiles that wait for HBM alike, on an H100 these took 2 to 8 % less
TILES = (
    (64, 8, 8, False, True), (64, 16, 8, False, True), (64, 32, 8, False, True), (128, 8, 12, False, True),
    (128, 16, 12, False, True),
    (128, 256, 12, False, False), (256, 128, 12, False, False), (128, 128, 12, True, False),
    (128, 192, 12, False, False), (128, 128, 12, False, False), (64, 256, 12, True, False),
    (128, 160, 12, False, False), (192, 128, 16, False, False), (64, 192, 12, True, False),
    (64, 128, 12, True, False), (128, 64, 12, False, False), (64, 128, 8, False, False),
    (64, 64, 8, False, True), (64, 256, 8, False, False), (64, 64, 8, False, False),
    (128, 96, 12, False, False), (64, 32, 8, False, False), (64, 16, 8, False, False),
    (128, 32, 12, False, True), (128, 64, 12, False, True))


def candidates(spec: GemmSpec, gpu: GPU) -> tuple[Wgmma, ...]:
    """The tiles, with the deepest ring that fits, the better known ones before the others; none where there
    is no wgmma."""
    return _candidates(gpu.arch, spec.a.dtype.itemsize) if gpu.arch == "sm_90a" else ()


@functools.cache
def _candidates(arch: str, itemsize: int) -> tuple[Wgmma, ...]:
    made = []
    for m, n, warps, pingpong, swap in TILES:
        schedule = Wgmma().block(m, n).k(128 // itemsize).warps(warps)
        if pingpong: schedule = schedule.pingpong()
        made.append(schedule.swap_operands() if swap else schedule)
    return tuple(schedule.deepest(arch, itemsize) for schedule in made)
