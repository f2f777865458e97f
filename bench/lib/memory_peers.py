# mypy: disallow-untyped-defs=False
"""Triton kernels that our memory-bound ones are held against, as they are commonly written: matrix times
vector with split K, norms and softmax with a row in a program, silu and multiply, the largest of a row,
selection by bisection, rotary embedding with an append to pages, gathered rows, paged decode attention, and
cross entropy with its gradient.

Protocol: operands are dense, of bf16 where no dtype is said. Norms have a power of two of columns, and other
extents are whole blocks where there is no mask.

Decode attention has two stages as inference servers have them: splits of a request's keys, each with the
query heads of a key head in one program, then a merge of the splits. Pages [page, token, head, d] are of bf16
for keys and for values, the block table is int32 [batch, pages], lengths int32 [batch], queries [batch, heads
· group, d].

Cross entropy is as Liger-Kernel has it: one program a row, which it reads twice. Blocks and warps are Liger's
(ops/cross_entropy.py, MAX_FUSED_SIZE; arXiv 2410.10989), but the gradient does not replace the logits.
"""
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

MOST_BLOCK, CROSS_ENTROPY_WARPS = 32768, 32


@triton.jit
def gemv(out, w, x, parts, K, SPLIT_K: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
         SPLIT: tl.constexpr):
    """One row x times w [N, K] transposed: elementwise products, summed at the end. A split has SPLIT_K."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    first = tl.program_id(1) * SPLIT_K
    acc = tl.zeros((BN, BK), dtype=tl.float32)
    for start in range(first, first + SPLIT_K, BK):
        k = start + tl.arange(0, BK)
        weights = tl.load(w + n[:, None].to(tl.int64) * K + k[None, :], cache_modifier=".cg")
        acc += weights.to(tl.float32) * tl.load(x + k)[None, :].to(tl.float32)
    total = tl.sum(acc, axis=1)
    if SPLIT == 1:
        tl.store(out + n, total.to(out.dtype.element_ty))
    else:
        tl.store(parts + tl.program_id(1) * N + n, total)


@triton.jit
def gemv_dot(out, w, x, parts, K, SPLIT_K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
             BK: tl.constexpr, SPLIT: tl.constexpr):
    """M rows, padded to 16, on tensor cores."""
    n, m = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, 16)
    first = tl.program_id(1) * SPLIT_K
    acc = tl.zeros((16, BN), dtype=tl.float32)
    for start in range(first, first + SPLIT_K, BK):
        k = start + tl.arange(0, BK)
        rows = tl.load(x + m[:, None] * K + k[None, :], mask=m[:, None] < M, other=0)
        acc = tl.dot(rows, tl.load(w + n[None, :].to(tl.int64) * K + k[:, None]), acc)
    inside = (m[:, None] < M) & (n[None, :] < N)
    if SPLIT == 1:
        tl.store(out + m[:, None] * N + n[None, :], acc.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(parts + (tl.program_id(1) * M + m[:, None]) * N + n[None, :], acc, mask=inside)


@triton.jit
def join_splits(out, parts, COUNT: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the splits' parts."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split = tl.arange(0, SPLIT)
    found = tl.load(parts + split[:, None] * COUNT + at[None, :])
    tl.store(out + at, tl.sum(found, axis=0).to(out.dtype.element_ty))


@triton.jit
def rms_norm(out, x, w, N: tl.constexpr):
    """A row in registers."""
    at = tl.arange(0, N)
    row = tl.load(x + tl.program_id(0) * N + at).to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row) / N + 1e-5)
    made = (row * scale).to(out.dtype.element_ty) * tl.load(w + at)
    tl.store(out + tl.program_id(0) * N + at, made)


@triton.jit
def layer_norm(out, x, w, b, N: tl.constexpr):
    """Mean, then variance, of a row in registers."""
    at = tl.arange(0, N)
    row = tl.load(x + tl.program_id(0) * N + at).to(tl.float32)
    centred = row - tl.sum(row) / N
    scale = tl.rsqrt(tl.sum(centred * centred) / N + 1e-5)
    weight, bias = tl.load(w + at), tl.load(b + at)
    tl.store(out + tl.program_id(0) * N + at, (centred * scale).to(out.dtype.element_ty) * weight + bias)


@triton.jit
def softmax(out, x, ROWS, N: tl.constexpr, CTAS: tl.constexpr, STAGES: tl.constexpr):
    """Persistent programs, a row after the other."""
    at = tl.arange(0, N)
    for row in tl.range(tl.program_id(0), ROWS, CTAS, num_stages=STAGES):
        values = tl.load(x + row * N + at).to(tl.float32)
        weights = tl.exp(values - tl.max(values))
        tl.store(out + row * N + at, (weights / tl.sum(weights)).to(out.dtype.element_ty))


@triton.jit
def silu_and_mul(out, x, N: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) · up of rows gate | up."""
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * N + at).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + at)
    tl.store(out + row * N + at, (gate * tl.sigmoid(gate)).to(out.dtype.element_ty) * up)


