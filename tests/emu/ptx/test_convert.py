"""Conversions and moves of the emulator: against torch for every code of the small formats, against exact
fractions for
every rounding, against Python's integers."""
from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.support.ptx.exact import (
    BF16,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    TF32,
    Format,
    Number,
    decode,
    encode,
    flushed,
)
from tests.support.ptx.lanewise import UNSIGNED, apply, apply1, doubles, floats, integers, signed

COUNT = 640
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64}
BYTES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
ROUNDINGS = ("rn", "rz", "rm", "rp")


def bits_of(kind: str) -> int:
    """Bits of an integer type."""
    return int(kind[1:])


def value(x: int, kind: str) -> int:
    """The low bits of a register as an integer type."""
    x &= (1 << bits_of(kind)) - 1
    return signed(x, bits_of(kind)) if kind[0] == "s" else x


def extent(kind: str) -> tuple[int, int]:
    """The least and the greatest of an integer type."""
    low = -(1 << (bits_of(kind) - 1)) if kind[0] == "s" else 0
    return low, low + (1 << bits_of(kind)) - 1


def codes(kind: str, seed: int = 1) -> np.ndarray:
    """Codes of a floating-point type; all of the 16-bit ones."""
    if BYTES[kind] == 2: return np.arange(1 << 16, dtype=np.uint16)
    return doubles(COUNT, seed) if kind == "f64" else floats(COUNT, seed)


def as_torch(bits: np.ndarray, kind: str) -> torch.Tensor:
    """Codes of a small format as a tensor of f32."""
    signed_view = bits.view({1: np.int8, 2: np.int16}[bits.itemsize])
    return torch.from_numpy(signed_view.copy()).view(TORCH[kind]).to(torch.float32)


# **** small formats to f32 and back ****

@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_to_f32(kind: str) -> None:
    """Every code, exactly; NaNs of f16 become the canonical one, those of bf16 keep their bits, as an H100
    has it. And on to f64."""
    all_codes = codes(kind)
    got, wide = apply(f"cvt.f32.{kind} %d0, %s0; cvt.f64.{kind} %d1, %s0;", [all_codes],
                      [np.uint32, np.uint64])
    want = as_torch(all_codes, kind).numpy()
    real = ~np.isnan(want)
    assert np.array_equal(got[real], want.view(np.uint32)[real])
    nans = all_codes[~real].astype(np.uint32) << 16 if kind == "bf16" else np.uint32(0x7fffffff)
    assert (got[~real] == nans).all()
    assert np.array_equal(wide.view(np.float64)[real], want[real].astype(np.float64))
    assert np.isnan(wide.view(np.float64)[~real]).all()


def around(kind: str) -> np.ndarray:
    """f32 codes at, between and beside all numbers of a 16-bit format, where nearest-even decides."""
    with np.errstate(over="ignore"):
        exact = as_torch(codes(kind), kind).numpy().view(np.uint32)
    shift = 13 if kind == "f16" else 16
    half = np.uint32(1 << (shift - 1))
    return np.concatenate([exact, exact + half, exact + half - np.uint32(1), exact + half + np.uint32(1)])


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_f32_to_halves(kind: str) -> None:
    """To nearest even against torch, at every number of the format, every tie, and beside each."""
    bits = np.concatenate([around(kind), floats(20000, 2)])
    with np.errstate(invalid="ignore"):
        tensor = torch.from_numpy(bits.view(np.float32).copy())
    want = tensor.to(TORCH[kind]).view(torch.int16).numpy().view(np.uint16)
    got = apply1(f"cvt.rn.{kind}.f32 %d0, %s0;", bits, result=np.uint16)
    real = ~torch.isnan(tensor).numpy()
    assert np.array_equal(got[real], want[real])
    assert (got[~real] == 0x7fff).all()
    packed = apply1(f"cvt.rn.{kind}x2.f32 %d0, %s0, %s1;", bits, bits[::-1], result=np.uint32)
    assert np.array_equal(packed, got.astype(np.uint32) << 16 | got[::-1])


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_f8_to_f16(kind: str) -> None:
    """Every pair of neighbouring codes of e4m3x2 and e5m2x2 to f16x2, exactly."""
    words = np.arange(1 << 16, dtype=np.uint16)
    got, relu = apply(f"cvt.rn.f16x2.{kind}x2 %d0, %s0; cvt.rn.relu.f16x2.{kind}x2 %d1, %s0;", [words],
                      [np.uint32, np.uint32])
    single = as_torch(np.arange(256, dtype=np.uint8),
                      kind).to(torch.float16).view(torch.int16).numpy().view(np.uint16)
    single = np.where(np.isnan(single.view(np.float16)), 0x7fff, single).astype(np.uint32)
    assert np.array_equal(got, single[words >> 8] << 16 | single[words & 255])
    kept = np.where(single >> 15 == 1, 0, single).astype(np.uint32)
    assert np.array_equal(relu, kept[words >> 8] << 16 | kept[words & 255])


