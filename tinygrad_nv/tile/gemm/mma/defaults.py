"""mma.sync's tiles worth trying first: 128×256 and 256×128 with eight warps, 128×128 with four, are what
CUTLASS uses on Ampere."""
from __future__ import annotations

import functools

from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.template import GPU

# rows, columns, bytes of K, warps along rows and columns
TILES = (
    (128, 256, 64, 2, 4), (256, 128, 64, 4, 2), (128, 128, 64, 2, 2), (128, 128, 128, 2, 2),
    (128, 128, 64, 2, 4), (128, 64, 64, 2, 2), (64, 128, 64, 2, 2), (64, 64, 128, 2, 2), (64, 64, 64, 2, 2),
    (64, 256, 64, 2, 4), (256, 64, 64, 4, 2), (32, 128, 128, 1, 4), (32, 64, 128, 1, 2),
    (128, 32, 128, 4, 1), (64, 32, 128, 2, 1), (16, 128, 128, 1, 4), (16, 64, 128, 1, 4), (16, 64, 128, 1, 2),
    (32, 32, 128, 1, 2), (32, 32, 128, 1, 1), (64, 16, 128, 4, 1), (32, 16, 128, 2, 1), (16, 32, 128, 1, 2),
    (16, 16, 128, 1, 1), (16, 32, 64, 1, 1), (16, 16, 32, 1, 1))


def candidates(spec: GemmSpec, gpu: GPU) -> tuple[Mma, ...]:
    """The tiles, with the deepest ring that fits, the better known ones before the others."""
    return _candidates(gpu.arch, spec.a.dtype.itemsize)


@functools.cache
def _candidates(arch: str, itemsize: int) -> tuple[Mma, ...]:
    made = [Mma().block(m, n).k(k_bytes // itemsize).warps(warps_m, warps_n)
            for m, n, k_bytes, warps_m, warps_n in TILES]
    return tuple(schedule.deepest(arch, itemsize) for schedule in made)
