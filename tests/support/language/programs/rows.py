"""Programs over rows: softmax, norms, losses, searches and sorts."""
from __future__ import annotations

import numpy as np
import torch

from tests.support.language.programs.case import Case, call, integers, normal
from tinygrad_nv.language import *


def next_power_of_2(n):
    power = 1
    while power < n: power *= 2
    return power


# **** softmax ****

@kernel(grid=lambda rows: (rows,))
def fused_softmax(x: KTile["rows", "cols", f32], out: OTile["rows", "cols", f32], *, BLOCK: int):
    row = tile.program_id(0)
    cols = tile.arange(0, BLOCK)
    mask = cols < x.shape[1]
    values = tile.load(x, row, cols, mask=mask, other=-INF)
    shifted = values - tile.max(values, axis=0)
    numerator = tile.exp(shifted)
    tile.store(out, numerator / tile.sum(numerator, axis=0), row, cols, mask=mask)


@kernel(grid=lambda programs: (programs,))
def persistent_softmax(x: KTile["rows", "cols", bf16], out: OTile["rows", "cols", bf16], *, programs: int):
    cols = tile.block(0, next_power_of_2(x.shape[1]))
    inside = cols.indices < x.shape[1]
    for row in tile.range(tile.program_id(0), x.shape[0], programs):
        values = tile.where(inside, x[row, cols].to(f32), -INF)
        e = tile.exp(values - tile.max(values, 0))
        out[row, cols] = (e / tile.sum(e, 0)).to(bf16)


def _softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# **** norms ****

@kernel(grid=lambda rows: (rows,))
def layer_norm(x: KTile["rows", "cols", f32], w: KTile["cols", f32], b: KTile["cols", f32],
               out: OTile["rows", "cols", f32], mean: OTile["rows", f32], rstd: OTile["rows", f32], *,
               BLOCK: int,
               eps: float = 1e-5):
    row, N = tile.program_id(0), x.shape[1]
    total = tile.zeros((BLOCK,), f32)
    for start in tile.range(0, N, BLOCK):
        total += x[row, tile.block(start, BLOCK)]
    mu = tile.sum(total) / N
    var = tile.zeros((BLOCK,), f32)
    for start in tile.range(0, N, BLOCK):
        cols = start + tile.arange(BLOCK)
        d = tile.where(cols < N, tile.load(x, row, cols, mask=cols < N) - mu, 0.0)
        var += d * d
    r = tile.rsqrt(tile.sum(var) / N + eps)
    mean[row] = mu
    rstd[row] = r
    for start in tile.range(0, N, BLOCK):
        cols = tile.block(start, BLOCK)
        out[row, cols] = (x[row, cols] - mu) * r * w[cols] + b[cols]


def _layer_norm(x, w, b, eps=1e-5):
    mean, var = x.mean(1), x.var(1)
    r = (1 / np.sqrt(var + x.dtype.type(eps))).astype(x.dtype)
    return (x - mean[:, None]) * r[:, None] * w + b, mean, r


@kernel(grid=lambda rows, group: (cdiv(rows, group),))
def layer_norm_backward(dy: KTile["rows", "cols", f32], x: KTile["rows", "cols", f32], w: KTile["cols", f32],
                        mean: KTile["rows", f32], rstd: KTile["rows", f32], dx: OTile["rows", "cols", f32],
                        dw: OTile["cols", f32], db: OTile["cols", f32], *, group: int):
    N = x.shape[1]
    cols = tile.block(0, next_power_of_2(N))
    dw_part = tile.zeros((cols,), f32)
    db_part = tile.zeros((cols,), f32)
    first = tile.program_id(0) * group
    for row in tile.range(first, tile.minimum(first + group, x.shape[0])):
        g, xhat = dy[row, cols], (x[row, cols] - mean[row]) * rstd[row]
        xhat = tile.where(cols.indices < N, xhat, 0.0)
        wdy = g * w[cols]
        c1 = tile.sum(xhat * wdy) / N
        c2 = tile.sum(wdy) / N
        dx[row, cols] = (wdy - (xhat * c1 + c2)) * rstd[row]
        dw_part += g * xhat
        db_part += g
    tile.atomic_add(dw, dw_part, cols)
    tile.atomic_add(db, db_part, cols)


def _layer_norm_backward(dy, x, w, mean, rstd):
    xhat = (x - mean[:, None]) * rstd[:, None]
    g = dy * w
    c1, c2 = (xhat * g).mean(1, keepdims=True), g.mean(1, keepdims=True)
    return (g - (xhat * c1 + c2)) * rstd[:, None], (dy * xhat).sum(0), dy.sum(0)


def mean_of_squares(values, count):
    return tile.sum(values * values, axis=1, keepdims=True) / count


@kernel(grid=lambda rows, BM: (cdiv(rows, BM),))
def rms_norm(x: KTile["rows", "cols", bf16], w: KTile["cols", bf16], out: OTile["rows", "cols", bf16], *,
             BM: int):
    r = tile.block(tile.program_id(0) * BM, BM)
    values = x[r, :].to(f32)
    scale = tile.rsqrt(mean_of_squares(values, x.shape[1]) + 1e-6)
    out[r, :] = (values * scale * w[:][None, :].to(f32)).to(bf16)


