"""Dots: kernels of the tile language on the emulated GPU against the interpreter."""
from __future__ import annotations

import itertools
import types

import numpy as np
import pytest
from tinygrad.dtype import DType, dtypes

from tests.support.tile.language_gpu_case import checked, inputs, launched, program, ref
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.language import attention as A
from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language import control as K
from tinygrad_nv.tile.language import elements as E
from tinygrad_nv.tile.language import linear as L
from tinygrad_nv.tile.language import memory as M
from tinygrad_nv.tile.language import values as V
from tinygrad_nv.tile.language.gpu import build
from tinygrad_nv.tile.language.ir import TensorParameter
from tinygrad_nv.tile.language.memory import TensorRef
from tinygrad_nv.tile.language.program import trace_program
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

F32, F16, BF16, S32 = dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int32
S8, U8, E4M3, E5M2 = dtypes.int8, dtypes.uint8, dtypes.fp8e4m3, dtypes.fp8e5m2


def matmul(a, b, o, *, block, flipped, tf32):
    bm, bn, bk = block
    i, j = C.block(C.program_id(0) * bm, bm), C.block(C.program_id(1) * bn, bn)
    acc = E.zeros((bm, bn), S32 if a.dtype in (S8, U8) else F32)
    for k in K.blocks(a.shape[0] if flipped[0] else a.shape[1], bk):
        x = a[k, i].T if flipped[0] else a[i, k]
        y = b[j, k].T if flipped[1] else b[k, j]
        acc = L.dot(x, y, acc, tf32=tf32)
    o[i, j] = acc


