"""mma.sync and mma.sp: every shape and type against numpy, exact on integers, bounded on random numbers."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.ptx.tensor_case import (
    BITS,
    FLOATS,
    HEADER,
    Mma,
    decode,
    integers,
    numbers,
    pack,
    randoms,
    run_warp,
    sparsify,
    warp_kernel,
    words,
)
from tinygrad_nv.errors import PTXError
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.emulator.fragments import a_fragment, b_fragment, c_fragment

DENSE = [
    *[Mma(16, 8, k, d, a, a) for a in ("f16", "bf16") for k in (8, 16) for d in ("f32", "f16")
      if (a, d) != ("bf16", "f16")],
    *[Mma(16, 8, k, "f32", "tf32", "tf32") for k in (4, 8)],
    *[Mma(16, 8, k, d, a, b) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for k in (16, 32)
      for d in ("f32", "f16")],
    *[Mma(m, 8, k, "s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")
      for m, k in ((8, 16), (16, 16), (16, 32))],
    *[Mma(m, 8, k, "s32", a, b) for a in ("s4", "u4") for b in ("s4", "u4")
      for m, k in ((8, 32), (16, 32), (16, 64))],
]
SPARSE = [
    *[Mma(16, 8, k, d, a, a, sparse=name, selector=s) for a in ("f16", "bf16") for d in ("f32", "f16")
      for k, selectors in ((16, 4), (32, 2)) for s in range(selectors)
      for name in ("sp", "sp::ordered_metadata")

      if (a, d) != ("bf16", "f16")],
    *[Mma(16, 8, k, "f32", "tf32", "tf32", sparse="sp", selector=s) for k, selectors in ((8, 4), (16, 2))
      for s in range(selectors)],
    *[Mma(16, 8, k, "s32", a, "u8", sparse="sp", selector=s) for a in ("s8", "u8")
      for k, selectors in ((32, 2), (64, 1)) for s in range(selectors)],
    *[Mma(16, 8, k, "s32", a, "s4", sparse="sp", selector=s) for a in ("s4", "u4")
      for k, selectors in ((64, 2), (128, 1)) for s in range(selectors)],
    *[Mma(16, 8, 64, "f32", a, b, sparse="sp") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")],
]
ON_AMPERE = [Mma(16, 8, 16, "f32", "bf16", "bf16", arch="sm_80"),
             Mma(16, 8, 16, "f16", "f16", "f16", arch="sm_80"),
             Mma(16, 8, 8, "f32", "tf32", "tf32", arch="sm_80"),
             Mma(16, 8, 32, "f32", "e4m3", "e5m2", arch="sm_89")]


def name_of(case: Mma) -> str:
    return f"{case.arch}-{case.name[4:]}-{case.selector}"


def start(case: Mma, seed: int = 1) -> tuple[np.random.Generator, np.ndarray]:
    """A generator and an integer C."""
    rng = np.random.default_rng(seed)
    low, high = (-2 ** 31, 2 ** 31) if case.d == "s32" else (-9, 10)
    return rng, rng.integers(low, high, (case.m, case.n))


@pytest.mark.sampled(17)
@pytest.mark.parametrize("case", [*DENSE, *ON_AMPERE], ids=name_of)
def test_dense_products_of_integers_are_exact(case: Mma) -> None:
    rng, c = start(case)
    a, b = integers(rng, case.a, (case.m, case.k)), integers(rng, case.b, (case.k, case.n))
    got = numbers(case.run(a, b, words(c, case.d)), case.d)
    want = decode(a, case.a) @ decode(b, case.b) + c
    if case.d == "s32": want = want.astype(np.int64).astype(np.int32)  # wraps
    np.testing.assert_array_equal(got, want)


@pytest.mark.sampled(19)
@pytest.mark.parametrize("case", SPARSE, ids=name_of)
def test_sparse_products_of_integers_are_exact(case: Mma) -> None:
    rng, c = start(case)
    sparse = sparsify(rng, integers(rng, case.a, (case.m, case.k)), case.a)
    b = integers(rng, case.b, (case.k, case.n))
    got = numbers(case.run(sparse.stored, b, words(c, case.d), sparse.codes), case.d)
    want = decode(sparse.dense, case.a) @ decode(b, case.b) + c
    if case.d == "s32": want = want.astype(np.int64).astype(np.int32)
    np.testing.assert_array_equal(got, want)


def bound(a: np.ndarray, b: np.ndarray, c: np.ndarray, case: Mma) -> np.ndarray:
    """Error bound elementwise. Alignment truncates each of at most k + 1 terms below 2^-F of the largest
    (whose exponent is at most 1 above that of the sum of magnitudes), for each step; the result rounds at
    2^-23 (8-bit floats on Ada: 2^-13) of itself, or for f16 at 2^-11."""
    size = np.abs(a) @ np.abs(b) + np.abs(c)
    eight_on_ada = case.arch == "sm_89" and case.a in ("e4m3", "e5m2")
    aligned = 2.0 ** -13 if eight_on_ada else 2.0 ** -24
    rounded = 2.0 ** -13 if eight_on_ada else 2.0 ** -11 if case.d == "f16" else 2.0 ** -23
    steps = 2
    return size * steps * ((case.k + 1) * aligned + rounded) + (2.0 ** -24 if case.d == "f16" else 0)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", [c for c in (*DENSE, *ON_AMPERE) if c.a in FLOATS], ids=name_of)
def test_random_products_are_near_float64(case: Mma) -> None:
    rng = np.random.default_rng(2)
    a, b = randoms(rng, case.a, (case.m, case.k)), randoms(rng, case.b, (case.k, case.n))
    c = numbers(words(rng.standard_normal((case.m, case.n)), case.d), case.d)
    got = numbers(case.run(a, b, words(c, case.d)), case.d)
    left, right = decode(a, case.a), decode(b, case.b)
    error = np.abs(got - (left @ right + c))
    assert (error <= bound(left, right, c, case)).all(), error.max()
    if case.d == "f32": assert error.max() > 0  # f32 cannot hold these sums


@pytest.mark.parametrize("kind", ["s8", "u8", "s4", "u4"])
@pytest.mark.parametrize("sign", [1, -1])
def test_saturation(kind: str, sign: int) -> None:
    k = 32 * 8 // BITS[kind]
    other = "s" + kind[1:]
    rng = np.random.default_rng(3)
    a = np.full((16, k), 1, np.uint32)
    b = integers(rng, other, (k, 8))
    c = np.full((16, 8), sign * (2 ** 31 - 5) - (sign < 0))
    want = decode(a, kind) @ decode(b, other) + c
    plain, clamped = (numbers(Mma(16, 8, k, "s32", kind, other, modifiers).run(a, b, words(c, "s32")), "s32")
                      for modifiers in ("", ".satfinite"))
    np.testing.assert_array_equal(clamped, np.clip(want, -2 ** 31, 2 ** 31 - 1))
    np.testing.assert_array_equal(plain, want.astype(np.int64).astype(np.int32))
    assert (clamped != plain).any()


@pytest.mark.parametrize(("m", "k"), [(8, 128), (16, 128), (16, 256)])
@pytest.mark.parametrize("operation", ["and", "xor"])
def test_single_bits(m: int, k: int, operation: str) -> None:
    rng = np.random.default_rng(4)
    a, b = integers(rng, "b1", (m, k)), integers(rng, "b1", (k, 8))
    c = rng.integers(-99, 99, (m, 8))
    got = numbers(Mma(m, 8, k, "s32", "b1", "b1", f".{operation}.popc").run(a, b, words(c, "s32")), "s32")
    pairs = a[:, :, None] & b[None] if operation == "and" else a[:, :, None] ^ b[None]
    np.testing.assert_array_equal(got, pairs.sum(1) + c)


@pytest.mark.parametrize(("m", "k"), [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_double_precision(m: int, k: int) -> None:
    """Fused multiply-adds in the order of k: each rounds at 2^-53 of what it gives."""
    rng = np.random.default_rng(5)
    a, b, c = rng.standard_normal((m, k)), rng.standard_normal((k, 8)), rng.standard_normal((m, 8))
    case = Mma(m, 8, k, "f64", "f64", "f64")
    sources = [pack(a.view(np.uint64), a_fragment(64, m, k), 64),
               pack(b.view(np.uint64), b_fragment(64, k), 64),
               c.view(np.uint64)[c_fragment(m, 8)]]
    registers = run_warp(case.ptx(), sources, case.counts()[0], "sm_90a")
    got = np.empty((m, 8))
    got[c_fragment(m, 8)] = registers.view(np.float64)
    want = np.longdouble(a) @ np.longdouble(b) + c
    assert (np.abs(got - want) <= (np.abs(a) @ np.abs(b) + np.abs(c)) * k * 2.0 ** -53).all()


def test_results_may_replace_their_operands() -> None:
    """D in the registers of C and of A."""
    rng = np.random.default_rng(6)
    a, b = integers(rng, "f16", (16, 16)), integers(rng, "f16", (16, 8))
    case = Mma(16, 8, 16, "f32", "f16", "f16")
    ptx = warp_kernel(f"{case.name} {{%a0, %c1, %a2, %c3}}, {{%a0, %a1, %a2, %a3}}, {{%b0, %b1}}, "
                      "{%c0, %c1, %c2, %c3};\nmov.b32 %d0, %a0;\nmov.b32 %d1, %c1;\nmov.b32 %d2, %a2;\n"
                      "mov.b32 %d3, %c3;", {"a": 4, "b": 2, "c": 4}, 4, "sm_90a")
    registers = run_warp(ptx, [pack(a, a_fragment(16, 16, 16), 16), pack(b, b_fragment(16, 16), 16),
                               np.zeros((4, 32), np.uint32)], 4, "sm_90a")
    got = np.empty((16, 8), np.uint32)
    got[c_fragment(16, 8)] = registers
    np.testing.assert_array_equal(numbers(got, "f32"), decode(a, "f16") @ decode(b, "f16"))


def test_flops_are_counted() -> None:
    case = Mma(16, 8, 16, "f32", "bf16", "bf16")
    emu = Emulator()
    report = emu.launch(case.ptx(), 3, 32, [emu.alloc(np.zeros((10, 32), np.uint32)), emu.alloc(4 * 128)])
    assert sum(site.flops for site in report.stats.sites) == 3 * 2 * 16 * 8 * 16


@pytest.mark.parametrize(("instruction", "said"), [
    ("mma.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%a0, %a1, %a2, %a3}, {%a0}, {%a0}, {%a0};",
     "no instruction"),
    ("mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16 {%a0, %a1}, {%a0}, {%a0}, {%a0};",
     "no instruction"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32 {%a0, %a1}, {%a0}, {%a0}, {%a0};",
     "no instruction"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%a0, %a1}, {%a0}, {%a0}, {%a0};",
     "2 registers for D"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%a0, %a1, %a2, %a3}, {%o, %a1}, {%a0}, "
     "{%a0, %a1, %a2, %a3};",
     "another size for A"),
])
def test_what_cannot_be_is_refused(instruction: str, said: str) -> None:
    text = HEADER.format(arch="sm_90a") + "{\n.reg .b32 %a<4>;\n.reg .b64 %o;\n" + instruction + "\nret;\n}"
    with pytest.raises(PTXError, match=said) as caught: Emulator().launch(text, 1, 32, [0, 0])
    assert caught.value.line == 8
