"""Flash attention: forward through pointers and descriptors, specialised, backward, and decoding over pages.

Scores carry log2(e) / sqrt(D); probabilities are rounded to the operand type before the second product, which
is what the bounds are made of: 2**-8 (bfloat16) or 2**-11 (float16) of sums of magnitudes, with a factor 4.
"""
from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from tests.support.ptx.triton_case import Case, Descriptor, Problem, Wanted, cases, values
from tests.support.ptx.triton_pointwise import Rng, real
from tests.support.ptx.triton_reductions import softmax_values

BF16, F16 = torch.bfloat16, torch.float16
LOG2E = 1.4426950408889634


@triton.jit
def forward_kernel(q, k, v, out, lse, S, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   CAUSAL: tl.constexpr, SPLIT: tl.constexpr):
    head = tl.program_id(1) * S
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    query = tl.load(q + (head + m)[:, None] * D + d[None, :], mask=m[:, None] < S, other=0.0)
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    last = tl.minimum((tl.program_id(0) + 1) * BM, S) if CAUSAL else S
    for start in tl.range(0, last, BN, warp_specialize=SPLIT):
        n = start + tl.arange(0, BN)
        key = tl.load(k + (head + n)[:, None] * D + d[None, :], mask=n[:, None] < S, other=0.0)
        s = tl.dot(query, key.T) * scale
        keep = (n[None, :] < S) & (m[:, None] >= n[None, :]) if CAUSAL else n[None, :] < S
        s = tl.where(keep, s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(p, 1)
        value = tl.load(v + (head + n)[:, None] * D + d[None, :], mask=n[:, None] < S, other=0.0)
        acc = tl.dot(p.to(value.dtype), value, acc * shrink[:, None])
        top = new
    tl.store(lse + head + m, top + tl.log2(total), mask=m < S)
    tl.store(out + (head + m)[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty),
             mask=m[:, None] < S)


@triton.jit
def tma_kernel(q, k, v, out, S, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               CAUSAL: tl.constexpr, SPLIT: tl.constexpr):
    head = tl.program_id(1) * S
    m = tl.program_id(0) * BM
    query = q.load([head + m, 0])
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    last = m + BM if CAUSAL else S
    for start in tl.range(0, last, BN, warp_specialize=SPLIT):
        s = tl.dot(query, k.load([head + start, 0]).T) * scale
        if CAUSAL:
            i = m + tl.arange(0, BM)
            j = start + tl.arange(0, BN)
            s = tl.where(i[:, None] >= j[None, :], s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v.load([head + start, 0]), acc * shrink[:, None])
        top = new
    out.store([head + m, 0], (acc / total[:, None]).to(out.dtype))


@triton.jit
def device_tma_kernel(q, k, v, out, rows, S, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                      CAUSAL: tl.constexpr, SPLIT: tl.constexpr):
    dq = tl.make_tensor_descriptor(q, [rows, D], [D, 1], [BM, D])
    dk = tl.make_tensor_descriptor(k, [rows, D], [D, 1], [BN, D])
    dv = tl.make_tensor_descriptor(v, [rows, D], [D, 1], [BN, D])
    do = tl.make_tensor_descriptor(out, [rows, D], [D, 1], [BM, D])
    tma_kernel(dq, dk, dv, do, S, scale, D, BM, BN, CAUSAL, SPLIT)


def scores(q: torch.Tensor, k: torch.Tensor, causal: bool) -> np.ndarray:
    """q @ k.T / sqrt(D) in float64, -inf where causality forbids."""
    s = values(q) @ values(k).swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if causal: s = np.where(np.tril(np.ones(s.shape[-2:])) > 0, s, -np.inf)
    return s


def forward(heads: int, s: int, d: int, block: tuple[int, int], dtype: torch.dtype, causal: bool,
            descriptors: str = "", split: bool = False) -> Any:
    """One batch of `heads`; `descriptors` is "" (pointers), "host" or "device"."""
    bm, bn = block
    step = 2**-8 if dtype is BF16 else 2**-11

    def make(rng: Rng) -> Problem:
        q, k, v = (real(rng, heads, s, d, dtype=dtype) for _ in range(3))
        a = scores(q, k, causal)
        p = softmax_values(a)
        want = p @ values(v)
        bound = 4 * step * (p @ np.abs(values(v)))
        tensors = {"q": q, "k": k, "v": v, "out": torch.zeros_like(q)}
        arguments: dict[str, Any] = {**tensors, "S": s, "scale": LOG2E / d**0.5}
        wanted = {"out": Wanted(want, bound)}
        if descriptors == "host":
            arguments |= {name: Descriptor(t.view(-1, d), (bn if name in "kv" else bm, d))
                          for name, t in tensors.items()}
            wanted = {"out": Wanted(want.reshape(-1, d), bound.reshape(-1, d))}
        elif descriptors == "device": arguments["rows"] = heads * s
        else:
            arguments["lse"] = torch.zeros(heads, s)
            wanted["lse"] = Wanted(np.log2(np.exp(a).sum(-1)), 1e-4)
        return Problem(arguments, wanted, (-(-s // bm), heads),
                       {"D": d, "BM": bm, "BN": bn, "CAUSAL": causal, "SPLIT": split})
    return make


@triton.jit
def delta_kernel(out, dout, delta, BM: tl.constexpr, D: tl.constexpr):
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    at = m[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(delta + m, tl.sum(tl.load(out + at).to(tl.float32) * tl.load(dout + at).to(tl.float32), axis=1))


@triton.jit
def dkdv_kernel(q, k, v, dout, lse, delta, dk, dv, S, scale, D: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, CAUSAL: tl.constexpr):
    head = tl.program_id(1) * S
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, D)
    mine = (head + n)[:, None] * D + d[None, :]
    key = tl.load(k + mine)
    value = tl.load(v + mine)
    grad_k = tl.zeros((BN, D), tl.float32)
    grad_v = tl.zeros((BN, D), tl.float32)
    for start in range(tl.program_id(0) * BN // BM * BM if CAUSAL else 0, S, BM):
        m = start + tl.arange(0, BM)
        query = tl.load(q + (head + m)[:, None] * D + d[None, :])
        p = tl.exp2(tl.dot(key, query.T) * (scale * 1.4426950408889634) - tl.load(lse + head + m)[None, :])
        if CAUSAL:
            p = tl.where(m[None, :] >= n[:, None], p, 0.0)
        grad = tl.load(dout + (head + m)[:, None] * D + d[None, :])
        grad_v = tl.dot(p.to(grad.dtype), grad, grad_v)
        ds = p * (tl.dot(value, grad.T) - tl.load(delta + head + m)[None, :])
        grad_k = tl.dot(ds.to(query.dtype), query, grad_k)
    tl.store(dk + mine, grad_k * scale)
    tl.store(dv + mine, grad_v)


@triton.jit
def dq_kernel(q, k, v, dout, lse, delta, dq, S, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              CAUSAL: tl.constexpr):
    head = tl.program_id(1) * S
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    mine = (head + m)[:, None] * D + d[None, :]
    query = tl.load(q + mine)
    grad = tl.load(dout + mine)
    log = tl.load(lse + head + m)
    mean = tl.load(delta + head + m)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BM if CAUSAL else S, BN):
        n = start + tl.arange(0, BN)
        key = tl.load(k + (head + n)[:, None] * D + d[None, :])
        value = tl.load(v + (head + n)[:, None] * D + d[None, :])
        p = tl.exp2(tl.dot(query, key.T) * (scale * 1.4426950408889634) - log[:, None])
        if CAUSAL:
            p = tl.where(m[:, None] >= n[None, :], p, 0.0)
        ds = p * (tl.dot(grad, value.T) - mean[:, None])
        acc = tl.dot(ds.to(key.dtype), key, acc)
    tl.store(dq + mine, acc * scale)


def backward(which: str, heads: int, s: int, d: int, block: tuple[int, int], causal: bool) -> Any:
    """dq, or dk and dv, from float64 row statistics; float16 operands."""
    bm, bn = block

    def make(rng: Rng) -> Problem:
        q, k, v, dout = (real(rng, heads, s, d, dtype=F16) for _ in range(4))
        a, g = scores(q, k, causal), values(dout)
        p = softmax_values(a)
        out = p @ values(v)
        delta = (out * g).sum(-1)
        lse = np.log2(np.exp(a).sum(-1))
        ds = p * (g @ values(v).swapaxes(-1, -2) - delta[..., None])
        c, root = 4 * 2**-11, d**-0.5
        def bound(left: np.ndarray, right: np.ndarray) -> np.ndarray:
            return c * (np.abs(left) @ np.abs(right)) + 1e-4
        turned, scored = ds.swapaxes(-1, -2), p.swapaxes(-1, -2)
        wanted = {"dq": Wanted(ds @ values(k) * root, bound(ds, values(k)) * root),
                  "dk": Wanted(turned @ values(q) * root, bound(turned, values(q)) * root),
                  "dv": Wanted(scored @ g, bound(scored, g))}
        names = ["dq"] if which == "dq" else ["dk", "dv"]
        return Problem({"q": q, "k": k, "v": v, "dout": dout, "S": s, "scale": root,
                        "lse": torch.from_numpy(lse).float(), "delta": torch.from_numpy(delta).float(),
                        **{name: torch.zeros(heads, s, d) for name in names}},
                       {name: wanted[name] for name in names}, (s // (bm if which == "dq" else bn), heads),
                       {"D": d, "BM": bm, "BN": bn, "CAUSAL": causal})
    return make


def delta(rng: Rng) -> Problem:
    """Row sums of out · dout."""
    out, dout = real(rng, 64, 64, dtype=F16), real(rng, 64, 64, dtype=F16)
    product = values(out) * values(dout)
    return Problem({"out": out, "dout": dout, "delta": torch.zeros(64)},
                   {"delta": Wanted(product.sum(1), 64 * 2**-23 * np.abs(product).sum(1))}, (2,),
                   {"BM": 32, "D": 64})


@triton.jit
def paged_kernel(q, cache_k, cache_v, table, length, out, scale, PAGES: tl.constexpr, PAGE: tl.constexpr,
                 GROUP: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0)
    g = tl.arange(0, GROUP)
    d = tl.arange(0, D)
    many = tl.load(length + row)
    query = tl.load(q + (row * GROUP + g)[:, None] * D + d[None, :])
    top = tl.full((GROUP,), -float("inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, D), tl.float32)
    for i in range(0, tl.cdiv(many, PAGE)):
        page = tl.load(table + row * PAGES + i)
        n = tl.arange(0, PAGE)
        at = (page * PAGE + n)[:, None] * D + d[None, :]
        s = tl.dot(query, tl.load(cache_k + at).T) * scale
        s = tl.where((i * PAGE + n)[None, :] < many, s, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(top - new)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(cache_v.dtype.element_ty), tl.load(cache_v + at), acc * shrink[:, None])
        top = new
    tl.store(out + (row * GROUP + g)[:, None] * D + d[None, :], acc / total[:, None])


def paged(rng: Rng) -> Problem:
    """Decoding: 16 query heads of one key head, pages of 16 in any order, lengths 37 and 80."""
    q = real(rng, 2, 16, 64, dtype=BF16)
    cache_k, cache_v = real(rng, 12, 16, 64, dtype=BF16), real(rng, 12, 16, 64, dtype=BF16)
    table = torch.from_numpy(rng.permutation(12)[:10].reshape(2, 5)).to(torch.int32)
    lengths = (37, 80)
    want, bound = np.zeros((2, 16, 64)), np.zeros((2, 16, 64))
    for row, many in enumerate(lengths):
        k, v = (values(cache[table[row].long()].view(-1, 64)[:many]) for cache in (cache_k, cache_v))
        p = softmax_values(values(q[row]) @ k.T / 8)
        want[row], bound[row] = p @ v, 4 * 2**-8 * (p @ np.abs(v))
    return Problem({"q": q, "cache_k": cache_k, "cache_v": cache_v, "table": table,
                    "length": torch.tensor(lengths, dtype=torch.int32), "out": torch.zeros(2, 16, 64),
                    "scale": LOG2E / 8}, {"out": Wanted(want, bound)}, (2,),
                   {"PAGES": 5, "PAGE": 16, "GROUP": 16, "D": 64})


CASES: list[Case] = [
    *cases("attention-bf16", forward_kernel, forward(2, 160, 64, (64, 32), BF16, False)),
    *cases("attention-causal-f16", forward_kernel, forward(1, 128, 64, (64, 32), F16, True), num_stages=2),
    *cases("attention-odd-2warps", forward_kernel, forward(1, 77, 32, (32, 16), F16, True), num_warps=2),
    *cases("attention-8warps-1stage", forward_kernel, forward(1, 128, 128, (128, 32), BF16, False),
           num_warps=8, num_stages=1),
    *cases("attention-tma", tma_kernel, forward(2, 192, 64, (64, 32), BF16, False, "host")),
    *cases("attention-tma-causal", tma_kernel, forward(1, 256, 64, (128, 64), F16, True, "host"), num_warps=8,
           num_stages=2),
    *cases("attention-tma-device", device_tma_kernel, forward(1, 192, 64, (64, 32), BF16, True, "device")),
    *cases("attention-specialised", device_tma_kernel, forward(1, 256, 64, (128, 64), BF16, False, "device",
                                                                True), archs=(90,), num_stages=2),
    *cases("attention-delta", delta_kernel, delta),
    *cases("attention-dkdv", dkdv_kernel, backward("dkdv", 1, 128, 64, (32, 64), False)),
    *cases("attention-dkdv-causal", dkdv_kernel, backward("dkdv", 2, 128, 32, (16, 32), True), num_stages=2),
    *cases("attention-dq", dq_kernel, backward("dq", 1, 128, 64, (64, 32), False)),
    *cases("attention-dq-causal", dq_kernel, backward("dq", 2, 128, 32, (32, 16), True), num_stages=2),
    *cases("attention-paged", paged_kernel, paged),
]
