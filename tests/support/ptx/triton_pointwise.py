"""Kernels without reductions: element-wise arithmetic, conversions, random numbers, gathers, quantisation.

Bounds are relative to the exact value unless said otherwise; `2**-23` is one ulp of float32.
"""
from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from tests.support.ptx.triton_case import Case, Problem, Wanted, cases, exact, values

N = 1000  # no multiple of a block: the last block is masked
Rng = np.random.Generator


def real(rng: Rng, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def whole(rng: Rng, *shape: int, low: int = -8, high: int = 9, dtype: torch.dtype = torch.int32
          ) -> torch.Tensor:
    """Integers in [low, high)."""
    return torch.from_numpy(rng.integers(low, high, shape)).to(dtype)


def relative(exactly: np.ndarray, bound: float) -> Wanted:
    """Within `bound` times the magnitude."""
    return Wanted(exactly, bound * np.abs(exactly))


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    tl.store(out + at, tl.load(x + at, mask=mask) + tl.load(y + at, mask=mask), mask=mask)


def add(dtype: torch.dtype, whole_numbers: bool = True) -> Any:
    """x + y into a buffer longer than n, whose tail must stay as it was."""
    def make(rng: Rng) -> Problem:
        x, y = ((whole(rng, N, low=-99, high=99, dtype=dtype) if whole_numbers else real(rng, N, dtype=dtype))
                for _ in range(2))
        out = torch.full((1024,), 7, dtype=dtype)
        want = out.clone()
        want[:N] = x + y
        return Problem({"x": x, "y": y, "out": out, "n": N}, {"out": exact(want)}, (4,), {"BLOCK": 256})
    return make


@triton.jit
def fused_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    a = tl.load(x + at, mask=mask, other=0.0)
    b = tl.load(y + at, mask=mask, other=1.0)
    got = tl.exp(a) / tl.sqrt(tl.abs(b) + 1.0) + tl.log(a * a + 2.0) * tl.rsqrt(b * b + 1.0)
    tl.store(out + at, got, mask=mask)


def fused(rng: Rng) -> Problem:
    """exp(x) / sqrt(|y| + 1) + log(x² + 2) · rsqrt(y² + 1): terms are positive, so errors stay relative."""
    x, y = real(rng, N), real(rng, N)
    a, b = values(x), values(y)
    want = np.exp(a) / np.sqrt(np.abs(b) + 1) + np.log(a * a + 2) / np.sqrt(b * b + 1)
    return Problem({"x": x, "y": y, "out": torch.zeros(N), "n": N}, {"out": relative(want, 16 * 2**-23)},
                   (4,), {"BLOCK": 256})


@triton.jit
def libdevice_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    tl.store(out + at, tl.sin(a))
    tl.store(out + n + at, tl.cos(a))
    tl.store(out + 2 * n + at, tl.erf(a))
    tl.store(out + 3 * n + at, libdevice.tanh(a))
    tl.store(out + 4 * n + at, libdevice.pow(tl.abs(a) + 0.5, 1.5))
    tl.store(out + 5 * n + at, libdevice.log1p(tl.abs(a)))
    tl.store(out + 6 * n + at, tl.floor(a) + tl.ceil(a))


def library(rng: Rng) -> Problem:
    """sin and cos of arguments up to 1e6 (beyond the fast range reduction), erf, tanh, pow, log1p."""
    x = real(rng, 256) * 4
    x[:16] = torch.tensor([1e6, 2e5, -3e5, 123456.0] * 4)
    from math import erf
    a = values(x)
    want = np.stack([np.sin(a), np.cos(a), np.vectorize(erf)(a), np.tanh(a), (np.abs(a) + 0.5) ** 1.5,
                     np.log1p(np.abs(a)), np.floor(a) + np.ceil(a)])
    bound = 8 * 2**-23 * np.maximum(np.abs(want), [[2**-2], [2**-2], [0], [0], [0], [0], [0]])
    return Problem({"x": x, "out": torch.zeros(7, 256), "n": 256}, {"out": Wanted(want, bound)}, (1,),
                   {"BLOCK": 256})


@triton.jit
def integer_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    b = tl.load(y + at)
    tl.store(out + at, a // b)
    tl.store(out + n + at, a % b)
    tl.store(out + 2 * n + at, (a << (b & 7)) ^ (a >> 3))
    high = tl.umulhi(a.to(tl.uint32, bitcast=True), 0x9E3779B9)
    tl.store(out + 3 * n + at, high.to(tl.int32, bitcast=True))
    tl.store(out + 4 * n + at, tl.minimum(tl.maximum(a, -b), b))
    tl.store(out + 5 * n + at, (a.to(tl.int64) * b.to(tl.int64) // 1000).to(tl.int32))
    tl.store(out + 6 * n + at, libdevice.popc(a) * 100 + libdevice.clz(b))
    tl.store(out + 7 * n + at, tl.where(a > b, a - b, a.to(tl.int16).to(tl.int32)))


def integers(rng: Rng) -> Problem:
    """Division, remainder, shifts, high products, popcount, narrowing."""
    x, y = whole(rng, 256, low=-2**31, high=2**31), whole(rng, 256, low=1, high=9999)
    a, b = values(x), values(y)
    unsigned = a & 0xFFFFFFFF
    def wrap(v: np.ndarray) -> np.ndarray: return v.astype(np.int64).astype(np.int32).astype(np.int64)
    quotient = np.sign(a) * (np.abs(a) // b)
    product = a * b
    high = (unsigned.astype(np.uint64) * np.uint64(0x9E3779B9)) >> np.uint64(32)
    ones = np.array([bin(v).count("1") * 100 for v in unsigned]) + [32 - int(v).bit_length() for v in b]
    want = np.stack([quotient, a - quotient * b, wrap(a << (b & 7)) ^ (a >> 3), wrap(high),
                     np.minimum(np.maximum(a, -b), b), wrap(np.sign(product) * (np.abs(product) // 1000)),
                     ones, np.where(a > b, wrap(a - b), a.astype(np.int16))])
    return Problem({"x": x, "y": y, "out": torch.zeros(8, 256, dtype=torch.int32), "n": 256},
                   {"out": Wanted(want)}, (1,), {"BLOCK": 256})


@triton.jit
def cast_kernel(x, half, brain, byte, long, double, back, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    a = tl.load(x + at)
    tl.store(half + at, a.to(tl.float16))
    tl.store(brain + at, a.to(tl.bfloat16))
    tl.store(byte + at, a.to(tl.int8))
    tl.store(long + at, (a * 1e10).to(tl.int64))
    tl.store(double + at, a.to(tl.float64) / 3)
    tl.store(back + at, a.to(tl.float16).to(tl.int16).to(tl.bfloat16).to(tl.float32))


def casts(rng: Rng) -> Problem:
    """float32 to every other type; conversions round to nearest even, to integers towards zero."""
    x = real(rng, 256) * 40
    x = x.clamp(-127, 127)
    makes = {"half": x.half(), "brain": x.bfloat16(), "byte": x.to(torch.int8),
             "long": (x * torch.tensor(1e10)).to(torch.int64), "double": x.double() / 3,
             "back": x.half().to(torch.int16).bfloat16().float()}
    return Problem({"x": x, **{k: torch.zeros_like(v) for k, v in makes.items()}},
                   {k: exact(v) for k, v in makes.items()}, (1,), {"BLOCK": 256})


@triton.jit
def philox_kernel(out, uniform, normal, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.randint(seed, at))
    tl.store(uniform + at, tl.rand(seed, at))
    tl.store(normal + at, tl.randn(seed, at))


def philox(counter: np.ndarray, seed: int) -> list[np.ndarray]:
    """Philox 4x32-10: four words for each counter (c, 0, 0, 0) under the key (seed, 0)."""
    c = [counter.astype(np.uint64), *(np.zeros_like(counter, np.uint64) for _ in range(3))]
    k, low = [np.uint64(seed), np.uint64(0)], np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ k[0], b & low, (a >> np.uint64(32)) ^ c[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def to_uniform(word: np.ndarray) -> np.ndarray:
    """Triton's map of a 32-bit word to [0, 1)."""
    signed = word.astype(np.uint32).view(np.int32).astype(np.int64)
    return np.where(signed < 0, -signed - 1, signed).astype(np.float32).astype(np.float64) * 4.6566127342e-10


def random_numbers(rng: Rng) -> Problem:
    """tl.randint bit for bit; tl.rand to a rounding; tl.randn by Box and Muller."""
    word = philox(np.arange(512), 1234)
    u1 = np.maximum(to_uniform(word[0]), 1e-7)
    normal = np.sqrt(-2 * np.log(u1)) * np.cos(2 * np.pi * to_uniform(word[1]))
    return Problem({"out": torch.zeros(512, dtype=torch.int32), "uniform": torch.zeros(512),
                    "normal": torch.zeros(512), "seed": 1234},
                   {"out": Wanted(word[0].astype(np.uint32).view(np.int32).astype(np.int64)),
                    "uniform": Wanted(to_uniform(word[0]), 2**-23), "normal": Wanted(normal, 1e-5)},
                   (2,), {"BLOCK": 256})


@triton.jit
def dropout_kernel(x, out, n, p, seed, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.rand(seed, at) > p
    got = tl.load(x + at, mask=at < n, other=0.0)
    tl.store(out + at, tl.where(kept, got * 2.0, 0.0), mask=at < n)


def dropout(rng: Rng) -> Problem:
    """Half of x, doubled, by the same Philox words."""
    x = whole(rng, N, dtype=torch.float32)
    kept = to_uniform(philox(np.arange(N), 77)[0]) > 0.5
    return Problem({"x": x, "out": torch.ones(N), "n": N, "p": 0.5, "seed": 77},
                   {"out": Wanted(np.where(kept, values(x) * 2, 0))}, (4,), {"BLOCK": 256})


@triton.jit
def gather_kernel(table, index, out, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    source = tl.load(index + row)
    got = tl.load(table + source[:, None] * WIDTH + column[None, :], mask=(source >= 0)[:, None], other=-1.0)
    turned = tl.gather(got, ((column[None, :] + row[:, None]) % WIDTH).to(tl.int32), axis=1)
    tl.store(out + row[:, None] * WIDTH + column[None, :], turned)


def gather(rng: Rng) -> Problem:
    """Rows of a table by index (a negative one gives -1), then each row turned by its number."""
    table, index = whole(rng, 50, 32, dtype=torch.bfloat16), whole(rng, 64, low=-3, high=50)
    rows = table[index.clamp(min=0)]
    rows[index < 0] = -1
    want = torch.stack([row.roll(-(i % 32)) for i, row in enumerate(rows)])
    return Problem({"table": table, "index": index, "out": torch.zeros(64, 32, dtype=torch.bfloat16)},
                   {"out": exact(want)}, (4,), {"WIDTH": 32, "ROWS": 16})


@triton.jit
def quantise_kernel(x, out, scale, n, top: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    a = tl.load(x + row * n + at, mask=at < n, other=0.0).to(tl.float32)
    s = tl.max(tl.abs(a)) / top
    tl.store(scale + row, s)
    tl.store(out + row * n + at, (a / s).to(out.dtype.element_ty), mask=at < n)


def quantise(dtype: torch.dtype, top: float) -> Any:
    """Rows divided by their largest magnitude over `top`; the largest is a power of two times `top`, so the
    quotients are exact and the rounding is the conversion's alone."""
    def make(rng: Rng) -> Problem:
        x = real(rng, 8, 200).clamp(-0.9, 0.9) * top
        x[:, 17] = top
        scale = torch.exp2(whole(rng, 8, low=-3, high=4, dtype=torch.float32))
        want = x.to(torch.int8) if dtype is torch.int8 else x.to(dtype)
        return Problem({"x": x * scale[:, None], "out": torch.zeros(8, 200, dtype=dtype),
                        "scale": torch.zeros(8), "n": 200}, {"scale": exact(scale), "out": exact(want)}, (8,),
                       {"top": top, "BLOCK": 256})
    return make


@triton.jit
def unpack_kernel(packed, out, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(packed + at)
    low = ((byte << 4) >> 4).to(tl.bfloat16)
    high = (byte >> 4).to(tl.bfloat16)
    both = tl.interleave(low, high)
    tl.store(out + tl.program_id(0) * 2 * BLOCK + tl.arange(0, 2 * BLOCK), both)


def unpack(rng: Rng) -> Problem:
    """Signed int4 pairs to bfloat16, low nibble first."""
    packed = whole(rng, 512, low=-128, high=128, dtype=torch.int8)
    low = ((packed.to(torch.int32) & 15) ^ 8) - 8
    want = torch.stack([low, packed.to(torch.int32) >> 4], 1).reshape(-1)
    return Problem({"packed": packed, "out": torch.zeros(1024, dtype=torch.bfloat16)}, {"out": exact(want)},
                   (2,), {"BLOCK": 256})


@triton.jit
def transpose_kernel(x, out, rows, columns, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (i < rows)[:, None] & (j < columns)[None, :]
    tile = tl.load(x + i[:, None] * columns + j[None, :], mask=mask, other=0)
    tl.store(out + j[:, None] * rows + i[None, :], tile.T, mask=mask.T)


def transpose(dtype: torch.dtype) -> Any:
    """A matrix through shared memory, 45 x 70 in tiles of 32."""
    def make(rng: Rng) -> Problem:
        x = whole(rng, 45, 70, low=-100, high=100, dtype=dtype)
        return Problem({"x": x, "out": torch.zeros(70, 45, dtype=dtype), "rows": 45, "columns": 70},
                       {"out": exact(x.T)}, (2, 3), {"BLOCK": 32})
    return make


@triton.jit
def adamw_kernel(p, g, m, v, rate, step, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    grad = tl.load(g + at, mask=mask, other=0.0)
    mean = 0.9 * tl.load(m + at, mask=mask, other=0.0) + 0.1 * grad
    square = 0.999 * tl.load(v + at, mask=mask, other=0.0) + 0.001 * grad * grad
    first = mean / (1.0 - tl.exp2(step * tl.log2(0.9)))
    second = square / (1.0 - tl.exp2(step * tl.log2(0.999)))
    old = tl.load(p + at, mask=mask, other=0.0)
    tl.store(p + at, old * (1.0 - rate * 0.01) - rate * first / (tl.sqrt(second) + 1e-8), mask=mask)
    tl.store(m + at, mean, mask=mask)
    tl.store(v + at, square, mask=mask)


def adamw(rng: Rng) -> Problem:
    """One step of AdamW in place."""
    p, g, m = real(rng, N), real(rng, N), real(rng, N) * 0.1
    v = real(rng, N) ** 2
    rate, step = 2.0**-7, 3.0
    mean = 0.9 * values(m) + 0.1 * values(g)
    square = 0.999 * values(v) + 0.001 * values(g) ** 2
    moved = values(p) * (1 - rate * 0.01) - rate * (mean / (1 - 0.9**step)) / (
        np.sqrt(square / (1 - 0.999**step)) + 1e-8)
    return Problem({"p": p, "g": g, "m": m, "v": v, "rate": rate, "step": step, "n": N},
                   {"p": Wanted(moved, 1e-6 + 1e-5 * rate * np.abs(mean) / np.sqrt(square) * 100),
                    "m": Wanted(mean, 1e-6), "v": Wanted(square, 1e-6 * (1 + square))}, (4,), {"BLOCK": 256})


@triton.jit
def dependent_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gdc_wait()
    a = tl.load(x + at, mask=at < n)
    gdc_launch_dependents()
    mixed = tl.inline_asm_elementwise("{ .reg .b32 t; shl.b32 t, $1, 3; lop3.b32 $0, t, $2, $1, 0x96; }",
                                      "=r,r,r", [a, a + 1], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(out + at, mixed, mask=at < n)


def dependent(rng: Rng) -> Problem:
    """A kernel that waits for the one before it (there is none), with assembly of its own."""
    x = whole(rng, N, low=0, high=2**20)
    return Problem({"x": x, "out": torch.zeros(N, dtype=torch.int32), "n": N},
                   {"out": exact((x << 3) ^ (x + 1) ^ x)}, (4,), {"BLOCK": 256})


CASES: list[Case] = [
    *cases("add-f32", add_kernel, add(torch.float32)),
    *cases("add-bf16", add_kernel, add(torch.bfloat16, whole_numbers=False)),
    *cases("add-f16-8warps", add_kernel, add(torch.float16), num_warps=8),
    *cases("add-i8-1warp", add_kernel, add(torch.int8), num_warps=1),
    *cases("add-f32-2ctas", add_kernel, add(torch.float32), archs=(90,), num_ctas=2),
    *cases("add-f64", add_kernel, add(torch.float64, whole_numbers=False)),
    *cases("fused", fused_kernel, fused),
    *cases("libdevice", libdevice_kernel, library),
    *cases("integers", integer_kernel, integers),
    *cases("casts", cast_kernel, casts),
    *cases("random", philox_kernel, random_numbers),
    *cases("dropout", dropout_kernel, dropout),
    *cases("gather", gather_kernel, gather),
    *cases("quantise-e4m3", quantise_kernel, quantise(torch.float8_e4m3fn, 448.0), archs=(90,)),
    *cases("quantise-e5m2", quantise_kernel, quantise(torch.float8_e5m2, 57344.0)),
    *cases("quantise-int8", quantise_kernel, quantise(torch.int8, 127.0)),
    *cases("unpack-int4", unpack_kernel, unpack),
    *cases("transpose-f16", transpose_kernel, transpose(torch.float16)),
    *cases("transpose-f32", transpose_kernel, transpose(torch.float32)),
    *cases("dependent-launch", dependent_kernel, dependent, archs=(90,), launch_pdl=True),
    *cases("adamw", adamw_kernel, adamw),
]
