"""Generated results and epilogues, bit for bit: extents, majors, gaps, batches, dtypes, ways to memory."""
from __future__ import annotations

from gemm_case import product
from hypothesis import given, settings
from hypothesis import strategies as st
from store_case import GROUPS, HALF, OUTS, SINGLE, SMALL, WARPS, exact, spec_of
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.expression import Load, Sum, where
from tinygrad_nv.tile.schedule import Schedule

EXTENTS = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 128, 136, 200]))
SCHEDULES = st.sampled_from([(SMALL, "sm_80"), (WARPS, "sm_80"), (WARPS, "sm_90a"), (GROUPS, "sm_90a"),
                             (GROUPS.block(64, 128).warps(8), "sm_90a"),
                             (Schedule().block(64, 48).warps(1, 1), "sm_89")])


@settings(max_examples=120, deadline=None)
@given(EXTENTS, EXTENTS, st.sampled_from([(), (2,), (2, 1, 2)]), st.sampled_from("NM"),
       st.sampled_from([0, 0, 1, 8]), st.sampled_from(OUTS), SCHEDULES, st.integers(0, 3))
def test_every_result(m: int, n: int, batch: tuple[int, ...], major: str, gap: int, out: DType,
                      way: tuple[Schedule, str], seed: int):
    schedule, arch = way
    if out == dtypes.fp8e4m3 and arch == "sm_80": arch = "sm_89"
    exact(spec_of(out, m, n, batch=batch, out_major=major, gap=gap), schedule, arch, seed)


@settings(max_examples=120, deadline=None)
@given(EXTENTS, EXTENTS, st.sampled_from([(), (2,)]), st.sampled_from("NM"), st.sampled_from([0, 1, 8]),
       st.sampled_from([HALF, dtypes.float16, SINGLE]), SCHEDULES, st.integers(0, 3),
       st.lists(st.sampled_from(["row", "column", "scalar", "residual", "turned", "mask"]), max_size=3),
       st.booleans())
def test_every_epilogue_of_integers(m: int, n: int, batch: tuple[int, ...], major: str, gap: int, out: DType,
                                    way: tuple[Schedule, str], seed: int, ends: list[str], gate: bool):
    schedule, arch = way
    node = Sum().cast(out)
    for parameter, what in enumerate(ends):
        strides = {"row": (1, 0), "column": (0, 1), "scalar": (0, 0), "residual": (n + gap, 1),
                   "turned": (1, m), "mask": (0, 1)}[what]
        matrix = m * (n + gap) if what in ("residual", "turned") else 0
        load = Load(parameter, out, *strides, (matrix,) * len(batch))
        if what == "mask": node = where(load < 1.0, node, -2.0)
        else: node = node * load if what in ("row", "scalar") else node + load
    if gate: node = where(node > 0.0, node, 0.0)
    exact(product(m, n, 1, HALF, out=out, batch=batch, out_major=major, gap=gap, epilogue=node), schedule,
          arch, seed)
