"""Floating-point arithmetic of the emulator against exact fractions, bit for bit, and approximations
against f64."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.ptx.exact import BF16, F16, F32, F64, Format, apply_exactly, decode, flushed
from tests.support.ptx.lanewise import F32_EDGES, apply, apply1, doubles, floats

COUNT = 700
FORMATS = {"f32": F32, "f64": F64, "f16": F16, "bf16": BF16}
TYPES = {"f32": np.uint32, "f64": np.uint64, "f16": np.uint16, "bf16": np.uint16}
ARITY = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "div": 2, "rcp": 1, "sqrt": 1}


def halves(count: int, seed: int) -> np.ndarray:
    """Codes of 16-bit formats."""
    random = np.random.default_rng(seed)
    edges = np.array([0, 0x8000, 1, 0x8001, 0x3ff, 0x400, 0x3c00, 0x3f80, 0xbf80, 0x7bff, 0x7c00, 0xfc00,
                      0x7f80, 0xff80,
                      0x7f7f, 0x7e00, 0x7fc1], np.uint16)
    anything = random.integers(0, 1 << 16, count, dtype=np.uint16)
    near = (random.standard_normal(count) * 3).astype(np.float16).view(np.uint16)
    return np.where(random.integers(4, size=count) == 0, random.choice(edges, count),
                    np.where(random.integers(2, size=count) == 0, anything, near)).astype(np.uint16)


def inputs(kind: str, count: int, number: int) -> list[np.ndarray]:
    """Operands of a type. Some sums cancel, and nearly."""
    make = {"f32": floats, "f64": doubles}.get(kind, halves)
    out = [make(count, 10 + i) for i in range(number)]
    if number > 1:
        one = TYPES[kind](1)
        out[-1][::7] = out[0][::7] ^ TYPES[kind](FORMATS[kind].sign)
        out[-1][1::7] = (out[0][1::7] ^ TYPES[kind](FORMATS[kind].sign)) + one
    return out


def is_nan(code: int, to: Format) -> bool:
    """Whether it is any NaN."""
    return decode(code, to)[1] == "nan"


def numbers_of(bits: np.ndarray, kind: str) -> np.ndarray:
    """Codes as f64."""
    with np.errstate(invalid="ignore"):
        if kind == "bf16": return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return bits.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]).astype(np.float64)


def check(opcode: str, name: str, kind: str, mode: str = "rn", **modifiers: bool) -> None:
    """Compares an instruction with the exact operation; NaNs of f64 may be any."""
    to, given = FORMATS[kind], inputs(kind, COUNT, ARITY[name])
    operands = ", ".join(["%d0", *(f"%s{i}" for i in range(len(given)))])
    got = apply1(f"{opcode} {operands};", *given, result=TYPES[kind])
    for i, result in enumerate(got):
        codes = [int(array[i]) for array in given]
        want = apply_exactly(name, codes, to, mode, **modifiers)
        same = is_nan(int(result), to) if kind == "f64" and is_nan(want, to) else int(result) == want
        assert same, (opcode, [hex(code) for code in codes], hex(int(result)), hex(want))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ARITY)
def test_f32_roundings(name: str, mode: str) -> None:
    """Every rounding of every operation, plain and flushed."""
    check(f"{name}.{mode}.f32", name, "f32", mode)
    check(f"{name}.{mode}.ftz.f32", name, "f32", mode, ftz=True)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", ARITY)
def test_f64_roundings(name: str, mode: str) -> None:
    """Every rounding of every operation."""
    check(f"{name}.{mode}.f64", name, "f64", mode)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("opcode", ["add", "sub", "mul", "fma.rn", "add.rz", "fma.rp"])
def test_f32_saturation(opcode: str) -> None:
    """.sat, and forms without a rounding."""
    name, _, mode = opcode.partition(".")
    check(f"{opcode}.sat.f32", name, "f32", mode or "rn", sat=True)
    check(f"{opcode}.ftz.sat.f32", name, "f32", mode or "rn", sat=True, ftz=True)
    check(f"{opcode}.f32", name, "f32", mode or "rn")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_half_arithmetic(name: str, kind: str) -> None:
    """f16 and bf16, one and two in a word, rounded once; .ftz and .sat of f16, .relu of fma."""
    check(f"{name}.rn.{kind}", name, kind)
    if kind == "f16":
        check(f"{name}.rn.sat.f16", name, kind, sat=True)
        check(f"{name}.rn.ftz.f16", name, kind, ftz=True)
    if name == "fma": check(f"{name}.rn.relu.{kind}", name, kind, relu=True)
    given = inputs(kind, COUNT, 6)
    words = [given[i].astype(np.uint32) | given[i + 3].astype(np.uint32) << 16 for i in range(ARITY[name])]
    operands = ", ".join(["%d0", *(f"%s{i}" for i in range(len(words)))])
    got = apply1(f"{name}.rn.{kind}x2 {operands};", *words, result=np.uint32)
    for i, word in enumerate(got):
        for at in (0, 1):
            want = apply_exactly(name, [int(given[j + 3 * at][i]) for j in range(ARITY[name])], FORMATS[kind])
            assert int(word) >> 16 * at & 0xffff == want


def test_half_fma_rounds_once() -> None:
    """bf16 and f16 products whose tail decides: rounding to f32 first would give another result."""
    random = np.random.default_rng(5)
    for kind in ("f16", "bf16"):
        a, b = (random.integers(0x3c00, 0x4200, 20000).astype(np.uint16) for _ in range(2))
        c = (random.integers(0, 0x2000, 20000) | random.integers(0, 2, 20000) << 15).astype(np.uint16)
        got = apply1(f"fma.rn.{kind} %d0, %s0, %s1, %s2;", a, b, c, result=np.uint16)
        for x, y, z, r in zip(a, b, c, got, strict=True):
            assert int(r) == apply_exactly("fma", [int(x), int(y), int(z)], FORMATS[kind])


def test_fma_beyond_a_tensor() -> None:
    """fma.oob: zero where a factor is the NaN that TMA fills in, whatever the others are; an H100 answers
    other NaNs with 0x7fff."""
    a = np.array([0x7ff7, 0x3c00, 0x3c00, 0x7c00, 0x7fff, 0x3c00], np.uint16)
    b = np.array([0x7c00, 0x7ff7, 0x4000, 0x3c00, 0x7c00, 0x7fff], np.uint16)
    c = np.array([0x3c00, 0x3c00, 0x3c00, 0, 0x3c00, 0x3c00], np.uint16)
    got = apply1("fma.rn.oob.f16 %d0, %s0, %s1, %s2;", a, b, c, result=np.uint16)
    assert got.tolist() == [0, 0, 0x4200, 0x7c00, 0x7fff, 0x7fff]
    got = apply1("fma.rn.oob.relu.bf16 %d0, %s0, %s1, %s2;", a, b, c, result=np.uint16)
    assert got[[0, 1, 4, 5]].tolist() == [0, 0, 0x7fff, 0x7fff]


# **** min, max, signs ****

def extreme(name: str, a: int, b: int, to: Format, nans: bool, xorsign: bool) -> int:
    """min and max by the manual: of magnitudes with .xorsign.abs, -0 below +0, a NaN gives the other."""
    ones = to.sign - 1
    sign = (a ^ b) & to.sign if xorsign else 0
    if xorsign: a, b = a & ones, b & ones
    if is_nan(a, to) or is_nan(b, to):
        if nans or (is_nan(a, to) and is_nan(b, to)): return to.nan
        return (b if is_nan(a, to) else a) ^ sign
    def rank(x: int) -> int: return -(x & ones) - 1 if x & to.sign else x
    return (min if name == "min" else max)(a, b, key=rank) ^ sign


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes(name: str, kind: str) -> None:
    """With NaNs, zeros of both signs, .NaN and .xorsign.abs."""
    a, b = inputs(kind, COUNT, 2)
    to = FORMATS[kind]
    forms = [("", False, False)] if kind == "f64" else [("", False, False), (".NaN", True, False),
                                                        (".xorsign.abs", False, True),
                                                        (".NaN.xorsign.abs", True, True)]
    for words, nans, xorsign in forms:
        got = apply1(f"{name}{words}.{kind} %d0, %s0, %s1;", a, b, result=TYPES[kind])
        for x, y, r in zip(a, b, got, strict=True):
            want = extreme(name, int(x), int(y), to, nans, xorsign)
            same = is_nan(int(r), to) if is_nan(want, to) and (kind == "f64" or xorsign) else int(r) == want
            assert same, (words, hex(x), hex(y), hex(r), hex(want))
    if kind == "f32":
        got = apply1(f"{name}.ftz.f32 %d0, %s0, %s1;", a, b, result=np.uint32)
        for x, y, r in zip(a, b, got, strict=True):
            assert int(r) == extreme(name, flushed(int(x), to), flushed(int(y), to), to, False, False)


@pytest.mark.parametrize("kind", FORMATS)
def test_signs(kind: str) -> None:
    """abs, neg and copysign are of the bits; .ftz flushes first. As on an H100, abs and neg of a NaN are the
    canonical one, and in f64 neg leaves it as it is."""
    a, b = inputs(kind, COUNT, 2)
    sign = TYPES[kind](FORMATS[kind].sign)
    nans = np.isnan(numbers_of(a, kind))

    def ours(wanted: np.ndarray, were: np.ndarray = nans) -> np.ndarray:
        return np.where(were, a if kind == "f64" else TYPES[kind](FORMATS[kind].nan), wanted)
    body = f"abs.{kind} %d0, %s0; neg.{kind} %d1, %s0;"
    if kind in ("f32", "f64"): body += f"copysign.{kind} %d2, %s0, %s1;"
    got = apply(body, [a, b], [TYPES[kind]] * (3 if kind in ("f32", "f64") else 2))
    for result, want in zip(got, (ours(a & ~sign), ours(a ^ sign), (a & sign) | (b & ~sign)), strict=False):
        assert np.array_equal(result, want)
    if kind in ("f32", "f16"):
        got = apply(f"abs.ftz.{kind} %d0, %s0; neg.ftz.{kind} %d1, %s0;", [a], [TYPES[kind]] * 2)
        flat = np.array([flushed(int(x), FORMATS[kind]) for x in a], TYPES[kind])
        assert np.array_equal(got[0], ours(flat & ~sign))
        assert np.array_equal(got[1], ours(flat ^ sign))
    if kind in ("f16", "bf16"):
        words = a.astype(np.uint32) | b.astype(np.uint32) << 16
        got = apply(f"abs.{kind}x2 %d0, %s0; neg.{kind}x2 %d1, %s0;", [words], [np.uint32] * 2)
        for result, change in ((got[0], lambda x: x & ~sign), (got[1], lambda x: x ^ sign)):
            assert np.array_equal(result & 0xffff, ours(change(a)))
            assert np.array_equal(result >> 16, ours(change(b), np.isnan(numbers_of(b, kind))))


@pytest.mark.parametrize(("opcode", "operands", "want"), [
    ("add.rn", (0x7ff8000000000000, 0xfff8000000000001), 0xfff8000000000001),     # the last NaN
    ("mul.rz", (0x7ff8000000000000, 0xfff8000000000000), 0xfff8000000000000),
    ("fma.rm", (0x7ff8000000000000, 0xfff0000000000000, 0xfff8000000000001), 0xfff8000000000001),
    ("fma.rm", (0x7ff8000000000000, 0xc0086e7b773902bf, 0x3ff0000000000001), 0x7ff8000000000000),
    ("sub.rp", (0x834729d0d536ffe2, 0x7ff8000000000000), 0x7ff8000000000000),     # with its sign
    ("sub.rn", (0x834729d0d536ffe2, 0x7ff8000000000000), 0x7ff8000000000000),
    ("sub.rp", (0x7ff0000000000000, 0xfff0000000000001), 0xfff8000000000001),     # and quiet
    ("add.rn", (0x7ff0000000000000, 0xfff0000000000000), 0xfff8000000000000),     # invalid
    ("fma.rm", (0xfff0000000000000, 0, 0x0010000000000000), 0xfff8000000000000)])
def test_nans_of_f64_as_an_h100_has_them(opcode: str, operands: tuple[int, ...], want: int) -> None:
    """Which NaN comes through, and its sign."""
    given = [np.array([each], np.uint64) for each in operands]
    names = ", ".join(f"%s{i}" for i in range(len(given)))
    assert apply1(f"{opcode}.f64 %d0, {names};", *given, result=np.uint64).tolist() == [want]


# **** approximations: within an ulp of f64's, far inside the manual's bounds ****

FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt, "ex2": np.exp2,
                                                            "lg2": np.log2,
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh}


@pytest.mark.parametrize(("name", "ftz"), [(name, ftz) for name in FUNCTIONS for ftz in (False, True)
                                           if (name, ftz) != ("tanh", True)])
def test_approximations(name: str, ftz: bool) -> None:
    """f32 functions; subnormals are flushed where .ftz says so."""
    bits = np.concatenate([floats(COUNT, 1), F32_EDGES])
    x = bits.view(np.float32)
    small = np.abs(x) < 2.0**-126
    with np.errstate(all="ignore"):
        want = FUNCTIONS[name](np.where(small & ftz, np.copysign(0, x),
                                        x).astype(np.float64)).astype(np.float32)
        want = np.where((np.abs(want) < 2.0**-126) & ftz, np.copysign(np.float32(0), want),
                        want).astype(np.float32)
    got = apply1(f"{name}.approx{'.ftz' if ftz else ''}.f32 %d0, %s0;", bits, result=np.uint32)
    result = got.view(np.float32)
    assert np.array_equal(np.isnan(result), np.isnan(want))
    assert (got[np.isnan(result)] == 0x7fffffff).all()
    fine = ~np.isnan(want)
    assert np.array_equal(np.signbit(result[fine]), np.signbit(want[fine]))
    assert (np.abs(got[fine].astype(np.int64) - want[fine].view(np.uint32).astype(np.int64)) <= 1).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["ex2", "tanh"])
def test_half_approximations(name: str, kind: str) -> None:
    """All 65536 codes: nearest to f64's, one and two in a word. Bounds of the manual: 2^-9.9 (f16), 2^-7
    (bf16)."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    flush = ".ftz" if (name, kind) == ("ex2", "bf16") else ""
    got = apply1(f"{name}.approx{flush}.{kind} %d0, %s0;", codes, result=np.uint16)
    to = FORMATS[kind]
    x, y = numbers_of(codes, kind), numbers_of(got, kind)
    if flush: x = np.where(np.abs(x) < 2.0**-126, 0, x)
    with np.errstate(all="ignore"): want = FUNCTIONS[name](x)
    assert np.array_equal(np.isnan(y), np.isnan(x))
    assert (got[np.isnan(x)] == to.nan).all()
    top = 65520.0 if kind == "f16" else float(np.float32(3.3961775e38))
    fine = ~np.isnan(x) & (np.abs(want) < top)
    least = 2.0**-25 if kind == "f16" else 2.0**-126 if flush else 2.0**-134
    bound = np.maximum(np.abs(want[fine]) * 2.0**-(to.mantissa + 1), least)
    assert (np.abs(y[fine] - want[fine]) <= bound).all()
    assert np.isinf(y[~np.isnan(x) & ~fine]).all()
    words = codes.astype(np.uint32) << 16 | codes[::-1]
    packed = apply1(f"{name}.approx{flush}.{kind}x2 %d0, %s0;", words, result=np.uint32)
    assert np.array_equal(packed, got.astype(np.uint32) << 16 | got[::-1])


