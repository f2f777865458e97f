"""Vectors in C: every pattern of every dtype, rounding against a search among all numbers, transcendental
functions against float64, and that nothing beyond the first n elements is touched."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Device

from tests.support.cpu.cpu_gemv_case import at_end
from tests.support.cpu.cpu_vector_case import CASES, FLOATS, LEVELS, NUMPY, call, wide
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.kernel import C_TYPES, kernel
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.toolchain import compile_object

SMALL = ("bf16", "f16", "e4m3", "e5m2")
# bits of mantissa and of the exponent, its bias
LAYOUT = {"bf16": (7, 8, 127), "f16": (10, 5, 15), "e4m3": (3, 4, 7), "e5m2": (2, 5, 15)}
levels = pytest.mark.parametrize("level", LEVELS, ids=str)


def decoded(kind: str) -> np.ndarray:
    """What every pattern of a dtype means, as float64."""
    mantissa, exponent, bias = LAYOUT[kind]
    bits = np.arange(1 << (1 + mantissa + exponent))
    m, e = bits & ((1 << mantissa) - 1), (bits >> mantissa) & ((1 << exponent) - 1)
    value = np.where(e > 0, (1 + m / 2**mantissa) * 2.0**(e - bias), m / 2**mantissa * 2.0**(1 - bias))
    top = e == (1 << exponent) - 1
    if kind == "e4m3": value[top & (m == 7)] = np.nan
    else: value[top] = np.where(m[top] > 0, np.nan, np.inf)
    return np.where(bits >> (mantissa + exponent), -value, value)


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal numbers of equal signs, NaN where NaN is."""
    np.testing.assert_array_equal(got, want)
    real = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[real]), np.signbit(want[real]))


@pytest.mark.sampled(1)
@levels
@pytest.mark.parametrize("kind", SMALL)
def test_every_pattern_of_a_float_is_read(kind: str, level: isa.ISA):
    want = decoded(kind)
    bits = np.arange(len(want)).astype(NUMPY[kind])
    for case in ("load", "one"):
        same(call(level, f"{case}_{kind}", len(bits), np.zeros(len(bits), np.float32), bits), want)


@pytest.mark.sampled(6)
@levels
@pytest.mark.parametrize("kind", ["bool", "s8", "u8", "s16", "u16"])
def test_every_pattern_of_an_integer_is_read_and_written(kind: str, level: isa.ISA):
    count = 1 << (8 * np.dtype(NUMPY[kind]).itemsize)
    values = np.arange(count).astype(NUMPY[kind])
    want = np.where(values != 0, -1, 0) if kind == "bool" else values.astype(np.int32)
    for case in ("load", "one"):
        got = call(level, f"{case}_{kind}", count, np.zeros(count, np.int32), values)
        np.testing.assert_array_equal(got, want)
    back = call(level, f"store_{kind}", count, np.zeros(count, NUMPY[kind]), want.astype(np.int32))
    np.testing.assert_array_equal(back, values != 0 if kind == "bool" else values)


def hard_to_round(kind: str) -> np.ndarray:
    """Numbers of a dtype, what lies half way between neighbours, and the next float32 on both sides; random
    patterns of float32."""
    table = np.unique(np.abs(decoded(kind)[np.isfinite(decoded(kind))]))
    beyond = table[-1] + (table[-1] - table[-2]) / 2
    with np.errstate(all="ignore"):
        points = np.concatenate([table, (table[1:] + table[:-1]) / 2, [beyond]]).astype(np.float32)
    above, below = (np.nextafter(points, np.float32(end)) for end in (np.inf, 0))
    points = np.concatenate([points, above, below])
    wild = np.random.default_rng(0).integers(0, 1 << 32, 50000).astype(np.uint32).view(np.float32)
    edges = np.array([np.inf, np.nan, 1e-45, 0], np.float32)
    out = np.concatenate([points, -points, wild, edges, -edges])
    return np.concatenate([out, np.zeros(-len(out) % 16, np.float32)])


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """The nearest number of a dtype, ties to the even pattern; too large is infinite, in 8 bits the
    largest."""
    values = decoded(kind)
    table = values[:int(np.nanargmax(np.where(np.isinf(values), np.nan, values))) + 1]
    with np.errstate(invalid="ignore"): size = np.abs(x.astype(np.float64))
    top = 2 * table[-1] - table[-2]
    numbers = np.append(table, top)
    right = np.clip(np.searchsorted(numbers, size), 1, len(numbers) - 1)
    middle = (numbers[right] + numbers[right - 1]) / 2
    index = np.where(size > middle, right, np.where(size < middle, right - 1, right - 1 + (right - 1) % 2))
    made = np.where((index == len(table)) | (size > top), table[-1] if len(values) == 256 else np.inf,
                    numbers[index])
    with np.errstate(invalid="ignore"): return np.where(np.isnan(x), np.nan, np.copysign(made, x))


