"""How tensor cores add: alignment that truncates, rounding, NaN and infinity, and the switch that turns it
off.

Random products are held bit for bit against `truncated`, the same arithmetic in Python integers; cases made
by
hand show each rule by itself.
"""
from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.support.ptx.tensor_case import BITS, Mma, decode, encode, numbers, randoms, truncated, words
from tests.support.ptx.wgmma_case import Operands, Wgmma, launch

HOPPER = Mma(16, 8, 16, "f32", "bf16", "bf16")
AMPERE = replace(HOPPER, arch="sm_80")
FLOAT16 = Mma(16, 8, 16, "f16", "f16", "f16")
EXACT = replace(HOPPER, exact=True)


def one(case: Mma, pairs: list[tuple[float, float]], c: float) -> float:
    """Element (0, 0) of the product of a row and a column given as pairs, plus c; bits that are no number
    come back
    as NaN."""
    a, b = np.zeros((case.m, case.k)), np.zeros((case.k, case.n))
    for k, (x, y) in enumerate(pairs): a[0, k], b[k, 0] = x, y
    with np.errstate(invalid="ignore", over="ignore"):
        start = words(np.full((case.m, case.n), c), case.d)
        got = case.run(encode(a, case.a), encode(b, case.b), start)
    if case.d == "f32" and math.isnan(numbers(got, "f32")[0, 0]): assert got[0, 0] == 0x7fffffff
    if case.d == "f16" and math.isnan(numbers(got, "f16")[0, 0]): assert got[0, 0] == 0x7fff
    return float(numbers(got, case.d)[0, 0])


def one_async(kinds: tuple[str, str, str], pairs: list[tuple[float, float]], c: float,
              exact: bool = False) -> float:
    """The same by wgmma."""
    case = Wgmma(8, 256 // BITS[kinds[1]], *kinds)
    a, b = np.zeros((64, case.k)), np.zeros((case.k, 8))
    for k, (x, y) in enumerate(pairs): a[0, k], b[k, 0] = x, y
    x = Operands(encode(a, case.a), encode(b, case.b), words(np.full((64, 8), c), case.d))
    return float(numbers(launch(case, x, exact=exact)[0], case.d)[0, 0])


TINY = 2.0 ** -12


@pytest.mark.parametrize(("case", "term", "times", "want"), [
    (HOPPER, 2.0 ** -13, 4, 1 + 2.0 ** -23),   # 4 * 2^-25 is seen
    (AMPERE, 2.0 ** -13, 4, 1.0),              # below 2^-24 nothing is
    (HOPPER, 2.0 ** -14, 8, 1.0),              # 8 * 2^-26 is not
    (EXACT, 2.0 ** -14, 8, 1 + 2.0 ** -23),
    (AMPERE, 2.0 ** -12, 2, 1 + 2.0 ** -23),
])
def test_small_terms_are_lost_one_by_one(case: Mma, term: float, times: int, want: float) -> None:
    assert one(case, [(TINY, term)] * times, 1.0) == want


def test_sums_are_rounded_toward_zero() -> None:
    assert one(HOPPER, [(-TINY, 2.0 ** -13)], 1.0) == 1 - 2.0 ** -24
    assert one(HOPPER, [(TINY, -(2.0 ** -14))], 1.0) == 1.0      # the term is lost, not the sum rounded
    assert one(HOPPER, [(TINY, 2.0 ** -12)], 1 + 2.0 ** -23) == 1 + 2.0 ** -23
    assert one(EXACT, [(-TINY, 2.0 ** -13)], 1.0) == 1.0


def test_exponents_of_products_are_not_renormalised() -> None:
    """1.5 * 1.5 = 2.25 counts as exponent 0, so that 2^-25 beside it is kept."""
    pairs = [(1.5, 1.5), (1.5, -1.5), (TINY, 2.0 ** -13)]
    assert one(HOPPER, pairs, 0.0) == 2.0 ** -25
    assert one(HOPPER, pairs, 2.0) == 2.0                         # an accumulator of exponent 1 takes it


def test_ampere_adds_halves() -> None:
    pairs = [(0.0, 0.0)] * 16
    pairs[0], pairs[1], pairs[8] = (4096.0, 4096.0), (0.5, 1.0), (4096.0, -4096.0)
    assert one(HOPPER, pairs, 0.0) == 0.5
    assert one(AMPERE, pairs, 0.0) == 0.0
    pairs[8], pairs[2] = pairs[2], pairs[8]
    assert one(AMPERE, pairs, 0.0) == 0.0                         # 0.5 is below 2^-24 of 2^24
    pairs[1] = (1.0, 1.0)
    assert one(AMPERE, pairs, 0.0) == 1.0


def test_halves_are_rounded_to_nearest_even() -> None:
    assert one(FLOAT16, [(2.0 ** -5, 2.0 ** -6)], 1.0) == 1.0
    assert one(FLOAT16, [(2.0 ** -5, 2.0 ** -6), (TINY, TINY)], 1.0) == 1 + 2.0 ** -10
    assert one(FLOAT16, [(2.0 ** -5, 2.0 ** -6)], 1 + 2.0 ** -10) == 1 + 2.0 ** -9
    assert one(FLOAT16, [(256.0, 256.0)], 0.0) == math.inf


def test_hopper_wgmma_of_8_bit_floats_keeps_13_bits() -> None:
    kinds = ("f32", "e4m3", "e4m3")
    assert one_async(kinds, [(2.0 ** -6, 2.0 ** -7)], 1.0) == 1 + 2.0 ** -13
    assert one_async(kinds, [(2.0 ** -7, 2.0 ** -7)] * 4, 1.0) == 1.0
    assert one_async(kinds, [], 1 + 2.0 ** -14) == 1.0
    assert one_async(kinds, [(2.0 ** -7, 2.0 ** -7)] * 4, 1.0, exact=True) == 1 + 2.0 ** -12
    assert one(Mma(16, 8, 32, "f32", "e4m3", "e4m3"), [(2.0 ** -7, 2.0 ** -7)] * 4, 1.0) == 1 + 2.0 ** -12


def test_tf32_ignores_low_bits() -> None:
    case = Mma(16, 8, 8, "f32", "tf32", "tf32")
    a = np.full((16, 8), 1 + 2.0 ** -10 + 2.0 ** -11, np.float32).view(np.uint32)
    got = numbers(case.run(a, encode(np.eye(8), "tf32"), words(np.zeros((16, 8)), "f32")), "f32")
    np.testing.assert_array_equal(got, 1 + 2.0 ** -10)


INF, NAN = math.inf, math.nan


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", [HOPPER, AMPERE, EXACT, FLOAT16, Mma(16, 8, 16, "f32", "e5m2", "e5m2")],
                         ids=lambda case: f"{case.arch}-{case.name[18:]}{'-exact' * case.exact}")