def small(bits: np.ndarray, kind: str, relu: bool) -> np.ndarray:
    """f32 codes to an 8-bit format, saturated to finite numbers, by fractions."""
    to, top = (E4M3, Fraction(448)) if kind == "e4m3" else (E5M2, Fraction(57344))
    out = []
    for code in bits:
        sign, size = decode(int(code), F32)
        if relu and size != "nan" and sign: sign, size = 0, Fraction(0)
        if size == "inf" or (isinstance(size, Fraction) and size > top): size = top
        out.append(encode((sign, size), to))
    return np.array(out, np.uint16)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_to_f8(kind: str, relu: bool) -> None:
    """Pairs of f32, and all codes of f16, to e4m3x2 and e5m2x2: nearest even, finite."""
    word = ".relu" if relu else ""
    bits = floats(4000, 3)
    near = np.random.default_rng(4).standard_normal(4000) * np.exp2(np.arange(4000) % 30 - 18)
    bits = np.concatenate([bits, near.astype(np.float32).view(np.uint32)])
    got = apply1(f"cvt.rn.satfinite{word}.{kind}x2.f32 %d0, %s0, %s1;", bits, bits[::-1], result=np.uint16)
    want = small(bits, kind, relu)
    assert np.array_equal(got, want << 8 | want[::-1])
    all_codes = codes("f16")
    words = all_codes.astype(np.uint32) << 16 | all_codes[::-1]
    got = apply1(f"cvt.rn.satfinite{word}.{kind}x2.f16x2 %d0, %s0;", words, result=np.uint16)
    with np.errstate(invalid="ignore"): wide = all_codes.view(np.float16).astype(np.float32).view(np.uint32)
    want = small(wide, kind, relu)
    assert np.array_equal(got, want << 8 | want[::-1])


def test_f8_agrees_with_torch() -> None:
    """Where torch has the same rule (nearest even, within range), its numbers."""
    x = np.random.default_rng(5).standard_normal(5000).astype(np.float32) * 20
    for kind in ("e4m3", "e5m2"):
        got = apply1(f"cvt.rn.satfinite.{kind}x2.f32 %d0, %s0, %s0;", x.view(np.uint32), result=np.uint16)
        want = torch.from_numpy(x).to(TORCH[kind]).view(torch.uint8).numpy().astype(np.uint16)
        assert np.array_equal(got, want << 8 | want)


# **** every rounding, by fractions ****

def limited(number: Number, to: Format, words: str) -> Number:
    """What .sat, .relu and .satfinite make of a number before it is rounded."""
    sign, size = number
    if "sat" in words.split("."):
        if size == "nan" or sign: return 0, Fraction(0)
        if size == "inf" or size > 1: return 0, Fraction(1)  # type: ignore[operator]
    if "relu" in words and size != "nan" and sign: return 0, Fraction(0)
    top = decode(to.top, to)[1]
    if "satfinite" in words and size != "nan" and (size == "inf"
                                                   or size > top): return sign, top  # type: ignore[operator]
    return number


# what an H100 makes of 0x7ff8000000000000, the one NaN among the codes
NAN_OF_F64 = {FORMATS["f16"]: 0x7e00, FORMATS["bf16"]: 0x7fc0, F32: 0x7fc00000}


def expected(code: int, kind: str, to: Format, mode: str, words: str) -> int:
    """A float conversion by fractions. .ftz is of f32 alone."""
    ftz = "ftz" in words
    if ftz and kind == "f32": code = flushed(code, F32)
    if kind == "f64" and to is not F64 and decode(code, F64)[1] == "nan" and "sat" not in words.split("."):
        return NAN_OF_F64[to]
    out = encode(limited(decode(code, FORMATS[kind]), to, words), to, mode)
    return flushed(out, F32) if ftz and to is F32 else out


