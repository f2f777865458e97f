"""quant_mma's tiles worth trying first: wide ones for few rows of activations, since every row of CTAs makes
operands of all codes."""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.tile.quant_gemm.mma.plan import QuantMmaPlan
from tinygrad_nv.tile.quant_gemm.schedules import QuantMma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.template import GPU

# rows of activations, columns, warps along both
TILES = ((128, 128, 2, 4), (64, 128, 1, 4), (32, 128, 1, 4), (16, 128, 1, 4), (64, 64, 2, 2), (32, 64, 1, 4),
         (16, 64, 1, 4), (16, 32, 1, 2), (16, 16, 1, 1))
WAVE = 1            # of tiles, which splits fill
STAGES = (4, 3, 2)


def candidates(spec: QuantGemmSpec, gpu: GPU) -> Iterator[QuantMma]:
    """Yields the candidates that are not twice as large as the matmul, with splits where tiles are few."""
    m, n = spec.gemm.m, spec.gemm.n
    sms, parts = gpu.sm_count or 108, spec.gemm.parts
    for rows, columns, along_m, along_n in TILES:
        if (rows >= 2 * m and rows > 16) or (columns >= 2 * n and columns > 16): continue
        for block_k in (64, 32):
            for stages in STAGES:
                s = QuantMma().block(rows, columns * parts).k(block_k).warps(along_m, along_n).stages(stages)
                tiles = -(-m // rows) * -(-n // columns)
                splits = min(sms * WAVE // tiles, QuantMmaPlan.of(spec, s).iterations // 4)
                if splits > 1 and not spec.gemm.symbolic: yield s.split(splits)
                yield s