@triton.jit
def add_residual(out, x, y, N: tl.constexpr, BLOCK: tl.constexpr):
    """A residual."""
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    made = tl.load(x + row * N + at) + tl.load(y + row * N + at)
    tl.store(out + row * N + at, made)


@triton.jit
def _store_largest(values, places, best, place, N, CUT: tl.constexpr):
    """A chunk's largest, and where it is first."""
    at, top = tl.program_id(0) * CUT + tl.program_id(1), tl.max(best)
    tl.store(values + at, top)
    tl.store(places + at, tl.min(tl.where(best == top, place, N)))


@triton.jit
def largest_parts(values, places, x, N, CHUNK: tl.constexpr, BLOCK: tl.constexpr, CUT: tl.constexpr):
    """The largest of a chunk of a row of float32, and where."""
    row, first = tl.program_id(0), tl.program_id(1) * CHUNK
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, CHUNK, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        found = tl.load(x + row * N + at, mask=at < N, other=-float("inf"))
        better = found > best
        best, place = tl.where(better, found, best), tl.where(better, at, place)
    _store_largest(values, places, best, place, N, CUT)


@triton.jit
def draw_parts(values, places, x, temperatures, seeds, N, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
               CUT: tl.constexpr):
    """The same with Gumbel noise of Philox added."""
    row, first = tl.program_id(0), tl.program_id(1) * CHUNK
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    drawn, seed = tl.load(temperatures + row) > 0, tl.load(seeds + row)
    for start in range(0, CHUNK, BLOCK):
        at = first + start + tl.arange(0, BLOCK)
        found = tl.load(x + row * N + at, mask=at < N, other=-float("inf"))
        noise = -tl.log(-tl.log(tl.maximum(tl.rand(seed, at), 1e-7)))
        found = tl.where(drawn, found + noise, found)
        better = found > best
        best, place = tl.where(better, found, best), tl.where(better, at, place)
    _store_largest(values, places, best, place, N, CUT)


@triton.jit
def largest(out, values, places, CUT: tl.constexpr):
    """The first of the largest of a row's chunks."""
    at = tl.program_id(0) * CUT + tl.arange(0, CUT)
    found = tl.load(values + at)
    tl.store(out + tl.program_id(0), tl.min(tl.where(found == tl.max(found), tl.load(places + at), 2 ** 30)))


@triton.jit
def filter_logits(out, x, weights, targets, N, BLOCK: tl.constexpr, COUNTED: tl.constexpr,
                  ROUNDS: tl.constexpr):
    """Keeps the largest that have a mass of the target: a threshold by bisection, a row in a program."""
    row, inside = tl.program_id(0), tl.arange(0, BLOCK)
    low, high = -1e4, 1e4
    target = tl.load(targets + row)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        mass = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N, BLOCK):
            at = row * N + start + inside
            found = tl.load(x + at, mask=start + inside < N, other=-float("inf"))
            each = 1.0 if COUNTED else tl.load(weights + at, mask=start + inside < N, other=0)
            mass += tl.where(found >= middle, each, 0.0)
        enough = tl.sum(mass) >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    for start in range(0, N, BLOCK):
        at = row * N + start + inside
        found = tl.load(x + at, mask=start + inside < N, other=-float("inf"))
        tl.store(out + at, tl.where(found >= low, found, -float("inf")), mask=start + inside < N)


@triton.jit
def rope_append(q_out, k_pages, v_pages, q, k, v, cos, sin, table, lengths, PAGES: tl.constexpr,
                Q_HEADS: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr):
    """A token's heads, one in a program: queries and keys rotated, keys and values to their page."""
    row, head, at = tl.program_id(0), tl.program_id(1), tl.arange(0, HALF)
    place = tl.load(lengths + row) - 1
    c, s = tl.load(cos + place * HALF + at), tl.load(sin + place * HALF + at)
    if head < Q_HEADS:
        source = q + (row * Q_HEADS + head) * 2 * HALF
        low, high = tl.load(source + at).to(tl.float32), tl.load(source + HALF + at).to(tl.float32)
        to = q_out + (row * Q_HEADS + head) * 2 * HALF
        tl.store(to + at, (low * c - high * s).to(q_out.dtype.element_ty))
        tl.store(to + HALF + at, (high * c + low * s).to(q_out.dtype.element_ty))
    else:
        page = tl.load(table + row * PAGES + place // PAGE).to(tl.int64)
        h = (head - Q_HEADS) % HEADS
        target = ((page * PAGE + place % PAGE) * HEADS + h) * 2 * HALF
        begin = (row * HEADS + h) * 2 * HALF
        if head < Q_HEADS + HEADS:
            low, high = tl.load(k + begin + at).to(tl.float32), tl.load(k + begin + HALF + at).to(tl.float32)
            tl.store(k_pages + target + at, (low * c - high * s).to(k_pages.dtype.element_ty))
            tl.store(k_pages + target + HALF + at, (high * c + low * s).to(k_pages.dtype.element_ty))
        else:
            tl.store(v_pages + target + at, tl.load(v + begin + at))
            tl.store(v_pages + target + HALF + at, tl.load(v + begin + HALF + at))


@triton.jit
def gather_rows(out, table, tokens, N: tl.constexpr, BLOCK: tl.constexpr):
    """A row of a table for each token."""
    row, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row).to(tl.int64)
    tl.store(out + row.to(tl.int64) * N + at, tl.load(table + token * N + at))


