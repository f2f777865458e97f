"""Programs of products: GEMMs with all that users put before and behind them, and solves."""
from __future__ import annotations

import numpy as np
import torch

from tests.support.language.programs.case import Case, call, fixed, integers, normal, uniform
from tinygrad_nv.language import *


@kernel
def context_matmul(a: KTile["M", "K", f32], b: KTile["K", "N", f32]) -> OTile["M", "N", f32]:
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(a.shape, T.k):
        acc = tile.dot(a[T.m, k], b[k, T.n], acc)
    return acc


@kernel(grid=lambda M, N, BM, BN: (cdiv(M, BM) * cdiv(N, BN),))
def grouped_order_matmul(a: KTile["M", "K", bf16], b: KTile["K", "N", bf16], c: OTile["M", "N", bf16], *,
                         BM: int,
                         BN: int, BK: int, GROUP: int = 2):
    M, K = a.shape
    N = b.shape[1]
    pid = tile.program_id(0)
    rows, columns = cdiv(M, BM), cdiv(N, BN)
    in_group = GROUP * columns
    group = pid // in_group
    first = group * GROUP
    size = tile.minimum(rows - first, GROUP)
    pid_m = first + (pid % in_group) % size
    pid_n = (pid % in_group) // size
    offs_m = (pid_m * BM + tile.arange(0, BM)) % M
    offs_n = (pid_n * BN + tile.arange(0, BN)) % N
    offs_k = tile.arange(0, BK)
    acc = tile.zeros((BM, BN), f32)
    for k in tile.range(0, cdiv(K, BK)):
        left = K - k * BK
        x = tile.load(a, offs_m[:, None], k * BK + offs_k[None, :], mask=offs_k[None, :] < left, other=0.0)
        y = tile.load(b, k * BK + offs_k[:, None], offs_n[None, :], mask=offs_k[:, None] < left, other=0.0)
        acc = tile.dot(x, y, acc)
    cm = pid_m * BM + tile.arange(0, BM)
    cn = pid_n * BN + tile.arange(0, BN)
    tile.store(c, acc.to(bf16), cm[:, None], cn[None, :], mask=(cm[:, None] < M) & (cn[None, :] < N))


@kernel(grid=lambda M, N: (cdiv(M, 32), cdiv(N, 32)))
def linear_gelu(x: KTile["M", "K", bf16], w: KTile["N", "K", bf16], bias: KTile["N", f32],
                out: OTile["M", "N", bf16]):
    m, n = tile.block(tile.program_id(0) * 32, 32), tile.block(tile.program_id(1) * 32, 32)
    acc = tile.zeros((m, n), f32)
    for k in tile.range_k(x, 32):
        acc += tile.dot(x[m, k], w[n, k].T)
    out[m, n] = tile.gelu(acc + bias[n][None, :]).to(bf16)


def _linear_gelu(x, w, bias):
    return torch.nn.functional.gelu(torch.from_numpy(x @ w.T + bias)).numpy()


@kernel
def batched_matmul(a: KTile["B", "M", "K", f16], b: KTile["B", "K", "N", f16]) -> OTile["B", "M", "N", f16]:
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(a.shape, T.k, prefetch=2):
        acc = tile.dot(tile.load(a, T.m, k), tile.load(b, k, T.n), acc)
    return tile.cast(acc, f16)


@kernel(grid=lambda M, N, SPLIT: (cdiv(M, 16), cdiv(N, 16), SPLIT))
def split_k(a: KTile["M", "K", f32], b: KTile["K", "N", f32], c: OTile["M", "N", f32], *, SPLIT: int):
    m, n = tile.block(tile.program_id(0) * 16, 16), tile.block(tile.program_id(1) * 16, 16)
    acc = tile.zeros((16, 16), f32)
    for k in tile.range(tile.program_id(2) * 16, a.shape[1], 16 * SPLIT):
        part = tile.block(k, 16)
        acc = tile.dot(a[m, part], b[part, n], acc)
    tile.atomic_add(c, acc, m, n)


