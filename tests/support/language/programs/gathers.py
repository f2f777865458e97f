"""Programs that go through memory in other orders: gathers, scatters, convolutions, sparse matrices."""
from __future__ import annotations

import numpy as np
import torch

from tests.support.language.programs.case import Case, call, fixed, integers, normal, permutation
from tinygrad_nv.language import *


@kernel(grid=lambda n, BLOCK: (cdiv(n, BLOCK),))
def histogram(x: KTile["n", uint8], counts: OTile["bins", int32], *, bins: int, BLOCK: int = 64):
    i = tile.program_id(0) * BLOCK + tile.arange(BLOCK)
    values = tile.load(x, i, mask=i < x.shape[0])
    tile.atomic_add(counts, 1, values, mask=i < x.shape[0])


@kernel(grid=lambda n: (cdiv(n, 100),))
def local_histogram(x: KTile["n", int32], counts: OTile["bins", int32], *, bins: int):
    i = tile.program_id(0) * 100 + tile.arange(100)
    local = tile.histogram(tile.load(x, i, mask=i < x.shape[0], other=-1), bins)
    tile.atomic_add(counts, local, tile.block(0, bins))


@kernel(grid=lambda n: (1,))
def counting_sort(x: KTile["n", int32], order: OTile["n", int32], *, bins: int):
    values = x[:]
    ranks, counts = tile.ranks(values, bins)
    begins = tile.cumsum(counts) - counts
    order[tile.gather(begins, values) + ranks] = tile.arange(x.shape[0])


@kernel(grid=lambda tokens: (tokens,))
def embedding(ids: KTile["tokens", int32], table: KTile["V", "D", bf16], out: OTile["tokens", "D", bf16]):
    token = tile.program_id(0)
    out[token, :] = table[ids[token], :]


@kernel(grid=lambda tokens: (cdiv(tokens, 8),))
def embedding_gradient(ids: KTile["tokens", int32], grad: KTile["tokens", "D", f32],
                       table: OTile["V", "D", f32], *,
                       V: int):
    tokens = tile.program_id(0) * 8 + tile.arange(8)
    rows = tile.load(ids, tokens, mask=tokens < ids.shape[0], other=-1)
    cols = tile.arange(grad.shape[1])
    g = tile.load(grad, tokens[:, None], cols[None, :])
    tile.atomic_add(table, g, rows[:, None], cols[None, :])


def _embedding_gradient(ids, grad):
    made = np.zeros((11, grad.shape[1]), grad.dtype)
    np.add.at(made, ids, grad)
    return made


