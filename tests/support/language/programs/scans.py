"""Programs whose elements depend on those before them: sums, recurrences, dynamic programming."""
from __future__ import annotations

import numpy as np

from tests.support.language.programs.case import Case, call, integers, normal, uniform
from tinygrad_nv.language import *


@kernel(grid=lambda rows: (rows,))
def row_cumsum(x: KTile["rows", "cols", f32], out: OTile["rows", "cols", f32], *, BLOCK: int):
    row, carry = tile.program_id(0), 0.0
    for start in tile.range(0, x.shape[1], BLOCK):
        cols = tile.block(start, BLOCK)
        sums = tile.cumsum(x[row, cols]) + carry
        out[row, cols] = sums
        carry = tile.sum(x[row, cols]) + carry


@kernel(grid=lambda rows: (cdiv(rows, 4),))
def reversed_products(x: KTile["rows", "cols", f32], out: OTile["rows", "cols", f32],
                      best: OTile["rows", "cols", f32]):
    r = tile.block(tile.program_id(0) * 4, 4)
    out[r, :] = tile.cumprod(x[r, :], axis=1, reverse=True)
    best[r, :] = tile.cummax(x[r, :], axis=-1)


@kernel(grid=lambda n, BLOCK: (cdiv(n, BLOCK),))
def block_sums(x: KTile["n", int32], sums: OTile["cdiv", int32], *, BLOCK: int, cdiv: int):
    pid = tile.program_id(0)
    sums[pid] = tile.sum((x[tile.block(pid * BLOCK, BLOCK)] > 0).to(int32))


@kernel(grid=lambda n, BLOCK: (cdiv(n, BLOCK),))
def compact(x: KTile["n", int32], ends: KTile["blocks", int32], out: OTile["n", int32], *, BLOCK: int):
    pid = tile.program_id(0)
    values = x[tile.block(pid * BLOCK, BLOCK)]
    keep = values > 0
    before = tile.where(pid == 0, 0, ends[tile.maximum(pid - 1, 0)])
    place = before + tile.cumsum(keep.to(int32)) - 1
    tile.store(out, values, place, mask=keep)