@levels
@pytest.mark.parametrize("kind", SMALL)
def test_rounding_to_nearest(kind: str, level: isa.ISA):
    x = hard_to_round(kind)
    want = rounded(x, kind)
    stored = call(level, f"store_{kind}", len(x), np.zeros(len(x), NUMPY[kind]), x)
    same(decoded(kind)[stored], want)
    same(call(level, f"round_{kind}", len(x), np.zeros(len(x), np.float32), x), want)


@levels
def test_integers_wrap(level: isa.ISA):
    x = np.random.default_rng(0).integers(-1 << 31, 1 << 31, 1024).astype(np.int32)
    for case, kind in (("wrap16", "s16"), ("wrap17", "u16"), ("wrap8", "s8"), ("wrap9", "u8")):
        np.testing.assert_array_equal(call(level, case, len(x), np.zeros_like(x), x), x.astype(NUMPY[kind]))


# **** a part of a vector ****

@pytest.mark.sampled(12)
@levels
@pytest.mark.parametrize("kind", C_TYPES)
def test_only_the_first_elements_are_touched(kind: str, level: isa.ISA):
    """Memory ends behind what may be read; what may not be written keeps its value."""
    lanes, to = level.lanes, wide(kind)
    values = np.arange(lanes) % (2 if kind == "bool" else 8) + (kind != "bool")
    held = encoded(values, kind)
    meant = (-values if kind == "bool" else values).astype(NUMPY[to])
    for n in range(lanes + 1):
        want = np.where(np.arange(lanes) < n, meant, 0)
        short = at_end(held[:n].view(np.uint8)).view(NUMPY[kind])
        got = call(level, f"load_n_{kind}", n, np.full(lanes, 99, NUMPY[to]), short)
        np.testing.assert_array_equal(got, want)
        spread = np.zeros(3 * n, NUMPY[kind])
        spread[::3] = held[:n]
        spread = at_end(spread[:max(3 * n - 2, 0)].view(np.uint8)).view(NUMPY[kind])
        got = call(level, f"strided_{kind}", n, np.full(lanes, 99, NUMPY[to]), spread)
        np.testing.assert_array_equal(got, want)
        out = at_end(np.full(n, 77, NUMPY[kind]).view(np.uint8)).view(NUMPY[kind])
        np.testing.assert_array_equal(call(level, f"store_n_{kind}", n, out, meant), held[:n])
        out = call(level, f"store_n_{kind}", n, np.full(lanes, 77, NUMPY[kind]), meant)
        np.testing.assert_array_equal(out, np.where(np.arange(lanes) < n, held, 77))
        out = call(level, f"scatter_{kind}", n, np.full(3 * lanes, 77, NUMPY[kind]), meant)
        assert (np.delete(out, np.s_[:3 * n:3]) == 77).all()
        np.testing.assert_array_equal(out[:3 * n:3], held[:n])


def encoded(values: np.ndarray, kind: str) -> np.ndarray:
    """Small integers as a dtype's patterns."""
    if kind not in SMALL: return values.astype(NUMPY[kind])
    table = decoded(kind)
    return np.array([np.flatnonzero(table == float(value))[0] for value in values]).astype(NUMPY[kind])


# **** functions ****

def ulps(got: np.ndarray, want: np.ndarray) -> float:
    """The largest error in units of the last place of float32; infinities and NaN must be equal."""
    near = want.astype(np.float32)
    real = np.isfinite(near)
    np.testing.assert_array_equal(got[~real], near[~real])
    return float((np.abs(got[real].astype(np.float64) - want[real]) / np.spacing(np.abs(near[real]))).max())


def applied(level: isa.ISA, name: str, *x: np.ndarray) -> np.ndarray:
    return call(level, name, len(x[0]), np.zeros(len(x[0]), np.float32), *x)


SPECIAL = np.array([0, -0.0, 1, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 127.99999, 128, -126, -126.00001,
                    -149, -150, 3e38, -3e38], np.float32)


@levels
def test_exp2(level: isa.ISA):
    """Within one unit, subnormal results too; of numbers up to 1 with results below 2^-126 as 0."""
    random = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-152, 130, 1 << 18), random.uniform(-1, 1, 1 << 16),
                        random.uniform(-1e-3, 1e-3, 1 << 12)]).astype(np.float32)
    with np.errstate(all="ignore"):
        assert ulps(applied(level, "exp2_", x), np.exp2(x.astype(np.float64))) <= 1
        same(applied(level, "exp2_", SPECIAL)[[0, 1, 2, 3, 4, 5, 9, 10, 12, 13, 14, 15]],
             np.float32([1, 1, 2, np.inf, 0, np.nan, np.inf, 2.0**-126, 2.0**-149, 0, np.inf, 0]))
        x = np.minimum(np.append(x, SPECIAL), 1)
        want = np.where(x < -126, 0, np.exp2(x.astype(np.float64)))
        assert ulps(applied(level, "exp2_small", x), want) <= 1


