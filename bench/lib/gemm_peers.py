# mypy: disallow-untyped-defs=False
"""Triton's own products, which ours are held against: the tutorial's grouped product through pointers, the
same with tensor descriptors, and a persistent, warp-specialised loop over tiles with descriptors.

Protocol: `Peer` names a kernel, its tile and Triton's options; `compile_kernel(peer, arch)` gives Triton's
PTX and cubin for an architecture without a GPU, extents known to be multiples of 16 as Triton's launcher
finds out. `b_major` "K" is x @ w.T (a weight of a linear layer), "MN" x @ w. Output is in the operands'
dtype, sums in float32 or int32.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHS = {"sm_80": 80, "sm_89": 89, "sm_90a": 90}
OURS_PTX = "9.0"  # what our assembler reads; Triton 3.9 writes 9.4 and uses nothing newer than 8.8


@triton.jit
def pointer_kernel(a, b, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
                   BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
                   ACC: tl.constexpr, EVEN: tl.constexpr):
    """Pointers and masks; `EVEN` says that K is a multiple of the tile, so that loads need no mask."""
    tile = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tile // (GROUP * columns) * GROUP
    height = min(rows - first, GROUP)
    m = (first + tile % (GROUP * columns) % height) * BM + tl.arange(0, BM)
    n = tile % (GROUP * columns) // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = a + (m % M)[:, None] * stride_am + k[None, :] * stride_ak
    b_at = b + k[:, None] * stride_bk + (n % N)[None, :] * stride_bn
    acc = tl.zeros((BM, BN), dtype=ACC)
    for start in range(0, tl.cdiv(K, BK)):
        if EVEN:
            left, right = tl.load(a_at), tl.load(b_at)
        else:
            left = tl.load(a_at, mask=k[None, :] < K - start * BK, other=0)
            right = tl.load(b_at, mask=k[:, None] < K - start * BK, other=0)
        acc = tl.dot(left, right, acc, out_dtype=ACC)
        a_at += BK * stride_ak
        b_at += BK * stride_bk
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c + m[:, None] * stride_cm + n[None, :], acc.to(c.dtype.element_ty), mask=inside)


@triton.jit
def descriptor_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                      GROUP: tl.constexpr, ACC: tl.constexpr, B_IS_NK: tl.constexpr):
    """Tensor descriptors made by the host: TMA."""
    tile = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tile // (GROUP * columns) * GROUP
    height = min(rows - first, GROUP)
    m = (first + tile % (GROUP * columns) % height) * BM
    n = tile % (GROUP * columns) // height * BN
    acc = tl.zeros((BM, BN), dtype=ACC)
    for k in range(0, tl.cdiv(K, BK)):
        if B_IS_NK:
            acc = tl.dot(a.load([m, k * BK]), b.load([n, k * BK]).T, acc, out_dtype=ACC)
        else:
            acc = tl.dot(a.load([m, k * BK]), b.load([k * BK, n]), acc, out_dtype=ACC)
    c.store([m, n], acc.to(c.dtype))


@triton.jit
def persistent_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                      GROUP: tl.constexpr, ACC: tl.constexpr, B_IS_NK: tl.constexpr, CTAS: tl.constexpr,
                      SPECIALISED: tl.constexpr):
    """Tiles in turn on a fixed number of CTAs, descriptors made in the kernel; warps of their own load when
    `SPECIALISED`."""
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    if B_IS_NK:
        right = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    else:
        right = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    out = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), rows * columns, CTAS, warp_specialize=SPECIALISED):
        first = tile // (GROUP * columns) * GROUP
        height = min(rows - first, GROUP)
        m = (first + tile % (GROUP * columns) % height) * BM
        n = tile % (GROUP * columns) // height * BN
        acc = tl.zeros((BM, BN), dtype=ACC)
        for k in range(0, tl.cdiv(K, BK)):
            if B_IS_NK:
                acc = tl.dot(left.load([m, k * BK]), right.load([n, k * BK]).T, acc, out_dtype=ACC)
            else:
                acc = tl.dot(left.load([m, k * BK]), right.load([k * BK, n]), acc, out_dtype=ACC)
        out.store([m, n], acc.to(c.dtype.element_ty))


KERNELS = {"pointers": pointer_kernel, "pointers, masked": pointer_kernel, "descriptors": descriptor_kernel,
           "persistent": persistent_kernel, "warp-specialised": persistent_kernel}
TYPES = {"bf16": "bf16", "f16": "fp16", "e4m3": "fp8e4nv", "s8": "i8"}


@dataclass(frozen=True)
class Peer:
    """A kernel of Triton's with its tile, warps and stages."""
    kind: str
    block: tuple[int, int, int]
    warps: int
    stages: int
    b_major: str = "MN"
    dtype: str = "bf16"

    @property
    def descriptors(self) -> bool:
        """Whether the host makes tensor descriptors."""
        return self.kind == "descriptors"

    def __str__(self) -> str:
        return f"Triton, {self.kind}, {self.warps} warps, {self.stages} stages"


