"""Subjects of kernels in public repositories, written anew in the tile language.

Protocol: each kernel computes what one of those computes; formulas are of the papers named. Liger-Kernel:
sparsemax, generalised Jensen-Shannon divergence, the gradient of GEGLU, multimodal rotary embedding, cross
entropy of a linear layer; flash-linear-attention: the gated delta rule; TileLang: Sinkhorn's iteration,
quantisation by groups, decoding with latents; vLLM: tokens of experts in blocks, routing; bitsandbytes and
Unsloth: NF4; JAX's Pallas: the gradient of a ragged dot.
"""
from __future__ import annotations

import math

import numpy as np
import torch

from tests.support.language.programs.case import Case, Given, call, fixed, integers, normal, uniform
from tinygrad_nv.language import *

# **** rows ****

@kernel(grid=lambda rows: (rows,))
def sparsemax(x: KTile["rows", "n", f32], out: OTile["rows", "n", f32]):
    """The nearest point of the simplex (Martins and Astudillo 2016, algorithm 1)."""
    row, n = tile.program_id(0), x.shape[1]
    z = x[row, :]
    z = z - tile.max(z, 0)
    down = tile.sort(z, 0, descending=True)
    total, rank = tile.cumsum(down, 0), (tile.arange(n) + 1).to(f32)
    kept = 1.0 + rank * down > total
    count = tile.sum(kept.to(f32), 0)
    threshold = (tile.sum(tile.where(kept, down, 0.0), 0) - 1.0) / count
    out[row, :] = tile.maximum(z - threshold, 0.0)


def _sparsemax(x):
    z = x - x.max(1, keepdims=True)
    down = -np.sort(-z, 1)
    total, rank = down.cumsum(1), np.arange(1, x.shape[1] + 1)
    count = (1 + rank * down > total).sum(1, keepdims=True)
    return np.maximum(z - (np.take_along_axis(total, count - 1, 1) - 1) / count, 0).astype(x.dtype)


@kernel(grid=lambda rows: (rows,))
def jensen_shannon(student: KTile["rows", "V", f32], teacher: KTile["rows", "V", f32],
                   loss: OTile["rows", f32], grad: OTile["rows", "V", f32], *, beta: float, BLOCK: int):
    """beta KL(t | m) + (1 - beta) KL(s | m) of log-probabilities, m = beta t + (1 - beta) s; the gradient of
    s's logarithm."""
    row = tile.program_id(0)
    total = tile.zeros((BLOCK,))
    for cols in tile.range_n(student.shape[1], BLOCK):
        s, t = student[row, cols], teacher[row, cols]
        p, q = tile.exp(s), tile.exp(t)
        middle = tile.log(beta * q + (1 - beta) * p)
        each = beta * q * (t - middle) + (1 - beta) * p * (s - middle)
        total += tile.where(cols.indices < student.shape[1], each, 0.0)
        grad[row, cols] = (1 - beta) * p * (s - middle)
    loss[row] = tile.sum(total, 0)


def _jensen_shannon(student, teacher, beta):
    s, t = torch.from_numpy(student).requires_grad_(), torch.from_numpy(teacher)
    p, q = s.exp(), t.exp()
    m = (beta * q + (1 - beta) * p).log()
    loss = (beta * q * (t - m) + (1 - beta) * p * (s - m)).sum(1)
    loss.sum().backward()
    return loss.detach().numpy(), s.grad.numpy()


@kernel(grid=lambda n: (cdiv(n, 128),))
def geglu_backward(dc: KTile["n", bf16], a: KTile["n", bf16], b: KTile["n", bf16], da: OTile["n", f32],
                   db: OTile["n", f32]):
    """The gradients of gelu(a) · b, by tanh."""
    at = tile.block(tile.program_id(0) * 128, 128)
    x, g = a[at].to(f32), dc[at].to(f32)
    root, cubic = math.sqrt(2 / math.pi), 0.044715
    t = tile.tanh(root * x * (1.0 + cubic * x * x))
    slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3 * cubic * x * x)
    da[at], db[at] = g * b[at].to(f32) * slope, g * 0.5 * x * (1.0 + t)


def _geglu_backward(dc, a, b):
    x, y = (torch.from_numpy(each).requires_grad_() for each in (a, b))
    (torch.nn.functional.gelu(x, approximate="tanh") * y).backward(torch.from_numpy(dc))
    return x.grad.numpy(), y.grad.numpy()