@kernel(grid=lambda B, G: (B, G))
def group_norm(x: KTile["B", "C", "L", f32], out: OTile["B", "C", "L", f32], *, G: int):
    b, size = tile.program_id(0), x.shape[1] // G
    channels = tile.block(tile.program_id(1) * size, size)
    values = x[b, channels, :]
    count = size * x.shape[2]
    mean = tile.sum(values) / count
    d = values - mean
    out[b, channels, :] = d * tile.rsqrt(tile.sum(d * d) / count + 1e-5)


def _group_norm(x, groups):
    B, C, L = x.shape
    y = x.reshape(B, groups, -1)
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + x.dtype.type(1e-5))
    return y.reshape(B, C, L)


@kernel(grid=lambda rows: (rows,))
def welford(x: KTile["rows", "cols", f32], mean: OTile["rows", f32], var: OTile["rows", f32]):
    def combine(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
        n = n_a + n_b
        delta = mean_b - mean_a
        part = n_b / n
        return mean_a + delta * part, m2_a + m2_b + delta * delta * n_a * part, n

    row, cols = tile.program_id(0), x.shape[1]
    values = x[row, :]
    mu, m2, n = tile.reduce((values, tile.zeros((cols,)), tile.ones((cols,))), 0, combine)
    mean[row] = mu
    var[row] = m2 / n


# **** losses ****

@kernel(grid=lambda rows: (rows,))
def cross_entropy(logits: KTile["rows", "V", f32], target: KTile["rows", int32], loss: OTile["rows", f32],
                  dlogits: OTile["rows", "V", f32], *, CHUNK: int):
    row, V = tile.program_id(0), logits.shape[1]
    m, l = -INF, 0.0
    for start in tile.range(0, V, CHUNK):
        cols = start + tile.arange(CHUNK)
        x = tile.load(logits, row, cols, mask=cols < V, other=-INF)
        m_new = tile.maximum(m, tile.max(x))
        l = l * tile.exp(m - m_new) + tile.sum(tile.exp(x - m_new))
        m = m_new
    lse = m + tile.log(l)
    y = target[row]
    loss[row] = lse - logits[row, y]
    for start in tile.range(0, V, CHUNK):
        cols = start + tile.arange(CHUNK)
        p = tile.exp(tile.load(logits, row, cols, mask=cols < V, other=-INF) - lse)
        tile.store(dlogits, p - (cols == y).to(f32), row, cols)


def _cross_entropy(x, y):
    logits = torch.from_numpy(x).requires_grad_()
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y).long(), reduction="none")
    loss.sum().backward()
    return loss.detach().numpy(), logits.grad.numpy()


@kernel(grid=lambda rows: (cdiv(rows, 4),))
def cosine(x: KTile["rows", "cols", f16], y: KTile["rows", "cols", f16], out: OTile["rows", f32]):
    r = tile.block(tile.program_id(0) * 4, 4)
    a, b = x[r, :].to(f32), y[r, :].to(f32)
    norm = tile.sqrt(tile.sum(a * a, 1)) * tile.sqrt(tile.sum(b * b, 1))
    out[r] = tile.where(norm > 0.0, tile.sum(a * b, 1) / norm, 0.0)


# **** searches and sorts ****

@kernel(grid=lambda rows, BM: (cdiv(rows, BM),))
def row_argmax(x: KTile["rows", "cols", f32], best: OTile["rows", f32], where: OTile["rows", int32], *,
               BM: int = 4):
    r = tile.block(tile.program_id(0) * BM, BM)
    top = tile.full((BM,), -INF)
    at = tile.zeros((BM,), int32)
    for start in tile.range(0, x.shape[1], 16):
        cols = tile.block(start, 16)
        values = tile.where((cols.indices < x.shape[1])[None, :], x[r, cols], -INF)
        local, index = tile.max(values, 1), tile.argmax(values, 1)
        better = local > top
        top, at = tile.where(better, local, top), tile.where(better, start + index, at)
    best[r] = top
    where[r] = at


@kernel(grid=lambda rows: (rows,))
def top_k(x: KTile["rows", "cols", f32], values: OTile["rows", "K", f32], index: OTile["rows", "K", int32],
          *, K: int):
    row = tile.program_id(0)
    left = x[row, :]
    for i in range(K):
        at = tile.argmax(left)
        values[row, i] = tile.max(left)
        index[row, i] = at
        left = tile.where(tile.arange(x.shape[1]) == at, -INF, left)


def _top_k(x, k):
    order = np.argsort(-x, 1, kind="stable")[:, :k]
    return np.take_along_axis(x, order, 1), order.astype(np.int32)


@kernel(grid=lambda rows: (rows,))
def bitonic_sort(x: KTile["rows", "n", int32], out: OTile["rows", "n", int32]):
    row, n = tile.program_id(0), x.shape[1]
    index, values = tile.arange(n), x[row, :]
    k = 2
    while k <= n:
        j = k // 2
        while j > 0:
            other = tile.gather(values, index ^ j)
            ascending = (index & k) == 0
            lower = (index & j) == 0
            values = tile.where(ascending == lower, tile.minimum(values, other), tile.maximum(values, other))
            j //= 2
        k *= 2
    out[row, :] = values