@kernel(grid=lambda programs: (programs,))
def grouped_gemm(x: KTile["M", "K", bf16], w: KTile["E", "K", "N", bf16], ends: KTile["E", int32],
                 out: OTile["M", "N", f32], *, programs: int):
    E, K, N = w.shape
    columns = cdiv(N, 16)
    last = 0
    start = 0
    for e in tile.range(E):
        end = ends[e]
        blocks = cdiv(end - start, 16) * columns
        t = tile.program_id(0)
        while t < last + blocks:
            if t >= last:
                here = t - last
                rows = start + here // columns * 16 + tile.arange(16)
                cols = tile.block(here % columns * 16, 16)
                acc = tile.zeros((16, 16), f32)
                for k in tile.range_k(K, 32):
                    xb = tile.load(x, rows, k, mask=(rows < end)[:, None])
                    acc = tile.dot(xb, w[e, k, cols], acc)
                tile.store(out, acc, rows, cols, mask=(rows < end)[:, None])
            t += programs
        last += blocks
        start = end


def _grouped(x, w, ends):
    starts = [0, *ends[:-1]]
    return np.concatenate([x[a:b] @ each for a, b, each in zip(starts, ends, w, strict=True)])


@kernel(grid=lambda M, N: (cdiv(M, 16), cdiv(N, 32)))
def int8_gemm(a: KTile["M", "K", int8], b: KTile["N", "K", int8], sa: KTile["M", f32], sb: KTile["N", f32],
              out: OTile["M", "N", f16]):
    m, n = tile.block(tile.program_id(0) * 16, 16), tile.block(tile.program_id(1) * 32, 32)
    acc = tile.zeros((16, 32), int32)
    for k in tile.range_k(a.shape, 64):
        acc = tile.dot(a[m, k], b[n, k].T, acc)
    out[m, n] = (acc.to(f32) * sa[m][:, None] * sb[n][None, :]).to(f16)


@kernel
def weight_only_int8(x: KTile["M", "K", bf16], q: KTile["K", "N", int8], scale: KTile["N", f32]) \
        -> OTile["M", "N", bf16]:
    T = tile.context()
    acc = tile.zeros((T.m, T.n), f32)
    for k in tile.range_k(x.shape, T.k):
        acc = tile.dot_dequant_i8(x[T.m, k], q[k, T.n], scale[T.n], acc)
    return tile.cast(acc, bf16)


@kernel(grid=lambda M, N: (cdiv(M, 16), cdiv(N, 16)))
def fp8_gemm(a: KTile["M", "K", e4m3], b: KTile["K", "N", e5m2], scale: KTile[1, f32],
             out: OTile["M", "N", f32]):
    m, n = tile.block(tile.program_id(0) * 16, 16), tile.block(tile.program_id(1) * 16, 16)
    acc = tile.zeros((16, 16), f32)
    for k in tile.range_k(a, 32):
        acc = tile.dot(a[m, k], b[k, n], acc)
    out[m, n] = acc * scale[0]


