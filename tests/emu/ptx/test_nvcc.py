"""CUDA C++ that nvcc compiled (nvcc/*.cu, their PTX beside them), on the emulated GPU, against numpy.

Integers are compared exactly. Bounds of real results are stated where they are compared; `ULP` is that of
float32. PTX for sm_80 runs on both machines; nvcc/hopper.ptx needs sm_90a.
"""
from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinygrad_nv.ptx.emulator import Emulator, TensorMap

ULP = 2.0**-23
N = 200  # no multiple of a warp


@cache
def text(name: str) -> str:
    """The PTX of nvcc/`name`.cu."""
    return (Path(__file__).parent / "nvcc" / f"{name}.ptx").read_text()


@pytest.fixture(params=["sm_80", "sm_90a"])
def emu(request: pytest.FixtureRequest) -> Emulator:
    """A machine of either architecture."""
    return Emulator(arch=request.param, check=True, seed=0)


def run(emu: Emulator, name: str, entry: str, grid: Sequence[int], block: Sequence[int],
        args: Sequence[Any], **options: Any) -> list[Any]:
    """Launches with arrays copied to the machine; gives each argument back, arrays as the kernel left them.
    Any finding fails."""
    passed = [emu.alloc(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    shape = {"grid": (*grid, 1, 1)[:3], "block": (*block, 1, 1)[:3]}
    report = emu.launch(text(name), **shape, args=passed, entry=entry, **options)
    assert not report.findings, "\n".join(map(str, report.findings))
    return [p.numpy() if isinstance(arg, np.ndarray) else arg for p, arg in zip(passed, args, strict=True)]


def ints(low: int, high: int, *shape: int, dtype: Any = np.int32) -> np.ndarray:
    """Integers in [low, high)."""
    return np.random.default_rng(1).integers(low, high, shape, dtype=dtype)


def reals(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Standard normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# **** basic.cu ****

def test_vector_add(emu: Emulator) -> None:
    """One rounding each."""
    x, y = reals(0, N), reals(1, N)
    *_, out, _ = run(emu, "basic", "vector_add", (2,), (128,), [x, y, np.zeros(256, np.float32), N])
    assert (out[:N] == x + y).all()
    assert (out[N:] == 0).all()


def test_loops_of_different_lengths(emu: Emulator) -> None:
    """Threads of a warp leave a loop at different times."""
    def steps(v: int) -> int:
        count = 0
        while v != 1 and count < 200: v, count = (3 * v + 1 if v & 1 else v >> 1), count + 1
        return count
    start = ints(1, 10**6, N, dtype=np.uint32)
    out = run(emu, "basic", "collatz", (4,), (64,), [start, np.zeros(N, np.int32), N])[1]
    assert out.tolist() == [steps(int(v)) for v in start]


def dispatched(op: int, v: int) -> int:
    """What the kernel `dispatch` makes of a value."""
    word = v & 0xFFFFFFFF
    quotient = abs(v) // 7 * (1 if v > 0 else -1)
    if op == 0: return v + 1
    if op == 1: return v * v
    if op == 2: return quotient
    if op == 3: return v - 7 * quotient + 100
    if op == 4: return 100
    if op == 5: return sum(j * v for j in range(v & 15) if j != 3)
    if op == 6:
        first = (word & -word).bit_length()
        return 32 - word.bit_length() + word.bit_count() * 100 + first * 10000
    if op == 7:
        both = word | (~word & 0xFFFFFFFF) << 32
        permuted = sum((both >> 8 * byte & 255) << 8 * i for i, byte in enumerate((1, 4, 5, 2)))
        return int(f"{word:032b}"[::-1], 2) ^ permuted
    return -1


def test_switch(emu: Emulator) -> None:
    """A branch of many ways, with a case that falls through and one that returns early."""
    op, x = ints(0, 10, N), ints(-40000, 40000, N)
    out = run(emu, "basic", "dispatch", (4,), (64,), [op, x, np.full(N, -1, np.int32), N])[2]
    want = [dispatched(int(o), int(v)) for o, v in zip(op, x, strict=True)]
    assert out.tolist() == np.array(want, np.int64).astype(np.int32).tolist()


def test_local_memory(emu: Emulator) -> None:
    """An array of a thread's own, indexed by data."""
    x = ints(-1000, 1000, 50, 16)
    out = run(emu, "basic", "sort_locally", (1,), (64,), [x, np.zeros_like(x), 50])[1]
    assert (out == np.sort(x, 1)).all()


def test_doubles(emu: Emulator) -> None:
    """Correctly rounded but for exp (1 ulp of float64) and sums of several roundings."""
    x, y = reals(2, N, dtype=np.float64) * 5, reals(3, N, dtype=np.float64)
    out = run(emu, "basic", "doubles", (2,), (128,), [x, y, np.zeros((7, N)), N])[2]
    assert (out[0] == x / y).all()
    assert (out[1] == np.sqrt(np.abs(x))).all()
    exactly = (x.astype(np.longdouble) * y + 1).astype(np.float64)
    assert np.abs(out[2] - exactly).max() <= 2**-52 * np.abs(exactly).max()
    assert (out[3] == np.floor(x) + np.rint(y) + np.trunc(x * 3) + np.ceil(y * 5)).all()
    narrow = x.astype(np.float32).astype(np.float64)
    assert (out[4] == narrow + np.trunc(y * 1e12) + np.trunc(np.abs(y) * 1e3)).all()
    assert (out[5] == np.fmin(x, y) * np.fmax(x, y)).all()
    np.testing.assert_allclose(out[6], np.exp(x), rtol=2**-51)


def test_floats(emu: Emulator) -> None:
    """CUDA's own functions within the errors its guide states, and directed roundings."""
    x = reals(4, N)
    out = run(emu, "basic", "floats", (2,), (128,), [x, np.zeros((7, N), np.float32), N])[1]
    out = out.astype(np.float64)
    v = x.astype(np.float64)
    size = np.abs(v) + 1
    np.testing.assert_allclose(out[0], np.exp(v), rtol=2 * ULP)
    np.testing.assert_allclose(out[1], np.log(np.abs(v) + 0.1), rtol=2 * ULP, atol=4 * ULP)
    np.testing.assert_allclose(out[2], np.sin(v * 10), atol=16 * ULP)  # the argument is rounded first
    assert (np.abs(out[3] - (v / 3 + np.exp(v) + np.sin(v))) <= 2**-20 * np.exp(size)).all()
    np.testing.assert_allclose(out[4], (np.abs(v) + 0.5) ** 2.5, rtol=8 * ULP)
    np.testing.assert_allclose(out[5], 1 / np.sqrt(np.abs(v) + 1) + np.tanh(v), atol=4 * ULP)
    want = v + 1e-3 + v * 1.0001 + v / 7 + np.sqrt(np.abs(v))
    assert (np.abs(out[6] - want) <= 8 * ULP * size).all()


def test_wide_integers(emu: Emulator) -> None:
    """128-bit products with carries, 64-bit division and shifts, narrow loads."""
    x, y = ints(-2**62, 2**62, N, dtype=np.int64), ints(1, 2**40, N, dtype=np.int64)
    small, medium = ints(-128, 128, N, dtype=np.int8), ints(0, 2**16, N, dtype=np.uint16)
    out = run(emu, "basic", "wide", (2,), (128,), [x, y, np.zeros((7, N), np.int64), small, medium, N])[2]
    mask = 2**64 - 1
    def wrap(v: int, bits: int = 64) -> int: return (v + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)
    for i in range(N):
        a, b, s, m = int(x[i]), int(y[i]), int(small[i]), int(medium[i])
        quotient = abs(a) // b * (1 if a > 0 else -1)
        word, product = a & mask, (a & mask) * b
        narrow = s * m + wrap(s * 3, 8) + (m + 60000) % 2**16
        bits = word.bit_count() if a > b else 64 - b.bit_length()
        assert out[:, i].tolist() == [
            quotient, a - quotient * b, wrap(product >> 64), wrap(wrap(product) + (a * b >> 64)),
            wrap((a << (b & 63)) ^ (a >> 7) ^ (word >> 9)), narrow, bits]


def test_constants_and_variables(emu: Emulator) -> None:
    """Initialised constant and global variables; integers, so the sum is exact."""
    weights = np.array([1, 2, 3, 4, 5, 6, 7, 8, -1, -2, -3, -4, -5, -6, -7, 9])
    x = ints(-9, 9, N).astype(np.float32)
    out = run(emu, "basic", "constants", (2,), (128,), [x, np.zeros(N, np.float32), N])[1]
    i = np.arange(N)
    assert (out == weights[i & 15] + sum(weights[j] * x[(i + j) % N] for j in range(16)) + 5).all()


def test_structures(emu: Emulator) -> None:
    """A structure of 32 bytes in memory and as a parameter."""
    pair = np.dtype([("a", "4f4"), ("b", "2i2"), ("c", "4i1"), ("d", "f8")])
    x = np.zeros(N, pair)
    x["a"], x["b"], x["c"], x["d"] = reals(5, N, 4), ints(-99, 99, N, 2), ints(-9, 9, N, 4), reals(6, N)
    add = np.zeros(1, pair)
    add["a"], add["b"], add["c"], add["d"] = (1.5, 2.5, 3.5, 4.5), (7, 0x55), (11, 12, 13, 14), 0.25
    out = run(emu, "basic", "aggregate", (2,), (128,), [x, np.zeros(N, pair), add.tobytes(), N])[1]
    i = np.arange(N)
    x["a"] = np.stack([x["a"][:, 0] + np.float32(1.5), x["a"][:, 1] * np.float32(2.5),
                       x["a"][:, 2] - np.float32(3.5), np.full(N, 4.5)], 1)
    x["b"] = np.stack([x["b"][:, 0] + 7, x["b"][:, 1] ^ 0x55], 1)
    x["c"][i, i & 3] = add["c"][0][(i + 1) & 3]
    x["d"] += 0.25
    assert out.tobytes() == x.tobytes()


# **** shared.cu ****

def test_tiled_matmul(emu: Emulator) -> None:
    """Two tiles in shared memory; 40 is no multiple of 16."""
    a, b = ints(-5, 6, 40, 40).astype(np.float32), ints(-5, 6, 40, 40).astype(np.float32).T.copy()
    out = run(emu, "shared", "matmul16", (3, 3), (16, 16), [a, b, np.zeros((40, 40), np.float32), 40])[2]
    assert (out == a @ b).all()


def test_transpose(emu: Emulator) -> None:
    """Tiles padded against bank conflicts: every request is served in one pass."""
    x = ints(-999, 999, 50, 70)
    out = run(emu, "shared", "transpose", (3, 2), (32, 8), [x, np.zeros((70, 50), np.int32), 50, 70])[1]
    assert (out == x.T).all()


def test_reduction(emu: Emulator) -> None:
    """Shuffles in warps, shared memory between them, an atomic between blocks."""
    x = ints(-999, 999, 3000)
    out = run(emu, "shared", "reduce", (3,), (256,), [x, np.zeros(1, np.int32), 3000])[1]
    assert out[0] == x.sum()


def test_scan(emu: Emulator) -> None:
    """Two buffers in dynamic shared memory."""
    x = ints(-99, 99, 2, 128)
    out = run(emu, "shared", "scan", (2,), (128,), [x, np.zeros_like(x)], dynamic_smem=2 * 128 * 4)[1]
    assert (out == x.cumsum(1)).all()


def test_histogram(emu: Emulator) -> None:
    """Shared atomics, then global ones."""
    x = ints(0, 256, 2000, dtype=np.uint8)
    out = run(emu, "shared", "histogram", (2,), (128,), [x, np.zeros(256, np.int32), 2000])[1]
    assert (out == np.bincount(x, minlength=256)).all()


def test_compaction(emu: Emulator) -> None:
    """Ballots give each even number a place; blocks come in any order."""
    x = ints(-50, 50, 4 * 32)
    _, out, count = run(emu, "shared", "compact", (4,), (32,), [x, np.zeros_like(x), np.zeros(1, np.int32)])
    even = x[x % 2 == 0]
    assert count[0] == len(even)
    assert np.sort(out[:len(even)]).tolist() == np.sort(even).tolist()


def test_votes(emu: Emulator) -> None:
    """Votes, matches, reductions and shuffles in warps; barriers that count."""
    x = ints(-9, 9, 128)
    out = run(emu, "shared", "votes", (1,), (128,), [x, np.zeros((6, 128), np.int32)])[1]
    warps = x.reshape(4, 32)
    t = np.arange(32)
    bits = (1 << t).astype(np.uint32)
    for w, v in enumerate(warps):
        mine = out.reshape(6, 4, 32)[:, w]
        assert (mine[0] == int((v > 5).any()) + 2 * int((v > -9).all())).all()
        assert (mine[1].view(np.uint32) == ((v & 3)[:, None] == (v & 3)) @ bits).all()
        assert (mine[2] == v.sum() + v.max() * 1000).all()
        assert (mine[3] == v[(t & ~7) + t * 5 % 8] + 100 * np.where(t % 16 >= 3, v[t - 3], v)).all()
        assert (mine[4] == np.where(t < 11, v + 11, 0)).all()
    assert (out[5] == (x > 0).sum() * 100 + int((x == 7).any()) * 10 + 1).all()


def test_last_block(emu: Emulator) -> None:
    """Partial sums published with a fence and a counter; the last block adds them."""
    x = ints(-99, 99, 5 * 128).astype(np.float32)
    _, _, out, done = run(emu, "shared", "last_block", (5,), (128,),
                          [x, np.zeros(5, np.float32), np.zeros(1, np.float32), np.zeros(1, np.uint32)])
    assert (out[0], done[0]) == (x.sum(), 0)


def counted(start: int, times: int, up: bool) -> int:
    """atomicInc or atomicDec with bound 40, `times` over."""
    for _ in range(times):
        if up: start = 0 if start >= 40 else start + 1
        else: start = 40 if start == 0 or start > 40 else start - 1
    return start


def test_atomics(emu: Emulator) -> None:
    """Every operation, four cells, and a maximum by compare and swap."""
    x = ints(-999, 999, 256)
    cells = np.zeros((9, 4), np.int32)
    cells[4] = -1
    real = np.array([0] * 4 + [-np.inf] * 4, np.float32)
    _, cells, wide, real, exact = run(emu, "shared", "atomics", (2,), (128,),
                                      [x, cells, np.zeros(8, np.uint64), real, np.zeros(4)])
    v = x.reshape(-1, 4)
    assert (cells == [v.sum(0), -v.sum(0), np.minimum(v.min(0), 0), np.maximum(v.max(0), 0),
                      np.bitwise_and.reduce(v), np.bitwise_or.reduce(v), np.bitwise_xor.reduce(v),
                      [counted(0, 64, True)] * 4, [counted(0, 64, False)] * 4]).all()
    assert (wide.view(np.int64)[:4] == v.sum(0)).all()
    assert (wide[4:] == v.view(np.uint32).max(0)).all()
    assert (real == np.concatenate([v.sum(0), v.max(0)])).all()
    assert (exact == v.sum(0)).all()


# **** tensor.cu ****

def test_halves(emu: Emulator) -> None:
    """Packed arithmetic rounds each operation once; multiples of 1/8 keep float64 references exact."""
    x, y = (ints(-64, 64, 2, 2 * N) / 8).astype(np.float16)
    out = run(emu, "tensor", "halves", (2,), (128,), [x, y, np.zeros((5, 2 * N), np.float16), N])[2]
    a, b = x.astype(np.float64), y.astype(np.float64)
    assert (out[0] == (a * b + 0.5).astype(np.float16)).all()
    assert (out[1] == ((a * b).astype(np.float16) + (a - b).astype(np.float16))).all()
    assert (out[2] == np.maximum(np.abs(a), -b)).all()
    assert (out[3] == np.where(np.arange(2 * N) % 2, b * 3, a * 3)).all()
    assert (out[4] == (a > b)).all()


def brain(values: np.ndarray) -> np.ndarray:
    """float64 → bfloat16 → float64; the values fit float32."""
    return torch.from_numpy(values).to(torch.bfloat16).double().numpy()


def bits16(values: np.ndarray) -> np.ndarray:
    """float64 values that bfloat16 holds, as its bits."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()


def test_brains(emu: Emulator) -> None:
    """bfloat16 in pairs."""
    a, b = ints(-64, 64, 2, 2 * N) / 8.0
    args = [bits16(a), bits16(b), np.zeros((4, 2 * N), np.int16), N]
    out = run(emu, "tensor", "brains", (2,), (128,), args)[2]
    got = torch.from_numpy(out).view(torch.bfloat16).double().numpy()
    assert (got == [brain(a * b + a), brain(a + b), brain(a * b), np.minimum(a, b)]).all()


def test_wmma(emu: Emulator) -> None:
    """Fragments loaded and stored by wmma."""
    a, b = ints(-5, 6, 2, 64, 64).astype(np.float16)
    out = run(emu, "tensor", "wmma", (4, 4), (32,), [a, b, np.zeros((64, 64), np.float32), 64])[2]
    assert (out == a.astype(np.float64) @ b.astype(np.float64).T).all()


def test_async_copy_pipeline(emu: Emulator) -> None:
    """cp.async in two stages, ldmatrix, mma; six turns of the loop."""
    a, b = ints(-5, 6, 2, 64, 192).astype(np.float64)
    args = [bits16(a), bits16(b), np.zeros((64, 64), np.float32), 192]
    out = run(emu, "tensor", "pipeline", (1,), (128,), args)[2]
    assert (out == a @ b.T).all()


# **** hopper.cu ****

@pytest.fixture
def hopper() -> Emulator:
    """An sm_90a."""
    return Emulator(arch="sm_90a", check=True, seed=0)


def test_distributed_shared_memory(hopper: Emulator) -> None:
    """CTAs of a cluster read one another's shared memory."""
    x = ints(-999, 999, 2, 4, 64)
    out = run(hopper, "hopper", "neighbour", (8,), (64,), [x, np.zeros_like(x)], cluster=(4, 1, 1))[1]
    assert (out == np.roll(x, -1, 1)[:, :, ::-1]).all()


def test_bulk_copies(hopper: Emulator) -> None:
    """Bulk copies in and out, an mbarrier for each of two stages."""
    x = ints(-999, 999, 6, 256)
    out = run(hopper, "hopper", "bulk", (1,), (256,), [x, np.zeros_like(x), 6])[1]
    assert (out == x * 2 + np.arange(6)[:, None]).all()


@pytest.mark.parametrize("seed", range(4))
def test_producer_and_consumers(seed: int) -> None:
    """TMA and wgmma through four stages; six turns."""
    emu = Emulator(arch="sm_90a", check=True, seed=seed)
    a, b = ints(-5, 6, 2, 64, 384).astype(np.float64)
    maps = [TensorMap.of_tiles(emu.alloc(bits16(v)), box=(64, 64), swizzle="128B", dtype="bf16")
            for v in (a, b)]
    out = run(emu, "hopper", "gemm", (1,), (160,), [*maps, np.zeros((64, 64), np.float32), 384],
              dynamic_smem=4 * 16384)[2]
    assert (out == a @ b.T).all()