def multiplied(a: DType, extents: tuple[int, int, int], block: tuple[int, int, int],
               flipped: tuple[bool, bool] = (False, False), b: DType | None = None, warps: int = 4,
               arch: str = "sm_80", out: DType | None = None, tf32: bool = False, stages: int = 3) -> None:
    """Whole numbers: sums are exact."""
    m, n, k = extents
    tensors = [ref("o", out or (S32 if a in (S8, U8) else F32), m, n, out=True),
               ref("a", a, *((k, m) if flipped[0] else (m, k))),
               ref("b", b or a, *((n, k) if flipped[1] else (k, n)))]
    schedule = TileSchedule(warps=warps, stages=stages)
    made = program(matmul, tensors, schedule, (-(-m // block[0]), -(-n // block[1])),
                   {"block": block, "flipped": flipped, "tf32": tf32})
    checked(made, schedule, arch, ulps=0.5, integers=True)


ORDERS = list(itertools.product((False, True), (False, True)))
orders = pytest.mark.parametrize("flipped", ORDERS, ids=["NN", "NT", "TN", "TT"])


@orders
@pytest.mark.parametrize(("extents", "block"), [((64, 64, 192), (64, 64, 32)), ((100, 72, 80), (64, 48, 32)),
                                                ((77, 51, 45), (32, 32, 48))])
def test_bfloat16(extents: tuple[int, int, int], block: tuple[int, int, int],
                  flipped: tuple[bool, bool]) -> None:
    """Rows that begin at multiples of 16 bytes, of 8, and of 2."""
    multiplied(BF16, extents, block, flipped)


@orders
def test_float32_in_a_loop_over_k(flipped: tuple[bool, bool]) -> None:
    """Columns of the operands' tiles, 32 of k, where k lies along rows; as many rows where it does not."""
    multiplied(F32, (64, 64, 192), (64, 64, 64), flipped)
    multiplied(F32, (60, 50, 90), (64, 64, 96), flipped, stages=2)


def test_the_loop_over_k_is_written_once() -> None:
    """A block of 64 of k has as many instructions that multiply as one of 32."""
    tensors = [ref("o", F32, 64, 64, out=True), ref("a", F32, 64, 64), ref("b", F32, 64, 64)]
    schedule, found = TileSchedule(warps=4, stages=2), []
    for k in (32, 64):
        made = program(matmul, tensors, schedule, (1, 1),
                       {"block": (64, 64, k), "flipped": (False, True), "tf32": False})
        found.append(build(made, schedule, GPU("sm_80")).ptx.count("fma.rn.f32"))
    assert found == [1024, 1024]


def chained(o, a, b, c, *, rows, columns):
    """(a bᵀ) c, as attention multiplies."""
    i, j = C.block(0, rows), C.block(0, columns)
    o[i, :] = L.dot(L.dot(a[i, :], b[j, :].T), c[j, :])


@pytest.mark.parametrize(("rows", "columns", "warps"), [(64, 32, 4), (64, 16, 2), (16, 64, 4), (16, 64, 2),
                                                        (32, 64, 2), (128, 32, 4)])
def test_sums_that_are_multiplied_again_meet_no_bank_conflict(rows: int, columns: int, warps: int) -> None:
    tensors = [ref("o", F32, rows, 64, out=True), ref("a", F32, rows, 64), ref("b", F32, columns, 64),
               ref("c", F32, columns, 64)]
    schedule = TileSchedule(warps=warps, stages=2)
    made = program(chained, tensors, schedule, (1, 1), {"rows": rows, "columns": columns})
    checked(made, schedule, ulps=0.5, integers=True)
    _, report = launched(made, inputs(made), schedule, "sm_80", 0)
    assert report.stats.bank_conflicts == {}


def test_operands_are_copied_behind_the_kernel_ahead() -> None:
    """Blocks that all programs load are fetched ahead into L2 where a thread has registers for them alone."""
    tensors = [ref("o", F32, 64, 64, out=True), ref("a", F32, 64, 64), ref("b", F32, 64, 64)]
    schedule = TileSchedule(warps=4, stages=2)
    made = program(chained, [*tensors, ref("c", F32, 64, 64)], schedule, (1, 1), {"rows": 64, "columns": 64})
    ptx = build(made, schedule, GPU("sm_90a"), pdl=True).ptx
    assert 0 < ptx.index("griddepcontrol.wait") < ptx.index("cp.async")
    assert "prefetch" not in ptx


def test_float32_operands_of_a_warp_lie_in_different_banks() -> None:
    """A matrix and a transpose, of which each thread reads 16 bytes along k."""
    tensors = [ref("o", F32, 64, 64, out=True), ref("a", F32, 64, 64), ref("b", F32, 64, 64)]
    schedule = TileSchedule(warps=4, stages=2)
    made = program(matmul, tensors, schedule, (1, 1),
                   {"block": (64, 64, 32), "flipped": (False, True), "tf32": False})
    _, report = launched(made, inputs(made), schedule, "sm_80", 0)
    assert not report.findings
    assert report.stats.bank_conflicts == {}


@pytest.mark.sampled(6)
@orders
@pytest.mark.parametrize("dtype", [S8, U8, E4M3, E5M2], ids=str)
def test_bytes(dtype: DType, flipped: tuple[bool, bool]) -> None:
    multiplied(dtype, (64, 64, 64), (64, 64, 32), flipped, arch="sm_89")
    multiplied(dtype, (50, 40, 60), (32, 48, 40), flipped, arch="sm_89")


@orders
@pytest.mark.parametrize("tf32", [False, True])
def test_float32(tf32: bool, flipped: tuple[bool, bool]) -> None:
    multiplied(F32, (64, 64, 32), (64, 64, 16), flipped, tf32=tf32)
    multiplied(F32, (50, 40, 30), (32, 32, 16), flipped, tf32=tf32)


def test_pairs_of_dtypes() -> None:
    multiplied(U8, (64, 64, 64), (64, 64, 32), b=S8)
    multiplied(E4M3, (64, 64, 256), (64, 64, 256), b=E5M2, arch="sm_89")


@pytest.mark.parametrize(("block", "warps"), [((128, 128, 32), 8), ((128, 96, 32), 8), ((80, 96, 32), 4),
                                              ((16, 16, 64), 4), ((16, 64, 64), 8), ((64, 24, 16), 2)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_blocks(arch: str, block: tuple[int, int, int], warps: int) -> None:
    multiplied(F16, (*block[:2], 128), block, (False, True), warps=warps, arch=arch)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("block", [(8, 64, 32), (1, 64, 32), (4, 12, 32), (40, 5, 16)])
@pytest.mark.parametrize("dtype", [F16, S8, F32], ids=str)
def test_small(dtype: DType, block: tuple[int, int, int]) -> None:
    """Too small for tensor cores."""
    multiplied(dtype, (*block[:2], 64), block)


def test_the_accuracy_of_float32() -> None:
    """No further from float64 than the same sums in NumPy's float32, in order of k."""
    def product(a, b, o): o[:, :] = L.dot(a[:, :], b[:, :])
    made = program(product, [ref("o", F32, 32, 32, out=True), ref("a", F32, 32, 64), ref("b", F32, 64, 32)])
    from tests.support.tile.language_gpu_case import inputs, launched
    arrays = inputs(made)
    a, b = arrays["a"], arrays["b"]
    total = np.zeros((32, 32), np.float32)
    for k in range(64): total += a[:, k, None] * b[None, k]
    exact = a.astype(np.float64) @ b.astype(np.float64)
    found, report = launched(made, arrays, TileSchedule(), "sm_80", 0)
    assert not report.findings
    assert np.abs(found["o"] - exact).max() <= 1.5 * np.abs(total - exact).max()


def test_chained() -> None:
    """The result of one dot as either operand of others."""
    def chain(a, b, o, p):
        s = V.cast(L.dot(a[:, :], b[:, :]), BF16)
        o[:, :] = L.dot(s, b[:, :])
        p[:, :] = L.dot(b[:, :], s.T) + L.dot(s.T, b[:, :])
    tensors = [ref("o", F32, 64, 64, out=True), ref("p", F32, 64, 64, out=True), ref("a", BF16, 64, 64),
               ref("b", BF16, 64, 64)]
    a, b = (np.random.default_rng(i).integers(-1, 2, (64, 64)).astype(np.float32) for i in range(2))
    checked(program(chain, tensors), ulps=0.5, a=a, b=b)


def test_dequantised() -> None:
    """The right operand is made in registers."""
    def dequantised(x, q, s, o):
        acc = E.zeros((32, 48), F32)
        for k in K.blocks(96, 32): acc = L.dot_dequant_i8(x[:, k], q[k, :], s[:], acc)
        o[:, :] = acc
    tensors = [ref("o", F32, 32, 48, out=True), ref("x", BF16, 32, 96), ref("q", S8, 96, 48),
               ref("s", F32, 48)]
    checked(program(dequantised, tensors), integers=True, ulps=2)


# **** flash attention ****

def flash_attention(q, cache, *, dropout: float, causal: bool):
    T = C.context()
    Qb = M.load(q, rows=T.m, cols=T.d, vector=T.vector, prefetch=2)
    acc, m, l = E.zeros((T.m, T.d), F32), E.fill((T.m,), -E.INF), E.zeros((T.m,), F32)
    for nblk in C.range_n(cache.K.shape, T.n, prefetch=2):
        Kb = M.load(cache.K, nblk, cols=T.d, vector=T.vector)
        Vb = M.load(cache.V, nblk, cols=T.d, vector=T.vector)
        S = L.dot(Qb, Kb.T) * E.rsqrt(float(T.d))
        if causal: A.mask_causal(S, A.row_index(), A.col_index(nblk))
        P, m_c, l_c = A.softmax_online(S)
        if dropout: P = A.dropout_in_kernel(P, p=dropout)
        acc, m, l = A.softmax_accumulate(acc, m, l, P, Vb, m_c, l_c)
    return V.cast(acc / l[:, None], q.dtype)


def attention(schedule: TileSchedule, causal: bool, dropout: float, shape: tuple[int, int, int],
              dtype: DType, arch: str) -> None:
    tensors = [TensorParameter(name, dtype, shape) for name in ("q", "cache.K", "cache.V")]
    q, k, v = map(TensorRef, tensors)
    given = {"q": q, "cache": types.SimpleNamespace(K=k, V=v), "dropout": dropout, "causal": causal}
    made = trace_program(flash_attention, given, tensors, schedule, None, None)
    checked(made, schedule, arch, ulps=4, seeds=(1, LATE))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("block", "warps"), [((64, 64), 4), ((64, 96), 4), ((128, 64), 8), ((32, 32), 4),
                                              ((80, 48), 4)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_flash_attention(arch: str, causal: bool, block: tuple[int, int], warps: int) -> None:
    """More blocks than stages; sums are rounded differently: 4 units of the result."""
    attention(TileSchedule(block=block, warps=warps), causal, 0.0, (2, 300, 64), BF16, arch)


@pytest.mark.slow
def test_flash_attention_of_other_heads() -> None:
    attention(TileSchedule(block=(64, 32)), True, 0.0, (1, 100, 128), F16, "sm_80")
    attention(TileSchedule(block=(64, 32)), True, 0.0, (1, 100, 80), F16, "sm_80")
    attention(TileSchedule(block=(64, 64)), True, 0.25, (1, 128, 32), BF16, "sm_89")


@pytest.mark.parametrize("block", [(64, 64, 64), (128, 64, 128), (64, 64, 256)])
@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_long_sums_of_float8(arch: str, block: tuple[int, int, int]) -> None:
    """All of one sign, 1024 of K: sums in the tensor core alone lose up to 8 times as much."""
    m, n, bk = block
    def product(a, b, o):
        acc = E.zeros((m, n), F32)
        for k in K.blocks(1024, bk): acc = L.dot(a[:, k], b[:, k].T, acc)
        o[:, :] = acc
    tensors = [ref("o", F32, m, n, out=True), ref("a", E4M3, m, 1024), ref("b", E4M3, n, 1024)]
    random = np.random.default_rng(0)
    from tests.support.tile.language_gpu_case import inputs, launched, round_to
    a, b = (round_to(random.random((count, 1024)).astype(np.float32) + 0.5, E4M3) for count in (m, n))
    made = program(product, tensors)
    found, report = launched(made, inputs(made, a=a, b=b), TileSchedule(), arch, 0)
    assert not report.findings
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    assert exact.max() < 8 * 256
    lost = 8 * 4 * 2.0 ** -6    # of 8 parts below 256, with every 32 of K a unit in their 13th bit
    assert np.abs(found["o"] - exact).max() <= lost