@dataclass(frozen=True)
class Compiled:
    """Kernel of Triton: PTX as it wrote it, its own cubin, and its launcher's facts."""
    ptx: str
    cubin: bytes
    name: str
    threads: int
    shared_bytes: int
    metadata: Any = field(repr=False)

    @property
    def readable(self) -> str:
        """The PTX with the version that our assembler reads."""
        return re.sub(r"\.version \d+\.\d+", f".version {OURS_PTX}", self.ptx)


def constants(peer: Peer, ctas: int = 132) -> dict[str, Any]:
    """Compile-time arguments; strides of 1 among them, as Triton's launcher makes them."""
    bm, bn, bk = peer.block
    made: dict[str, Any] = {"BM": bm, "BN": bn, "BK": bk, "GROUP": 8,
                            "ACC": tl.int32 if peer.dtype == "s8" else tl.float32}
    if peer.kind.startswith("pointers"):
        return {**made, "EVEN": "masked" not in peer.kind, "stride_ak": 1,
                "stride_bk" if peer.b_major == "K" else "stride_bn": 1}
    made["B_IS_NK"] = peer.b_major == "K"
    if not peer.descriptors: made |= {"CTAS": ctas, "SPECIALISED": peer.kind == "warp-specialised"}
    return made


def blocks(peer: Peer) -> tuple[tuple[int, int], ...]:
    """The boxes of the descriptors of A, B and the result."""
    bm, bn, bk = peer.block
    return (bm, bk), (bn, bk) if peer.b_major == "K" else (bk, bn), (bm, bn)


def source(peer: Peer) -> ASTSource:
    """The kernel with its types, for Triton's compiler."""
    fn, fixed = KERNELS[peer.kind], constants(peer)
    kind = TYPES[peer.dtype]
    out = "i32" if peer.dtype == "s8" else "bf16" if peer.dtype == "e4m3" else kind
    if peer.descriptors:
        pointers = {name: f"tensordesc<{dtype}[{', '.join(map(str, box))}]>"
                    for name, dtype, box in zip("abc", (kind, kind, out), blocks(peer), strict=True)}
    else: pointers = {"a": f"*{kind}", "b": f"*{kind}", "c": f"*{out}"}
    signature = {name: pointers.get(name, "constexpr" if name in fixed else "i32") for name in fn.arg_names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(fn.arg_names)
                 if signature[name][0] == "*" or signature[name] == "i32"}
    return ASTSource(fn, signature, fixed, divisible)


def compile_kernel(peer: Peer, arch: str) -> Compiled:
    """Triton's kernel for an architecture; its cache is the caller's matter."""
    made = triton.compile(source(peer), target=GPUTarget("cuda", ARCHS[arch], 32),
                          options={"num_warps": peer.warps, "num_stages": peer.stages})
    required = re.search(r"\.reqntid\s+(\d+)", made.asm["ptx"])
    return Compiled(made.asm["ptx"], made.asm["cubin"], made.metadata.name,
                    int(required[1]) if required else 32 * peer.warps, made.metadata.shared, made.metadata)