@kernel(grid=lambda L, B, BLOCK: (cdiv(L, BLOCK), B))
def conv1d(x: KTile["B", "C", "L", f32], w: KTile["O", "C", "K", f32], bias: KTile["O", f32],
           out: OTile["B", "O", "L", f32], *, BLOCK: int):
    b, t = tile.program_id(1), tile.block(tile.program_id(0) * BLOCK, BLOCK)
    O, K = w.shape[0], w.shape[2]
    acc = tile.zeros((O, BLOCK), f32)
    for k in range(K):
        acc += tile.dot(w[:, :, k], x[b, :, t + (k - K // 2)])
    out[b, :, t] = acc + bias[:][:, None]


def _conv1d(x, w, bias):
    return torch.nn.functional.conv1d(*map(torch.from_numpy, (x, w, bias)), padding=w.shape[2] // 2).numpy()


@kernel(grid=lambda D, B: (cdiv(D, 8), B))
def causal_depthwise(x: KTile["B", "L", "D", f32], w: KTile["D", "K", f32], out: OTile["B", "L", "D", f32]):
    d, b = tile.block(tile.program_id(0) * 8, 8), tile.program_id(1)
    K = w.shape[1]
    past = tuple(tile.zeros((8,)) for _ in range(K - 1))
    for t in tile.range(x.shape[1]):
        now = (*past, x[b, t, d])
        total = tile.zeros((8,))
        for i in range(K):
            total += now[i] * w[d, i]
        out[b, t, d] = tile.silu(total)
        past = now[1:]


def _depthwise(x, w):
    K = w.shape[1]
    padded = np.pad(x, ((0, 0), (K - 1, 0), (0, 0)))
    y = sum(padded[:, i:i + x.shape[1]] * w[:, i] for i in range(K))
    return y / (1 + np.exp(-y))


@kernel(grid=lambda O, N, OH, OW: (cdiv(N * OH * OW, 32), cdiv(O, 16)))
def conv2d(x: KTile["N", "C", "H", "W", f32], w: KTile["O", "C", "R", "S", f32],
           out: OTile["N", "O", "OH", "OW", f32], *,
           OH: int, OW: int, stride: int, pad: int):
    C, R, S = w.shape[1:]
    place = tile.program_id(0) * 32 + tile.arange(32)
    n, y, z = place // (OH * OW), place // OW % OH, place % OW
    o = tile.program_id(1) * 16 + tile.arange(16)
    acc = tile.zeros((32, 16), f32)
    for start in tile.range(0, C * R * S, 16):
        k = start + tile.arange(16)
        c, r, s = k // (R * S), k // S % R, k % S
        h, v = y[:, None] * stride - pad + r[None, :], z[:, None] * stride - pad + s[None, :]
        a = tile.load(x, n[:, None], c[None, :], h, v, mask=(k < C * R * S)[None, :])
        b = tile.load(w, o[None, :], c[:, None], r[:, None], s[:, None])
        acc = tile.dot(a, b, acc)
    tile.store(out, acc, n[:, None], o[None, :], y[:, None], z[:, None])


def _conv2d(x, w, stride, pad):
    return torch.nn.functional.conv2d(torch.from_numpy(x), torch.from_numpy(w), stride=stride,
                                      padding=pad).numpy()


@kernel(grid=lambda H, W, C: (cdiv(H, 2), cdiv(W, 2), C))
def max_pool(x: KTile["C", "H", "W", f32], out: OTile["C", "H//2", "W//2", f32]):
    y, z, c = tile.program_id(0), tile.program_id(1), tile.program_id(2)
    out[c, y, z] = tile.max(x[c, tile.block(2 * y, 2), tile.block(2 * z, 2)])


@kernel(grid=lambda M, N, BM, BN: (cdiv(M, BM), cdiv(N, BN)))
def transpose(x: KTile["M", "N", int32], out: OTile["N", "M", int32], *, BM: int, BN: int):
    m, n = tile.block(tile.program_id(0) * BM, BM), tile.block(tile.program_id(1) * BN, BN)
    out[n, m] = tile.transpose(x[m, n])


@kernel(grid=lambda A, B: (A, B))
def permute(x: KTile["A", "B", "C", "D", f16], out: OTile["D", "A", "C", "B", f16]):
    a, b = tile.program_id(0), tile.program_id(1)
    out[:, a, :, b] = x[a, b, :, :].T


@kernel(grid=lambda rows: (rows,))
def sparse_matvec(starts: KTile["rows+1", int32], columns: KTile["nnz", int32], values: KTile["nnz", f32],
                  x: KTile["cols", f32], y: OTile["rows", f32]):
    row = tile.program_id(0)
    first, last = starts[row], starts[row + 1]
    acc = tile.zeros((8,))
    for start in tile.range(first, last, 8):
        i = start + tile.arange(8)
        mask = i < last
        acc += tile.load(values, i, mask=mask) * tile.load(x, tile.load(columns, i, mask=mask), mask=mask)
    y[row] = tile.sum(acc)


MATRIX = np.where(np.random.default_rng(3).random((13, 30)) < 0.3,
                  np.random.default_rng(4).standard_normal((13, 30)), 0)
ROW_STARTS = np.concatenate([[0], (MATRIX != 0).sum(1).cumsum()])


def _sparse(starts, columns, values, x):
    made = np.zeros((13, 30), x.dtype)
    made[MATRIX != 0] = values
    return made @ x


@kernel(grid=lambda n: (cdiv(n, 16),))
def scatter_rows(src: KTile["n", "D", f32], where: KTile["n", int32], out: OTile["n", "D", f32]):
    rows = tile.block(tile.program_id(0) * 16, 16)
    out[tile.load(where, rows, other=-1), :] = src[rows, :]


def _scatter(src, where):
    made = np.zeros_like(src)
    made[where] = src
    return made


@kernel(grid=lambda n, E: (cdiv(n, 16),))
def count_by_expert(expert: KTile["n", int32], counts: OTile["E", int32], rank: OTile["n", int32], *, E: int):
    i = tile.program_id(0) * 16 + tile.arange(16)
    inside = i < expert.shape[0]
    e = tile.load(expert, i, mask=inside)
    before = tile.atomic_add(counts, inside.to(int32), e, mask=inside)
    tile.store(rank, (before >= 0).to(int32), i, mask=inside)


@kernel(grid=lambda n: (cdiv(n, 32),))
def extremes(x: KTile["n", int32], group: KTile["n", int32], low: OTile["G", int32], high: OTile["G", int32]):
    i = tile.block(tile.program_id(0) * 32, 32)
    inside = i.indices < x.shape[0]
    tile.atomic_min(low, x[i], group[i], mask=inside)
    tile.atomic_max(high, x[i], group[i], mask=inside)


def _extremes(x, group, low, high):
    low, high = low.copy(), high.copy()
    np.minimum.at(low, group, x)
    np.maximum.at(high, group, x)
    return low, high


@kernel(grid=lambda H, W, h, w: (h, cdiv(w, 16)))
def bilinear(x: KTile["H", "W", f32], out: OTile["h", "w", f32], *, h: int, w: int):
    H, W = x.shape
    row, cols = tile.program_id(0), tile.program_id(1) * 16 + tile.arange(16)
    y, z = row.to(f32) * ((H - 1) / (h - 1)), cols.to(f32) * ((W - 1) / (w - 1))
    y0, z0 = tile.floor(y), tile.floor(z)
    fy, fz = y - y0, z - z0
    i, j = y0.to(int32), z0.to(int32)
    i1, j1 = tile.minimum(i + 1, H - 1), tile.minimum(j + 1, W - 1)
    top = x[i, j] * (1 - fz) + x[i, j1] * fz
    bottom = x[i1, j] * (1 - fz) + x[i1, j1] * fz
    out[row, tile.block(tile.program_id(1) * 16, 16)] = top * (1 - fy) + bottom * fy


def _bilinear(x, h, w):
    made = torch.nn.functional.interpolate(torch.from_numpy(x)[None, None], (h, w), mode="bilinear",
                                           align_corners=True)
    return made[0, 0].numpy()


PROGRAMS = [
    Case("histogram-500", call(histogram, bins=256), (integers(0, 256, 500, dtype=uint8),),
         lambda x: np.bincount(x, minlength=256).astype(np.int32)),
    *(Case(f"local_histogram-250-{bins}", call(local_histogram, bins=bins), (integers(0, bins, 250),),
           lambda x, bins=bins: np.bincount(x, minlength=bins).astype(np.int32)) for bins in (10, 1000)),
    *(Case(f"counting_sort-{size}-{bins}", call(counting_sort, bins=bins), (integers(0, bins, size),),
           lambda x: np.argsort(x, kind="stable").astype(np.int32)) for size, bins in ((500, 7), (13, 40))),
    Case("embedding-19", call(embedding), (integers(0, 11, 19), normal(11, 20, dtype=bf16)), lambda i,
         t: t[i]),
    Case("embedding_gradient-19", call(embedding_gradient, V=11), (integers(0, 11, 19), normal(19, 20)),
         _embedding_gradient),
    *(Case(f"conv1d-{length}-{block}", call(conv1d, BLOCK=block),
           (normal(2, 3, length), normal(5, 3, 3), normal(5)), _conv1d) for length,
           block in ((50, 16), (11, 7))),
    Case("causal_depthwise-2x17", call(causal_depthwise), (normal(2, 17, 11), normal(11, 4)), _depthwise,
         c=8.0),
    *(Case(f"conv2d-{stride}-{pad}", call(conv2d, OH=oh, OW=ow, stride=stride, pad=pad),
           (normal(2, 3, 9, 11), normal(5, 3, 3, 3)), lambda x, w, s=stride, p=pad: _conv2d(x, w, s, p))
      for stride, pad, oh, ow in ((1, 1, 9, 11), (2, 0, 4, 5))),
    Case("max_pool-2x9x12", call(max_pool), (normal(2, 8, 12),),
         lambda x: x.reshape(2, 4, 2, 6, 2).max((2, 4))),
    *(Case(f"transpose-{m}x{n}", call(transpose, BM=bm, BN=bn), (integers(0, 1000, m, n),), lambda x: x.T)
      for m, n, bm, bn in ((33, 50, 16, 32), (7, 9, 5, 4))),
    Case("permute-2x3x5x4", call(permute), (normal(2, 3, 5, 4, dtype=f16),),
         lambda x: x.transpose(3, 0, 2, 1)),
    Case("sparse_matvec-13x30", call(sparse_matvec), (fixed(ROW_STARTS), fixed(MATRIX.nonzero()[1]),
         normal(len(MATRIX.nonzero()[1])), normal(30)), _sparse),
    Case("scatter_rows-37", call(scatter_rows), (normal(37, 5), permutation(37)), _scatter),
    Case("count_by_expert-50", call(count_by_expert, E=6), (integers(0, 6, 50),),
         lambda e: (np.bincount(e, minlength=6).astype(np.int32), np.ones(50, np.int32))),
    Case("extremes-70", call(extremes),
         (integers(-99, 99, 70), integers(0, 5, 70), fixed([10**6] * 5), fixed([-10**6] * 5)), _extremes),
    Case("bilinear-7x9", call(bilinear, h=12, w=21), (normal(7, 9),), lambda x: _bilinear(x, 12, 21), c=16.0),
]