@pytest.mark.parametrize(("pairs", "c", "want"), [
    ([(INF, 1.0)], 1.0, INF), ([(INF, -2.0)], 1.0, -INF), ([(INF, 0.0)], 1.0, NAN),
    ([(INF, 1.0), (-INF, 1.0)], 0.0, NAN),
    ([(NAN, 0.0)], 0.0, NAN), ([(1.0, 1.0)], NAN, NAN), ([(1.0, 1.0)], INF, INF), ([(INF, 1.0)], -INF, NAN),
    ([(INF, INF)], INF, INF), ([(1.0, 1.0)], -INF, -INF)])
def test_nan_and_infinity(case: Mma, pairs: list[tuple[float, float]], c: float, want: float) -> None:
    got = one(case, pairs, c)
    assert got == want or (math.isnan(got) and math.isnan(want))


def test_one_nan_leaves_the_others_alone() -> None:
    rng = np.random.default_rng(1)
    a, b = randoms(rng, "bf16", (16, 16)), randoms(rng, "bf16", (16, 8))
    c = words(rng.standard_normal((16, 8)), "f32")
    clean = HOPPER.run(a, b, c)
    a[3, 5], b[7, 2] = 0x7fc0, 0x7f80
    got = HOPPER.run(a, b, c)
    touched = np.zeros((16, 8), bool)
    touched[3], touched[:, 2] = True, True
    np.testing.assert_array_equal(got[~touched], clean[~touched])
    assert not np.isfinite(numbers(got, "f32")[touched]).any()


def test_overflow() -> None:
    assert one(HOPPER, [(2.0 ** 64, 2.0 ** 63)] * 2, 0.0) == math.inf
    assert one(HOPPER, [(2.0 ** 64, 2.0 ** 63)] * 2, -(2.0 ** 127)) == 2.0 ** 127
    assert one(AMPERE, [(2.0 ** 64, 2.0 ** 63)] * 2 + [(0, 0)] * 6 + [(2.0 ** 64, -(2.0 ** 63))],
               0.0) == math.inf
    assert one(FLOAT16, [(200.0, 200.0)] * 2, -40000.0) == 40000.0


# **** against the arithmetic in integers ****

