# mypy: disallow-untyped-defs=False
"""Triton kernels of paged decode attention, in two stages as inference servers have them: splits of a
request's keys, each with the query heads of a key head in one program, then a merge of the splits.

Protocol: pages [page, token, head, d] of bf16 for keys and for values, a block table int32 [batch, pages],
lengths int32 [batch], queries [batch, heads · group, d].
"""
from __future__ import annotations

import triton
import triton.language as tl


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
def merged(out, parts, lse, lengths, HEADS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr,
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
