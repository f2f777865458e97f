"""Attention as users write it: forward with every kind of mask, backward, decoding, pages, blocks, linear."""
from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import torch

from tests.support.language.programs.case import Case, call, fixed, integers, normal
from tinygrad_nv.language import *


@kernel
def cache_attention(q: KTile["B*H", "S", "D_h", bf16], cache, *, causal: bool):
    T = tile.context()
    Qb = tile.load(q, rows=T.m, cols=T.d, vector=T.vector, prefetch=2)
    acc = tile.zeros((T.m, T.d), f32)
    m = tile.full((T.m,), -INF)
    l = tile.zeros((T.m,), f32)
    for nblk in tile.range_n(cache.K.shape, T.n, prefetch=2):
        Kb = tile.load(cache.K, nblk, cols=T.d, vector=T.vector)
        Vb = tile.load(cache.V, nblk, cols=T.d, vector=T.vector)
        S = tile.dot(Qb, tile.transpose(Kb)) * tile.rsqrt(float(T.d))
        if causal: tile.mask_causal(S, tile.row_index(), tile.col_index(nblk))
        P, m_c, l_c = tile.softmax_online(S)
        acc, m, l = tile.softmax_accumulate(acc, m, l, P, Vb, m_c, l_c)
    return tile.cast(acc / l[:, None], bf16)


@kernel(grid=lambda S, H, B, BM: (cdiv(S, BM), H, B))
def flash(q: KTile["B", "H", "S", "D", f32], k: KTile["B", "G", "T", "D", f32],
          v: KTile["B", "G", "T", "D", f32],
          out: OTile["B", "H", "S", "D", f32], lse: OTile["B", "H", "S", f32], *, BM: int, BN: int,
          causal: bool = False,
          window: int = 0, slope: float = 0.0, cap: float = 0.0):
    head, batch = tile.program_id(1), tile.program_id(2)
    T, D = k.shape[2], q.shape[3]
    group = head // (q.shape[1] // k.shape[1])
    rows = tile.block(tile.program_id(0) * BM, BM)
    i = rows.indices[:, None]
    Q = q[batch, head, rows, :]
    m = tile.full((BM,), -INF)
    l = tile.zeros((BM,))
    acc = tile.zeros((BM, D))
    first, last = 0, T
    if causal: last = tile.minimum(rows.start + BM, T)
    if window: first = tile.maximum(rows.start - window + 1, 0) // BN * BN
    for start in tile.range(first, last, BN):
        cols = tile.block(start, BN)
        j = cols.indices[None, :]
        s = tile.dot(Q, k[batch, group, cols, :].T) * (1 / math.sqrt(D))
        if cap: s = cap * tile.tanh(s / cap)
        if slope: s += slope * (head + 1).to(f32) * (j - i).to(f32)
        seen = j < T
        if causal: seen &= j <= i
        if window: seen &= i - j < window
        s = tile.where(seen, s, -INF)
        m_new = tile.maximum(m, tile.max(s, 1))
        safe = tile.where(m_new == -INF, 0.0, m_new)
        p = tile.exp(s - safe[:, None])
        alpha = tile.exp(m - safe)
        l = l * alpha + tile.sum(p, 1)
        acc = tile.dot(p, v[batch, group, cols, :], acc * alpha[:, None])
        m = m_new
    out[batch, head, rows, :] = acc / l[:, None]
    lse[batch, head, rows] = m + tile.log(l)