@kernel(grid=lambda M, N: (cdiv(M, 16), cdiv(N, 32)))
def w4a16(x: KTile["M", "K", f16], packed: KTile["K//8", "N", int32], scales: KTile["K//group", "N", f16],
          zeros: KTile["K//group", "N", f16], out: OTile["M", "N", f16], *, group: int):
    m, n = tile.block(tile.program_id(0) * 16, 16), tile.block(tile.program_id(1) * 32, 32)
    acc = tile.zeros((16, 32), f32)
    for start in tile.range(0, x.shape[1], 32):
        rows = start + tile.arange(32)
        words = tile.load(packed, rows // 8, n)
        q = (words >> ((rows % 8) * 4)[:, None]) & 0xF
        s, z = tile.load(scales, rows // group, n), tile.load(zeros, rows // group, n)
        w = (q.to(f16) - z) * s
        acc = tile.dot(x[m, tile.block(start, 32)], w, acc)
    out[m, n] = acc.to(f16)


def _w4a16(x, packed, scales, zeros):
    q = (packed[:, None] >> (np.arange(8) * 4)[None, :, None]) & 15
    q = q.reshape(-1, packed.shape[1])
    group = len(q) // len(scales)
    w = (q.astype(np.float16) - np.repeat(zeros, group, 0).astype(np.float16)) * \
        np.repeat(scales, group, 0).astype(np.float16)
    return x @ w.astype(x.dtype)


@kernel(grid=lambda M: (cdiv(M, 16),))
def lora(x: KTile["M", "K", f32], w: KTile["K", "N", f32], a: KTile["K", "R", f32], b: KTile["R", "N", f32],
         out: OTile["M", "N", f32], *, alpha: float):
    m = tile.block(tile.program_id(0) * 16, 16)
    base, low = tile.zeros((16, w.shape[1]), f32), tile.zeros((16, a.shape[1]), f32)
    for k in tile.range_k(x, 16):
        rows = x[m, k]
        base, low = tile.dot(rows, w[k, :], base), tile.dot(rows, a[k, :], low)
    out[m, :] = base + alpha * tile.dot(low, b[:, :])


@kernel(grid=lambda M, N: (cdiv(M, 16), cdiv(N, 16)))
def conditional_gemm(a: KTile["M", "K", f32], b: KTile["K", "N", f32], c: KTile["M", "N", f32],
                     flags: KTile[2, int32], out: OTile["M", "N", f32]):
    m, n = tile.block(tile.program_id(0) * 16, 16), tile.block(tile.program_id(1) * 16, 16)
    acc = tile.zeros((16, 16), f32)
    if flags[0] != 0:
        for k in tile.range_k(a, 16):
            acc = tile.dot(a[m, k], b[k, n], acc)
    if flags[1] > 0:
        acc += c[m, n]
    elif flags[1] < 0:
        acc -= c[m, n]
    out[m, n] = acc


def _conditional(a, b, c, flags):
    return (a @ b if flags[0] else np.zeros_like(c)) + np.sign(flags[1]).astype(c.dtype) * c


@kernel(grid=lambda M: (cdiv(M, 16),))
def mlp(x: KTile["M", "D", bf16], gate: KTile["D", "H", bf16], up: KTile["D", "H", bf16],
        down: KTile["H", "D", bf16],
        out: OTile["M", "D", f32]):
    m = tile.block(tile.program_id(0) * 16, 16)
    rows = x[m, :]
    acc = tile.zeros((16, x.shape[1]), f32)
    for h in tile.range_k(gate, 32):
        g, u = tile.dot(rows, gate[:, h]), tile.dot(rows, up[:, h])
        acc = tile.dot((tile.silu(g) * u).to(bf16), down[h, :], acc)
    out[m, :] = acc


def _mlp(x, gate, up, down):
    """The plain reference rounds what is between the products to bfloat16, as the kernel does."""
    g = x @ gate
    hidden = g / (1 + np.exp(-g)) * (x @ up)
    if x.dtype == np.float32: hidden = torch.from_numpy(hidden).bfloat16().float().numpy()
    return hidden @ down


@kernel(grid=lambda B: (B,))
def triangular_solve(L: KTile["B", "n", "n", f32], b: KTile["B", "n", f32], x: OTile["B", "n", f32]):
    batch, n = tile.program_id(0), L.shape[1]
    index = tile.arange(n)
    solution, rest = tile.zeros((n,), f32), b[batch, :]
    for i in tile.range(n):
        column = L[batch, :, i]
        value = tile.sum(tile.where(index == i, rest, 0.0)) / L[batch, i, i]
        solution = tile.where(index == i, value, solution)
        rest = rest - tile.where(index > i, column * value, 0.0)
    x[batch, :] = solution


@kernel(grid=lambda B: (B,))
def cholesky(a: KTile["B", "n", "n", f32], out: OTile["B", "n", "n", f32]):
    batch, n = tile.program_id(0), a.shape[1]
    i, j = tile.arange(n)[:, None], tile.arange(n)[None, :]
    m = a[batch, :, :]
    for k in tile.range(n):
        column = tile.sum(tile.where(j == k, m, 0.0), axis=1)
        pivot = tile.sqrt(tile.sum(tile.where(tile.arange(n) == k, column, 0.0)))
        column = tile.where(tile.arange(n) >= k, column / pivot, 0.0)
        rest = m - column[:, None] * column[None, :]
        m = tile.where((i > k) & (j > k), rest, tile.where(j == k, column[:, None], m))
    out[batch, :, :] = tile.where(i >= j, m, 0.0)


def _spd(b, n):
    from tests.support.language.programs.case import Given

    def draw(rng):
        x = rng.standard_normal((b, n, n))
        return x @ np.swapaxes(x, 1, 2) + n * np.eye(n)
    return Given(draw, f32)


def _matmul(a, b): return a @ b


PROGRAMS = [
    *(Case(f"context_matmul-{m}x{n}x{k}", call(context_matmul), (normal(m, k), normal(k, n)), _matmul)
      for m, n, k in ((70, 90, 50), (3, 5, 7))),
    *(Case(f"context_matmul-{m}x{n}x{k}-odd",
           call(context_matmul.with_schedule(Schedule(block=(24, 40), k=20))),
           (normal(m, k), normal(k, n)), _matmul) for m, n, k in ((70, 90, 50),)),
    *(Case(f"grouped_order_matmul-{m}x{n}x{k}", call(grouped_order_matmul, BM=16, BN=32, BK=16),
           (normal(m, k, dtype=bf16), normal(k, n, dtype=bf16)), _matmul) for m, n, k in ((50, 70, 40),)),
    Case("linear_gelu-40x50x70", call(linear_gelu),
         (normal(40, 70, dtype=bf16), normal(50, 70, dtype=bf16, scale=0.2), normal(50)), _linear_gelu),
    Case("batched_matmul-3x40x50x30", call(batched_matmul),
         (normal(3, 40, 30, dtype=f16), normal(3, 30, 50, dtype=f16)), _matmul),
    Case("split_k-20x30x100", call(split_k, SPLIT=3), (normal(20, 100), normal(100, 30)), _matmul),
    Case("grouped_gemm-45", call(grouped_gemm, programs=3),
         (normal(45, 50, dtype=bf16), normal(4, 50, 40, dtype=bf16), fixed([5, 5, 38, 45])), _grouped),
    Case("int8_gemm-20x40x100", call(int8_gemm), (integers(-127, 128, 20, 100, dtype=int8),
         integers(-127, 128, 40, 100, dtype=int8), uniform(20, high=0.01), uniform(40, high=0.01)),
         lambda a, b, sa, sb: (a.astype(int) @ b.astype(int).T).astype(sa.dtype) * sa[:, None] * sb),
    Case("weight_only_int8-10x40x70", call(weight_only_int8), (normal(10, 70, dtype=bf16),
         integers(-127, 128, 70, 40, dtype=int8), uniform(40, high=0.01)), lambda x, q,
         s: x @ q.astype(x.dtype) * s),
    Case("fp8_gemm-20x30x50", call(fp8_gemm),
         (normal(20, 50, dtype=e4m3), normal(50, 30, dtype=e5m2), fixed([0.5], f32)), lambda a, b,
         s: a @ b * s),
    Case("w4a16-10x40x64", call(w4a16, group=32), (normal(10, 64, dtype=f16),
         integers(-2**31, 2**31, 8, 40), uniform(2, 40, low=0.01, high=0.1, dtype=f16),
         fixed(np.full((2, 40), 8.0), f16)), _w4a16),
    Case("lora-20x40x50", call(lora, alpha=0.5),
         (normal(20, 50), normal(50, 40), normal(50, 4), normal(4, 40)),
         lambda x, w, a, b: x @ w + x.dtype.type(0.5) * (x @ a @ b)),
    *(Case(f"conditional_gemm-{a}{b}", call(conditional_gemm),
           (normal(20, 30), normal(30, 20), normal(20, 20), fixed([a, b])), _conditional)
      for a, b in ((1, 1), (0, -1), (1, 0))),
    Case("mlp-20x32x70", call(mlp), (normal(20, 32, dtype=bf16), normal(32, 70, dtype=bf16, scale=0.2),
         normal(32, 70, dtype=bf16, scale=0.2), normal(70, 32, dtype=bf16)), _mlp),
    Case("triangular_solve-3x17", call(triangular_solve),
         (fixed(np.tril(np.random.default_rng(1).standard_normal((3, 17, 17))) + 5 * np.eye(17), f32),
          normal(3, 17)),
         lambda L, b: np.linalg.solve(L, b[..., None])[..., 0]),
    Case("cholesky-2x13", call(cholesky), (_spd(2, 13),), np.linalg.cholesky),
]
