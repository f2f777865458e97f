"""scaled_mma's tiles worth trying first."""
from __future__ import annotations

import functools

from tinygrad_nv.tile.scaled_gemm.mma.legality import ARCH
from tinygrad_nv.tile.scaled_gemm.schedules import ScaledMma
from tinygrad_nv.tile.scaled_gemm.spec import ScaledGemmSpec
from tinygrad_nv.tile.template import GPU

# rows, columns, warps along both
TILES = ((128, 128, 2, 4), (128, 64, 2, 2), (64, 128, 2, 2), (64, 64, 2, 2), (32, 128, 1, 4), (32, 64, 1, 2),
         (16, 128, 1, 4), (16, 64, 1, 4), (16, 64, 1, 2), (32, 32, 1, 2), (16, 32, 1, 2), (16, 16, 1, 1))


def candidates(spec: ScaledGemmSpec, gpu: GPU) -> tuple[ScaledMma, ...]:
    """The tiles, with the deepest ring that fits, the better known ones before the others; none where
    mma.sync has no 8-bit floats of its own."""
    return _candidates() if gpu.arch == ARCH else ()


@functools.cache
def _candidates() -> tuple[ScaledMma, ...]:
    made = [ScaledMma().block(m, n).warps(warps_m, warps_n) for m, n, warps_m, warps_n in TILES]
    deepest = [schedule.deepest(ARCH, 1) for schedule in made]
    # three stages of the first are all of shared memory, and splits take four bytes more
    return (*deepest, deepest[0].stages(2))