def attention(q, k, v, causal=False, window=0, slope=0.0, cap=0.0):
    """Scores of q (B, H, S, D) over k and v (B, G, T, D): the result, and the logarithms of the sums."""
    H, S, D = q.shape[1:]
    T = k.shape[2]
    kind = q.dtype.type
    k, v = (np.repeat(x, H // x.shape[1], 1) for x in (k, v))
    s = q @ np.swapaxes(k, -1, -2) * kind(1 / math.sqrt(D))
    i, j = np.arange(S)[:, None], np.arange(T)[None, :]
    if cap: s = kind(cap) * np.tanh(s / kind(cap))
    if slope: s = s + (kind(slope) * (np.arange(H)[:, None, None] + 1) * (j - i)).astype(q.dtype)
    seen = np.full((S, T), True)
    if causal: seen &= j <= i
    if window: seen &= i - j < window
    s = np.where(seen, s, kind(-np.inf))
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    return p / p.sum(-1, keepdims=True) @ v, (top + np.log(p.sum(-1, keepdims=True)))[..., 0]


# **** backward ****

@kernel(grid=lambda rows: (cdiv(rows, 8),))
def row_products(o: KTile["rows", "D", f32], do: KTile["rows", "D", f32], delta: OTile["rows", f32]):
    r = tile.block(tile.program_id(0) * 8, 8)
    delta[r] = tile.sum(o[r, :] * do[r, :], 1)


def probabilities(q, k, lse, rows, cols, scale):
    s = tile.dot(q, k.T) * scale
    seen = (cols.indices[None, :] <= rows.indices[:, None]) & (cols.indices[None, :] < lse.shape[1])
    return tile.where(seen, tile.exp(s - lse[tile.program_id(1), rows][:, None]), 0.0)


@kernel(grid=lambda S, H, BM: (cdiv(S, BM), H))
def flash_dq(q: KTile["H", "S", "D", f32], k: KTile["H", "S", "D", f32], v: KTile["H", "S", "D", f32],
             do: KTile["H", "S", "D", f32], lse: KTile["H", "S", f32], delta: KTile["H", "S", f32],
             dq: OTile["H", "S", "D", f32], *, BM: int):
    h, rows = tile.program_id(1), tile.block(tile.program_id(0) * BM, BM)
    scale = 1 / math.sqrt(q.shape[2])
    Q, dO, row_delta = q[h, rows, :], do[h, rows, :], delta[h, rows]
    acc = tile.zeros((BM, q.shape[2]))
    for start in tile.range(0, rows.start + BM, BM):
        cols = tile.block(start, BM)
        K, V = k[h, cols, :], v[h, cols, :]
        p = probabilities(Q, K, lse, rows, cols, scale)
        ds = p * (tile.dot(dO, V.T) - row_delta[:, None]) * scale
        acc = tile.dot(ds, K, acc)
    dq[h, rows, :] = acc


@kernel(grid=lambda S, H, BM: (cdiv(S, BM), H))
def flash_dkv(q: KTile["H", "S", "D", f32], k: KTile["H", "S", "D", f32], v: KTile["H", "S", "D", f32],
              do: KTile["H", "S", "D", f32], lse: KTile["H", "S", f32], delta: KTile["H", "S", f32],
              dk: OTile["H", "S", "D", f32], dv: OTile["H", "S", "D", f32], *, BM: int):
    h, cols = tile.program_id(1), tile.block(tile.program_id(0) * BM, BM)
    S, D = q.shape[1:]
    scale = 1 / math.sqrt(D)
    K, V = k[h, cols, :], v[h, cols, :]
    grads = tile.zeros((BM, D)), tile.zeros((BM, D))
    for start in tile.range(cols.start, S, BM):
        rows = tile.block(start, BM)
        Q, dO = q[h, rows, :], do[h, rows, :]
        p = tile.where(rows.indices[:, None] < S, probabilities(Q, K, lse, rows, cols, scale), 0.0)
        ds = p * (tile.dot(dO, V.T) - delta[h, rows][:, None]) * scale
        grads = tile.dot(ds.T, Q, grads[0]), tile.dot(p.T, dO, grads[1])
    dk[h, cols, :], dv[h, cols, :] = grads


def _backward(launch, q, k, v, do, *, BM):
    four = [x.reshape(1, *x.shape) for x in (q, k, v)]
    out, lse = (x[0].contiguous() for x in launch(flash, *four, BM=16, BN=16, causal=True))
    delta = launch(row_products, out.reshape(-1, out.shape[-1]),
                   do.reshape(-1, out.shape[-1])).reshape(*lse.shape)
    given = [x.contiguous() for x in (q, k, v, do, lse, delta)]
    return launch(flash_dq, *given, BM=BM), *launch(flash_dkv, *given, BM=BM)


def _backward_reference(q, k, v, do):
    leaves = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True).backward(torch.from_numpy(do))
    return tuple(each.grad.numpy() for each in leaves)


# **** decoding ****

@kernel(grid=lambda H, B, SPLITS: (H, B, SPLITS))
def decode_splits(q: KTile["B", "H", "D", f32], k: KTile["B", "T", "G", "D", f32],
                  v: KTile["B", "T", "G", "D", f32],
                  lengths: KTile["B", int32], part: OTile["SPLITS", "B", "H", "D", f32],
                  lse: OTile["SPLITS", "B", "H", f32], *, SPLITS: int, BN: int = 16):
    h, b, split = tile.program_id(0), tile.program_id(1), tile.program_id(2)
    g, D = h // (q.shape[1] // k.shape[2]), q.shape[2]
    length = lengths[b]
    each = cdiv(cdiv(length, BN), SPLITS) * BN
    first, last = split * each, tile.minimum(split * each + each, length)
    query = q[b, h, :]
    m, l, acc = -INF, 0.0, tile.zeros((D,))
    for start in tile.range(first, last, BN):
        cols = tile.block(start, BN)
        s = tile.sum(k[b, cols, g, :] * query[None, :], 1) * (1 / math.sqrt(D))
        s = tile.where(cols.indices < last, s, -INF)
        top = tile.maximum(m, tile.max(s))
        p, alpha = tile.exp(s - top), tile.exp(m - top)
        l = l * alpha + tile.sum(p)
        acc = acc * alpha + tile.sum(p[:, None] * v[b, cols, g, :], 0)
        m = top
    empty = l == 0.0
    part[split, b, h, :] = tile.where(empty, 0.0, acc / tile.where(empty, 1.0, l))
    lse[split, b, h] = tile.where(empty, -INF, m + tile.log(l))


@kernel(grid=lambda H, B: (H, B))
def combine_splits(part: KTile["SPLITS", "B", "H", "D", f32], lse: KTile["SPLITS", "B", "H", f32],
                   out: OTile["B", "H", "D", f32]):
    h, b = tile.program_id(0), tile.program_id(1)
    logs = lse[:, b, h]
    weights = tile.softmax(logs)
    out[b, h, :] = tile.sum(weights[:, None] * part[:, b, h, :], axis=0)


def _decode(launch, q, k, v, lengths):
    part, lse = launch(decode_splits, q, k, v, lengths, SPLITS=3)
    return launch(combine_splits, part, lse)


def _decode_reference(q, k, v, lengths):
    rows = [attention(q[b][None, :, None], np.swapaxes(k[b, :n], 0, 1)[None],
                      np.swapaxes(v[b, :n], 0, 1)[None])[0]
            for b, n in enumerate(lengths)]
    return np.concatenate(rows)[:, :, 0]


@kernel(grid=lambda H, B: (H, B))
def paged_attention(q: KTile["B", "H", "D", f16], k_pages: KTile["P", "PAGE", "G", "D", f16],
                    v_pages: KTile["P", "PAGE", "G", "D", f16], tables: KTile["B", "M", int32],
                    lengths: KTile["B", int32], out: OTile["B", "H", "D", f32]):
    h, b = tile.program_id(0), tile.program_id(1)
    page_size, D = k_pages.shape[1], q.shape[2]
    g = h // (q.shape[1] // k_pages.shape[2])
    query, length = q[b, h, :].to(f32) / math.sqrt(D), lengths[b]
    m, l, acc = -INF, 0.0, tile.zeros((D,))
    for i in tile.range(cdiv(length, page_size)):
        page = tables[b, i]
        K, V = k_pages[page, :, g, :].to(f32), v_pages[page, :, g, :].to(f32)
        position = i * page_size + tile.arange(page_size)
        s = tile.where(position < length, tile.sum(K * query, 1), -INF)
        top = tile.maximum(m, tile.max(s))
        p = tile.exp(s - top)
        alpha = tile.exp(m - top)
        l, acc, m = l * alpha + tile.sum(p), acc * alpha + tile.sum(p[:, None] * V, 0), top
    out[b, h, :] = acc / l


def _paged_reference(q, k_pages, v_pages, tables, lengths):
    k, v = (x[tables].reshape(len(q), -1, *x.shape[2:]) for x in (k_pages, v_pages))
    return _decode_reference(q, k, v, lengths)


@kernel(grid=lambda nb, H: (nb, H))
def block_sparse(q: KTile["H", "S", "D", f32], k: KTile["H", "S", "D", f32], v: KTile["H", "S", "D", f32],
                 starts: KTile["nb+1", int32], columns: KTile["nnz", int32], out: OTile["H", "S", "D", f32],
                 *,
                 nb: int):
    h, block_row = tile.program_id(1), tile.program_id(0)
    BLOCK = q.shape[1] // nb
    rows = tile.block(block_row * BLOCK, BLOCK)
    Q = q[h, rows, :]
    m, l = tile.full((BLOCK,), -INF), tile.zeros((BLOCK,))
    acc = tile.zeros((BLOCK, q.shape[2]))
    for e in tile.range(starts[block_row], starts[block_row + 1]):
        cols = tile.block(columns[e] * BLOCK, BLOCK)
        s = tile.dot(Q, k[h, cols, :].T) * (1 / math.sqrt(q.shape[2]))
        p, m_c, l_c = tile.softmax_online(s)
        acc, m, l = tile.softmax_accumulate(acc, m, l, p, v[h, cols, :], m_c, l_c)
    out[h, rows, :] = acc / l[:, None]


LAYOUT = np.array([[1, 0, 0, 1], [0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]])
STARTS, COLUMNS = np.concatenate([[0], LAYOUT.sum(1).cumsum()]), LAYOUT.nonzero()[1]


def _block_sparse_reference(q, k, v, *_):
    size = q.shape[1] // 4
    s = q @ np.swapaxes(k, 1, 2) * q.dtype.type(1 / math.sqrt(q.shape[2]))
    s = np.where(np.kron(LAYOUT, np.ones((size, size))) > 0, s, q.dtype.type(-np.inf))
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ v


# **** linear attention ****

@kernel(grid=lambda H: (H,))
def linear_attention(q: KTile["H", "S", "D", f32], k: KTile["H", "S", "D", f32], v: KTile["H", "S", "D", f32],
                     decay: KTile["H", f32], out: OTile["H", "S", "D", f32], *, CHUNK: int):
    h, D = tile.program_id(0), q.shape[2]
    log_decay = tile.log(decay[h])
    i = tile.arange(CHUNK)
    gap = (i[:, None] - i[None, :]).to(f32)
    inner = tile.where(gap >= 0.0, tile.exp(gap * log_decay), 0.0)
    state = tile.zeros((D, D))
    for start in tile.range(0, q.shape[1], CHUNK):
        rows = tile.block(start, CHUNK)
        Q, K, V = q[h, rows, :], k[h, rows, :], v[h, rows, :]
        since = tile.exp((i + 1).to(f32) * log_decay)[:, None]
        until = tile.exp((CHUNK - 1 - i).to(f32) * log_decay)[:, None]
        out[h, rows, :] = tile.dot(Q * since, state) + tile.dot(tile.dot(Q, K.T) * inner, V)
        state = state * tile.exp(CHUNK * log_decay) + tile.dot((K * until).T, V)


def _linear_reference(q, k, v, decay):
    out, state = np.zeros_like(q), np.zeros((len(q), q.shape[2], q.shape[2]), q.dtype)
    for t in range(q.shape[1]):
        state = state * decay[:, None, None] + k[:, t, :, None] * v[:, t, None]
        out[:, t] = (q[:, t, None] @ state)[:, 0]
    return out


def _cache(launch, q, k, v, **options): return launch(cache_attention, q, SimpleNamespace(K=k, V=v),
                                                      **options)


def _flash(name, shape, *, G=None, T=None, BM=16, BN=16, c=4.0, **options):
    B, H, S, D = shape
    keys = normal(B, G or H, T or S, D)
    return Case(name, call(flash, BM=BM, BN=BN, **options), (normal(*shape), keys, keys),
                lambda q, k, v: attention(q, k, v, **options), c)


PROGRAMS = [
    *(Case(f"cache_attention-{causal}", lambda launch, *x, causal=causal: _cache(launch, *x, causal=causal),
           (normal(3, 70, 32, dtype=bf16),) * 3,
           lambda q, k, v, causal=causal: attention(q[None], k[None], v[None], causal)[0][0], c=6.0)
      for causal in (False, True)),
    _flash("flash-causal", (1, 2, 50, 16), causal=True),
    _flash("flash-full-odd-blocks", (2, 2, 23, 12), T=37, BM=10, BN=7),
    _flash("flash-grouped", (1, 6, 20, 16), G=2, T=33),
    _flash("flash-window", (1, 2, 50, 16), causal=True, window=12),
    _flash("flash-alibi", (1, 3, 40, 16), causal=True, slope=0.1),
    _flash("flash-soft-cap", (1, 2, 40, 16), cap=3.0, causal=True, c=8.0),
    *(Case(f"flash_backward-{bm}", lambda launch, *x, bm=bm: _backward(launch, *x, BM=bm),
           (normal(2, 40, 16),) * 4,
           _backward_reference, c=8.0) for bm in (16, 12)),
    Case("decode_splits", _decode, (normal(3, 4, 16), normal(3, 90, 2, 16), normal(3, 90, 2, 16),
                                    fixed([90, 5, 33])),
         _decode_reference),
    Case("paged_attention", call(paged_attention),
         (normal(3, 4, 16, dtype=f16), normal(12, 8, 2, 16, dtype=f16), normal(12, 8, 2, 16, dtype=f16),
          integers(0, 12, 3, 5), fixed([40, 3, 17])), _paged_reference),
    Case("block_sparse", call(block_sparse, nb=4), (normal(2, 40, 16), normal(2, 40, 16), normal(2, 40, 16),
         fixed(STARTS), fixed(COLUMNS)), _block_sparse_reference),
    *(Case(f"linear_attention-{n}-{chunk}", call(linear_attention, CHUNK=chunk),
           (normal(2, n, 8), normal(2, n, 8), normal(2, n, 8), fixed([0.9, 0.5], f32)), _linear_reference,
           c=8.0)
      for n, chunk in ((40, 16), (21, 8))),
]
