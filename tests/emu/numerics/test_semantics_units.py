"""The model of tensor cores against the emulator, bit for bit: edges by themselves, and drawn operands.

The quick run has some thousand sums of each instruction; the slow one a million.
"""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.numerics.semantics_case import drawn, edges, mma
from tests.support.ptx.tensor_case import Mma
from tests.support.ptx.wgmma_case import Operands, Wgmma
from tests.support.ptx.wgmma_case import launch as launch_wgmma
from tinygrad_nv.numerics.semantics import FORMATS, Unit, dot, tensor_core
from tinygrad_nv.numerics.semantics.units import Bytes

EIGHTS = [(a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
CASES = [
    *[Mma(16, 8, k, d, "f16", "f16", arch=arch) for arch in ("sm_80", "sm_90a") for k in (8, 16)
      for d in ("f32", "f16")],
    *[Mma(16, 8, k, "f32", "bf16", "bf16", arch=arch) for arch in ("sm_80", "sm_90a") for k in (8, 16)],
    *[Mma(16, 8, k, "f32", "tf32", "tf32", arch=arch) for arch in ("sm_80", "sm_90a") for k in (4, 8)],
    *[Mma(16, 8, 32, d, a, b, arch=arch) for arch in ("sm_89", "sm_90a") for d in ("f32", "f16")
      for a, b in EIGHTS],
]
TYPES = [("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"),
         *((d, a, b) for d in ("f32", "f16") for a, b in EIGHTS)]
SMALL, MILLION, AT_ONCE = 40, 2 ** 20, 512


def unit_of(case: Mma) -> Unit: return tensor_core(case.arch, "mma", case.a, case.d, case.b, case.k)


def name_of(case: Mma) -> str: return f"{case.arch}-{case.k}-{case.d}-{case.a}-{case.b}"


def check(case: Mma, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    """Every sum of every matrix."""
    for i in range(0, len(a), AT_ONCE):
        some = slice(i, i + AT_ONCE)
        got, want = mma(case, a[some], b[some], c[some]), dot(unit_of(case), a[some], b[some], c[some])
        wrong = np.argwhere(got != want)
        assert not len(wrong), (case.name, *wrong[0], hex(got[*wrong[0]]), hex(want[*wrong[0]]))


def check_drawn(case: Mma, matrices: int, seed: int) -> None:
    """A quarter each of which 50, 90, 98 and 100 % of the operands are numbers near 1."""
    rng = np.random.default_rng(seed)
    for near in (0.5, 0.9, 0.98, 1.0):
        count = -(-matrices // 4)
        check(case, drawn(FORMATS[case.a], (count, case.m, case.k), rng, near),
              drawn(FORMATS[case.b], (count, case.k, case.n), rng, near),
              drawn(FORMATS[case.d], (count, case.m, case.n), rng, near))


@pytest.mark.sampled(9)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_mma(case: Mma) -> None: check_drawn(case, SMALL, 1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_million_sums_of_mma(case: Mma) -> None: check_drawn(case, MILLION // (case.m * case.n), 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.a[0] == "e"], ids=name_of)
def test_edges_of_mma_of_fp8(case: Mma) -> None: test_edges_of_mma(case)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", [case for case in CASES if case.a[0] != "e"], ids=name_of)
def test_edges_of_mma(case: Mma) -> None:
    """Every pair of edges as the only product, beside every edge as C: 8-bit formats have 256 of each."""
    a, b, c = (edges(FORMATS[kind]) for kind in (case.a, case.b, case.d))
    rows, columns = -(-len(a) // case.m), -(-len(b) // case.n)
    left, right = (np.zeros((count, extent, case.k), some.dtype)
                   for count, extent, some in ((rows, case.m, a), (columns, case.n, b)))
    left[:, :, 1], right[:, :, 1] = np.resize(a, (rows, case.m)), np.resize(b, (columns, case.n))
    every_a, every_b = left.reshape(-1, case.k), right.reshape(-1, case.k).T
    lefts, rights = left.repeat(columns, 0), np.tile(right.transpose(0, 2, 1), (rows, 1, 1))
    for code in c:
        sums = np.full((rows * columns, case.m, case.n), code, c.dtype)
        got = mma(case, lefts, rights, sums).reshape(rows, columns, case.m, case.n).transpose(0, 2, 1, 3)
        want = dot(unit_of(case), every_a, every_b, np.full((len(every_a), every_b.shape[1]), code, c.dtype))
        wrong = np.argwhere(got.reshape(want.shape) != want)
        assert not len(wrong), (case.name, [hex(each) for each in (
            every_a[wrong[0][0], 1], every_b[1, wrong[0][1]], code, got.reshape(want.shape)[*wrong[0]],
            want[*wrong[0]])])


def test_a_sum_that_overflowed_meets_the_other_infinity() -> None:
    """The first step overflows, the second has a product of -inf: NaN, as of two instructions."""
    case = Mma(16, 8, 32, "f16", "e5m2", "e5m2", arch="sm_90a")
    a, b = np.zeros((1, 16, 32), np.uint8), np.zeros((1, 32, 8), np.uint8)
    a[0, 0, 0], b[0, 0, 0] = 0x7b, 0x7b       # 57344², beyond f16
    a[0, 0, 2], b[0, 2, 0] = 0xfc, 0x3c       # -inf · 1, in the second instruction
    check(case, a, b, np.zeros((1, 16, 8), np.uint16))
    assert mma(case, a, b, np.zeros((1, 16, 8), np.uint16))[0, 0, 0] == 0x7fff


# **** wgmma ****

def check_wgmma(types: tuple[str, str, str], n: int, seed: int, launches: int) -> None:
    """Launches of m64nN of drawn operands."""
    rng, (d, a, b) = np.random.default_rng(seed), types
    k = 256 // FORMATS[a].bits
    case, unit = Wgmma(n, k, d, a, b), tensor_core("sm_90a", "wgmma", a, d, b, k)
    for i in range(launches):
        near = (0.5, 0.9, 0.98, 1.0)[i % 4]
        codes = [drawn(FORMATS[kind], shape, rng, near)
                 for kind, shape in ((a, (64, k)), (b, (k, n)), (d, (64, n)))]
        got = launch_wgmma(case, Operands(*(each.astype(np.uint32) for each in codes)), check=False)[0]
        assert np.array_equal(got, dot(unit, *codes)), (types, i)


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_wgmma(types: tuple[str, str, str]) -> None: check_wgmma(types, 16, 3, 4)


@pytest.mark.slow
@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_a_million_sums_of_wgmma(types: tuple[str, str, str]) -> None: check_wgmma(types, 256, 4, 64)


# **** integers ****

SUMS = (-2 ** 31, 2 ** 31 - 1, 0, 2 ** 31 - 200000, -2 ** 31 + 200000, 7)
BYTE_TYPES = [("s8", "s8"), ("u8", "s8"), ("s8", "u8"), ("u8", "u8")]


def check_integer_wgmma(a: str, b: str, saturate: bool, n: int, launches: int) -> None:
    """Launches of m64nNk32 of bytes: of all values, and of the extremes."""
    rng, case = np.random.default_rng(6), Wgmma(n, 32, "s32", a, b, satfinite=saturate)
    for i in range(launches):
        codes = [rng.integers(0, 256, shape) if i % 2 else rng.choice([0, 127, 128, 255], shape)
                 for shape in ((64, 32), (32, n))]
        c = rng.choice(SUMS, (64, n)).astype(np.int32)
        got = launch_wgmma(case, Operands(*(each.astype(np.uint32) for each in codes), c.view(np.uint32)),
                           check=False)[0]
        values = [each.astype(np.uint8).view(np.int8 if kind == "s8" else np.uint8)
                  for each, kind in zip(codes, (a, b), strict=True)]
        assert np.array_equal(got.view(np.int32), dot(Bytes(saturate, 32), *values, c)), (a, b, i)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("a", "b"), BYTE_TYPES)
def test_wgmma_of_integers(a: str, b: str, saturate: bool) -> None:
    check_integer_wgmma(a, b, saturate, 16, 4)


@pytest.mark.slow
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("a", "b"), BYTE_TYPES)
def test_a_million_sums_of_wgmma_of_integers(a: str, b: str, saturate: bool) -> None:
    check_integer_wgmma(a, b, saturate, 256, 64)


def check_integers(a: str, b: str, saturate: bool, count: int) -> None:
    """Sums of m16n8k32 of bytes of all values."""
    rng, case = np.random.default_rng(5), Mma(16, 8, 32, "s32", a, b, ".satfinite" * saturate)
    codes = [rng.integers(0, 256, shape).astype(np.uint8) for shape in ((count, 16, 32), (count, 32, 8))]
    c = rng.choice(SUMS, (count, 16, 8))
    got = mma(case, *codes, c.astype(np.int32).view(np.uint32)).view(np.int32)
    values = [each.view(np.int8) if kind == "s8" else each for each, kind in zip(codes, (a, b), strict=True)]
    assert np.array_equal(got, dot(Bytes(saturate, 32), *values, c))


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("a", "b"), BYTE_TYPES)
def test_mma_of_integers(a: str, b: str, saturate: bool) -> None: check_integers(a, b, saturate, SMALL)


@pytest.mark.slow
@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize(("a", "b"), BYTE_TYPES)
def test_a_million_sums_of_mma_of_integers(a: str, b: str, saturate: bool) -> None:
    check_integers(a, b, saturate, MILLION // (16 * 8))


def test_the_comparison_can_fail() -> None:
    """A model with a bit less is found out."""
    case = CASES[-1]
    rng = np.random.default_rng(6)
    case = replace(case, a="bf16", b="bf16", d="f32", k=16)
    a, b = (drawn(FORMATS["bf16"], (1, *shape), rng, 1.0) for shape in ((16, 16), (16, 8)))
    c = drawn(FORMATS["f32"], (1, 16, 8), rng, 1.0)
    right = tensor_core("sm_90a", "mma", "bf16")
    got = mma(case, a, b, c)[0]
    assert np.array_equal(got, dot(right, a[0], b[0], c[0]))
    assert not np.array_equal(got, dot(replace(right, bits=24), a[0], b[0], c[0]))