def check_floats(opcode: str, kind: str, to: Format, mode: str = "rn", shift: int = 0,
                 result: type = np.uint16) -> None:
    """Compares a conversion with `expected`."""
    bits = codes(kind) if BYTES[kind] > 2 else codes(kind)[::37]
    got = apply1(f"{opcode} %d0, %s0;", bits, result=result)
    for code, out in zip(bits, got, strict=True):
        want = expected(int(code), kind, to, mode, opcode)
        if want == TF32.nan and mode == "rna": continue  # test_nans_of_f32_as_an_h100_has_them
        if want == to.nan and to is F64: assert decode(int(out), to)[1] == "nan"
        else: assert int(out) == (to_word(want, shift) if shift else want), (opcode, hex(code), hex(out),
                                                                             hex(want))


def to_word(code: int, shift: int) -> int:
    """tf32 in a word of f32."""
    return 0x7fffe000 if code == TF32.nan else code << shift


@pytest.mark.sampled(12)
@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize(("to", "kind"), [("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("bf16", "f64"),
                                          ("f32", "f64"),
                                          ("f16", "bf16"), ("bf16", "f16")])
def test_float_roundings(to: str, kind: str, mode: str) -> None:
    """To a narrower format, each rounding."""
    result = UNSIGNED[BYTES[to]]
    check_floats(f"cvt.{mode}.{to}.{kind}", kind, FORMATS[to], mode, result=result)
    if to == "f32": check_floats(f"cvt.{mode}.ftz.{to}.{kind}", kind, FORMATS[to], mode, result=result)


@pytest.mark.parametrize(("to", "kind"), [("f16", "f32"), ("bf16", "f32"), ("f16", "f64"), ("bf16", "f64")])
def test_ties_go_to_even(to: str, kind: str) -> None:
    """Odd numbers of a bit more than the format has."""
    odd = (2 << (10 if to == "f16" else 7)) + np.arange(1, 9, 2)
    wide = np.concatenate([odd, -odd]).astype(np.float32 if kind == "f32" else np.float64) / 4
    got = apply1(f"cvt.rn.{to}.{kind} %d0, %s0;", wide.view(UNSIGNED[BYTES[kind]]), result=np.uint16)
    wanted = torch.from_numpy(wide).to(TORCH[to]).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("opcode", ["cvt.rn.relu.f16.f32", "cvt.rz.relu.bf16.f32", "cvt.rn.satfinite.f16.f32",
                                    "cvt.rn.relu.satfinite.bf16.f32", "cvt.rn.sat.f16.f32",
                                    "cvt.rz.ftz.f16.f32",
                                    "cvt.sat.f32.f32", "cvt.ftz.f32.f32", "cvt.ftz.sat.f32.f32",
                                    "cvt.f64.f32",
                                    "cvt.ftz.f64.f32", "cvt.sat.f32.f16", "cvt.rn.sat.f32.f64",
                                    "cvt.sat.f64.f64"])
def test_float_modifiers(opcode: str) -> None:
    """.relu, .sat, .satfinite and .ftz."""
    *words, to, kind = opcode.split(".")
    check_floats(opcode, kind, FORMATS[to], "rz" if "rz" in words else "rn", result=UNSIGNED[BYTES[to]])


@pytest.mark.parametrize("opcode", ["cvt.rna.tf32.f32", "cvt.rn.tf32.f32", "cvt.rz.tf32.f32",
                                    "cvt.rn.relu.tf32.f32",
                                    "cvt.rna.satfinite.tf32.f32"])
def test_tf32(opcode: str) -> None:
    """tf32 is a word of f32 whose low 13 bits are zero."""
    check_floats(opcode, "f32", TF32, opcode.split(".")[1], 13, np.uint32)


@pytest.mark.parametrize(("opcode", "wanted"), [
    ("cvt.rn.tf32.f32", [0x7fffe000] * 5), ("cvt.rz.tf32.f32", [0x7fffe000] * 5),
    ("cvt.rn.relu.tf32.f32", [0x7fffe000] * 5),
    ("cvt.rna.tf32.f32", [0x7f800000, 0x7fc00000, 0xff8cc000, 0xffc00000, 0xffc02000]),
    ("cvt.rna.satfinite.tf32.f32", [0x7f7fe000, 0x7fbfe000, 0xff8ca000, 0xffbfe000, 0xffc00000]),
    ("cvt.ftz.f64.f32", [0x7fffffffe0000000] * 5)])
def test_nans_of_f32_as_an_h100_has_them(opcode: str, wanted: list[int]) -> None:
    """As it has them: .rna drops low bits, and its .satfinite takes the next code towards zero."""
    bits = np.array([0x7f800001, 0x7fc00000, 0xff8cd21c, 0xffc00001, 0xffc02904], np.uint32)
    got = apply1(f"{opcode} %d0, %s0;", bits, result=np.uint64 if "f64" in opcode else np.uint32)
    assert got.tolist() == wanted


@pytest.mark.parametrize("opcode", ["cvt.rz.relu.f16x2.f32", "cvt.rz.bf16x2.f32", "cvt.rn.relu.bf16x2.f32",
                                    "cvt.rn.satfinite.bf16x2.f32", "cvt.rz.satfinite.f16x2.f32"])
def test_packed_modifiers(opcode: str) -> None:
    """Pairs: the first source is the upper half."""
    a, b = floats(COUNT, 1), floats(COUNT, 2)
    to, mode = FORMATS[opcode.split(".")[-2][:-2]], "rz" if ".rz" in opcode else "rn"
    for x, y, out in zip(a, b, apply1(f"{opcode} %d0, %s0, %s1;", a, b, result=np.uint32), strict=True):
        high, low = (expected(int(code), "f32", to, mode, opcode) for code in (x, y))
        assert int(out) == high << 16 | low


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_integral_floats(kind: str) -> None:
    """Float to float, to an integer in each direction; zeros keep their sign, .ftz flushes first."""
    bits = codes(kind)[::41] if BYTES[kind] == 2 else codes(kind)
    with np.errstate(invalid="ignore"):
        x = ((bits.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else
             bits.view({2: np.float16, 4: np.float32, 8: np.float64}[BYTES[kind]])).astype(np.float64)
    for word, function in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        got = apply1(f"cvt.{word}.{kind}.{kind} %d0, %s0;", bits, result=UNSIGNED[BYTES[kind]])
        with np.errstate(invalid="ignore"): want = function(x)
        for y, out in zip(want, got, strict=True):
            code = encode(decode(int(np.float64(y).view(np.uint64)), F64), FORMATS[kind])
            if np.isnan(y): assert decode(int(out), FORMATS[kind])[1] == "nan"
            else: assert int(out) == code
    got = apply1("cvt.rpi.ftz.f32.f32 %d0, %s0;", np.array([1, 0x80000001, 0x00800000], np.uint32),
                 result=np.uint32)
    assert got.tolist() == [0, 0x80000000, 0x3f800000]


# **** integers ****

@pytest.mark.sampled(32)
@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("to", INTEGERS)
def test_integers(to: str, kind: str) -> None:
    """Integer to integer, cut and saturated, between registers as wide as the types and wider."""
    low, high = extent(to)
    least, most = extent(kind)
    saturates = not low <= least <= most <= high  # PTX has no .sat where it would do nothing
    for wider in (0, 1):
        sizes = [min(8, max(bits_of(t) // 8, 2) << wider) for t in (to, kind)]
        source = integers(8 * sizes[1], COUNT, 1)
        body = f"cvt.{to}.{kind} %d0, %s0; cvt{'.sat' * saturates}.{to}.{kind} %d1, %s0;"
        cut, kept = apply(body, [source], [UNSIGNED[sizes[0]]] * 2)
        ones = (1 << 8 * sizes[0]) - 1
        for x, a, b in zip(source, cut, kept, strict=True):
            number = value(int(x), kind)
            assert int(a) == value(number, to) & ones
            assert int(b) == (max(low, min(number, high)) if saturates else value(number, to)) & ones


@pytest.mark.sampled(16)
@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_to_floats(kind: str, mode: str) -> None:
    """Each rounding of each format."""
    source = integers(max(bits_of(kind), 16), COUNT, 1)
    formats = [to for to in FORMATS if not (to == "bf16" and bits_of(kind) == 8)]
    body = " ".join(f"cvt.{mode}.{to}.{kind} %d{i}, %s0;" for i, to in enumerate(formats))
    got = apply(body, [source], [UNSIGNED[BYTES[to]] for to in formats])
    for result, to in zip(got, (FORMATS[name] for name in formats), strict=True):
        for x, out in zip(source, result, strict=True):
            number = value(int(x), kind)
            assert int(out) == encode((int(number < 0), Fraction(abs(number))), to, mode), (number, to)
    sat = apply1(f"cvt.{mode}.sat.f32.{kind} %d0, %s0;", source, result=np.uint32)
    assert all(int(out) == (0x3f800000 if value(int(x), kind) > 0 else 0) for x,
               out in zip(source, sat, strict=True))


def whole(number: Number, word: str) -> int:
    """A finite number as an integer."""
    size = number[1]
    assert isinstance(size, Fraction)
    x = -size if number[0] else size
    return {"rni": round, "rzi": int, "rmi": lambda v: v.__floor__(), "rpi": lambda v: v.__ceil__()}[word](x)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("word", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("kind", FORMATS)
def test_floats_to_integers(kind: str, word: str) -> None:
    """Each direction to each integer type: clamped; NaN is zero, or the highest bit where 64 bits are
    involved."""
    bits = codes(kind)[::53] if BYTES[kind] == 2 else codes(kind)
    near = np.array([2.0**k + d for k in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, -0.5, 0, 0.5)],
                    np.float64)
    if kind == "f64": bits = np.concatenate([bits, near.view(np.uint64), (-near).view(np.uint64)])
    if kind == "f32":
        bits = np.concatenate([bits, near.astype(np.float32).view(np.uint32),
                               (-near).astype(np.float32).view(np.uint32)])
    integer_types = INTEGERS[2:] if kind == "bf16" else INTEGERS
    body = " ".join(f"cvt.{word}.{to}.{kind} %d{i}, %s0;" for i, to in enumerate(integer_types))
    sizes = [max(bits_of(to) // 8, 2) for to in integer_types]
    got = apply(body, [bits], [UNSIGNED[size] for size in sizes])
    for to, size, result in zip(integer_types, sizes, got, strict=True):
        n, (low, high) = bits_of(to), extent(to)
        for code, out in zip(bits, result, strict=True):
            number = decode(int(code), FORMATS[kind])
            if number[1] == "nan": want = 1 << (n - 1) if n == 64 or kind == "f64" else 0
            elif number[1] == "inf": want = low if number[0] else high
            else: want = max(low, min(whole(number, word), high))
            if number[1] == "nan": want = value(want, to)
            assert int(out) == want & ((1 << 8 * size) - 1), (to, hex(code), int(out), want)


@pytest.mark.parametrize(("kind", "word"), [("f32", 0), ("f64", 1 << 31)])
def test_nan_as_an_integer(kind: str, word: int) -> None:
    """Zero, or the highest bit where 64 bits are involved, as an H100 has it."""
    bits = np.full(32, np.nan, np.float32 if kind == "f32" else np.float64).view(UNSIGNED[BYTES[kind]])
    body = " ".join(f"cvt.rzi.{to}.{kind} %d{i}, %s0;" for i, to in enumerate(INTEGERS[4:]))
    got = apply(body, [bits], [UNSIGNED[size] for size in (4, 4, 8, 8)])
    assert [set(each.tolist()) for each in got] == [{word}, {word}, {1 << 63}, {1 << 63}]


def test_flushed_before_rounding_up() -> None:
    """cvt.rpi.ftz of a subnormal is zero."""
    body = "cvt.rpi.ftz.s32.f32 %d0, %s0; cvt.rpi.s32.f32 %d1, %s0;"
    got = apply(body, [np.array([1, 0x007fffff], np.uint32)], [np.uint32] * 2)
    assert [x.tolist() for x in got] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("to", ["s16", "u16", "s8", "u8", "s4", "u4", "s2", "u2"])
def test_pack(to: str) -> None:
    """cvt.pack: a above b, clamped; below 16 bits, c above both."""
    n = int(to[1:])
    a, b, c = (integers(32, COUNT, seed) for seed in (1, 2, 3))
    tail, operands = (".s32.b32", ", %s2") if n < 16 else (".s32", "")
    low, high = extent(to)
    def cut(x: int) -> int: return max(low, min(signed(x, 32), high)) & ((1 << n) - 1)
    got = apply1(f"cvt.pack.sat.{to}{tail} %d0, %s0, %s1{operands};", a, b, c, result=np.uint32)
    for x, y, z, out in zip(a, b, c, got, strict=True):
        above = int(z) << 2 * n if n < 16 else 0
        assert int(out) == (above | cut(int(x)) << n | cut(int(y))) & 0xffffffff