@kernel(grid=lambda S, H: (S, H))
def multimodal_rope(x: KTile["S", "H", "D", f32], cos: KTile[3, "S", "D//2", f32],
                    sin: KTile[3, "S", "D//2", f32],
                    out: OTile["S", "H", "D", f32], *, first: int, second: int):
    """Angles of time, height and width by sections of the head (Wang et al. 2024, Qwen2-VL)."""
    s, h, half = tile.program_id(0), tile.program_id(1), x.shape[2] // 2
    i = tile.arange(half)
    axis = (i >= first).to(int32) + (i >= first + second).to(int32)
    c, w = tile.load(cos, axis, s, i), tile.load(sin, axis, s, i)
    left, right = x[s, h, :half], x[s, h, half:]
    out[s, h, :half] = left * c - right * w
    out[s, h, half:] = right * c + left * w


def _multimodal_rope(x, cos, sin, first, second):
    half = x.shape[2] // 2
    axis = np.repeat([0, 1, 2], [first, second, half - first - second])
    c, s = (each[axis, :, np.arange(half)].T[:, None] for each in (cos, sin))
    left, right = x[..., :half], x[..., half:]
    return np.concatenate([left * c - right * s, right * c + left * s], 2)


@kernel(grid=lambda rows: (cdiv(rows, 16),))
def linear_cross_entropy(x: KTile["rows", "D", f32], w: KTile["V", "D", f32], target: KTile["rows", int32],
                         loss: OTile["rows", f32], *, BV: int):
    """The loss of logits x wᵀ that are never stored: an online logsumexp over blocks of the vocabulary."""
    rows, V = tile.block(tile.program_id(0) * 16, 16), w.shape[0]
    hidden, wanted = x[rows, :], target[rows]
    m, l, own = tile.full((16,), -INF), tile.zeros((16,)), tile.zeros((16,))
    for v in tile.range_n(V, BV):
        logits = tile.dot(hidden, w[v, :].T)
        logits = tile.where(v.indices[None, :] < V, logits, -INF)
        top = tile.maximum(m, tile.max(logits, 1))
        l = l * tile.exp(m - top) + tile.sum(tile.exp(logits - top[:, None]), 1)
        own += tile.sum(tile.where(v.indices[None, :] == wanted[:, None], logits, 0.0), 1)
        m = top
    loss[rows] = m + tile.log(l) - own


def _linear_cross_entropy(x, w, target):
    logits, wanted = torch.from_numpy(x @ w.T), torch.from_numpy(target).long()
    return torch.nn.functional.cross_entropy(logits, wanted, reduction="none").numpy()


# **** the gated delta rule ****

@kernel(grid=lambda V, H, BV: (cdiv(V, BV), H))
def gated_delta_rule(q: KTile["H", "T", "K", f32], k: KTile["H", "T", "K", f32], v: KTile["H", "T", "V", f32],
                     g: KTile["H", "T", f32], beta: KTile["H", "T", f32], out: OTile["H", "T", "V", f32], *,
                     BV: int, CHUNK: int):
    """S = exp(g) S (1 - beta k kᵀ) + beta v kᵀ, o = S q, by chunks (Yang et al. 2024, Gated DeltaNet); the
    triangular system of a chunk is solved forward, a row after the other."""
    h, cols = tile.program_id(1), tile.block(tile.program_id(0) * BV, BV)
    i, j = tile.arange(CHUNK)[:, None], tile.arange(CHUNK)[None, :]
    state = tile.zeros((k.shape[2], BV))
    for t in tile.range_m(q.shape[1], CHUNK):
        Q, K, V = q[h, t, :], k[h, t, :], v[h, t, cols]
        b, decay = beta[h, t], tile.cumsum(g[h, t], 0)
        ratio = tile.exp(tile.where(i >= j, decay[:, None] - decay[None, :], -INF))
        mixed = tile.where(i > j, tile.dot(K, K.T) * ratio * b[:, None], 0.0)
        # u = beta (v - exp(decay) k S) - mixed u, of which each row needs the rows above
        u = b[:, None] * (V - tile.exp(decay)[:, None] * tile.dot(K, state))
        for row in tile.range(CHUNK):
            own = tile.sum(tile.where(i == row, u, 0.0), 0)
            column = tile.sum(tile.where(j == row, mixed, 0.0), 1)
            u = u - column[:, None] * own[None, :]
        scores = tile.dot(Q, K.T) * ratio
        out[h, t, cols] = tile.exp(decay)[:, None] * tile.dot(Q, state) + tile.dot(scores, u)
        last = tile.sum(tile.where(tile.arange(CHUNK) == CHUNK - 1, decay, 0.0), 0)
        state = tile.exp(last) * state + tile.dot((K * tile.exp(last - decay)[:, None]).T, u)


