"""Integer arithmetic, logic, shifts and bit fields of the emulator against Python's integers, bit for bit."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.ptx.lanewise import UNSIGNED, apply, apply1, integers, signed, typed

COUNT = 640


def widths(kind: str) -> int:
    """Bits of a type."""
    return int(kind[1:])


def check(opcode: str, kinds: str, expected: Callable[..., int], count: int = COUNT, tail: str = "") -> None:
    """Applies `opcode d, a, …` to random operands of `kinds` (the destination's type first), and compares
    with
    `expected` of Python integers, cut to the destination's width."""
    to, *sources = kinds.split()
    given = [integers(widths(kind), count, seed) for seed, kind in enumerate(sources)]
    operands = ", ".join(["%d0", *(f"%s{i}" for i in range(len(sources)))])
    got = apply1(f"{opcode} {operands}{tail};", *given, result=UNSIGNED[widths(to) // 8])
    ones = (1 << widths(to)) - 1
    columns = zip(*([typed(int(x), kind) for x in array] for array, kind in zip(given, sources, strict=True)),
                  strict=True)
    for i, row in enumerate(columns):
        assert int(got[i]) == expected(*row) & ones, (opcode, row, hex(int(got[i])),
                                                      hex(expected(*row) & ones))


def clamp(x: int, bits: int) -> int:
    """Saturated to a signed type."""
    return max(-(1 << (bits - 1)), min(x, (1 << (bits - 1)) - 1))


def quotient(a: int, b: int, bits: int) -> int:
    """Towards zero; all ones for a divisor of zero."""
    if b == 0: return (1 << bits) - 1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int, bits: int) -> int:
    """With the sign of the dividend; all ones for a divisor of zero, as an H100 has it."""
    return -1 if b == 0 else a - quotient(a, b, bits) * b


ALL = ("s16", "u16", "s32", "u32", "s64", "u64")
CASES: list[tuple[str, str, Callable[..., int]]] = []


def add(opcode: str, kinds: str, expected: Callable[..., int]) -> None:
    """A row of the table."""
    CASES.append((opcode, kinds, expected))


for kind in ALL:
    n = widths(kind)
    add(f"add.{kind}", f"{kind} {kind} {kind}", lambda a, b: a + b)
    add(f"sub.{kind}", f"{kind} {kind} {kind}", lambda a, b: a - b)
    add(f"mul.lo.{kind}", f"{kind} {kind} {kind}", lambda a, b: a * b)
    add(f"mul.hi.{kind}", f"{kind} {kind} {kind}", lambda a, b, n=n: a * b >> n)
    add(f"mad.lo.{kind}", f"{kind} {kind} {kind} {kind}", lambda a, b, c: a * b + c)
    add(f"mad.hi.{kind}", f"{kind} {kind} {kind} {kind}", lambda a, b, c, n=n: (a * b >> n) + c)
    add(f"div.{kind}", f"{kind} {kind} {kind}", lambda a, b, n=n: quotient(a, b, n))
    add(f"rem.{kind}", f"{kind} {kind} {kind}", lambda a, b, n=n: remainder(a, b, n))
    add(f"min.{kind}", f"{kind} {kind} {kind}", min)
    add(f"max.{kind}", f"{kind} {kind} {kind}", max)
    add(f"sad.{kind}", f"{kind} {kind} {kind} {kind}", lambda a, b, c: c + abs(a - b))
    add(f"shr.{kind}", f"{kind} {kind} u32", lambda a, b: a >> min(b, 64))
    if n < 64:
        wide = f"{kind[0]}{2 * n}"
        add(f"mul.wide.{kind}", f"{wide} {kind} {kind}", lambda a, b: a * b)
        add(f"mad.wide.{kind}", f"{wide} {kind} {kind} {wide}", lambda a, b, c: a * b + c)
    if kind[0] == "s":
        add(f"abs.{kind}", f"{kind} {kind}", abs)
        add(f"neg.{kind}", f"{kind} {kind}", lambda a: -a)
    if n >= 32:
        add(f"bfind.{kind}", f"u32 {kind}", lambda a: (a if a >= 0 else ~a).bit_length() - 1)
        add(f"bfind.shiftamt.{kind}", f"u32 {kind}",
            lambda a, n=n: n - (a if a >= 0 else ~a).bit_length() if a not in (0, -1) else -1)
for n in (16, 32, 64):
    kind = f"b{n}"
    for name, function in (("and", lambda a, b: a & b), ("or", lambda a, b: a | b),
                           ("xor", lambda a, b: a ^ b)):
        add(f"{name}.{kind}", f"{kind} {kind} {kind}", function)
    add(f"not.{kind}", f"{kind} {kind}", lambda a: ~a)
    add(f"cnot.{kind}", f"{kind} {kind}", lambda a: int(a == 0))
    add(f"shl.{kind}", f"{kind} {kind} u32", lambda a, b: a << min(b, 64))
    add(f"shr.{kind}", f"{kind} {kind} u32", lambda a, b: a >> min(b, 64))
for n in (32, 64):
    kind = f"b{n}"
    add(f"popc.{kind}", f"u32 {kind}", lambda a: a.bit_count())
    add(f"clz.{kind}", f"u32 {kind}", lambda a, n=n: n - a.bit_length())
    add(f"brev.{kind}", f"{kind} {kind}", lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2))
add("add.sat.s32", "s32 s32 s32", lambda a, b: clamp(a + b, 32))
add("sub.sat.s32", "s32 s32 s32", lambda a, b: clamp(a - b, 32))
add("mad.hi.sat.s32", "s32 s32 s32 s32", lambda a, b, c: clamp((a * b >> 32) + c, 32))
add("min.relu.s32", "s32 s32 s32", lambda a, b: max(min(a, b), 0))
add("max.relu.s32", "s32 s32 s32", lambda a, b: max(a, b, 0))


def low24(x: int, kind: str) -> int:
    """The low 24 bits."""
    return typed(x & 0xffffff, f"{kind[0]}24")


for kind in ("s32", "u32"):
    add(f"mul24.lo.{kind}", f"{kind} {kind} {kind}", lambda a, b, k=kind: low24(a, k) * low24(b, k))
    add(f"mul24.hi.{kind}", f"{kind} {kind} {kind}", lambda a, b, k=kind: low24(a, k) * low24(b, k) >> 16)
    add(f"mad24.lo.{kind}", f"{kind} {kind} {kind} {kind}", lambda a, b, c,
        k=kind: low24(a, k) * low24(b, k) + c)
    add(f"mad24.hi.{kind}", f"{kind} {kind} {kind} {kind}",
        lambda a, b, c, k=kind: (low24(a, k) * low24(b, k) >> 16) + c)
add("mad24.hi.sat.s32", "s32 s32 s32 s32", lambda a,
    b, c: clamp((low24(a, "s") * low24(b, "s") >> 16) + c, 32))


@pytest.mark.sampled(68)
@pytest.mark.parametrize(("opcode", "kinds", "expected"), CASES, ids=[case[0] for case in CASES])
def test_against_python(opcode: str, kinds: str, expected: Callable[..., int]) -> None:
    """Every instruction of the table on random operands and edges."""
    check(opcode, kinds, expected)


# **** shifts and fields, where small amounts matter ****

def small(count: int, seed: int, top: int = 70) -> np.ndarray:
    """Amounts around the width, and large ones."""
    random = np.random.default_rng(seed)
    large = random.integers(0, 1 << 32, count, dtype=np.uint32)
    return np.where(random.integers(8, size=count) == 0, large,
                    random.integers(0, top, count, dtype=np.uint32)).astype(np.uint32)


@pytest.mark.parametrize("kind", ["s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64"])
def test_shifts_clamp(kind: str) -> None:
    """Amounts up to and beyond the width."""
    n = widths(kind)
    a, b = integers(n, COUNT, 1), small(COUNT, 2)
    right = apply1(f"shr.{kind} %d0, %s0, %s1;", a, b, result=UNSIGNED[n // 8])
    left = apply1(f"shl.b{n} %d0, %s0, %s1;", a, b, result=UNSIGNED[n // 8])
    for x, by, r, q in zip(a, b, right, left, strict=True):
        x, by, ones = int(x), min(int(by), 64), (1 << n) - 1
        assert int(r) == (typed(x, kind) >> by) & ones
        assert int(q) == (x << by) & ones


@pytest.mark.parametrize("mode", ["wrap", "clamp"])
def test_funnel_shifts(mode: str) -> None:
    """Of the 64 bits b:a."""
    a, b, c = integers(32, COUNT, 1), integers(32, COUNT, 2), small(COUNT, 3, 40)
    left, right = apply(f"shf.l.{mode}.b32 %d0, %s0, %s1, %s2; shf.r.{mode}.b32 %d1, %s0, %s1, %s2;",
                        [a, b, c],
                        [np.uint32, np.uint32])
    for x, y, by, q, r in zip(a, b, c, left, right, strict=True):
        by = int(by) & 31 if mode == "wrap" else min(int(by), 32)
        word = int(y) << 32 | int(x)
        assert int(q) == word << by >> 32 & 0xffffffff
        assert int(r) == word >> by & 0xffffffff


def extracted(a: int, at: int, length: int, kind: str) -> int:
    """bfe, bit by bit as the manual has it; of 64 bits an H100 takes all of `at` and `length`."""
    top = widths(kind) - 1
    if top == 31: at, length = at & 255, length & 255
    sign = 0 if kind[0] == "u" or length == 0 else a >> min(at + length - 1, top) & 1
    return sum((a >> (at + i) & 1 if i < length and at + i <= top else sign) << i for i in range(top + 1))


@pytest.mark.parametrize("kind", ["s32", "u32", "s64", "u64"])
def test_fields_out(kind: str) -> None:
    """bfe."""
    n = widths(kind)
    a, b, c = integers(n, COUNT, 1), small(COUNT, 2), small(COUNT, 3)
    got = apply1(f"bfe.{kind} %d0, %s0, %s1, %s2;", a, b, c, result=UNSIGNED[n // 8])
    for x, at, length, r in zip(a, b, c, got, strict=True):
        assert int(r) == extracted(int(x), int(at), int(length), kind), (hex(x), at, length)


@pytest.mark.parametrize("n", [32, 64])
def test_fields_in(n: int) -> None:
    """bfi."""
    a, b, c, d = integers(n, COUNT, 1), integers(n, COUNT, 2), small(COUNT, 3), small(COUNT, 4)
    got = apply1(f"bfi.b{n} %d0, %s0, %s1, %s2, %s3;", a, b, c, d, result=UNSIGNED[n // 8])
    for x, y, at, length, r in zip(a, b, c, d, got, strict=True):
        want, at, length = int(y), *(int(i) & 255 if n == 32 else int(i) for i in (at, length))
        for i in range(min(length, max(n - at, 0))):
            want = want & ~(1 << (at + i)) | (int(x) >> i & 1) << (at + i)
        assert int(r) == want


def test_fields_beyond_a_word_as_an_h100_has_them() -> None:
    """Positions and lengths of more than 8 bits, of 64-bit fields."""
    a = np.array([0x61ae321cf5e93fd4, 0xffffffffffffe7d8, 0xfff2a1121b13f6a9], np.uint64)
    at = np.array([0x99a03025, 0x7e60e106, 0x14], np.uint32)
    length = np.array([0x1a, 0x2e, 0xbf323e03], np.uint32)
    got = apply("bfe.s64 %d0, %s0, %s1, %s2; bfe.u64 %d1, %s0, %s1, %s2;", [a, at, length], [np.uint64] * 2)
    assert got[0].tolist() == [0, 0xffffffffffffffff, 0xffffffff2a1121b1]
    assert got[1].tolist() == [0, 0, 0xfff2a1121b1]
    a, b = np.array([0xfffff0c47cf51fc7, 0xffffffffffffca1f], np.uint64), np.array([7, 0x2faa], np.uint64)
    at, length = np.array([0xde860724, 0xc], np.uint32), np.array([0x3b, 0x96e1e31c], np.uint32)
    got = apply("bfi.b64 %d0, %s0, %s1, %s2, %s3;", [a, b, at, length], [np.uint64])
    assert got[0].tolist() == [7, 0xfffffffffca1ffaa]


@pytest.mark.parametrize("mode", ["clamp", "wrap"])
def test_extensions_and_masks(mode: str) -> None:
    """szext and bmsk."""
    a, b, at = integers(32, COUNT, 1), small(COUNT, 2, 40), small(COUNT, 3, 40)
    body = (f"szext.{mode}.s32 %d0, %s0, %s1; szext.{mode}.u32 %d1, %s0, %s1;"
            f"bmsk.{mode}.b32 %d2, %s2, %s1;")
    for x, bits, start, s, u, mask in zip(a, b, at, *apply(body, [a, b, at], [np.uint32] * 3), strict=True):
        x, bits, start = int(x), int(bits), int(start)
        if mode == "wrap": bits, start = bits & 31, start & 31
        kept = x & ((1 << min(bits, 32)) - 1)
        assert int(u) == kept
        assert int(s) == (signed(kept, min(bits, 32)) & 0xffffffff if bits else 0)
        assert int(mask) == (((1 << min(bits, 32)) - 1) << start & 0xffffffff if start < 32 else 0)


def nth(mask: int, base: int, offset: int) -> int:
    """fns, as the manual has it."""
    if base > 31: return 0xffffffff
    if offset == 0: return base if mask >> base & 1 else 0xffffffff
    step, left = (1 if offset > 0 else -1), abs(offset)
    places = [at for at in range(base, 32 if step > 0 else -1, step) if mask >> at & 1]
    return places[left - 1] if left <= len(places) else 0xffffffff


def test_find_nth_set() -> None:
    """fns, upwards and downwards."""
    a, b = integers(32, COUNT, 1), np.arange(COUNT, dtype=np.uint32) % 32
    c = np.random.default_rng(3).integers(-6, 7, COUNT).astype(np.int32).view(np.uint32)
    got = apply1("fns.b32 %d0, %s0, %s1, %s2;", a, b, c, result=np.uint32)
    assert [int(x) for x in got] == [nth(int(x), int(y), signed(int(z), 32)) for x, y,
                                     z in zip(a, b, c, strict=True)]


# **** bytes ****

def byte_of(a: int, b: int, nibble: int) -> int:
    """One byte of prmt."""
    byte = (b << 32 | a) >> 8 * (nibble & 7) & 255
    return (255 if byte >> 7 else 0) if nibble & 8 else byte


def test_permute() -> None:
    """prmt with any selector."""
    a, b, c = (integers(32, COUNT, seed) for seed in (1, 2, 3))
    got = apply1("prmt.b32 %d0, %s0, %s1, %s2;", a, b, c, result=np.uint32)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        assert int(r) == sum(byte_of(int(x), int(y), int(z) >> 4 * i & 15) << 8 * i for i in range(4))


# the manual's table, bytes 3 to 0 for selectors 0 to 3
MODES = {"f4e": ("3210", "4321", "5432", "6543"), "b4e": ("5670", "6701", "7012", "0123"),
         "rc8": ("0000", "1111", "2222", "3333"), "ecl": ("3210", "3211", "3222", "3333"),
         "ecr": ("0000", "1110", "2210", "3210"), "rc16": ("1010", "3232", "1010", "3232")}


@pytest.mark.parametrize("mode", MODES)
def test_permute_modes(mode: str) -> None:
    """The modes of prmt."""
    a, b, c = integers(32, 128, 1), integers(32, 128, 2), np.arange(128, dtype=np.uint32)
    got = apply1(f"prmt.b32.{mode} %d0, %s0, %s1, %s2;", a, b, c, result=np.uint32)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        digits = MODES[mode][int(z) & 3][::-1]
        assert int(r) == sum(byte_of(int(x), int(y), int(digit)) << 8 * i for i, digit in enumerate(digits))


def parts(x: int, bits: int, kind: str) -> list[int]:
    """A word in equal parts, read as signed or not."""
    return [typed(x >> at & ((1 << bits) - 1), f"{kind[0]}{bits}") for at in range(0, 32, bits)]


@pytest.mark.parametrize("first", ["s32", "u32"])
@pytest.mark.parametrize("other", ["s32", "u32"])
def test_dot_products(first: str, other: str) -> None:
    """dp4a and dp2a of every pair of types."""
    a, b, c = (integers(32, COUNT, seed) for seed in (1, 2, 3))
    kinds = f"{first}.{other}"
    body = (f"dp4a.{kinds} %d0, %s0, %s1, %s2; dp2a.lo.{kinds} %d1, %s0, %s1, %s2;"
            f"dp2a.hi.{kinds} %d2, %s0, %s1, %s2;")
    for x, y, z, four, low, high in zip(a, b, c, *apply(body, [a, b, c], [np.uint32] * 3), strict=True):
        bytes_, ours, halves = parts(int(y), 8, other), parts(int(x), 8, first), parts(int(x), 16, first)
        def dot(p: list[int], q: list[int], z: int = int(z)) -> int:
            return z + sum(i * j for i, j in zip(p, q, strict=True)) & 0xffffffff
        assert (int(four), int(low), int(high)) == (dot(ours, bytes_), dot(halves, bytes_[:2]),
                                                    dot(halves, bytes_[2:]))


@pytest.mark.parametrize("kind", ["s16x2", "u16x2"])
def test_packed_halves(kind: str) -> None:
    """add, min and max of two 16-bit integers in a word."""
    a, b = integers(32, COUNT, 1), integers(32, COUNT, 2)
    body = f"add.{kind} %d0, %s0, %s1; min.{kind} %d1, %s0, %s1; max.{kind} %d2, %s0, %s1;"
    relu = f"min.relu.{kind} %d3, %s0, %s1; max.relu.{kind} %d4, %s0, %s1;" if kind == "s16x2" else ""
    got = apply(body + relu, [a, b], [np.uint32] * (5 if relu else 3))
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        pairs = list(zip(parts(int(x), 16, kind), parts(int(y), 16, kind), strict=True))
        functions: list[Callable[[int, int], int]] = [lambda p, q: p + q, min, max, lambda p,
                                                      q: max(min(p, q), 0),
                                                      lambda p, q: max(p, q, 0)]
        for result, function in zip(got, functions, strict=False):
            assert int(result[i]) == sum((function(p, q) & 0xffff) << 16 * j for j,
                                         (p, q) in enumerate(pairs))


# **** logic of three, predicates, carries ****

@pytest.mark.parametrize("table", [0x00, 0x80, 0xca, 0xe8, 0x96, 0x1b, 0xff])
def test_lookup_tables(table: int) -> None:
    """lop3: bit (a, b, c) of the table."""
    a, b, c = (integers(32, 256, seed) for seed in (1, 2, 3))
    q = np.arange(256) % 2 == 0
    body = (f"lop3.b32 %d0, %s0, %s1, %s2, {table}; lop3.or.b32 %t0|%d1, %s0, %s1, %s2, {table}, %s3;"
            f"lop3.and.b32 _|%d2, %s0, %s1, %s2, {table}, !%s3;")
    got, either, both = apply(body, [a, b, c, q], [np.uint32, np.bool_, np.bool_])
    for i, (x, y, z) in enumerate(zip(a, b, c, strict=True)):
        want = sum((table >> ((int(x) >> k & 1) << 2 | (int(y) >> k & 1) << 1 | int(z) >> k & 1) & 1) << k
                   for k in range(32))
        assert int(got[i]) == want
        assert bool(either[i]) == (want != 0 or bool(q[i]))
        assert bool(both[i]) == (want != 0 and not q[i])


def test_predicates() -> None:
    """and, or, xor, not and mov of predicates."""
    p, q = np.arange(128) % 2 == 0, np.arange(128) // 2 % 2 == 0
    body = ("and.pred %d0, %s0, %s1; or.pred %d1, %s0, !%s1; xor.pred %d2, %s0, %s1; not.pred %d3, %s0;"
            "mov.pred %d4, %s1; mov.pred %q0, 1; and.pred %d5, %q0, %s0;")
    got = apply(body, [p, q], [np.bool_] * 6)
    for result, want in zip(got, (p & q, p | ~q, p ^ q, ~p, q, p), strict=True):
        assert np.array_equal(result.astype(np.bool_), want)


@pytest.mark.parametrize("bits", [32, 64])
def test_carry_chains(bits: int) -> None:
    """Sums, differences and products of three words."""
    words = [integers(bits, COUNT, seed) for seed in range(6)]
    kind = f"u{bits}"
    for name in ("add", "sub"):
        body = (f"{name}.cc.{kind} %d0, %s0, %s3; {name}c.cc.{kind} %d1, %s1, %s4;"
                f"{name}c.{kind} %d2, %s2, %s5;")
        got = apply(body, words, [UNSIGNED[bits // 8]] * 3)
        for i in range(COUNT):
            a, b, r = (sum(int(group[j][i]) << bits * j for j in range(3))
                       for group in (words[:3], words[3:], got))
            assert r == (a + b if name == "add" else a - b) & ((1 << 3 * bits) - 1)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_carries_of_products(kind: str) -> None:
    """mad.cc and madc: c + a * b over two words, then a third that takes the carry of the high product."""
    bits = widths(kind)
    a, b, low, high = (integers(bits, COUNT, seed) for seed in range(4))
    body = (f"mad.lo.cc.{kind} %d0, %s0, %s1, %s2; madc.hi.cc.{kind} %d1, %s0, %s1, %s3;"
            f"addc.{kind} %d2, 0, 0;"
            f"mad.hi.cc.{kind} %d3, %s0, %s1, %s3; madc.lo.cc.{kind} %d4, %s0, %s1, %s2;"
            f"addc.{kind} %d5, 0, 0;")
    got = apply(body, [a, b, low, high], [UNSIGNED[bits // 8]] * 6)
    ones = (1 << bits) - 1
    for i in range(COUNT):
        product = typed(int(a[i]), kind) * typed(int(b[i]), kind)
        bottom, top = product & ones, product >> bits & ones
        first = bottom + int(low[i])
        second = top + int(high[i]) + (first >> bits)
        assert [int(got[j][i]) for j in range(3)] == [first & ones, second & ones, second >> bits]
        first = top + int(high[i])
        second = bottom + int(low[i]) + (first >> bits)
        assert [int(got[j][i]) for j in range(3, 6)] == [first & ones, second & ones, second >> bits]