@kernel(grid=lambda rows: (cdiv(rows, 2),))
def row_sort(x: KTile["rows", "cols", f32], up: OTile["rows", "cols", f32], down: OTile["rows", "cols", f32],
             median: OTile["rows", f32]):
    r = tile.block(tile.program_id(0) * 2, 2)
    values = tile.sort(x[r, :])
    up[r, :] = values
    down[r, :] = tile.sort(x[r, :], descending=True)
    median[r] = tile.gather(values, tile.full((2, 1), x.shape[1] // 2, int32)).reshape(2)


@kernel(grid=lambda m, BM: (cdiv(m, BM),))
def matvec(a: KTile["m", "n", f32], x: KTile["n", f32], y: OTile["m", f32], *, BM: int, BN: int):
    r = tile.block(tile.program_id(0) * BM, BM)
    acc = tile.zeros((BM, BN), f32)
    for start in tile.range(0, a.shape[1], BN):
        c = tile.block(start, BN)
        acc += a[r, c] * x[c][None, :]
    y[r] = tile.sum(acc, axis=1)


@kernel(grid=lambda n, m: (cdiv(n, 8), cdiv(m, 8)))
def distances(x: KTile["n", "d", f32], y: KTile["m", "d", f32], out: OTile["n", "m", f32]):
    i, j = tile.block(tile.program_id(0) * 8, 8), tile.block(tile.program_id(1) * 8, 8)
    difference = x[i, :][:, None, :] - y[j, :][None, :, :]
    out[i, j] = tile.sqrt(tile.sum(difference * difference, axis=2))


PROGRAMS = [
    *(Case(f"fused_softmax-{m}x{n}", call(fused_softmax, BLOCK=next_power_of_2(n)),
           (normal(m, n, scale=4.0),),
           _softmax) for m, n in ((5, 100), (3, 1), (2, 781))),
    Case("persistent_softmax-11x50", call(persistent_softmax, programs=4), (normal(11, 50, dtype=bf16),),
         _softmax),
    *(Case(f"layer_norm-{m}x{n}-{block}", call(layer_norm, BLOCK=block),
           (normal(m, n, mean=2.0), normal(n), normal(n)), _layer_norm)
      for m, n, block in ((5, 100, 64), (3, 77, 30))),
    Case("layer_norm_backward-10x50", call(layer_norm_backward, group=4),
         (normal(10, 50), normal(10, 50), normal(50), normal(10, scale=0.1), normal(10, scale=0.1, mean=1.0)),
         _layer_norm_backward, c=8.0),
    *(Case(f"rms_norm-{m}x{n}-{block}", call(rms_norm, BM=block),
           (normal(m, n, dtype=bf16), normal(n, dtype=bf16)),
           lambda x, w: x / np.sqrt((x * x).mean(1, keepdims=True) + x.dtype.type(1e-6)) * w)
      for m, n, block in ((9, 64, 4), (5, 43, 3))),
    Case("group_norm-2x6x25", call(group_norm, G=3), (normal(2, 6, 25),), lambda x: _group_norm(x, 3)),
    *(Case(f"welford-{m}x{n}", call(welford), (normal(m, n, mean=3.0),), lambda x: (x.mean(1), x.var(1)))
      for m, n in ((3, 50), (2, 7))),
    Case("cross_entropy-5x130-48", call(cross_entropy, CHUNK=48),
         (normal(5, 130, scale=3.0), integers(0, 130, 5)),
         _cross_entropy),
    Case("cosine-7x40", call(cosine), (normal(7, 40, dtype=f16), normal(7, 40, dtype=f16)),
         lambda x, y: (x * y).sum(1) / np.sqrt((x * x).sum(1)) / np.sqrt((y * y).sum(1))),
    *(Case(f"row_argmax-{m}x{n}", call(row_argmax), (normal(m, n),),
           lambda x: (x.max(1), x.argmax(1).astype(np.int32))) for m, n in ((7, 50), (1, 16))),
    Case("top_k-3x40-5", call(top_k, K=5), (normal(3, 40),), lambda x: _top_k(x, 5)),
    Case("bitonic_sort-3x32", call(bitonic_sort), (integers(-50, 50, 3, 32),), lambda x: np.sort(x, 1)),
    Case("row_sort-3x37", call(row_sort), (normal(3, 37),),
         lambda x: (np.sort(x, 1), np.sort(x, 1)[:, ::-1], np.sort(x, 1)[:, 18])),
    *(Case(f"matvec-{m}x{n}-{bm}x{bn}", call(matvec, BM=bm, BN=bn), (normal(m, n), normal(n)), lambda a,
           x: a @ x)
      for m, n, bm, bn in ((37, 100, 8, 32), (5, 23, 3, 7))),
    Case("distances-11x13x20", call(distances), (normal(11, 20), normal(13, 20)),
         lambda x, y: np.sqrt(((x[:, None] - y[None]) ** 2).sum(-1))),
]