def _gated_delta_rule(q, k, v, g, beta):
    H, T, K = k.shape
    state, out = np.zeros((H, K, v.shape[2]), v.dtype), np.zeros_like(v)
    for t in range(T):
        state = state * np.exp(g[:, t])[:, None, None]
        seen = np.einsum("hk,hkv->hv", k[:, t], state)
        state = state + np.einsum("hk,hv->hkv", k[:, t], beta[:, t, None] * (v[:, t] - seen))
        out[:, t] = np.einsum("hk,hkv->hv", q[:, t], state)
    return out


def _keys(*shape):
    """Keys of length 1."""
    def draw(rng):
        x = rng.standard_normal(shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)
    return Given(draw, f32)


# **** matrices ****

@kernel(grid=lambda B: (cdiv(B, 8),))
def sinkhorn(x: KTile["B", "n", "n", f32], out: OTile["B", "n", "n", f32], *, steps: int):
    """Columns and rows of exp(x) scaled in turn until both sum to 1 (Sinkhorn 1964): 8 matrices a program."""
    at = tile.block(tile.program_id(0) * 8, 8)
    m = tile.softmax(x[at, :, :], 2)
    for _ in tile.range(steps):
        m = m / tile.sum(m, 1)[:, None, :]
        m = m / tile.sum(m, 2)[:, :, None]
    out[at, :, :] = m


def _sinkhorn(x, steps):
    m = np.exp(x - x.max(2, keepdims=True))
    m /= m.sum(2, keepdims=True)
    for _ in range(steps):
        m = m / m.sum(1, keepdims=True)
        m = m / m.sum(2, keepdims=True)
    return m


