"""Products with few rows of any extents, majors, strides, dtypes, batches and schedules."""
from __future__ import annotations

from gemm_case import product
from gemv_case import ARCHES, DTYPES, check, exact, scheduled
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType

from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

FEW = st.integers(1, 3)


@settings(max_examples=110, deadline=None, derandomize=True)
@given(st.integers(1, 16), st.one_of(st.integers(1, 100), st.sampled_from([64, 128])),
       st.one_of(st.integers(1, 500), st.sampled_from([64, 256, 512])), st.sampled_from(DTYPES),
       st.sampled_from(["KK", "KM", "MK", "MM"]), st.sampled_from([0, 0, 1, 8, 16]),
       st.sampled_from([(), (), (2,), (2, 3)]), st.booleans(),
       st.tuples(FEW, FEW, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 1, 2, 3, 9])),
       st.sampled_from(ARCHES), st.integers(0, 3))
def test_integers_come_out_exactly(m: int, n: int, k: int, dtype: DType, majors: str, gap: int,
                                   batch: tuple[int, ...], symbolic: bool, sizes: tuple[int, int, int, int],
                                   arch: str, seed: int):
    spec = product(m, n, k, dtype, exact(dtype), majors, gap, batch, symbolic=symbolic)
    schedule = scheduled(spec, *sizes)
    if TABLE.problems(spec, schedule, GPU(arch)): schedule = scheduled(spec, 1, 1, 4, 1)
    check(spec, schedule, arch, seed, -(-m // 2) if symbolic else None)
