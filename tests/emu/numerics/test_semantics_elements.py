"""The model of operations element by element against the emulator's CUDA cores, bit for bit.

The quick run has all edges (pairs and triples of them too) and 2^14 drawn operands; the slow one 2^20.
"""
from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.support.numerics.semantics_case import drawn, edges
from tests.support.ptx.lanewise import apply1
from tinygrad_nv.numerics.semantics import FORMATS, apply, convert
from tinygrad_nv.numerics.semantics.formats import Codes, Format

QUICK, MILLION = 2 ** 14, 2 ** 20
ARITY = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "div": 2, "rcp": 1, "sqrt": 1, "max": 2, "min": 2}
MODES = ("rn", "rz", "rm", "rp")
CASES = [
    *[(name, "f32", mode, ftz) for name in ("add", "sub", "mul", "fma", "div", "rcp", "sqrt")
      for mode in MODES for ftz in ("", ".ftz")],
    *[(name, kind, "rn", "") for name in ("add", "sub", "mul", "fma") for kind in ("f16", "bf16")],
    *[(name, "f16", "rn", ".ftz") for name in ("add", "sub", "mul", "fma")],
    *[(name, kind, "", "") for name in ("max", "min", "max.NaN", "min.NaN")
      for kind in ("f32", "f16", "bf16")],
]


def name_of(case: object) -> str: return "-".join(case) if isinstance(case, tuple) else str(case)


def operands(of: Format, number: int, count: int, seed: int) -> list[Codes]:
    """Every combination of edges, then drawn codes; some sums of two cancel, and nearly."""
    rng = np.random.default_rng(seed)
    some = edges(of) if number < 3 else edges(of)[::3]
    combined = np.array(list(itertools.product(some, repeat=number)), of.kind).T
    more = [drawn(of, (count,), rng) for _ in range(number)]
    if number > 1:
        more[-1][::7] = more[0][::7] ^ of.kind(of.sign)
        more[-1][1::7] = (more[0][1::7] ^ of.kind(of.sign)) + of.kind(1)
    return [np.concatenate([a, b]) for a, b in zip(combined, more, strict=True)]


def check(case: tuple[str, str, str, str], count: int) -> None:
    """An instruction and the model of it."""
    opcode, kind, mode, ftz = case
    name, of = opcode.partition(".")[0], FORMATS[kind]
    given = operands(of, ARITY[name], count, 1)
    listed = ", ".join(["%d0", *(f"%s{i}" for i in range(len(given)))])
    suffix = f".{mode}" * bool(mode)
    got = apply1(f"{opcode}{suffix}{ftz}.{kind} {listed};", *given, result=of.kind)
    want = apply(name, of, given, mode or "rn", ftz=bool(ftz), nan="NaN" in opcode)
    wrong = np.nonzero(got != want)[0]
    assert not len(wrong), (case, [hex(each[wrong[0]]) for each in (*given, got, want)], len(wrong))


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_operations(case: tuple[str, str, str, str]) -> None: check(case, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_million_operands(case: tuple[str, str, str, str]) -> None: check(case, MILLION)


@pytest.mark.parametrize("name", ["add", "mul", "fma"])
def test_saturation(name: str) -> None:
    given = operands(FORMATS["f32"], ARITY[name], QUICK, 2)
    listed = ", ".join(["%d0", *(f"%s{i}" for i in range(len(given)))])
    got = apply1(f"{name}.rn.sat.f32 {listed};", *given, result=np.uint32)
    assert np.array_equal(got, apply(name, FORMATS["f32"], given, saturate=True))


# **** conversions ****

def floats(count: int) -> Codes:
    """float32 at and around every number of the 16-bit formats, edges, drawn ones."""
    rng = np.random.default_rng(3)
    halves = np.arange(1 << 16, dtype=np.uint16)
    exact = [convert(halves, FORMATS[kind], FORMATS["f32"]) for kind in ("f16", "bf16")]
    ties = [codes + np.uint32((1 << shift) + by) for codes in exact for shift in (12, 15)
            for by in (-1, 0, 1)]
    return np.concatenate([*exact, *ties, edges(FORMATS["f32"]), drawn(FORMATS["f32"], (count,), rng)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("to", "mode"), [("f16", "rn"), ("f16", "rz"), ("bf16", "rn"), ("bf16", "rz"),
                                          ("tf32", "rna"), ("tf32", "rn"), ("tf32", "rz")])
def test_narrowing_of_float32(to: str, mode: str) -> None:
    given = floats(QUICK)
    got = apply1(f"cvt.{mode}.{to}.f32 %d0, %s0;", given, result=FORMATS[to].kind)
    want = convert(given, FORMATS["f32"], FORMATS[to], mode)
    # the lower 13 bits of tf32 are not read, NaN's neither
    unread = FORMATS[to].kind(~((1 << FORMATS[to].unread) - 1) & (1 << FORMATS[to].bits) - 1)
    assert np.array_equal(got & unread, want)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("to", ["e4m3", "e5m2"])
def test_narrowing_to_fp8(to: str) -> None:
    """From float32 and, all codes, from float16; too large ones become the largest."""
    given = floats(QUICK)
    got = apply1(f"cvt.rn.satfinite.{to}x2.f32 %d0, %s0, %s1;", given, given[::-1].copy(), result=np.uint16)
    want = convert(given, FORMATS["f32"], FORMATS[to]).astype(np.uint16)
    assert np.array_equal(got, want << 8 | want[::-1])
    halves = np.arange(1 << 16, dtype=np.uint16)
    got = apply1(f"cvt.rn.satfinite.{to}x2.f16x2 %d0, %s0;", halves.astype(np.uint32), result=np.uint16)
    assert np.array_equal(got & 0xff, convert(halves, FORMATS["f16"], FORMATS[to]))


@pytest.mark.parametrize("of", ["f16", "bf16", "e4m3", "e5m2"])
def test_widening_of_every_code(of: str) -> None:
    codes = np.arange(1 << FORMATS[of].bits, dtype=FORMATS[of].kind)
    if of in ("f16", "bf16"):
        got, to = apply1(f"cvt.f32.{of} %d0, %s0;", codes, result=np.uint32), "f32"
    else:
        got = apply1(f"cvt.rn.f16x2.{of}x2 %d0, %s0;", codes.astype(np.uint16), result=np.uint32) & 0xffff
        to = "f16"
    assert np.array_equal(got, convert(codes, FORMATS[of], FORMATS[to]))