@kernel(grid=lambda M, K, G: (cdiv(M, 8), K // G))
def cast_groups(x: KTile["M", "K", f32], q: OTile["M", "K", int8], scale: OTile["M", "K//G", f32], *, G: int):
    """A power of 2 for each row and group of G, so that the largest is at most 127."""
    m, g = tile.block(tile.program_id(0) * 8, 8), tile.program_id(1)
    cols = tile.block(g * G, G)
    values = x[m, cols]
    top = tile.maximum(tile.max(tile.abs(values), 1), 1e-4)
    power = tile.exp2(tile.ceil(tile.log2(top * (1 / 127))))
    q[m, cols] = tile.round(values / power[:, None]).to(int8)
    scale[m, g] = power


def _cast_groups(x, G):
    groups = x.reshape(len(x), -1, G)
    top = np.maximum(np.abs(groups).max(2), x.dtype.type(1e-4))
    scale = np.exp2(np.ceil(np.log2(top / 127))).astype(x.dtype)
    return np.round(groups / scale[..., None]).astype(np.int8).reshape(x.shape), scale


# NF4: quantiles of a normal distribution (Dettmers et al. 2023, QLoRA, appendix E)
NF4 = np.array([-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
                0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0])


@kernel(grid=lambda M, N: (cdiv(M, 16), cdiv(N, 16)))
def nf4_linear(x: KTile["M", "K", f32], packed: KTile["N", "K//2", uint8], top: KTile["N", "K//block", f32],
               book: KTile[16, f32], out: OTile["M", "N", f32], *, block: int):
    """x wᵀ of codes of a book, two in a byte, the first in the upper half, and the largest of each block."""
    m, n = tile.block(tile.program_id(0) * 16, 16), tile.block(tile.program_id(1) * 16, 16)
    acc = tile.zeros((16, 16))
    for g in tile.range(x.shape[1] // block):
        both = packed[n, tile.block(g * (block // 2), block // 2)].to(int32)
        codes = (both[:, :, None] >> (4 - 4 * tile.arange(2))[None, None, :]) & 15
        values = tile.load(book, codes.reshape(16, block)) * top[n, g][:, None]
        acc = tile.dot(x[m, tile.block(g * block, block)], values.T, acc)
    out[m, n] = acc


def _nf4_linear(x, packed, top, book, block):
    codes = np.stack([packed >> 4, packed & 15], 2).reshape(len(packed), -1)
    return x @ (book[codes] * np.repeat(top, block, 1)).T.astype(x.dtype)


@kernel(grid=lambda E, K, N: (E, cdiv(K, 16), cdiv(N, 32)))
def ragged_gradient(x: KTile["M", "K", bf16], dy: KTile["M", "N", bf16], ends: KTile["E", int32],
                    dw: OTile["E", "K", "N", f32]):
    """xᵀ dy of each group's rows, which end where `ends` says; zeros of groups without rows."""
    e, k = tile.program_id(0), tile.block(tile.program_id(1) * 16, 16)
    n = tile.block(tile.program_id(2) * 32, 32)
    begin = tile.where(e > 0, ends[tile.maximum(e - 1, 0)], 0)
    end, acc = ends[e], tile.zeros((16, 32))
    for start in tile.range(begin, end, 16):
        rows = tile.block(start, 16)
        own = tile.where(rows.indices[:, None] < end, x[rows, k], 0.0)
        acc = tile.dot(own.T, dy[rows, n], acc)
    dw[e, k, n] = acc


def _ragged_gradient(x, dy, ends):
    starts = [0, *ends[:-1]]
    return np.stack([x[a:b].T @ dy[a:b] for a, b in zip(starts, ends, strict=True)])


# **** mixtures of experts ****

@kernel(grid=lambda: (1,))
def align_blocks(expert: KTile["n", int32], sorted_ids: OTile["most", int32],
                 block_expert: OTile["blocks", int32], *, E: int, BLOCK: int, most: int, blocks: int):
    """Tokens in the order of their experts, each expert's filled up to whole blocks with n; a block's expert,
    -1 beyond the last."""
    n = expert.shape[0]
    token, e = tile.arange(n), tile.arange(E)
    own = expert[:]
    hit = (own[:, None] == e[None, :]).to(int32)
    rank = tile.sum(tile.cumsum(hit, 0) * hit, 1) - 1
    padded = (tile.sum(hit, 0) + BLOCK - 1) // BLOCK * BLOCK
    last = tile.cumsum(padded, 0)
    sorted_ids[:] = tile.full((most,), n, int32)
    tile.store(sorted_ids, token, tile.gather(last - padded, own, 0) + rank)
    begin = tile.arange(blocks) * BLOCK
    before = tile.sum((last[None, :] <= begin[:, None]).to(int32), 1)
    block_expert[:] = tile.where(before < E, before, -1)


def _align_blocks(expert, E, BLOCK, most, blocks):
    ids, owners = [], []
    for e in range(E):
        own = list(np.nonzero(expert == e)[0])
        ids += own + [len(expert)] * (-len(own) % BLOCK)
        owners += [e] * -(-len(own) // BLOCK)
    return (np.array(ids + [len(expert)] * (most - len(ids)), np.int32),
            np.array(owners + [-1] * (blocks - len(owners)), np.int32))


@kernel(grid=lambda rows: (cdiv(rows, 4),))
def route(logits: KTile["rows", "E", f32], weights: OTile["rows", "K", f32],
          chosen: OTile["rows", "K", int32], *, K: int):
    """The K most probable experts of each token, of equal ones the first; weights add up to 1."""
    rows, e = tile.block(tile.program_id(0) * 4, 4), tile.arange(logits.shape[1])
    p, place = tile.softmax(logits[rows, :], 1), tile.arange(K)
    values, index = tile.zeros((4, K)), tile.zeros((4, K), int32)
    for i in range(K):
        best, where = tile.max(p, 1), tile.argmax(p, 1)
        values = tile.where(place[None, :] == i, best[:, None], values)
        index = tile.where(place[None, :] == i, where[:, None], index)
        p = tile.where(e[None, :] == where[:, None], -1.0, p)
    weights[rows, :], chosen[rows, :] = values / tile.sum(values, 1)[:, None], index


def _route(logits, K):
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    chosen = np.argsort(-p, 1, kind="stable")[:, :K]
    values = np.take_along_axis(p, chosen, 1)
    return values / values.sum(1, keepdims=True), chosen.astype(np.int32)


@kernel(grid=lambda B: (B,))
def latent_decode(q: KTile["B", "H", "R", f32], q_rope: KTile["B", "H", "P", f32],
                  pages: KTile["pages", "PAGE", "R", f32], rope: KTile["pages", "PAGE", "P", f32],
                  table: KTile["B", "most", int32], lengths: KTile["B", int32],
                  out: OTile["B", "H", "R", f32]):
    """All heads over one latent of each token, its key and value at once (DeepSeek-V2 2024, absorbed MLA)."""
    b, PAGE = tile.program_id(0), pages.shape[1]
    heads, length = q.shape[1], lengths[b]
    Q, P = q[b, :, :], q_rope[b, :, :]
    m, l, acc = tile.full((heads,), -INF), tile.zeros((heads,)), tile.zeros((heads, q.shape[2]))
    for number in tile.range((length + PAGE - 1) // PAGE):
        page = table[b, number]
        latents = pages[page, :, :]
        s = (tile.dot(Q, latents.T) + tile.dot(P, rope[page, :, :].T)) * (q.shape[2] ** -0.5)
        s = tile.where((number * PAGE + tile.arange(PAGE))[None, :] < length, s, -INF)
        top = tile.maximum(m, tile.max(s, 1))
        p, old = tile.exp(s - top[:, None]), tile.exp(m - top)
        m, l = top, l * old + tile.sum(p, 1)
        acc = tile.dot(p, latents, acc * old[:, None])
    out[b, :, :] = acc / l[:, None]


def _latent_decode(q, q_rope, pages, rope, table, lengths):
    made = []
    for b, length in enumerate(lengths):
        c, r = (each[table[b]].reshape(-1, each.shape[2])[:length] for each in (pages, rope))
        s = (q[b] @ c.T + q_rope[b] @ r.T) * q.dtype.type(q.shape[2] ** -0.5)
        p = np.exp(s - s.max(1, keepdims=True))
        made.append(p / p.sum(1, keepdims=True) @ c)
    return np.stack(made)


def _log_probabilities(*shape):
    def draw(rng):
        x = rng.standard_normal(shape)
        return x - np.log(np.exp(x).sum(1, keepdims=True))
    return Given(draw, f32)


def _delta(H, T, K, V):
    return (normal(H, T, K), _keys(H, T, K), normal(H, T, V), uniform(H, T, low=-0.5, high=0.0),
            uniform(H, T))


PROGRAMS = [
    *(Case(f"sparsemax-5x{n}", call(sparsemax), (normal(5, n),), _sparsemax) for n in (32, 19)),
    *(Case(f"jensen_shannon-{beta}", call(jensen_shannon, beta=beta, BLOCK=48),
           (_log_probabilities(3, 100), _log_probabilities(3, 100)),
           lambda s, t, beta=beta: _jensen_shannon(s, t, beta), c=16.0) for beta in (0.5, 0.1)),
    Case("geglu_backward-300", call(geglu_backward), tuple(normal(300, dtype=bf16) for _ in range(3)),
         _geglu_backward, c=16.0),
    Case("multimodal_rope-7x3", call(multimodal_rope, first=2, second=3),
         (normal(7, 3, 16), normal(3, 7, 8), normal(3, 7, 8)), lambda *x: _multimodal_rope(*x, 2, 3)),
    Case("linear_cross_entropy-20", call(linear_cross_entropy, BV=32),
         (normal(20, 24), normal(70, 24, scale=0.3), integers(0, 70, 20)), _linear_cross_entropy, c=8.0),
    *(Case(f"gated_delta_rule-{T}-{chunk}", call(gated_delta_rule, BV=8, CHUNK=chunk), _delta(2, T, 16, 12),
           _gated_delta_rule, c=8.0) for T, chunk in ((40, 16), (19, 8))),
    Case("sinkhorn-11x4", call(sinkhorn, steps=6), (normal(11, 4, 4),), lambda x: _sinkhorn(x, 6), c=8.0),
    Case("cast_groups-10x96", call(cast_groups, G=32), (normal(10, 96),), lambda x: _cast_groups(x, 32)),
    Case("nf4_linear-20x24", call(nf4_linear, block=32),
         (normal(20, 64), integers(0, 256, 24, 32, dtype=uint8), uniform(24, 2, low=0.5, high=2.0),
          fixed(NF4, f32)), lambda *x: _nf4_linear(*x, 32)),
    Case("ragged_gradient-45", call(ragged_gradient),
         (normal(45, 20, dtype=bf16), normal(45, 40, dtype=bf16), fixed([5, 5, 38, 45])), _ragged_gradient),
    Case("align_blocks-50", call(align_blocks, E=6, BLOCK=8, most=96, blocks=12), (integers(0, 6, 50),),
         lambda e: _align_blocks(e, 6, 8, 96, 12)),
    Case("route-10x16", call(route, K=3), (normal(10, 16),), lambda x: _route(x, 3)),
    Case("latent_decode-3x8", call(latent_decode),
         (normal(3, 8, 32), normal(3, 8, 16), normal(9, 8, 32), normal(9, 8, 16),
          fixed([[4, 0, 7], [8, 1, 2], [3, 5, 6]]), fixed([17, 8, 23])), _latent_decode),
]