@triton.jit
def split_keys(parts, lse, q, keys, values, table, lengths, scale, PAGES: tl.constexpr, HEADS: tl.constexpr,
               GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
               SPLITS: tl.constexpr):
    """Stage 1: a split of a request's keys, for one key head."""
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, g, c = tl.arange(0, D), tl.arange(0, 16), tl.arange(0, BN)
    length = tl.load(lengths + request)
    each = tl.cdiv(tl.cdiv(length, SPLITS), BN) * BN
    first, last = split * each, tl.minimum((split + 1) * each, length)
    own = (request * HEADS + head) * GROUP + g
    rows = tl.load(q + own[:, None] * D + d[None, :], mask=g[:, None] < GROUP, other=0)
    top, total = tl.full((16,), -float("inf"), tl.float32), tl.zeros((16,), tl.float32)
    acc = tl.zeros((16, D), tl.float32)
    for start in range(first, last, BN):
        key = start + c
        page = tl.load(table + request * PAGES + key // PAGE, mask=key < last, other=0).to(tl.int64)
        at = ((page * PAGE + key % PAGE) * HEADS + head) * D
        k = tl.load(keys + at[None, :] + d[:, None], mask=key[None, :] < last, other=0)
        scores = tl.where(key[None, :] < last, tl.dot(rows, k) * scale, -float("inf"))
        above = tl.maximum(top, tl.max(scores, 1))
        shrink, weights = tl.exp2(top - above), tl.exp2(scores - above[:, None])
        v = tl.load(values + at[:, None] + d[None, :], mask=key[:, None] < last, other=0)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None])
        total, top = total * shrink + tl.sum(weights, 1), above
    if last > first:
        place = own * SPLITS + split
        tl.store(parts + place[:, None] * D + d[None, :], acc / total[:, None], mask=g[:, None] < GROUP)
        tl.store(lse + place, top + tl.log2(total), mask=g < GROUP)


@triton.jit
def merge_splits(out, parts, lse, lengths, HEADS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
                 SPLITS: tl.constexpr):
    """Stage 2: the splits of one query head."""
    request, head, d = tl.program_id(0), tl.program_id(1), tl.arange(0, D)
    length = tl.load(lengths + request)
    each = tl.cdiv(tl.cdiv(length, SPLITS), BN) * BN
    row = request * HEADS + head
    top, total = -float("inf"), 0.0
    acc = tl.zeros((D,), tl.float32)
    for split in range(0, SPLITS):
        if split * each < length:
            one = tl.load(lse + row * SPLITS + split)
            above = tl.maximum(top, one)
            shrink, weight = tl.exp2(top - above), tl.exp2(one - above)
            acc = acc * shrink + weight * tl.load(parts + (row * SPLITS + split) * D + d)
            total, top = total * shrink + weight, above
    tl.store(out + row * D + d, (acc / total).to(out.dtype.element_ty))


@triton.jit
def _cross_entropy(gradient, losses, logits, classes, n, ignored, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(classes + row)
    x_at, to = logits + row * n, gradient + row * n
    at = tl.arange(0, BLOCK)
    if own == ignored:
        for first in range(0, n, BLOCK):
            tl.store(to + first + at, tl.zeros((BLOCK,), to.dtype.element_ty), mask=first + at < n)
        tl.store(losses + row, 0.0)
        return
    most, total = -float("inf"), 0.0
    for first in range(0, n, BLOCK):
        x = tl.load(x_at + first + at, mask=first + at < n, other=-float("inf")).to(tl.float32)
        now = tl.maximum(most, tl.max(x))
        total = total * tl.exp(most - now) + tl.sum(tl.exp(x - now))
        most = now
    tl.store(losses + row, most + tl.log(total) - tl.load(x_at + own).to(tl.float32))
    for first in range(0, n, BLOCK):
        x = tl.load(x_at + first + at, mask=first + at < n, other=-float("inf")).to(tl.float32)
        p = tl.exp(x - most) / total
        p = tl.where(first + at == own, p - 1.0, p)
        tl.store(to + first + at, p.to(to.dtype.element_ty), mask=first + at < n)


def cross_entropy(gradient: Any, losses: Any, logits: Any, classes: Any, ignored: int) -> None:
    """Launches cross entropy of matrices whose rows lie side by side."""
    rows, n = logits.shape
    block = min(MOST_BLOCK, triton.next_power_of_2(n))
    _cross_entropy[(rows,)](gradient, losses, logits, classes, n, ignored, BLOCK=block,
                            num_warps=CROSS_ENTROPY_WARPS)
