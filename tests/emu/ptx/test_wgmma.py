"""wgmma: every type, layout and option against numpy, exact on integers, bounded on random numbers."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.ptx.tensor_case import BITS, FLOATS, decode, integers, numbers, randoms, sparsify, words
from tests.support.ptx.wgmma_case import Operands, Wgmma, launch

DEPTH = {kind: 256 // BITS[kind] for kind in ("f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "b1")}
TYPES = [("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "bf16", "bf16"), ("f32", "tf32", "tf32"),
         *[(d, a, b) for d in ("f32", "f16") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")],
         *[("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8")]]


def dense(d: str, a: str, b: str, n: int = 32, **options: object) -> Wgmma:
    return Wgmma(n, DEPTH[a], d, a, b, **options)  # type: ignore[arg-type]


def operands(case: Wgmma, seed: int = 1, real: bool = False) -> tuple[Operands, np.ndarray]:
    """Operands, and A * B as it should be (float64)."""
    rng = np.random.default_rng(seed)
    make = randoms if real else integers
    a, b = make(rng, case.a, (64, case.k)), make(rng, case.b, (case.k, case.n))
    c = rng.standard_normal((64, case.n)) if real else rng.integers(-9, 10, (64, case.n))
    stored, metadata = a, None
    if case.sparse:
        sparse = sparsify(rng, a, case.a)
        a, stored, metadata = sparse.dense, sparse.stored, sparse.codes
    product = decode(a, case.a) @ decode(b, case.b)
    if case.negate_a: product = -product
    if case.negate_b: product = -product
    return Operands(stored, b, words(c, case.d), metadata), product


def check_exact(case: Wgmma, seed: int = 0) -> None:
    x, product = operands(case)
    got, report = launch(case, x, seed=seed)
    assert not report.findings, report.findings
    want = product + (numbers(x.c, case.d) if case.scale == "1" else 0)
    np.testing.assert_array_equal(numbers(got, case.d), want)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("a_major", ["k", None])
def test_products_of_integers_are_exact(types: tuple[str, str, str], a_major: str | None) -> None:
    check_exact(dense(*types, a_major=a_major))


@pytest.mark.sampled(24)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("a_major", ["k", "mn", None])
@pytest.mark.parametrize("b_major", ["k", "mn"])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_majors_and_swizzles(kind: str, a_major: str | None, b_major: str, span: int) -> None:
    other = {0: 64, 32: 128, 64: 0, 128: 32}[span]
    check_exact(dense("f32", kind, kind, n=64, a_major=a_major, b_major=b_major, a_span=span, b_span=other))
    check_exact(dense("f32", kind, kind, n=128, a_major=a_major, b_major=b_major, a_span=other, b_span=span))


@pytest.mark.parametrize("rows", [1, 6])
def test_a_swizzle_that_begins_within_a_pattern(rows: int) -> None:
    """The base offset says by how many rows of 128 bytes."""
    case = dense("f32", "f16", "f16")
    (x, product), (left, right), image = operands(case), case.tiles(), np.zeros(1 << 17, np.uint8)
    assert left is not None
    left.place(image, x.a, 16)
    image = np.roll(image, 128 * rows)      # a swizzle moves nothing from row to row
    right.place(image, x.b.T, 16)
    moved = replace(left, start=128 * rows, base=rows)
    got, report = launch(case, x, image=image, tiles=(moved, right))
    assert not report.findings, report.findings
    np.testing.assert_array_equal(numbers(got, "f32"), product + numbers(x.c, "f32"))


@pytest.mark.parametrize("kind", ["tf32", "e4m3", "s8"])
@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_swizzles_of_other_sizes(kind: str, span: int) -> None:
    check_exact(dense("s32" if kind == "s8" else "f32", kind, kind, a_span=span, b_span=span))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("n", [*range(8, 257, 8)])
def test_every_width(n: int) -> None:
    check_exact(dense("f32", "bf16", "bf16", n=n))


@pytest.mark.parametrize("n", [8, 16, 24, 48, 256])
def test_widths_of_integers(n: int) -> None: check_exact(dense("s32", "u8", "s8", n=n))


@pytest.mark.parametrize("n", [8, 24, 256])
def test_widths_of_halves(n: int) -> None: check_exact(dense("f16", "f16", "f16", n=n))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("types", [t for t in TYPES if t[1] in FLOATS], ids="-".join)
@pytest.mark.parametrize("negate", [(True, False), (False, True), (True, True)])
def test_negation(types: tuple[str, str, str], negate: tuple[bool, bool]) -> None:
    check_exact(dense(*types, n=8, negate_a=negate[0], negate_b=negate[1]))


@pytest.mark.parametrize("scale", ["0", "1"])
@pytest.mark.parametrize("types", [TYPES[0], TYPES[1], TYPES[-1]], ids="-".join)
def test_scale_d(types: tuple[str, str, str], scale: str) -> None:
    check_exact(dense(*types, scale=scale))


SPARSE = [*[replace(dense(*types), k=2 * DEPTH[types[1]], sparse=True, selector=s) for types in TYPES
            for s in ((0, 1) if BITS[types[1]] > 8 else (0,))]]


@pytest.mark.sampled(13)
@pytest.mark.parametrize("case", SPARSE, ids=lambda case: f"{case.name[16:]}-{case.selector}")
@pytest.mark.parametrize("a_major", ["k", None])
def test_sparse(case: Wgmma, a_major: str | None) -> None:
    check_exact(replace(case, a_major=a_major, a_span=64))
    check_exact(replace(case, a_major=a_major, b_span=32))


def test_sparse_with_rows_across_k() -> None:
    check_exact(Wgmma(64, 32, "f32", "bf16", "bf16", "mn", "mn", sparse=True, selector=1))


@pytest.mark.parametrize("span", [0, 32, 128])
def test_single_bits(span: int) -> None:
    check_exact(Wgmma(48, 256, "s32", "b1", "b1", a_span=span, b_span=span))


@pytest.mark.parametrize("sign", [1, -1])
def test_saturation(sign: int) -> None:
    case = dense("s32", "s8", "s8", satfinite=True)
    x, product = operands(case)
    c = np.full((64, 32), sign * (2 ** 31 - 9))
    got, _ = launch(case, replace(x, c=words(c, "s32")))
    np.testing.assert_array_equal(numbers(got, "s32"), np.clip(product + c, -2 ** 31, 2 ** 31 - 1))
    got, _ = launch(replace(case, satfinite=False), replace(x, c=words(c, "s32")))
    np.testing.assert_array_equal(numbers(got, "s32"), (product + c).astype(np.int64).astype(np.int32))


@pytest.mark.parametrize("types", [t for t in TYPES if t[1] in FLOATS], ids="-".join)
def test_random_products_are_near_float64(types: tuple[str, str, str]) -> None:
    """Each of k + 1 terms is truncated below 2^-25 (8-bit floats: 2^-13) of the largest, whose exponent is
    at most one above that of the sum of magnitudes; the result rounds at 2^-23 (2^-13; f16: 2^-11) of
    itself."""
    case = dense(*types)
    x, product = operands(case, real=True)
    got, report = launch(case, x)
    assert not report.findings
    c = numbers(x.c, case.d)
    size = np.abs(decode(x.a, case.a)) @ np.abs(decode(x.b, case.b)) + np.abs(c)
    eight = BITS[case.a] == 8
    rounding = 2.0 ** -11 if case.d == "f16" else 2.0 ** -13 if eight else 2.0 ** -23
    bound = size * ((case.k + 1) * 2.0 ** (-12 if eight else -24) + rounding) + 2.0 ** -24
    error = np.abs(numbers(got, case.d) - (product + c))
    assert (error <= bound).all(), (error / bound).max()
    assert error.max() > 0
    precise, _ = launch(case, x, exact=True)
    error = np.abs(numbers(precise, case.d) - (product + c))
    assert (error <= np.abs(product + c) * (2.0 ** -11 if case.d == "f16" else 2.0 ** -24) + 2.0 ** -25).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("check", [True, False])
def test_order_of_warps_does_not_matter(seed: int, check: bool) -> None:
    case = dense("f32", "bf16", "bf16", n=64)
    x, product = operands(case)
    got, report = launch(case, x, seed=seed, check=check)
    assert not report.findings
    np.testing.assert_array_equal(numbers(got, "f32"), product + numbers(x.c, "f32"))


def test_flops_are_counted() -> None:
    case = dense("f32", "f16", "f16", n=64)
    _, report = launch(case, operands(case)[0])
    assert sum(site.flops for site in report.stats.sites) == 2 * 64 * 64 * 16