def scattered(rng: np.random.Generator, kind: str, shape: tuple[int, ...], spread: int) -> np.ndarray:
    """Codes of numbers whose exponents are spread over about twice `spread`, some of them zero."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    return encode(np.where(rng.random(shape) < 0.1, 0, np.clip(values, -3e38, 3e38)), kind)


RULES = [  # case, fractional bits, elements of a step, mantissa bits kept
    (HOPPER, 25, 16, 23), (AMPERE, 24, 8, 23), (FLOAT16, 25, 16, 23),
    (replace(FLOAT16, arch="sm_80"), 24, 8, 23), (Mma(16, 8, 8, "f32", "tf32", "tf32"), 25, 8, 23),
    (Mma(16, 8, 8, "f32", "tf32", "tf32", arch="sm_80"), 24, 4, 23),
    (Mma(16, 8, 32, "f32", "e4m3", "e5m2"), 25, 16, 23), (Mma(16, 8, 16, "f32", "e5m2", "e4m3"), 25, 8, 23),
    (Mma(16, 8, 32, "f16", "e4m3", "e4m3"), 25, 16, 23),
    (Mma(16, 8, 32, "f32", "e4m3", "e5m2", arch="sm_89"), 13, 16, 13),
    (Mma(16, 8, 32, "f16", "e5m2", "e5m2", arch="sm_89"), 13, 16, 23)]


def added(case: Mma, a: np.ndarray, b: np.ndarray, c: float, bits: int, step: int, keep: int) -> float:
    """One element. 8-bit floats on Hopper are made f16: elements 0 and 1 of each four are summed first, then
    2 and 3, and C is added last. (An H100 had these bits for k = 32 and f32; the rest is ptxas's code.)"""
    kinds = (case.a, case.b)
    if case.arch != "sm_90a" or BITS[case.a] != 8:
        return truncated(a, b, c, kinds, bits, step, keep, case.d == "f16")
    order = sorted(range(case.k), key=lambda k: (k & 2, k))
    left, right = (encode(decode(codes[order], kind), "f16")
                   for codes, kind in zip((a, b), kinds, strict=True))
    total = truncated(left, right, 0.0, ("f16", "f16"), bits, step, keep, case.d == "f16")
    kind = np.float16 if case.d == "f16" else np.float32
    return float(kind(c) + kind(total))


@pytest.mark.sampled(23)
@pytest.mark.parametrize(("case", "bits", "step", "keep"), RULES, ids=lambda x: f"{x.arch}-{x.name[18:]}"
                         if isinstance(x, Mma) else None)
@pytest.mark.parametrize("spread", [0, 6, 30, 60, 100])
def test_mma_adds_as_described(case: Mma, bits: int, step: int, keep: int, spread: int) -> None:
    limit = {"f16": 6, "e4m3": 4, "e5m2": 6}.get(case.a, 100)
    rng = np.random.default_rng(spread + 1)
    spread = min(spread, limit)
    a, b = scattered(rng, case.a, (16, case.k), spread), scattered(rng, case.b, (case.k, 8), spread)
    c = rng.standard_normal((16, 8)) * 2.0 ** rng.integers(-spread, spread + 1, (16, 8))
    start = words(c, case.d)
    got = numbers(case.run(a, b, start), case.d)
    first = numbers(start, case.d)
    want = np.array([[added(case, a[i], b[:, j], float(first[i, j]), bits, step, keep) for j in range(8)]
                     for i in range(16)])
    np.testing.assert_array_equal(got, want)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kinds", "bits", "keep"), [
    (("f32", "bf16", "bf16"), 25, 23), (("f32", "f16", "f16"), 25, 23), (("f16", "f16", "f16"), 25, 23),
    (("f32", "tf32", "tf32"), 25, 23), (("f32", "e4m3", "e5m2"), 13, 13), (("f16", "e4m3", "e4m3"), 13, 23)])
@pytest.mark.parametrize("spread", [0, 6, 60])
def test_wgmma_adds_as_described(kinds: tuple[str, str, str], bits: int, keep: int, spread: int) -> None:
    case = Wgmma(8, 256 // BITS[kinds[1]], *kinds)
    rng = np.random.default_rng(spread + 9)
    spread = min(spread, {"f16": 6, "e4m3": 4}.get(case.a, 100))
    a, b = scattered(rng, case.a, (64, case.k), spread), scattered(rng, case.b, (case.k, 8), spread)
    c = words(rng.standard_normal((64, 8)) * 2.0 ** rng.integers(-spread, spread + 1, (64, 8)), case.d)
    got, report = launch(case, Operands(a, b, c))
    assert not report.findings
    first = numbers(c, case.d)
    want = np.array([[truncated(a[i], b[:, j], float(first[i, j]), (case.a, case.b), bits, case.k, keep,
                                case.d == "f16") for j in range(8)] for i in range(64)])

    np.testing.assert_array_equal(numbers(got, case.d), want)


@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "e4m3"])
def test_subnormal_operands(kind: str) -> None:
    """The least numbers of a type times the largest powers of two that keep it in range."""
    k = 256 // BITS[kind]
    case = Mma(16, 8, k, "f32", kind, kind)
    rng = np.random.default_rng(5)
    low = 13 if kind == "tf32" else 0
    a = (rng.integers(1, 1 << {"f16": 10, "bf16": 7, "tf32": 10, "e4m3": 3}[kind],
                      (16, k)) << low).astype(np.uint32)
    b = encode(np.full((k, 8), 2.0 ** 7), kind)
    got = numbers(case.run(a, b, words(np.zeros((16, 8)), "f32")), "f32")
    step = 16 if kind == "e4m3" else k
    want = [[truncated(a[i], b[:, j], 0.0, (kind, kind), 25, step) for j in range(8)] for i in range(16)]
    np.testing.assert_array_equal(got, np.array(want))
    assert (got == decode(a, kind) @ decode(b, kind)).all()  # nothing to align