def test_approximate_division() -> None:
    """div.full is a quotient; div.approx gives zero, or NaN for infinity, where the reciprocal is too
    small."""
    a, b = floats(COUNT, 1), floats(COUNT, 2)
    full, approx = apply("div.full.f32 %d0, %s0, %s1; div.approx.f32 %d1, %s0, %s1;", [a, b], [np.uint32] * 2)
    size = np.abs(b.view(np.float32))
    with np.errstate(all="ignore"): want = a.view(np.float32) / b.view(np.float32)
    same = (full == want.view(np.uint32)) | (np.isnan(want) & (full == 0x7fffffff))
    assert same.all()
    large = (size > 2.0**126) & np.isfinite(size)
    assert large.sum() > 5
    assert np.array_equal(approx[~large], full[~large])
    quotient, top = approx[large].view(np.float32), a[large].view(np.float32)
    assert (np.isnan(quotient) == ~np.isfinite(top)).all()
    assert (quotient[np.isfinite(top)] == 0).all()


def test_f64_approximations() -> None:
    """rcp and rsqrt of f64: 20 bits of mantissa, subnormals flushed; rsqrt.approx alone is full."""
    bits = doubles(COUNT, 1)
    rcp, rsqrt, fine = apply("rcp.approx.ftz.f64 %d0, %s0; rsqrt.approx.ftz.f64 %d1, %s0;"
                             "rsqrt.approx.f64 %d2, %s0;",
                             [bits], [np.uint64] * 3)
    x = bits.view(np.float64)
    flat = np.where(np.abs(x) < 2.0**-1022, np.copysign(0, x), x)
    with np.errstate(all="ignore"):
        cases = ((rcp, 1 / flat, 2.0**-19), (rsqrt, 1 / np.sqrt(flat), 2.0**-19),
                 (fine, 1 / np.sqrt(x), 2.0**-51))
        for result, want, bound in cases:
            y = result.view(np.float64)
            assert np.array_equal(np.isnan(y), np.isnan(want))
            normal = np.isfinite(want) & (np.abs(want) >= 2.0**-1022)
            assert (np.abs(y - want)[normal] <= bound * np.abs(want[normal])).all()
            assert np.array_equal(y[np.isinf(want)], want[np.isinf(want)])
    assert not (rcp & np.uint64(0xffffffff)).any()


