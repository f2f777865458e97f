# mypy: disallow-untyped-defs=False
"""Triton's own attentions, which ours are held against: the tutorial's fused forward pass, through pointers
and through tensor descriptors, specialised or not, and its backward pass in two kernels (dk and dv; dq).

Protocol: `Flash` names a kernel, its tile and Triton's options; `compile_kernel(flash, arch)` gives Triton's
PTX and cubin without a GPU. Operands are dense [batch · heads, S, D] of bfloat16, S a multiple of the tile;
the scale of the scores has log2 e in it already, and l is in base 2.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.lib.gemm_peers import ARCHS


@triton.jit
def _block(query, q_at, k, v, S, start, scale, top, total, acc, m,
           BN: tl.constexpr, D: tl.constexpr, HIDDEN: tl.constexpr, TMA: tl.constexpr):
    """Takes in the keys from `start` on; `HIDDEN`: some are hidden from some rows."""
    n = start + tl.arange(0, BN)
    d = tl.arange(0, D)
    key = k.load([q_at + start, 0]) if TMA else tl.load(k + (q_at + n)[:, None] * D + d[None, :])
    s = tl.dot(query, key.T) * scale
    if HIDDEN: s = tl.where(m[:, None] >= n[None, :], s, -float("inf"))
    new = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new[:, None])
    shrink = tl.exp2(top - new)
    value = v.load([q_at + start, 0]) if TMA else tl.load(v + (q_at + n)[:, None] * D + d[None, :])
    acc = tl.dot(p.to(tl.bfloat16), value, acc * shrink[:, None])
    return new, total * shrink + tl.sum(p, 1), acc


@triton.jit
def forward_kernel(q, k, v, out, log, S, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
                   CAUSAL: tl.constexpr, TMA: tl.constexpr, SPLIT: tl.constexpr):
    """Blocks that all rows see first, then those on the diagonal."""
    first = tl.program_id(0) * BM
    head = tl.program_id(1) * S
    m = first + tl.arange(0, BM)
    d = tl.arange(0, D)
    query = q.load([head + first, 0]) if TMA else tl.load(q + (head + m)[:, None] * D + d[None, :])
    top = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    seen = first if CAUSAL else S
    for start in tl.range(0, seen, BN, warp_specialize=SPLIT):
        top, total, acc = _block(query, head, k, v, S, start, scale, top, total, acc, m, BN, D, False, TMA)
    if CAUSAL:
        for start in tl.range(first, first + BM, BN):
            top, total, acc = _block(query, head, k, v, S, start, scale, top, total, acc, m, BN, D, True, TMA)
    tl.store(log + head + m, top + tl.log2(total))
    result = (acc / total[:, None]).to(tl.bfloat16)
    if TMA: out.store([head + first, 0], result)
    else: tl.store(out + (head + m)[:, None] * D + d[None, :], result)


@triton.jit
def keys_kernel(q, k, v, grad, log, delta, dk, dv, S, scale, root, D: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, CAUSAL: tl.constexpr):
    """dk and dv of a block of keys."""
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
        rows = (head + m)[:, None] * D + d[None, :]
        query = tl.load(q + rows)
        p = tl.exp2(tl.dot(key, query.T) * scale - tl.load(log + head + m)[None, :])
        if CAUSAL: p = tl.where(m[None, :] >= n[:, None], p, 0.0)
        out = tl.load(grad + rows)
        grad_v = tl.dot(p.to(tl.bfloat16), out, grad_v)
        ds = p * (tl.dot(value, out.T) - tl.load(delta + head + m)[None, :])
        grad_k = tl.dot(ds.to(tl.bfloat16), query, grad_k)
    tl.store(dk + mine, (grad_k * root).to(tl.bfloat16))
    tl.store(dv + mine, grad_v.to(tl.bfloat16))


@triton.jit
def rows_kernel(q, k, v, grad, log, delta, dq, S, scale, root, D: tl.constexpr, BM: tl.constexpr,
                BN: tl.constexpr, CAUSAL: tl.constexpr):
    """dq of a block of rows."""
    head = tl.program_id(1) * S
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    mine = (head + m)[:, None] * D + d[None, :]
    query = tl.load(q + mine)
    out = tl.load(grad + mine)
    l = tl.load(log + head + m)
    mean = tl.load(delta + head + m)
    acc = tl.zeros((BM, D), tl.float32)
    for start in range(0, (tl.program_id(0) + 1) * BM if CAUSAL else S, BN):
        n = start + tl.arange(0, BN)
        columns = (head + n)[:, None] * D + d[None, :]
        key = tl.load(k + columns)
        p = tl.exp2(tl.dot(query, key.T) * scale - l[:, None])
        if CAUSAL: p = tl.where(m[:, None] >= n[None, :], p, 0.0)
        ds = p * (tl.dot(out, tl.load(v + columns).T) - mean[:, None])
        acc = tl.dot(ds.to(tl.bfloat16), key, acc)
    tl.store(dq + mine, (acc * root).to(tl.bfloat16))


KERNELS = {"forward": forward_kernel, "dk, dv": keys_kernel, "dq": rows_kernel}


@dataclass(frozen=True)
class Flash:
    """A kernel of Triton's: which pass, its rows and columns, warps and stages."""
    what: str
    d: int
    block: tuple[int, int]
    warps: int
    stages: int
    causal: bool = False
    descriptors: bool = False
    specialised: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time arguments."""
        made: dict[str, Any] = {"D": self.d, "BM": self.block[0], "BN": self.block[1], "CAUSAL": self.causal}
        return made | ({"TMA": self.descriptors, "SPLIT": self.specialised} if self.what == "forward" else {})

    def box(self, name: str) -> tuple[int, int]:
        """Returns the box of an operand's descriptor."""
        return self.block[int(name in ("k", "v"))], self.d

    def __str__(self) -> str:
        kind = "warp-specialised" if self.specialised else "descriptors" if self.descriptors else "pointers"
        return f"Triton, {kind}, {'x'.join(map(str, self.block))}, {self.warps} warps, {self.stages} stages"


def compile_kernel(flash: Flash, arch: str) -> Any:
    """Triton's kernel for an architecture."""
    fn, fixed = KERNELS[flash.what], flash.constants
    kinds = {"log": "*fp32", "delta": "*fp32", "S": "i32", "scale": "fp32", "root": "fp32"}

    def kind(name: str) -> str:
        if name in fixed: return "constexpr"
        if flash.descriptors and name in ("q", "k", "v", "out"):
            return f"tensordesc<bf16[{', '.join(map(str, flash.box(name)))}]>"
        return kinds.get(name, "*bf16")
    signature = {name: kind(name) for name in fn.arg_names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names)
                 if signature[name][0] == "*" or name == "S"}
    return triton.compile(ASTSource(fn, signature, fixed, divisible),
                          target=GPUTarget("cuda", ARCHS[arch], 32),
                          options={"num_warps": flash.warps, "num_stages": flash.stages})
