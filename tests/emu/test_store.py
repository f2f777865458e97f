"""Results in memory: every major, alignment, edge, dtype and batch, bit for bit, and nothing beside them."""
from __future__ import annotations

from itertools import product as every

import pytest
from gemm_case import arguments, product, reference, run
from store_case import outer
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.schedule import Schedule

SMALL = Schedule().block(32, 32).warps(2, 2)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("out", [dtypes.bfloat16, dtypes.float16, dtypes.float32])
def test_every_major_edge_and_gap(arch: str, out: DType):
    for (m, n), gap, major, batch in every([(32, 32), (40, 50), (17, 33)], [0, 1, 8], "NM", [(), (2, 3)]):
        spec = product(m, n, 1, dtypes.bfloat16, out=out, out_major=major, gap=gap, batch=batch)
        given = arguments(spec, m)
        assert (run(outer(spec, SMALL, arch), spec, given, arch) == reference(spec, given)).all(), str(spec)
