"""sparse_mma's tiles worth trying first."""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.tile.sparse_gemm.mma.plan import SparseMmaPlan
from tinygrad_nv.tile.sparse_gemm.schedules import SparseMma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec
from tinygrad_nv.tile.template import GPU

# rows of the matrix, rows of activations, warps along both
TILES = ((128, 128, 2, 4), (128, 64, 4, 2), (64, 128, 2, 2), (64, 64, 2, 2), (128, 32, 4, 1), (64, 32, 4, 1),
         (128, 16, 4, 1), (64, 16, 4, 1), (32, 16, 2, 1), (16, 16, 1, 1))
STAGES = (4, 3, 2)


def candidates(spec: SparseGemmSpec, gpu: GPU) -> Iterator[SparseMma]:
    """Yields the candidates that are not twice as large as the matmul, with splits where tiles are few."""
    m, n = spec.gemm.n, spec.gemm.m
    sms, size = gpu.sm_count or 108, spec.gemm.a.dtype.itemsize
    for rows, columns, along_m, along_n in TILES:
        if (rows >= 2 * m and rows > 16) or (columns >= 2 * n and columns > 16): continue
        for block_k in (128 // size, 64):
            for stages in STAGES:
                s = SparseMma().block(rows, columns).k(block_k).warps(along_m, along_n).stages(stages)
                tiles = -(-m // rows) * -(-n // columns)
                splits = min(sms // tiles, SparseMmaPlan.of(spec, s).iterations // 4)
                if splits > 1: yield s.split(splits)
                yield s
