"""Programs whose producer goes through several runs of a loop: loops inside of loops, and CTAs that go
through programs. Emulated, against the interpreter."""
from __future__ import annotations

import pytest
from tinygrad.dtype import DType, dtypes

from tests.support.tile.language_gpu_case import checked, program, ref
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language import control as K
from tinygrad_nv.tile.language import elements as E
from tinygrad_nv.tile.language import linear as L
from tinygrad_nv.tile.language import memory as M
from tinygrad_nv.tile.language import reductions as R
from tinygrad_nv.tile.language import values as V
from tinygrad_nv.tile.language.gpu import build
from tinygrad_nv.tile.language.ir import TensorParameter
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

F32, BF16, S32 = dtypes.float32, dtypes.bfloat16, dtypes.int32
SEEDS = (0, 1, 2, LATE)
ARCH = "sm_90a"


def matmul(a, b, o):
    i, j = C.block(C.program_id(0) * 64, 64), C.block(C.program_id(1) * 64, 64)
    acc = E.zeros((64, 64), F32)
    for k in K.blocks(a.shape[1], 64): acc = L.dot(a[i, k], b[j, k].T, acc)
    o[i, j] = V.cast(acc, o.dtype)


def operands(m: int, n: int, k: int, out: DType = F32) -> list[TensorParameter]:
    return [ref("o", out, m, n, out=True), ref("a", BF16, m, k), ref("b", BF16, n, k)]


@pytest.mark.parametrize("grid", [(3, 2), (16, 2), (1, 5), (5, 1)])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_cta_for_several_programs(grid: tuple[int, int], stages: int) -> None:
    """Fewer iterations than stages and more, in all orders of the grid."""
    m, n = grid
    schedule = TileSchedule(warps=8, stages=stages)
    for k in (64, 64 * (stages + 2)):
        made = program(matmul, operands(64 * m, 64 * n, k), grid=grid)
        assert build(made, schedule, GPU(ARCH, 2)).grid == (2, 1, 1)
        checked(made, schedule, ARCH, integers=True, ulps=0.5, seeds=SEEDS, sms=2)


def test_results_of_16_bits() -> None:
    """Which lanes of a warp exchange before they store."""
    made = program(matmul, operands(192, 128, 192, BF16), grid=(3, 2))
    checked(made, TileSchedule(warps=8), ARCH, integers=True, seeds=SEEDS, sms=2)
    text = build(made, TileSchedule(warps=8), GPU(ARCH, 2)).ptx
    assert "shfl.sync.bfly" in text
    assert "st.global.v4.b32" in text
    checked(made, TileSchedule(warps=4), "sm_80", integers=True, seeds=SEEDS)


def test_where_ctas_stay_ones_own() -> None:
    """With room for two CTAs on a multiprocessor, or loops of different lengths."""
    made = program(matmul, operands(192, 128, 192), grid=(3, 2))
    assert build(made, TileSchedule(warps=4, stages=2), GPU(ARCH, 2)).grid == (3, 2, 1)
    assert build(made, TileSchedule(warps=8), GPU(ARCH, 6)).grid == (3, 2, 1)

    def triangle(a, b, o):
        i = C.block(C.program_id(0) * 64, 64)
        acc = E.zeros((64, 64), F32)
        for k in K.blocks(C.program_id(0) * 64 + 64, 64): acc = L.dot(a[i, k], b[:, k].T, acc)
        o[i, :] = acc
    uneven = program(triangle, operands(192, 64, 192), grid=(3,))
    assert build(uneven, TileSchedule(warps=8), GPU(ARCH, 2)).grid == (3, 1, 1)
    checked(uneven, TileSchedule(warps=8), ARCH, integers=True, ulps=0.5, seeds=SEEDS, sms=2)


