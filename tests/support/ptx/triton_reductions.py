"""Kernels that reduce, scan or sort: softmax and norms, sums along both axes, scans, sort, histogram."""
from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tests.support.ptx.triton_case import Case, Problem, Wanted, cases, exact, values
from tests.support.ptx.triton_pointwise import Rng, real, relative, whole

ULP = 2**-23


@triton.jit
def softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    a = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf")).to(tl.float32)
    e = tl.exp(a - tl.max(a, axis=0))
    tl.store(out + row * columns + at, (e / tl.sum(e, axis=0)).to(out.dtype.element_ty), mask=at < columns)


def softmax_values(a: np.ndarray) -> np.ndarray:
    """Softmax along the last axis."""
    e = np.exp(a - a.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def softmax(dtype: torch.dtype, columns: int, block: int) -> Any:
    """Rows of normal numbers; bfloat16 outputs are rounded once more (2**-8)."""
    def make(rng: Rng) -> Problem:
        x = real(rng, 7, columns, dtype=dtype)
        last = 2**-8 if dtype is torch.bfloat16 else 0
        return Problem({"x": x, "out": torch.zeros(7, columns, dtype=dtype), "columns": columns},
                       {"out": relative(softmax_values(values(x)), 2**-18 + last)}, (7,), {"BLOCK": block})
    return make


@triton.jit
def online_softmax_kernel(x, out, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x + row * columns + at, mask=at < columns, other=-float("inf"))
        new = tl.maximum(top, a)
        total = total * tl.exp(top - new) + tl.exp(a - new)
        top = new
    most = tl.max(top, axis=0)
    every = tl.sum(total * tl.exp(top - most), axis=0)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x + row * columns + at, mask=at < columns)
        tl.store(out + row * columns + at, tl.exp(a - most) / every, mask=at < columns)


@triton.jit
def layer_norm_kernel(x, weight, bias, out, mean, rstd, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < n
    a = tl.load(x + row * n + at, mask=mask, other=0.0).to(tl.float32)
    m = tl.sum(a, axis=0) / n
    centred = tl.where(mask, a - m, 0.0)
    r = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / n + eps)
    tl.store(mean + row, m)
    tl.store(rstd + row, r)
    w = tl.load(weight + at, mask=mask)
    b = tl.load(bias + at, mask=mask)
    tl.store(out + row * n + at, (centred * r * w + b).to(out.dtype.element_ty), mask=mask)


def layer_norm(dtype: torch.dtype) -> Any:
    """Forward layer norm with its statistics. Absolute bounds: outputs are of order 1."""
    def make(rng: Rng) -> Problem:
        x, weight, bias = real(rng, 6, 120, dtype=dtype), real(rng, 120), real(rng, 120)
        a = values(x)
        mean = a.mean(1)
        rstd = 1 / np.sqrt(a.var(1) + 1e-5)
        want = (a - mean[:, None]) * rstd[:, None] * values(weight) + values(bias)
        last = 2**-11 * np.abs(want) if dtype is torch.float16 else 0
        return Problem({"x": x, "weight": weight, "bias": bias, "out": torch.zeros(6, 120, dtype=dtype),
                        "mean": torch.zeros(6), "rstd": torch.zeros(6), "n": 120, "eps": 1e-5},
                       {"out": Wanted(want, 1e-5 + last), "mean": Wanted(mean, 1e-6),
                        "rstd": Wanted(rstd, 1e-5)}, (6,), {"BLOCK": 128})
    return make


