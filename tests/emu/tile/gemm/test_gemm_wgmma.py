"""The wgmma template on the emulator: generated products, schedules and epilogues, bit for bit."""
from __future__ import annotations

from dataclasses import replace

import torch
from gemm_case import arguments, dense, operand, reference, result, run
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.expression import Expression, Load, Position, Sum, relu
from tinygrad_nv.tile.gemm.schedules import GemmSchedule, Wgmma
from tinygrad_nv.tile.gemm.spec import FLOAT16S, FP8, INT8S, GemmSpec, Operand
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, S32 = dtypes.float32, dtypes.int32
KINDS = [*FLOAT16S, *FLOAT16S, F32, *FP8, *INT8S]
EXTENT = st.one_of(st.integers(1, 40), st.sampled_from([64, 72, 96, 128, 136, 200]))
DEPTH_K = st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 200, 256, 392]))


def padded(extent: int, dtype: DType) -> int:
    """The gap after a row that makes its pitch a multiple of 16 bytes."""
    return -extent % (16 // dtype.itemsize)


@st.composite
def operands(draw: st.DrawFn, dtype: DType, mn: int, k: int, batch: tuple[int, ...],
             parts: int = 1) -> Operand:
    """Any major that wgmma takes, any aligned gap and offset; the same for all of some dimensions."""
    eight = 16 // dtype.itemsize
    major = draw(st.sampled_from(["K", "MN"])) if dtype in FLOAT16S else "K"
    gap = padded(k if major == "K" else mn, dtype) + draw(st.sampled_from([0, 0, eight]))
    made = operand(dtype, mn * parts, k, major, gap, batch, draw(st.sampled_from([0, 0, 3 * eight])))
    if major == "MN" and parts > 1:  # parts are columns apart, which the pitch must hold
        pitch = parts * (mn + padded(mn, dtype))
        made = replace(made, k=pitch, batch=dense(batch, pitch * k))
    kept = tuple(0 if draw(st.integers(0, 3)) == 0 else stride for stride in made.batch)
    return replace(made, batch=kept)


@st.composite
def epilogues(draw: st.DrawFn, spec: GemmSpec) -> Expression:
    """Sums of parts, a row, a column, a matrix, the index, a clamp: all exact for integers."""
    made: Expression = Sum(spec.accumulate)
    for part in range(1, spec.parts): made = made + Sum(spec.accumulate, part) * (part + 1)
    if spec.accumulate == S32: return made
    strides = {"row": (0, 1), "column": (1, 0), "matrix": (spec.n + 1, 1), "scalar": (0, 0)}
    for i, which in enumerate(draw(st.lists(st.sampled_from(list(strides)), max_size=2, unique=True))):
        m, n = strides[which]
        batch = dense(spec.batch, spec.m * (spec.n + 1)) if which == "matrix" else ()
        made = made + Load(i, F32, m, n, batch, draw(st.sampled_from([0, 5])))
    if draw(st.booleans()): made = made + Position(draw(st.sampled_from(["m", "n"]))).cast(F32)
    return relu(made) if draw(st.booleans()) else made


@st.composite
def specs(draw: st.DrawFn) -> GemmSpec:
    m, n, k, a_dtype = draw(EXTENT), draw(EXTENT), draw(DEPTH_K), draw(st.sampled_from(KINDS))
    kinds = next((kinds for kinds in (FP8, INT8S) if a_dtype in kinds), (a_dtype,))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=3 if m * n * k < 200_000 else 0)))
    parts, b_dtype = draw(st.sampled_from([1, 1, 1, 2])), draw(st.sampled_from(kinds))
    a = draw(operands(a_dtype, m, k, batch))
    b = draw(operands(b_dtype, n, k, batch, parts))
    part = n * b.mn if b.k == 1 else n + padded(n, b_dtype)
    out = result(S32 if a_dtype in INT8S else F32, m, n, draw(st.sampled_from("NNM")),
                 draw(st.sampled_from([0, 1, 4])), batch)
    made = GemmSpec(m, n, k, a, b, out, batch, parts=parts, part=part if parts > 1 else 0,
                    symbolic=draw(st.integers(0, 3)) == 0, tf32=a_dtype == F32)
    return replace(made, epilogue=draw(epilogues(made)))


@st.composite
def schedules(draw: st.DrawFn, spec: GemmSpec) -> GemmSchedule:
    """Tiles, roles, rings and clusters; whatever is legal for the spec."""
    consumers, size = draw(st.sampled_from([1, 2, 2, 2, 3])), spec.a.dtype.itemsize
    pingpong = consumers > 1 and draw(st.integers(0, 2)) == 0
    rows = 64 * (1 if pingpong else consumers) * draw(st.sampled_from([1, 1, 2]))
    columns = 8 * draw(st.one_of(st.sampled_from([1, 2, 4, 8, 12, 16]), st.integers(1, 20)))
    s = Wgmma().block(rows, columns).k(draw(st.sampled_from([32, 64, 128])) // size)
    s = s.warps(4 + 4 * consumers).stages(draw(st.integers(2, 5))).grouped(draw(st.integers(1, 3)))
    kind = draw(st.sampled_from(["", "", "cluster", "cluster", "split", "stream"]))
    if kind == "cluster": s = s.cluster(draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2])))
    elif kind == "stream": s = s.streamed()
    elif kind == "split":
        most = -(-spec.k // s.block_k)
        s = s.split(draw(st.sampled_from([count for count in (2, 4, 8) if count <= max(most, 2)])))
    s = s.swizzle(draw(st.sampled_from(["", "", "", "32B", "64B"])))
    if draw(st.integers(0, 5)) == 0: s = s.swapped()
    return s.pingpong() if pingpong else s


@settings(max_examples=160, deadline=None)
@given(st.data(), st.integers(0, 3), st.sampled_from([1, 4, 7]))
def test_integers_come_out_exactly(data: st.DataObject, seed: int, sm_count: int):
    spec = data.draw(specs())
    schedule = data.draw(schedules(spec))
    assume(not TABLE.problems(spec, schedule, GPU("sm_90a")))
    m = data.draw(st.integers(1, spec.m)) if spec.symbolic else spec.m
    given = arguments(spec, seed)
    got = run(TABLE.build(spec, schedule, GPU("sm_90a", sm_count)), spec, given, "sm_90a", seed, m)
    assert torch.equal(got, reference(spec, given)[..., :m, :])
