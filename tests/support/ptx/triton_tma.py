"""Matmuls and copies through tensor descriptors: made by the kernel or by the host, persistent and
warp-specialised loops, reductions into global memory by the TMA unit.

On sm_80 Triton turns descriptors into pointers; the same kernels must give the same numbers there.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tests.support.ptx.triton_case import Case, Descriptor, Problem, Wanted, cases, exact, values
from tests.support.ptx.triton_matmul import E4M3, operands, product
from tests.support.ptx.triton_pointwise import Rng, whole

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@triton.jit
def device_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  B_IS_NK: tl.constexpr):
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    if B_IS_NK:
        right = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    else:
        right = tl.make_tensor_descriptor(b, [K, N], [N, 1], [BK, BN])
    out = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    m = tl.program_id(0) * BM
    n = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = left.load([m, k])
        if B_IS_NK:
            acc = tl.dot(x, right.load([n, k]).T, acc)
        else:
            acc = tl.dot(x, right.load([k, n]), acc)
    out.store([m, n], acc.to(c.dtype.element_ty))


@triton.jit
def host_kernel(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, B_IS_NK: tl.constexpr):
    m = tl.program_id(0) * BM
    n = tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = a.load([m, k])
        if B_IS_NK:
            acc = tl.dot(x, b.load([n, k]).T, acc)
        else:
            acc = tl.dot(x, b.load([k, n]), acc)
    c.store([m, n], acc.to(c.dtype))


@triton.jit
def persistent_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                      CTAS: tl.constexpr, FLATTEN: tl.constexpr):
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * columns, CTAS, flatten=FLATTEN):
        m = (tile // columns) * BM
        n = (tile % columns) * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, tl.cdiv(K, BK)):
            acc = tl.dot(a.load([m, k * BK]), b.load([n, k * BK]).T, acc)
        c.store([m, n], acc.to(c.dtype))


@triton.jit
def specialised_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                       CTAS: tl.constexpr, SPLIT: tl.constexpr):
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * columns, CTAS, warp_specialize=SPLIT == "outer"):
        m = (tile // columns) * BM
        n = (tile % columns) * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, tl.cdiv(K, BK), warp_specialize=SPLIT == "inner"):
            acc = tl.dot(a.load([m, k * BK]), b.load([n, k * BK]).T, acc)
        i = m + tl.arange(0, BM)
        j = n + tl.arange(0, BN)
        tl.store(c + i[:, None] * N + j[None, :], acc.to(c.dtype.element_ty))


@triton.jit
def partitioned_kernel(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                       CTAS: tl.constexpr):
    left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    right = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    out = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    columns = tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * columns, CTAS, warp_specialize=True):
        m = (tile // columns) * BM
        n = (tile % columns) * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, tl.cdiv(K, BK)):
            acc = tl.dot(left.load([m, k * BK]), right.load([n, k * BK]).T, acc)
        # stores through pointers are wrong here in Triton 3.9: the second half adds its offset twice
        out.store([m, n], acc.to(c.dtype.element_ty))


def gemm(m: int, n: int, k: int, block: tuple[int, int, int], dtype: torch.dtype, out: torch.dtype,
         trans: str, host: bool, whole_numbers: bool = True) -> Any:
    """C = A @ B with descriptors made in the kernel, or by the host; "NT" gives B as [N, K]."""
    bm, bn, bk = block

    def make(rng: Rng) -> Problem:
        a, b, lay_a, lay_b = operands(rng, m, n, k, dtype, whole_numbers, trans)
        c = torch.zeros(m, n, dtype=out)
        transposed = trans == "NT"
        blocks = ((bm, bk), (bn, bk) if transposed else (bk, bn), (bm, bn))
        tensors = dict(zip("abc", (lay_a, lay_b, c), strict=True))
        arguments: dict[str, Any] = {**tensors, "M": m, "N": n, "K": k}
        if host:
            arguments = {"K": k}
            for name, size in zip("abc", blocks, strict=True):
                arguments[name] = Descriptor(tensors[name], size)
        return Problem(arguments, {"c": product(a, b, out, whole_numbers)}, (-(-m // bm), -(-n // bn)),
                       {"BM": bm, "BN": bn, "BK": bk, "B_IS_NK": transposed})
    return make


def looped(m: int, n: int, k: int, block: tuple[int, int, int], ctas: int, host: str,
           **constants: Any) -> Any:
    """Tiles in turn on a fixed number of CTAs; `host` names the operands whose descriptors the host makes."""
    bm, bn, bk = block

    def make(rng: Rng) -> Problem:
        a, b, lay_a, lay_b = operands(rng, m, n, k, BF16, True, "NT")
        tensors = {"a": (lay_a, (bm, bk)), "b": (lay_b, (bn, bk)), "c": (torch.zeros(m, n), (bm, bn))}
        arguments = {name: Descriptor(t, size) if name in host else t for name, (t, size) in tensors.items()}
        return Problem({**arguments, "M": m, "N": n, "K": k}, {"c": product(a, b, F32, True)}, (ctas,),
                       {"BM": bm, "BN": bn, "BK": bk, "CTAS": ctas, **constants})
    return make


@triton.jit
def reduce_kernel(x, total, most, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BM, BN])
    into = tl.make_tensor_descriptor(total, [BM, N], [N, 1], [BM, BN])
    top = tl.make_tensor_descriptor(most, [BM, N], [N, 1], [BM, BN])
    tile = source.load([tl.program_id(0) * BM, tl.program_id(1) * BN])
    into.atomic_add([0, tl.program_id(1) * BN], tile)
    top.atomic_max([0, tl.program_id(1) * BN], tile)


def reduce(rng: Rng) -> Problem:
    """Tiles of four CTAs added, and their maximum taken, by the TMA unit."""
    x = whole(rng, 64, 64, low=-500, high=500)
    return Problem({"x": x, "total": torch.zeros(16, 64, dtype=torch.int32),
                    "most": torch.full((16, 64), -1000, dtype=torch.int32), "M": 64, "N": 64},
                   {"total": exact(x.view(4, 16, 64).sum(0)), "most": exact(x.view(4, 16, 64).amax(0))},
                   (4, 2),
                   {"BM": 16, "BN": 32})


@triton.jit
def copy_kernel(x, out, A, B, C, BA: tl.constexpr, BB: tl.constexpr, BC: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [A, B, C], [B * C, C, 1], [BA, BB, BC])
    target = tl.make_tensor_descriptor(out, [A, B, C], [B * C, C, 1], [BA, BB, BC])
    at = [tl.program_id(0) * BA, tl.program_id(1) * BB, tl.program_id(2) * BC]
    tile = source.load(at)
    target.store(at, tile + tile)


def copy(dtype: torch.dtype) -> Any:
    """Three-dimensional boxes that reach beyond every end."""
    def make(rng: Rng) -> Problem:
        x = whole(rng, 3, 21, 48, low=-50, high=50, dtype=dtype)
        return Problem({"x": x, "out": torch.zeros_like(x), "A": 3, "B": 21, "C": 48}, {"out": exact(x + x)},
                       (2, 3, 2), {"BA": 2, "BB": 8, "BC": 32})
    return make


@triton.jit
def pad_kernel(x, out, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    tile = x.load([tl.program_id(0) * ROWS - 2, -8])
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], tile)


def pad(rng: Rng) -> Problem:
    """Boxes that begin at negative coordinates read zeros there."""
    x = whole(rng, 20, 40, low=1, high=50, dtype=F16)
    want = torch.zeros(32, 64, dtype=F16)
    want[2:22, 8:48] = x
    return Problem({"x": Descriptor(x, (16, 64)), "out": torch.ones(32, 64, dtype=F16)},
                   {"out": Wanted(values(want))}, (2,), {"ROWS": 16, "WIDTH": 64})


MEDIUM = (64, 64, 64)
CASES: list[Case] = [
    *cases("tma-device-bf16-nt", device_kernel, gemm(128, 64, 320, MEDIUM, BF16, BF16, "NT", host=False)),
    *cases("tma-device-bf16-nn", device_kernel, gemm(64, 128, 320, (64, 128, 64), BF16, F32, "NN",
                                                     host=False)),
    *cases("tma-device-f16-edges", device_kernel, gemm(80, 72, 168, (64, 64, 32), F16, F16, "NN",
                                                       host=False)),
    *cases("tma-device-real", device_kernel, gemm(64, 64, 320, MEDIUM, BF16, BF16, "NT", host=False,
                                                  whole_numbers=False), num_stages=4),
    *cases("tma-host-bf16-nt", host_kernel, gemm(128, 64, 320, MEDIUM, BF16, BF16, "NT", host=True)),
    *cases("tma-host-bf16-nn", host_kernel, gemm(64, 128, 160, (64, 128, 32), BF16, F32, "NN", host=True)),
    *cases("tma-host-8warps", host_kernel, gemm(128, 128, 384, (128, 128, 64), BF16, BF16, "NT", host=True),
           num_warps=8, num_stages=4),
    *cases("tma-host-e4m3", host_kernel, gemm(64, 64, 640, (64, 64, 128), E4M3, F32, "NT", host=True),
           archs=(90,)),
    *cases("tma-host-tf32", host_kernel, gemm(64, 64, 160, (64, 64, 32), F32, F32, "NT", host=True)),
    *cases("tma-host-edges-2stages", host_kernel, gemm(72, 96, 168, MEDIUM, BF16, BF16, "NN", host=True),
           num_stages=2),
    *cases("tma-host-2ctas", host_kernel, gemm(128, 128, 320, (128, 128, 64), BF16, BF16, "NT", host=True),
           archs=(90,), num_ctas=2),
    *cases("tma-persistent", persistent_kernel, looped(192, 128, 320, MEDIUM, 2, "abc", FLATTEN=False)),
    *cases("tma-persistent-flat", persistent_kernel, looped(192, 128, 320, MEDIUM, 2, "abc", FLATTEN=True)),
    *cases("specialised-outer", specialised_kernel, looped(192, 64, 320, MEDIUM, 2, "ab", SPLIT="outer"),
           archs=(90,)),
    *cases("specialised-inner", specialised_kernel, looped(128, 128, 320, MEDIUM, 3, "ab", SPLIT="inner"),
           archs=(90,)),
    *cases("specialised-4stages", specialised_kernel, looped(128, 64, 512, MEDIUM, 1, "ab", SPLIT="outer"),
           archs=(90,), num_stages=4),
    *cases("partitioned", partitioned_kernel, looped(384, 64, 320, (128, 64, 64), 2, ""), archs=(90,)),
    *cases("partitioned-2stages", partitioned_kernel, looped(256, 128, 256, (128, 128, 64), 1, ""),
           archs=(90,), num_stages=2),
    *cases("tma-reduce", reduce_kernel, reduce),
    *cases("tma-3d-f16", copy_kernel, copy(F16)),
    *cases("tma-3d-i32", copy_kernel, copy(torch.int32)),
    *cases("tma-pad", pad_kernel, pad),
]