@levels
@pytest.mark.parametrize("name", ["exp2_", "exp2_small", "log2_", "sqrt_"])
def test_every_nan_stays_one(name: str, level: isa.ISA):
    """Whatever its sign and its other bits: each alone, all, and random ones."""
    random = np.random.default_rng(4).integers(1, 1 << 23, 4096)
    bits = np.concatenate([1 << np.arange(23), [(1 << 23) - 1], random, random[:-24]]).astype(np.uint32)
    bits = np.concatenate([bits | 0x7f800000, bits | 0xff800000]).astype(np.uint32)
    assert len(bits) % 16 == 0
    assert np.isnan(applied(level, name, bits.view(np.float32))).all()


@levels
def test_log2(level: isa.ISA):
    """Within three units, of subnormal numbers and next to 1 too."""
    random = np.random.default_rng(0)
    x = np.concatenate([random.integers(0, 0x7F800000, 1 << 18).astype(np.uint32).view(np.float32),
                        random.uniform(0.5, 2, 1 << 16), 1 + random.uniform(-2**-12, 2**-12, 1 << 12),
                        SPECIAL]).astype(np.float32)
    with np.errstate(all="ignore"): want = np.log2(x.astype(np.float64))
    assert ulps(applied(level, "log2_", x), want) <= 3


@levels
def test_arithmetic(level: isa.ISA):
    random = np.random.default_rng(1)
    a, b, c = (random.integers(0, 1 << 32, 4096).astype(np.uint32).view(np.float32) for _ in range(3))
    a[:16], b[16:32] = SPECIAL, SPECIAL
    with np.errstate(all="ignore"):
        assert ulps(applied(level, "sqrt_", a), np.sqrt(a.astype(np.float64))) <= 0.5001
        same(applied(level, "abs_", a), np.abs(a))
        np.testing.assert_array_equal(applied(level, "max_", a, b), np.where(a > b, a, b))
        np.testing.assert_array_equal(applied(level, "min_", a, b), np.where(a < b, a, b))
        a, b, c = (random.uniform(-1, 1, 1024).astype(np.float32) for _ in range(3))
        error = np.abs(applied(level, "fma_", a, b, c) - (a.astype(np.float64) * b + c))
    assert error.max() <= 2.0**-24  # an unfused product has as much by itself


@levels
def test_sums_have_one_order(level: isa.ISA):
    """Halves to halves, four vectors at a time as one."""
    x = np.random.default_rng(2).uniform(-1, 1, (64, level.lanes)).astype(np.float32)
    out, whole = np.zeros((64, 3), np.float32), np.zeros(64, np.int32)
    call(level, "sums", 64, out, x, whole)
    halves = x
    while halves.shape[1] > 1: halves = halves[:, :halves.shape[1] // 2] + halves[:, halves.shape[1] // 2:]
    np.testing.assert_array_equal(out, np.stack([halves[:, 0], halves[:, 0], x.max(1)], 1))
    np.testing.assert_array_equal(whole, x.view(np.int32).sum(1, dtype=np.int32))


@levels
def test_transposition(level: isa.ISA):
    square = np.arange(level.lanes**2, dtype=np.int32).reshape(level.lanes, -1)
    np.testing.assert_array_equal(call(level, "transpose", 0, np.zeros_like(square), square), square.T)


def test_pairs_of_bfloat16():
    """They compile where the processor lacks them."""
    level = isa.AVX512_BF16
    if level not in LEVELS:
        compiler = Device["CPU"].renderer.compiler
        made = kernel("pairs", level, "dot_pairs((vf)0, (vi)0, (vi)0);", [("float", "out")], [])
        compile_object(compiler.found, compiler.arguments, made.source)
        return
    random = np.random.default_rng(3)
    for n in range(33):
        a, b = (random.integers(-9, 10, 32).astype(np.float32) for _ in range(2))
        c = random.integers(-9, 10, 16).astype(np.float32)
        x, y = ((values.view(np.uint32) >> 16).astype(np.uint16) for values in (a, b))
        got = call(level, "dot_pairs", n, np.zeros(16, np.float32), x, at_end(y[:n].view(np.uint8)), c)
        np.testing.assert_array_equal(got, c + (a * b * (np.arange(32) < n)).reshape(16, 2).sum(1))


def test_every_case_is_one_that_levels_have():
    assert all(f"{case}_{kind}" in CASES for case in ("load", "store", "one") for kind in C_TYPES)
    assert set(FLOATS) - set(SMALL) == {"f32"}
    made = load(kernel("lanes", LEVELS[-1], "store_s32(out, iota_());", [("s32", "out")], []))
    out = np.zeros(LEVELS[-1].lanes, np.int32)
    made(out)
    np.testing.assert_array_equal(out, np.arange(len(out)))