def _compact(launch, x, *, BLOCK):
    blocks = -(-x.shape[0] // BLOCK)
    counts = launch(block_sums, x, BLOCK=BLOCK, cdiv=blocks)
    return launch(compact, x, counts.cumsum(0).cast("int32").contiguous(), x.zeros_like().contiguous(),
                  BLOCK=BLOCK)


def _compact_reference(x):
    kept = x[x > 0]
    return np.concatenate([kept, np.zeros(len(x) - len(kept), np.int32)])


@kernel(grid=lambda rows: (rows,))
def segmented_scan(x: KTile["rows", "n", f32], flags: KTile["rows", "n", int32],
                   out: OTile["rows", "n", f32]):
    def combine(sum_a, flag_a, sum_b, flag_b):
        return tile.where(flag_b != 0, sum_b, sum_a + sum_b), flag_a | flag_b

    row = tile.program_id(0)
    sums, _ = tile.scan((x[row, :], flags[row, :]), 0, combine)
    out[row, :] = sums


def _segmented(x, flags):
    out = x.copy()
    for i in range(1, x.shape[1]): out[:, i] = np.where(flags[:, i] != 0, x[:, i], out[:, i - 1] + x[:, i])
    return out


def first_order(a1, b1, a2, b2):
    return a1 * a2, a2 * b1 + b2


@kernel(grid=lambda D, B: (cdiv(D, 4), B))
def selective_scan(u: KTile["B", "L", "D", f32], delta: KTile["B", "L", "D", f32], A: KTile["D", "N", f32],
                   Bm: KTile["B", "L", "N", f32], Cm: KTile["B", "L", "N", f32],
                   y: OTile["B", "L", "D", f32], *,
                   CHUNK: int):
    d, b = tile.block(tile.program_id(0) * 4, 4), tile.program_id(1)
    a, h = A[d, :], tile.zeros((4, A.shape[1]), f32)
    for start in tile.range(0, u.shape[1], CHUNK):
        t = tile.block(start, CHUNK)
        dt, x = delta[b, t, d], u[b, t, d]
        decay = tile.exp(dt[:, :, None] * a[None, :, :])
        inputs = (dt * x)[:, :, None] * Bm[b, t, :][:, None, :]
        decays, states = tile.scan((decay, inputs), 0, first_order)
        states = states + decays * h[None, :, :]
        y[b, t, d] = tile.sum(states * Cm[b, t, :][:, None, :], axis=2)
        h = tile.sum(tile.where((tile.arange(CHUNK) == CHUNK - 1)[:, None, None], states, 0.0), axis=0)


@kernel(grid=lambda D, B: (cdiv(D, 8), B))
def recurrent_scan(u: KTile["B", "L", "D", f32], delta: KTile["B", "L", "D", f32], A: KTile["D", "N", f32],
                   Bm: KTile["B", "L", "N", f32], Cm: KTile["B", "L", "N", f32],
                   y: OTile["B", "L", "D", f32]):
    d, b = tile.block(tile.program_id(0) * 8, 8), tile.program_id(1)
    h, a = tile.zeros((8, A.shape[1])), A[d, :]
    for t in tile.range(u.shape[1]):
        dt = delta[b, t, d][:, None]
        h = tile.exp(dt * a) * h + dt * u[b, t, d][:, None] * Bm[b, t, :][None, :]
        y[b, t, d] = tile.sum(h * Cm[b, t, :][None, :], 1)


def _selective(u, delta, A, Bm, Cm):
    h, y = np.zeros((len(u), *A.shape), u.dtype), np.zeros_like(u)
    for t in range(u.shape[1]):
        dt = delta[:, t, :, None]
        h = np.exp(dt * A) * h + dt * u[:, t, :, None] * Bm[:, t, None]
        y[:, t] = (h * Cm[:, t, None]).sum(-1)
    return y


@kernel(grid=lambda rows: (rows,))
def moving_average(x: KTile["rows", "n", f32], out: OTile["rows", "n", f32], *, decay: float):
    row, n = tile.program_id(0), x.shape[1]
    _, out[row, :] = tile.scan((tile.full((n,), decay), (1 - decay) * x[row, :]), 0, first_order)


def _average(x, decay):
    out, state = np.zeros_like(x), np.zeros(len(x), x.dtype)
    for t in range(x.shape[1]): out[:,
                                    t] = state = x.dtype.type(decay) * state + x.dtype.type(1 - decay) * x[:,
                                                                                                           t]
    return out


@kernel(grid=lambda rows: (rows,))
def log_cumsum_exp(x: KTile["rows", "n", f32], out: OTile["rows", "n", f32]):
    def combine(m1, s1, m2, s2):
        m = tile.maximum(m1, m2)
        return m, s1 * tile.exp(m1 - m) + s2 * tile.exp(m2 - m)

    values = x[tile.program_id(0), :]
    m, s = tile.scan((values, tile.ones(values.shape)), 0, combine)
    out[tile.program_id(0), :] = m + tile.log(s)


@kernel(grid=lambda pairs: (pairs,))
def levenshtein(a: KTile["pairs", "m", int32], b: KTile["pairs", "n", int32], out: OTile["pairs", int32]):
    pair, n = tile.program_id(0), b.shape[1]
    j = tile.arange(n)
    other = b[pair, :]
    row = j + 1
    corner = 0
    for i in tile.range(a.shape[1]):
        letter = a[pair, i]
        diagonal = tile.where(j == 0, corner, tile.gather(row, tile.maximum(j - 1, 0)))
        best = tile.minimum(row + 1, diagonal + (other != letter).to(int32))
        best = tile.where(j == 0, tile.minimum(best, i + 2), best)
        row = tile.scan(best - j, 0, tile.minimum) + j
        corner = i + 1
    out[pair] = tile.sum(tile.where(j == n - 1, row, 0))


def _levenshtein(a, b):
    def one(x, y):
        before = list(range(len(y) + 1))
        for i, p in enumerate(x):
            row = [i + 1]
            for j, q in enumerate(y): row.append(min(row[j] + 1, before[j + 1] + 1, before[j] + (p != q)))
            before = row
        return before[-1]
    return np.array([one(x, y) for x, y in zip(a, b, strict=True)], np.int32)


@kernel(grid=lambda pairs: (pairs,))
def smith_waterman(a: KTile["pairs", "m", int32], b: KTile["pairs", "n", int32], out: OTile["pairs", int32]):
    pair, n = tile.program_id(0), b.shape[1]
    j, letters = tile.arange(n), b[pair, :]
    row, best = tile.zeros((n,), int32), 0
    for i in tile.range(a.shape[1]):
        diagonal = tile.where(j == 0, 0, tile.gather(row, tile.maximum(j - 1, 0)))
        score = tile.where(letters == a[pair, i], 2, -1)
        local = tile.maximum(tile.maximum(diagonal + score, row - 2), 0)
        row = tile.scan(local + 2 * j, 0, tile.maximum) - 2 * j
        best = tile.maximum(best, tile.max(row))
    out[pair] = best


def _smith_waterman(a, b):
    def one(x, y):
        h = np.zeros((len(x) + 1, len(y) + 1), int)
        for i, p in enumerate(x):
            for j, q in enumerate(y):
                h[i + 1, j + 1] = max(0, h[i, j] + (2 if p == q else -1), h[i, j + 1] - 2, h[i + 1, j] - 2)
        return h.max()
    return np.array([one(x, y) for x, y in zip(a, b, strict=True)], np.int32)


@kernel(grid=lambda B: (B,))
def gru(x: KTile["B", "T", "I", f32], w: KTile["I", "3*H", f32], u: KTile["H", "3*H", f32],
        out: OTile["B", "T", "H", f32],
        *, H: int):
    b = tile.program_id(0)
    h = tile.zeros((H,))
    z_part, r_part, n_part = tile.block(0, H), tile.block(H, H), tile.block(2 * H, H)

    def project(vector, weights, part):
        return tile.sum(vector[:, None] * weights[:, part], 0)

    for t in tile.range(x.shape[1]):
        xt = x[b, t, :]
        z = tile.sigmoid(project(xt, w, z_part) + project(h, u, z_part))
        r = tile.sigmoid(project(xt, w, r_part) + project(h, u, r_part))
        n = tile.tanh(project(xt, w, n_part) + r * project(h, u, n_part))
        h = (1 - z) * n + z * h
        out[b, t, :] = h


def _gru(x, w, u):
    H, out = len(u), np.zeros((*x.shape[:2], len(u)), x.dtype)
    h = np.zeros((len(x), H), x.dtype)
    for t in range(x.shape[1]):
        a, c = np.split(x[:, t] @ w, 3, 1), np.split(h @ u, 3, 1)
        z, r = (1 / (1 + np.exp(-(a[i] + c[i]))) for i in (0, 1))
        h = (1 - z) * np.tanh(a[2] + r * c[2]) + z * h
        out[:, t] = h
    return out


@kernel(grid=lambda B: (B,))
def power_iteration(a: KTile["B", "n", "n", f32], value: OTile["B", f32], *, steps: int = 5):
    m, n = a[tile.program_id(0), :, :], a.shape[1]
    state = (tile.full((n,), 1.0), 0.0, 0)
    while state[2] < steps:
        v, _, i = state
        w = tile.sum(m * v[None, :], axis=1)
        norm = tile.sqrt(tile.sum(w * w))
        state = (w / norm, norm, i + 1)
    value[tile.program_id(0)] = state[1]


def _power(a):
    v = np.ones(a.shape[:2], a.dtype)
    for _ in range(5):
        w = (a @ v[..., None])[..., 0]
        norm = np.sqrt((w * w).sum(1))
        v = w / norm[:, None]
    return norm


def _states(B, L, D, N):
    return (normal(B, L, D), uniform(B, L, D, high=0.5), uniform(D, N, low=-2.0, high=-0.1), normal(B, L, N),
            normal(B, L, N))


PROGRAMS = [
    *(Case(f"row_cumsum-{n}-{block}", call(row_cumsum, BLOCK=block), (normal(3, n),), lambda x: x.cumsum(1))
      for n, block in ((100, 32), (50, 7))),
    Case("reversed_products-6x20", call(reversed_products), (uniform(6, 20, low=0.5, high=1.5),),
         lambda x: (np.cumprod(x[:, ::-1], 1)[:, ::-1], np.maximum.accumulate(x, 1)), c=8.0),
    *(Case(f"compact-{n}-{block}", lambda launch, x, block=block: _compact(launch, x, BLOCK=block),
           (integers(-5, 6, n),), _compact_reference) for n, block in ((200, 32), (37, 10))),
    Case("segmented_scan-3x50", call(segmented_scan), (normal(3, 50), integers(0, 2, 3, 50)), _segmented),
    *(Case(f"selective_scan-{shape}", call(selective_scan, CHUNK=chunk), _states(*shape), _selective)
      for shape, chunk in (((2, 32, 6, 8), 8), ((1, 24, 4, 3), 6))),
    Case("recurrent_scan-2x20", call(recurrent_scan), _states(2, 20, 10, 4), _selective),
    Case("moving_average-3x60", call(moving_average, decay=0.9), (normal(3, 60),),
         lambda x: _average(x, 0.9)),
    Case("log_cumsum_exp-2x40", call(log_cumsum_exp), (normal(2, 40, scale=5.0),),
         lambda x: np.logaddexp.accumulate(x, 1)),
    Case("levenshtein-4", call(levenshtein), (integers(0, 4, 4, 20), integers(0, 4, 4, 17)), _levenshtein),
    Case("smith_waterman-4", call(smith_waterman), (integers(0, 4, 4, 20), integers(0, 4, 4, 17)),
         _smith_waterman),
    Case("gru-2x7", call(gru), (normal(2, 7, 5), normal(5, 18), normal(6, 18)), _gru),
    Case("power_iteration-3x9", call(power_iteration), (uniform(3, 9, 9),), _power),
]