def walking(a, b, o):
    for j in K.range_(C.program_id(0), 5, 2):
        acc = E.zeros((64, 64), F32)
        for k in K.blocks(a.shape[1], 64): acc = L.dot(a[:, k], b[C.block(j * 64, 64), k].T, acc)
        o[:, C.block(j * 64, 64)] = acc


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_producer_goes_through_outer_loops(stages: int) -> None:
    for k in (64, 64 * (stages + 2)):
        made = program(walking, operands(64, 320, k), grid=(2,))
        assert "cp.async.bulk.tensor" in build(made, TileSchedule(stages=stages), GPU(ARCH)).ptx
        checked(made, TileSchedule(stages=stages), ARCH, integers=True, ulps=0.5, seeds=SEEDS)


def attention(q, keys, values, o):
    for i in K.blocks(q.shape[0], 64):
        rows = q[i, :]
        acc, m, l = E.zeros((64, 64), F32), E.fill((64,), -E.INF), E.zeros((64,), F32)
        for j in K.blocks(keys.shape[0], 64):
            s = L.dot(rows, keys[j, :].T) * 0.125
            top = E.maximum(m, R.max_(s, 1))
            p, old = E.exp(s - top[:, None]), E.exp(m - top)
            acc = L.dot(V.cast(p, BF16), values[j, :], acc * old[:, None])
            m, l = top, l * old + R.sum_(p, 1)
        o[i, :] = acc / l[:, None]


@pytest.mark.parametrize(("rows", "keys"), [(64, 64), (192, 64), (320, 320)])
def test_attention_with_an_outer_loop(rows: int, keys: int) -> None:
    """Queries have stages of their own: those of the next rows come while the last block is computed."""
    tensors = [ref("o", F32, rows, 64, out=True), ref("q", BF16, rows, 64), ref("keys", BF16, keys, 64),
               ref("values", BF16, keys, 64)]
    made = program(attention, tensors)
    text = build(made, TileSchedule(), GPU(ARCH)).ptx
    assert "cp.async.bulk.tensor" in text
    assert "cp.async.cg" not in text
    checked(made, TileSchedule(), ARCH, exact=3.0, seeds=SEEDS)
    checked(made, TileSchedule(), "sm_80", exact=3.0, seeds=(1, LATE))


def guarded(a, b, o, count):
    n = M.load(count, 0)
    for j in K.range_(0, 4):
        acc = E.zeros((64, 64), F32)
        if j < n:
            for k in K.blocks(a.shape[1], 64): acc = L.dot(a[:, k], b[C.block(j * 64, 64), k].T, acc)
        o[:, C.block(j * 64, 64)] = acc


def test_a_branch_around_a_loop() -> None:
    """The producer takes it, too."""
    import numpy as np
    tensors = [*operands(64, 256, 320), ref("count", S32, 1)]
    made = program(guarded, tensors)
    assert "cp.async.bulk.tensor" in build(made, TileSchedule(), GPU(ARCH)).ptx
    for count in (0, 3):
        checked(made, TileSchedule(), ARCH, integers=True, ulps=0.5, seeds=SEEDS, count=np.array([count]))


def added(x, o, p):
    total, scaled = E.fill((64,), 3.0), E.fill((32,), 1.0)
    for i in K.range_(0, 6):
        part = V.cast(x[C.block(i * 32, 32), :], F32)
        total = total + R.sum_(part, 0)
        scaled = scaled * 0.5 + R.sum_(part, 1)
    o[:] = total
    p[:] = scaled


@pytest.mark.parametrize("warps", [1, 4, 8])
def test_sums_that_a_loop_adds_up_in_parts(warps: int) -> None:
    """What they begin with counts once; across warps there is one exchange, behind the loop."""
    tensors = [ref("o", F32, 64, out=True), ref("p", F32, 32, out=True), ref("x", BF16, 192, 64)]
    made = program(added, tensors)
    checked(made, TileSchedule(warps=warps), "sm_80", integers=True, ulps=0.5)
    text = build(made, TileSchedule(warps=warps), GPU("sm_80")).ptx
    loop = text[text.index("$loop"):text.index("$endloop", text.index("bra $loop"))]
    assert "shfl" not in loop
    assert "bar.sync" not in loop