@triton.jit
def layer_norm_backward_kernel(dout, x, weight, mean, rstd, dx, dweight, dbias, locks, n,
                               GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < n
    normal = (tl.load(x + row * n + at, mask=mask, other=0.0) - tl.load(mean + row)) * tl.load(rstd + row)
    normal = tl.where(mask, normal, 0.0)
    grad = tl.load(dout + row * n + at, mask=mask, other=0.0)
    scaled = grad * tl.load(weight + at, mask=mask, other=0.0)
    c1 = tl.sum(normal * scaled, axis=0) / n
    c2 = tl.sum(scaled, axis=0) / n
    tl.store(dx + row * n + at, (scaled - (normal * c1 + c2)) * tl.load(rstd + row), mask=mask)
    group = row % GROUPS
    lock = locks + group
    count = locks + GROUPS + group
    part_w = grad * normal
    part_b = grad
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    if tl.load(count) == 0:
        tl.atomic_xchg(count, 1)
    else:
        part_w += tl.load(dweight + group * n + at, mask=mask)
        part_b += tl.load(dbias + group * n + at, mask=mask)
    tl.store(dweight + group * n + at, part_w, mask=mask)
    tl.store(dbias + group * n + at, part_b, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def backward_values(x: torch.Tensor, dout: torch.Tensor, weight: torch.Tensor
                    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, np.ndarray]:
    """mean, rstd, x normalised, dout in float64, and layer norm's dx."""
    a, grad, w = x.double(), dout.double(), weight.double()
    mean, rstd = a.mean(1), 1 / (a.var(1, unbiased=False) + 1e-5).sqrt()
    normal = (a - mean[:, None]) * rstd[:, None]
    scaled = grad * w
    dx = (scaled - normal * (normal * scaled).mean(1, keepdim=True) - scaled.mean(1, keepdim=True)
          ) * rstd[:, None]
    return mean, rstd, normal, grad, dx.numpy()


def layer_norm_backward(rng: Rng) -> Problem:
    """dx, and partial dweight and dbias of 8 rows summed into 2 groups under a spin lock."""
    x, dout, weight = real(rng, 8, 100), real(rng, 8, 100), real(rng, 100)
    mean, rstd, normal, grad, dx = backward_values(x, dout, weight)
    dw = (grad * normal).view(4, 2, 100).sum(0).numpy()
    db = grad.view(4, 2, 100).sum(0).numpy()
    return Problem({"dout": dout, "x": x, "weight": weight, "mean": mean.float(), "rstd": rstd.float(),
                    "dx": torch.zeros(8, 100), "dweight": torch.zeros(2, 100), "dbias": torch.zeros(2, 100),
                    "locks": torch.zeros(4, dtype=torch.int32), "n": 100},
                   {"dx": Wanted(dx, 1e-5), "dweight": Wanted(dw, 1e-5), "dbias": Wanted(db, 1e-5),
                    "locks": exact(torch.tensor([0, 0, 1, 1]))}, (8,), {"GROUPS": 2, "BLOCK": 128})


@triton.jit
def norm_atomic_kernel(dout, normal, dweight, rows, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    mask = (i < rows)[:, None] & (at < n)[None, :]
    where = i[:, None] * n + at[None, :]
    part = tl.load(dout + where, mask=mask, other=0.0) * tl.load(normal + where, mask=mask, other=0.0)
    tl.atomic_add(dweight + at, tl.sum(part, axis=0), mask=at < n, sem="relaxed")


def norm_atomic(rng: Rng) -> Problem:
    """dweight summed by atomics; integer values, so that any order gives the same."""
    dout, normal = whole(rng, 30, 100, dtype=torch.float32), whole(rng, 30, 100, dtype=torch.float32)
    return Problem({"dout": dout, "normal": normal, "dweight": torch.zeros(100), "rows": 30, "n": 100},
                   {"dweight": exact((dout * normal).sum(0))}, (4,), {"ROWS": 8, "BLOCK": 128})


@triton.jit
def rms_norm_kernel(x, weight, out, n, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    square = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
        square += a * a
    r = tl.rsqrt(tl.sum(square, axis=0) / n + eps)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
        w = tl.load(weight + at, mask=at < n)
        tl.store(out + row * n + at, (a * r).to(out.dtype.element_ty) * w, mask=at < n)


def rms_norm(rng: Rng) -> Problem:
    """bfloat16 rows of 600 in blocks of 128: two roundings to bfloat16 (2**-8 each)."""
    x, weight = real(rng, 4, 600, dtype=torch.bfloat16), real(rng, 600, dtype=torch.bfloat16)
    a = values(x)
    want = a / np.sqrt((a * a).mean(1, keepdims=True) + 1e-6) * values(weight)
    return Problem({"x": x, "weight": weight, "out": torch.zeros_like(x), "n": 600, "eps": 1e-6},
                   {"out": relative(want, 2**-7 + 2**-12)}, (4,), {"BLOCK": 128})


@triton.jit
def sums_kernel(x, rows, columns, best, least, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)
    j = tl.arange(0, N)
    a = tl.load(x + i[:, None] * N + j[None, :])
    tl.store(rows + i, tl.sum(a, axis=1))
    tl.store(columns + j, tl.sum(a, axis=0))
    tl.store(best + i, tl.argmax(a, axis=1))
    tl.store(least + j, tl.argmin(a, axis=0))


def sums(dtype: torch.dtype, m: int, n: int) -> Any:
    """Sums along both axes; argmax and argmin with ties, the first one wins."""
    def make(rng: Rng) -> Problem:
        x = whole(rng, m, n, dtype=dtype)
        total = torch.int32 if dtype in (torch.int8, torch.int32) else dtype
        a = values(x)
        return Problem({"x": x, "rows": torch.zeros(m, dtype=total), "columns": torch.zeros(n, dtype=total),
                        "best": torch.zeros(m, dtype=torch.int32),
                        "least": torch.zeros(n, dtype=torch.int32)},
                       {"rows": Wanted(a.sum(1)), "columns": Wanted(a.sum(0)),
                        "best": Wanted(a.argmax(1)), "least": Wanted(a.argmin(0))}, (1,), {"M": m, "N": n})
    return make


@triton.jit
def fused_pair(a1, b1, a2, b2):
    return a1 * a2, b1 * a2 + b2


@triton.jit
def welford(mean1, square1, count1, mean2, square2, count2):
    count = count1 + count2
    delta = mean2 - mean1
    part = tl.where(count == 0.0, 0.0, count2 / count)
    return mean1 + delta * part, square1 + square2 + delta * delta * count1 * part, count


@triton.jit
def scans_kernel(x, sums, products, pairs, reverse, moments, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)
    j = tl.arange(0, N)
    at = i[:, None] * N + j[None, :]
    a = tl.load(x + at)
    tl.store(sums + at, tl.cumsum(a, axis=1))
    tl.store(products + at, tl.cumprod(tl.where(a > 0, 1, -1), axis=0))
    state = tl.associative_scan((tl.where(a > 0, 1, -1), a), 1, fused_pair)
    tl.store(pairs + at, state[1])
    tl.store(reverse + at, tl.cumsum(a, axis=1, reverse=True))
    real = a.to(tl.float32)
    one = tl.full(real.shape, 1.0, tl.float32)
    mean, square, count = tl.reduce((real, tl.zeros_like(real), one), 1, welford)
    tl.store(moments + i, mean)
    tl.store(moments + M + i, square / count)


def scans(rng: Rng) -> Problem:
    """Scans along both axes, a linear recurrence h = ±h + x, reversed sums, mean and variance by Welford."""
    x = whole(rng, 16, 128)
    a = values(x)
    sign = np.where(a > 0, 1, -1)
    pairs = np.zeros_like(a)
    h = np.zeros(16, np.int64)
    for j in range(128): pairs[:, j] = h = sign[:, j] * h + a[:, j]
    names = ("sums", "products", "pairs", "reverse")
    ints = {name: torch.zeros(16, 128, dtype=torch.int32) for name in names}
    return Problem({"x": x, **ints, "moments": torch.zeros(2, 16)},
                   {"sums": Wanted(a.cumsum(1)), "products": Wanted(sign.cumprod(0)), "pairs": Wanted(pairs),
                    "reverse": Wanted(a[:, ::-1].cumsum(1)[:, ::-1]),
                    "moments": Wanted(np.stack([a.mean(1), a.var(1)]), 1e-4)}, (1,), {"M": 16, "N": 128})


@triton.jit
def sort_kernel(x, out, down, top, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    i = tl.arange(0, M)
    at = i[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + at)
    tl.store(out + at, tl.sort(a))
    tl.store(down + at, tl.flip(tl.sort(a, descending=True)))
    tl.store(top + i[:, None] * K + tl.arange(0, K)[None, :], tl.topk(a, K))


def sort(dtype: torch.dtype) -> Any:
    """Rows sorted both ways, and the 8 largest."""
    def make(rng: Rng) -> Problem:
        x = whole(rng, 4, 64, low=-1000, high=1000, dtype=dtype)
        want = x.sort(1).values
        return Problem({"x": x, "out": torch.zeros_like(x), "down": torch.zeros_like(x),
                        "top": torch.zeros(4, 8, dtype=dtype)},
                       {"out": exact(want), "down": exact(want), "top": exact(want.flip(1)[:, :8])}, (1,),
                       {"M": 4, "N": 64, "K": 8})
    return make


@triton.jit
def histogram_kernel(x, out, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    count = tl.histogram(tl.load(x + at, mask=mask, other=0), BINS, mask=mask)
    tl.atomic_add(out + tl.arange(0, BINS), count)


def histogram(rng: Rng) -> Problem:
    """900 values in 64 bins, over two CTAs."""
    x = whole(rng, 900, low=0, high=64)
    return Problem({"x": x, "out": torch.zeros(64, dtype=torch.int32), "n": 900},
                   {"out": exact(torch.bincount(x, minlength=64))}, (2,), {"BINS": 64, "BLOCK": 512})


@triton.jit
def cross_entropy_kernel(logits, target, loss, grad, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    label = tl.load(target + row)
    top = -float("inf")
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(a, axis=0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(a - new), axis=0)
        top = new
    chosen = tl.load(logits + row * vocabulary + label).to(tl.float32)
    if label >= 0:
        tl.store(loss + row, tl.log(total) + top - chosen)
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        a = tl.load(logits + row * vocabulary + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        got = tl.exp(a - top) / total - tl.where(at == label, 1.0, 0.0)
        tl.store(grad + row * vocabulary + at, got, mask=at < vocabulary)


def cross_entropy(rng: Rng) -> Problem:
    """Loss and gradient over a vocabulary of 500 in blocks of 128."""
    logits, target = real(rng, 5, 500, dtype=torch.bfloat16), whole(rng, 5, low=0, high=500)
    p = softmax_values(values(logits))
    loss = -np.log(p[np.arange(5), values(target)])
    p[np.arange(5), values(target)] -= 1
    return Problem({"logits": logits, "target": target, "loss": torch.zeros(5), "grad": torch.zeros(5, 500),
                    "vocabulary": 500}, {"loss": Wanted(loss, 1e-5), "grad": Wanted(p, 1e-5)}, (5,),
                   {"BLOCK": 128})


CASES: list[Case] = [
    *cases("softmax-f32", softmax_kernel, softmax(torch.float32, 200, 256)),
    *cases("softmax-bf16-8warps", softmax_kernel, softmax(torch.bfloat16, 700, 1024), num_warps=8),
    *cases("softmax-2ctas", softmax_kernel, softmax(torch.float32, 700, 1024), archs=(90,), num_ctas=2),
    *cases("softmax-online", online_softmax_kernel, softmax(torch.float32, 600, 128)),
    *cases("layer-norm-f32", layer_norm_kernel, layer_norm(torch.float32)),
    *cases("layer-norm-f16", layer_norm_kernel, layer_norm(torch.float16), num_warps=2),
    *cases("layer-norm-backward-locks", layer_norm_backward_kernel, layer_norm_backward),
    *cases("layer-norm-backward-atomics", norm_atomic_kernel, norm_atomic),
    *cases("rms-norm", rms_norm_kernel, rms_norm),
    *cases("sums-i32", sums_kernel, sums(torch.int32, 32, 64)),
    *cases("sums-f16-1warp", sums_kernel, sums(torch.float16, 16, 16), num_warps=1),
    *cases("sums-f32-8warps", sums_kernel, sums(torch.float32, 64, 128), num_warps=8),
    *cases("scans", scans_kernel, scans),
    *cases("sums-f32-2ctas", sums_kernel, sums(torch.float32, 64, 128), archs=(90,), num_ctas=2),
    *cases("sort-i32", sort_kernel, sort(torch.int32)),
    *cases("sort-f32-2warps", sort_kernel, sort(torch.float32), num_warps=2),
    *cases("histogram", histogram_kernel, histogram),
    *cases("cross-entropy", cross_entropy_kernel, cross_entropy),
]