# **** comparisons ****

ORDERED: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
                                                                      "ge": np.greater_equal}


def compared(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A comparison by the manual: ordered ones fail with NaN, those with u hold."""
    either = np.isnan(x) | np.isnan(y)
    if name in ("num", "nan"): return ~either if name == "num" else either
    if name in ORDERED: return ORDERED[name](x, y) & ~either
    return ORDERED[name[:-1]](x, y) | either


NAMES = [*ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_comparisons(name: str, kind: str) -> None:
    """setp and set, each comparison of each type."""
    a, b = inputs(kind, 256, 2)
    b[::5] = a[::5]
    c = np.arange(256) % 2 == 0
    want = compared(name, numbers_of(a, kind), numbers_of(b, kind))
    second = "|%q0" if kind in ("f32", "f64") else ""
    body = (f"setp.{name}.{kind} %d0, %s0, %s1; setp.{name}.and.{kind} %d1{second}, %s0, %s1, !%s2;"
            f"set.{name}.s32.{kind} %d2, %s0, %s1; mov.pred %d3, %q0;")
    got = apply(body if second else body.replace("%q0", "%d1"), [a, b, c],
                [np.bool_, np.bool_, np.uint32, np.bool_])
    assert np.array_equal(got[0].astype(np.bool_), want)
    assert np.array_equal(got[1].astype(np.bool_), want & ~c)
    assert np.array_equal(got[2], np.where(want, 0xffffffff, 0))
    if second: assert np.array_equal(got[3].astype(np.bool_), ~want & ~c)


def test_flushed_comparisons() -> None:
    """.ftz: subnormals equal zero."""
    a, b = np.array([1, 0x80000001, 0x00800000], np.uint32), np.zeros(3, np.uint32)
    got = apply("setp.eq.ftz.f32 %d0, %s0, %s1; setp.eq.f32 %d1, %s0, %s1;", [a, b], [np.bool_] * 2)
    assert [x.tolist() for x in got] == [[1, 1, 0], [0, 0, 0]]
    got = apply("setp.eq.ftz.f16 %d0, %s0, %s1;", [a.astype(np.uint16) | 0x3ff, b.astype(np.uint16)],
                [np.bool_])
    assert got[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_comparisons(kind: str) -> None:
    """setp of packed halves gives a predicate for each; set gives 1.0, or a mask, in each half."""
    a, b, c, d = inputs(kind, 256, 4)
    one, other = (x.astype(np.uint32) | y.astype(np.uint32) << 16 for x, y in ((a, c), (b, d)))
    low, high = (compared("ltu", numbers_of(x, kind), numbers_of(y, kind)) for x, y in ((a, b), (c, d)))
    body = (f"setp.ltu.{kind}x2 %d0|%d1, %s0, %s1; set.ltu.{kind}x2.{kind}x2 %d2, %s0, %s1;"
            f"set.ltu.u32.{kind}x2 %d3, %s0, %s1;")
    got = apply(body, [one, other], [np.bool_, np.bool_, np.uint32, np.uint32])
    unit = 0x3c00 if kind == "f16" else 0x3f80
    assert np.array_equal(got[0].astype(np.bool_), low)
    assert np.array_equal(got[1].astype(np.bool_), high)
    assert np.array_equal(got[2], low * np.uint32(unit) | high * np.uint32(unit << 16))
    assert np.array_equal(got[3], low * np.uint32(0xffff) | high * np.uint32(0xffff0000))


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_properties(kind: str) -> None:
    """testp: zero is normal."""
    (a,) = inputs(kind, COUNT, 1)
    x = numbers_of(a, kind)
    small = (np.abs(x) < (2.0**-126 if kind == "f32" else 2.0**-1022)) & (x != 0)
    want = {"finite": np.isfinite(x), "infinite": np.isinf(x), "number": ~np.isnan(x),
            "notanumber": np.isnan(x),
            "normal": np.isfinite(x) & ~small, "subnormal": small}
    body = " ".join(f"testp.{name}.{kind} %d{i}, %s0;" for i, name in enumerate(want))
    for result, expected in zip(apply(body, [a], [np.bool_] * 6), want.values(), strict=True):
        assert np.array_equal(result.astype(np.bool_), expected)
