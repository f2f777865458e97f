"""Matmuls through pointers: every operand type, warps, stages, remainders, batches, split K.

Integer-valued operands are exact in every type here as long as sums stay below 2**24. Real operands are held
to K · 2**-22 · (|A| @ |B|): a tensor core truncates the aligned products of an instruction to about 24 bits,
an addition loses at most as much, and there are fewer than K of both; rounding to the output type comes on
top.
"""
from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tests.support.ptx.triton_case import Case, Problem, Wanted, cases, exact, values
from tests.support.ptx.triton_pointwise import Rng, real, whole

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32, I8 = torch.bfloat16, torch.float16, torch.float32, torch.int8


@triton.jit
def gemm_kernel(a, b, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
                PRECISION: tl.constexpr, EVEN: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = a + m[:, None] * stride_am + k[None, :] * stride_ak
    b_at = b + k[:, None] * stride_bk + n[None, :] * stride_bn
    acc = tl.zeros((BM, BN), dtype=ACC)
    for start in range(0, K, BK):
        if EVEN:
            left = tl.load(a_at)
            right = tl.load(b_at)
        else:
            left = tl.load(a_at, mask=(m[:, None] < M) & (start + k[None, :] < K), other=0)
            right = tl.load(b_at, mask=(start + k[:, None] < K) & (n[None, :] < N), other=0)
        acc = tl.dot(left, right, acc, input_precision=PRECISION, out_dtype=ACC)
        a_at += BK * stride_ak
        b_at += BK * stride_bk
    out = c + m[:, None] * N + n[None, :]
    tl.store(out, acc.to(c.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def operands(rng: Rng, m: int, n: int, k: int, dtype: torch.dtype, whole_numbers: bool,
             trans: str = "NN") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A [M, K] and B [K, N] as the product sees them, then both as they lie in memory."""
    top = {E4M3: 2, E5M2: 2, torch.int8: 127}.get(dtype, 4)
    make = (lambda *s: whole(rng, *s, low=-top, high=top + 1)) if whole_numbers else (
        lambda *s: real(rng, *s))
    a, b = make(m, k).to(dtype), make(k, n).to(dtype)
    lay_a = a.t().contiguous() if trans[0] == "T" else a
    lay_b = b.t().contiguous() if trans[1] == "T" else b
    return a, b, lay_a, lay_b


def product(a: torch.Tensor, b: torch.Tensor, out: torch.dtype, whole_numbers: bool,
            loss: float = 0.0) -> Wanted:
    """a @ b, exact but for the rounding to `out`; or within the bound above plus `loss`, a relative loss of
    each product."""
    left, right = (values(t).astype(np.float64) for t in (a, b))
    want = left @ right
    if whole_numbers: return exact(torch.from_numpy(want).to(out))
    scale = np.abs(left) @ np.abs(right)
    last = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}[out]
    return Wanted(want, scale * (a.shape[1] * 2**-22 + loss) + np.abs(want) * last)


def gemm(m: int, n: int, k: int, block: tuple[int, int, int], dtype: torch.dtype,
         out: torch.dtype | None = None, whole_numbers: bool = True, trans: str = "NN", acc: Any = tl.float32,
         precision: str = "tf32", loss: float = 0.0) -> Any:
    """C = A @ B in blocks; `trans` says which operand lies transposed in memory."""
    kind = out or dtype

    def make(rng: Rng) -> Problem:
        a, b, lay_a, lay_b = operands(rng, m, n, k, dtype, whole_numbers, trans)
        strides = {"stride_am": 1 if trans[0] == "T" else k, "stride_ak": m if trans[0] == "T" else 1,
                   "stride_bk": 1 if trans[1] == "T" else n, "stride_bn": k if trans[1] == "T" else 1}
        ones = {name: 1 for name, stride in strides.items() if stride == 1}
        passed = {name: stride for name, stride in strides.items() if stride != 1}
        even = not (m % block[0] or n % block[1] or k % block[2])
        return Problem({"a": lay_a, "b": lay_b, "c": torch.zeros(m, n, dtype=kind), "M": m, "N": n, "K": k,
                        **passed}, {"c": product(a, b, kind, whole_numbers, loss)},
                       (-(-m // block[0]), -(-n // block[1])),
                       {"BM": block[0], "BN": block[1], "BK": block[2], "ACC": acc, "PRECISION": precision,
                        "EVEN": even, **ones})
    return make


@triton.jit
def batched_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    batch = tl.program_id(0)
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    acc = tl.zeros((M, N), tl.float32)
    for start in tl.range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(a + batch * M * K + m[:, None] * K + k[None, :])
        right = tl.load(b + batch * K * N + k[:, None] * N + n[None, :])
        acc = tl.dot(left, right, acc)
    tl.store(c + batch * M * N + m[:, None] * N + n[None, :], acc.to(tl.float16))


def batched(rng: Rng) -> Problem:
    """Three products of 32 x 96 by 96 x 32."""
    a, b = whole(rng, 3, 32, 96, dtype=F16), whole(rng, 3, 96, 32, low=-2, high=3, dtype=F16)
    return Problem({"a": a, "b": b, "c": torch.zeros(3, 32, 32, dtype=torch.float16)},
                   {"c": Wanted(values(a) @ values(b))}, (3,), {"M": 32, "N": 32, "K": 96, "BK": 16})


@triton.jit
def batched_dot_kernel(a, b, c, B: tl.constexpr, M: tl.constexpr, K: tl.constexpr):
    i = tl.arange(0, B)[:, None, None]
    m = tl.arange(0, M)
    k = tl.arange(0, K)
    left = tl.load(a + i * M * K + m[None, :, None] * K + k[None, None, :])
    right = tl.load(b + i * M * K + k[None, :, None] * M + m[None, None, :])
    tl.store(c + i * M * M + m[None, :, None] * M + m[None, None, :], tl.dot(left, right))


def batched_dot(rng: Rng) -> Problem:
    """tl.dot of three-dimensional tiles."""
    a, b = whole(rng, 4, 32, 32, dtype=torch.bfloat16), whole(rng, 4, 32, 32, dtype=torch.bfloat16)
    return Problem({"a": a, "b": b, "c": torch.zeros(4, 32, 32)}, {"c": Wanted(values(a) @ values(b))}, (1,),
                   {"B": 4, "M": 32, "K": 32})


@triton.jit
def split_k_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                   SPLITS: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.program_id(2) * BK + tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, tl.cdiv(K, BK * SPLITS)):
        left = tl.load(a + m[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        right = tl.load(b + k[:, None] * N + n[None, :], mask=k[:, None] < K, other=0.0)
        acc = tl.dot(left, right, acc)
        k += BK * SPLITS
    tl.atomic_add(c + m[:, None] * N + n[None, :], acc.to(c.dtype.element_ty), sem="relaxed")


def split_k(out: torch.dtype) -> Any:
    """K split over three CTAs that add into C; integers, so that any order gives the same."""
    def make(rng: Rng) -> Problem:
        a, b, *_ = operands(rng, 64, 64, 288, torch.bfloat16, whole_numbers=True)
        a, b = (t.clamp(-1, 1) if out is not torch.float32 else t for t in (a, b))
        return Problem({"a": a, "b": b, "c": torch.zeros(64, 64, dtype=out), "M": 64, "N": 64, "K": 288},
                       {"c": Wanted(values(a) @ values(b))}, (2, 2, 3),
                       {"BM": 32, "BN": 32, "BK": 32, "SPLITS": 3})
    return make


@triton.jit
def stream_k_kernel(a, b, c, partial, arrived, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                    SPLITS: tl.constexpr):
    tile = tl.program_id(0)
    m = (tile % (M // BM)) * BM + tl.arange(0, BM)
    n = (tile // (M // BM)) * BN + tl.arange(0, BN)
    split = tl.program_id(1)
    k = split * (K // SPLITS) + tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K // SPLITS // BK):
        acc = tl.dot(tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :]), acc)
        k += BK
    inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(partial + (tile * SPLITS + split) * BM * BN + inside, acc)
    tl.debug_barrier()
    if tl.atomic_add(arrived + tile, 1) == SPLITS - 1:
        total = tl.zeros((BM, BN), tl.float32)
        for other in range(0, SPLITS):
            total += tl.load(partial + (tile * SPLITS + other) * BM * BN + inside)
        tl.store(c + m[:, None] * N + n[None, :], total)


def stream_k(rng: Rng) -> Problem:
    """Partial tiles in global memory; the CTA that arrives last adds them up."""
    a, b, *_ = operands(rng, 64, 32, 192, torch.float16, whole_numbers=True)
    return Problem({"a": a, "b": b, "c": torch.zeros(64, 32), "partial": torch.zeros(2, 3, 32 * 32),
                    "arrived": torch.zeros(2, dtype=torch.int32), "M": 64, "N": 32, "K": 192},
                   {"c": Wanted(values(a) @ values(b)), "arrived": exact(torch.tensor([3, 3]))}, (2, 3),
                   {"BM": 32, "BN": 32, "BK": 32, "SPLITS": 3})


@triton.jit
def int4_gemm_kernel(a, packed, scale, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        word = tl.load(packed + ((start + k) // 8)[:, None] * N + n[None, :])
        nibble = ((word >> ((k % 8) * 4)[:, None]) & 15) - 8
        group = tl.load(scale + (start // BK) * N + n)
        right = (nibble * group[None, :]).to(tl.bfloat16)
        left = tl.load(a + m[:, None] * K + (start + k)[None, :])
        acc = tl.dot(left, right, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc)


def int4_gemm(rng: Rng) -> Problem:
    """bfloat16 by int4 weights, eight to a word along K, a power-of-two scale for each group of 32."""
    a = whole(rng, 32, 160, dtype=torch.bfloat16)
    nibbles = rng.integers(0, 16, (160, 64))
    words = (nibbles.reshape(20, 8, 64) << (4 * np.arange(8)[:, None])).sum(1)
    scale = torch.exp2(whole(rng, 5, 64, low=-2, high=3, dtype=torch.float32))
    weights = (nibbles - 8) * np.repeat(values(scale), 32, 0)
    packed = torch.from_numpy(words.astype(np.uint32).view(np.int32))
    return Problem({"a": a, "packed": packed, "scale": scale, "c": torch.zeros(32, 64), "M": 32, "N": 64,
                    "K": 160}, {"c": Wanted(values(a) @ weights)}, (2, 2),
                   {"BM": 16, "BN": 32, "BK": 32})


@triton.jit
def moe_kernel(a, w, order, expert, c, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    which = tl.load(expert + tl.program_id(0))
    if which < 0:
        return
    row = tl.load(order + tl.program_id(0) * BM + tl.arange(0, BM))
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + row[:, None] * K + (start + k)[None, :], mask=(row >= 0)[:, None], other=0.0)
        right = tl.load(w + which * K * N + (start + k)[:, None] * N + n[None, :])
        acc = tl.dot(left, right, acc)
    tl.store(c + row[:, None] * N + n[None, :], acc.to(tl.bfloat16), mask=(row >= 0)[:, None])


def mixture(rng: Rng) -> Problem:
    """Rows gathered by expert; one block of the grid has no expert and leaves early."""
    a, w = whole(rng, 40, 128, low=-2, high=3, dtype=torch.bfloat16), whole(rng, 3, 128, 64, low=-1, high=2,
                                                                          dtype=torch.bfloat16)
    chosen = rng.integers(0, 3, 40)
    order, expert = [], []
    for e in range(3):
        rows = np.flatnonzero(chosen == e)
        padded = np.full(-(-len(rows) // 16) * 16, -1)
        padded[:len(rows)] = rows
        order.append(padded)
        expert += [e] * (len(padded) // 16)
    flat = torch.from_numpy(np.concatenate([*order, np.full(16, -1)]).astype(np.int32))
    want = np.einsum("mk,mkn->mn", values(a), values(w)[chosen])
    return Problem({"a": a, "w": w, "order": flat, "expert": torch.tensor([*expert, -1], dtype=torch.int32),
                    "c": torch.zeros(40, 64, dtype=torch.bfloat16), "N": 64, "K": 128},
                   {"c": exact(torch.from_numpy(want).bfloat16())}, (len(expert) + 1, 2),
                   {"BM": 16, "BN": 32, "BK": 32})


SQUARE, SMALL = (64, 64, 32), (32, 32, 32)
@triton.jit
def scaled_kernel(a, scale_a, b, scale_b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m = tl.arange(0, M)
    n = tl.arange(0, N)
    k = tl.arange(0, K)
    group = tl.arange(0, K // 32)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + n[None, :])
    left_scale = tl.load(scale_a + m[:, None] * (K // 32) + group[None, :])
    right_scale = tl.load(scale_b + n[:, None] * (K // 32) + group[None, :])
    tl.store(c + m[:, None] * N + n[None, :],
             tl.dot_scaled(left, left_scale, "e4m3", right, right_scale, "e5m2"))


def scaled(rng: Rng) -> Problem:
    """Blocks of 32 along K share a power-of-two scale (microscaling)."""
    a, b, *_ = operands(rng, 64, 64, 128, torch.float32, whole_numbers=True)
    scale_a, scale_b = (whole(rng, 64, 4, low=125, high=130, dtype=torch.uint8) for _ in range(2))
    left = values(a) * np.repeat(2.0 ** (values(scale_a) - 127), 32, 1)
    right = values(b) * np.repeat(2.0 ** (values(scale_b) - 127), 32, 1).T
    return Problem({"a": a.to(E4M3), "scale_a": scale_a, "b": b.to(E5M2), "scale_b": scale_b,
                    "c": torch.zeros(64, 64)}, {"c": Wanted(left @ right)}, (1,),
                   {"M": 64, "N": 64, "K": 128})


CASES: list[Case] = [
    *cases("gemm-bf16-1stage", gemm_kernel, gemm(64, 64, 128, SQUARE, BF16, F32), num_stages=1),
    *cases("gemm-bf16-2stages", gemm_kernel, gemm(64, 64, 128, SQUARE, BF16, F32), num_stages=2),
    *cases("gemm-bf16-3stages", gemm_kernel, gemm(128, 64, 160, SQUARE, BF16, F32), num_stages=3),
    *cases("gemm-bf16-4stages-8warps", gemm_kernel, gemm(128, 128, 192, (128, 128, 32), BF16, F32),
           num_stages=4, num_warps=8),
    *cases("gemm-bf16-1warp", gemm_kernel, gemm(32, 32, 160, SMALL, BF16, F32), num_warps=1),
    *cases("gemm-bf16-2warps", gemm_kernel, gemm(64, 32, 160, SMALL, BF16, F32), num_warps=2),
    *cases("gemm-bf16-masked", gemm_kernel, gemm(72, 88, 168, SQUARE, BF16, F32)),
    *cases("gemm-bf16-odd", gemm_kernel, gemm(50, 37, 75, SMALL, BF16, F32), num_stages=2),
    *cases("gemm-bf16-real", gemm_kernel, gemm(64, 64, 160, SQUARE, BF16, whole_numbers=False)),
    # for sm_90 this kernel reads accumulators before wgmma.wait_group; ptxas says so too (C7517)
    *cases("gemm-f16-f16-accumulator", gemm_kernel, gemm(64, 64, 160, SQUARE, F16, acc=tl.float16),
           archs=(80,)),
    *cases("gemm-f16-real", gemm_kernel, gemm(64, 64, 160, SQUARE, F16, whole_numbers=False)),
    *cases("gemm-f16-nt", gemm_kernel, gemm(64, 64, 160, SQUARE, F16, F32, trans="NT")),
    *cases("gemm-f16-tn", gemm_kernel, gemm(64, 64, 160, SQUARE, F16, F32, trans="TN")),
    *cases("gemm-bf16-tt", gemm_kernel, gemm(64, 64, 160, SQUARE, BF16, F32, trans="TT")),
    *cases("gemm-tf32", gemm_kernel, gemm(64, 64, 160, SQUARE, F32)),
    *cases("gemm-tf32-real", gemm_kernel, gemm(64, 64, 160, SQUARE, F32, whole_numbers=False, loss=2**-9)),
    *cases("gemm-tf32x3", gemm_kernel, gemm(32, 32, 160, SMALL, F32, whole_numbers=False, precision="tf32x3",
                                            loss=2**-20)),
    *cases("gemm-bf16x3", gemm_kernel, gemm(32, 32, 160, SMALL, F32, whole_numbers=False, precision="bf16x3",
                                            loss=2**-14)),
    *cases("gemm-f32-ieee", gemm_kernel, gemm(32, 32, 80, (32, 32, 16), F32, whole_numbers=False,
                                              precision="ieee")),
    *cases("gemm-f64", gemm_kernel, gemm(32, 32, 80, (32, 32, 16), torch.float64, acc=tl.float64)),
    *cases("gemm-i8", gemm_kernel, gemm(64, 64, 320, (64, 64, 64), I8, torch.int32, acc=tl.int32)),
    *cases("gemm-i8-nt", gemm_kernel, gemm(64, 64, 320, (64, 64, 64), I8, torch.int32, acc=tl.int32,
                                           trans="NT")),
    *cases("gemm-e4m3", gemm_kernel, gemm(64, 64, 320, (64, 64, 64), E4M3, F32, trans="NT"), archs=(90,)),
    *cases("gemm-e5m2", gemm_kernel, gemm(64, 64, 320, (64, 64, 64), E5M2, F32, trans="NT")),
    *cases("gemm-bf16-2ctas", gemm_kernel, gemm(128, 128, 160, (128, 128, 32), BF16, F32), archs=(90,),
           num_ctas=2),
    *cases("gemm-f16-maxnreg", gemm_kernel, gemm(64, 64, 160, SQUARE, F16, F32), maxnreg=128),
    *cases("gemm-scaled", scaled_kernel, scaled, archs=(90,)),
    *cases("batched", batched_kernel, batched),
    *cases("batched-dot", batched_dot_kernel, batched_dot),
    *cases("split-k-f32", split_k_kernel, split_k(F32)),
    *cases("split-k-f16", split_k_kernel, split_k(F16)),
    *cases("split-k-bf16", split_k_kernel, split_k(BF16), archs=(90,)),
    *cases("last-arrival-k", stream_k_kernel, stream_k),
    *cases("gemm-int4-weights", int4_gemm_kernel, int4_gemm),
    *cases("experts", moe_kernel, mixture),
]
