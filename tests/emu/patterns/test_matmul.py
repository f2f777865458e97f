"""DEV=EMU: matmuls in all their forms, einsums and random graphs around products go to a template, and are
exact for integers."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.dtype import DType

from tests.support.patterns.matmul_case import BF16, check, extents, rounded, stored, taken, whole
from tests.support.patterns.on_emu import emu  # noqa: F401
from tinygrad_nv import Context, Tensor, disabled, dtypes, explain
from tinygrad_nv.tile.expression import show


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("a", "b", "wanted"), [
    ((24, 48), (48, 40), (24, 40, 48)),
    ((3, 24, 48), (3, 48, 40), (3, 24, 40, 48)),
    ((3, 24, 48), (48, 40), (72, 40, 48)),          # rows of the batch are rows
    ((24, 48), (3, 48, 40), (3, 24, 40, 48)),       # one left operand for all
    ((2, 3, 8, 16), (3, 16, 24), (2, 3, 8, 24, 16)),
    ((2, 3, 8, 16), (2, 1, 16, 24), (2, 24, 24, 16)),  # the broadcast dimension is rows
    ((48,), (48, 40), (1, 40, 48)),
    ((40, 48), (48,), (1, 40, 48)),
    ((1, 48), (48, 40), (1, 40, 48)),
    ((17, 13), (13, 5), (17, 5, 13)),
    ((2, 3), (3, 2), (2, 2, 3)),
])
def test_shapes(a: tuple[int, ...], b: tuple[int, ...], wanted: tuple[int, ...]):
    x, w = whole(*a), whole(*b)
    check(stored(x) @ stored(w), x @ w, wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("majors", ["KK", "KN", "MK", "MN"])
@pytest.mark.parametrize("dtype", [BF16, dtypes.half], ids=["bf16", "f16"])
def test_majors(majors: str, dtype: DType):
    a, b = whole(24, 40), whole(40, 56)
    x = stored(a, dtype) if majors[0] == "K" else stored(a.T, dtype).T
    w = stored(b, dtype) if majors[1] == "N" else stored(b.T, dtype).T
    (spec,) = check(x @ w, a @ b, (24, 56, 40))
    assert spec.a.major == ("K" if majors[0] == "K" else "MN")
    assert spec.b.major == ("K" if majors[1] == "K" else "MN")
    assert (spec.a.dtype, spec.out.dtype) == (dtype, dtype)


def test_a_transposed_result_is_the_product_with_operands_changed():
    a, b = whole(24, 48), whole(48, 40)
    (spec,) = check((stored(a) @ stored(b)).T.contiguous(), (a @ b).T, (40, 24, 48))
    assert spec.out.n == 1


@pytest.mark.parametrize(("accumulated", "dtype"), [("cast", BF16), ("cast", dtypes.half), ("dtype", BF16)])
def test_results_in_float32(accumulated: str, dtype: DType):
    a, b = whole(24, 48), whole(48, 40)
    x, w = stored(a, dtype), stored(b, dtype)
    y = x.float() @ w.float() if accumulated == "cast" else x.matmul(w, dtype=dtypes.float)
    (spec,) = check(y, a @ b, (24, 40, 48))
    assert (spec.a.dtype, spec.b.dtype, spec.out.dtype) == (dtype, dtype, dtypes.float)


def test_bytes_in_int32():
    a, b = whole(24, 48), whole(40, 48)
    x, w = stored(a, dtypes.int8), stored(b, dtypes.int8)
    y = x.cast(dtypes.int) @ w.cast(dtypes.int).T
    (spec,) = check(y, a @ b.T, (24, 40, 48))
    assert (spec.a.dtype, spec.out.dtype) == (dtypes.int8, dtypes.int)


def test_bytes_are_scaled_by_rows_and_columns():
    a, b, rows, columns = whole(24, 48), whole(40, 48), whole(24, 1), whole(40)
    x, w = stored(a, dtypes.int8).cast(dtypes.int), stored(b, dtypes.int8).cast(dtypes.int)
    y = (x @ w.T).float() * stored(rows, dtypes.float) * stored(columns, dtypes.float)
    (spec,) = check(y, (a @ b.T) * rows * columns, (24, 40, 48))
    assert show(spec.epilogue) == "((sum.f32 * x0[m]) * x1[n])"


def test_long_sums_are_seen_before_tinygrad_splits_them():
    y = Tensor.empty(32, 40000, dtype=BF16) @ Tensor.empty(40000, 24, dtype=BF16)
    assert [extents(spec) for spec in taken(y)] == [(32, 24, 40000)]


def test_fp8():
    a, b = whole(32, 64, most=2), whole(48, 64, most=2)
    x, w = stored(a, dtypes.fp8e4m3), stored(b, dtypes.fp8e5m2)
    (spec,) = check(x.float() @ w.float().T, a @ b.T, (32, 48, 64))
    assert (spec.a.dtype, spec.b.dtype) == (dtypes.fp8e4m3, dtypes.fp8e5m2)


def test_float32_where_tf32_is_allowed():
    a, b = whole(32, 64), whole(48, 64)  # integers that 10 bits of mantissa hold
    y = stored(a, dtypes.float) @ stored(b, dtypes.float).T
    with Context(ALLOW_TF32=1):
        (spec,) = check(y, a @ b.T, (32, 48, 64))
    assert spec.tf32


# **** views ****

def test_slices_are_offsets():
    a, b = whole(24, 48), whole(48, 40)
    (spec,) = check(stored(a)[2:20, 8:40] @ stored(b)[4:36], a[2:20, 8:40] @ b[4:36], (18, 40, 32))
    assert (spec.a.offset, spec.b.offset) == (2 * 48 + 8, 4 * 40)
    assert (spec.a.mn, spec.b.k) == (48, 40)


def test_strided_rows_and_columns():
    a, b = whole(24, 48), whole(48, 40)
    (spec,) = check(stored(a)[::3, ::2] @ stored(b)[::2, ::4], a[::3, ::2] @ b[::2, ::4], (8, 10, 24))
    assert (spec.a.mn, spec.a.k, spec.b.mn, spec.b.k) == (144, 2, 4, 80)


def test_one_operand_twice():
    a = whole(24, 48)
    x = stored(a)
    check(x @ x.T, a @ a.T, (24, 24, 48))


def test_heads_are_a_batch_in_place():
    """q and k as (B, T, H, D) in memory, scores as (B, H, T, S): nothing is copied."""
    q, k = whole(2, 8, 3, 16), whole(2, 12, 3, 16)
    (spec,) = check(stored(q).transpose(1, 2) @ stored(k).transpose(1, 2).transpose(-1, -2),
                    np.einsum("bthd,bshd->bhts", q, k), (2, 3, 8, 12, 16))
    assert (spec.a.batch, spec.a.mn) == ((8 * 3 * 16, 16), 3 * 16)


@pytest.mark.parametrize("rows", [1, 8])
def test_grouped_queries_are_rows(rows: int):
    q, k = whole(2, 4, rows, 16), whole(2, 2, 12, 16)
    y = stored(q) @ stored(k).repeat_interleave(2, 1).transpose(-1, -2)
    (spec,) = check(y, q @ np.repeat(k, 2, 1).swapaxes(-1, -2), (4, 2 * rows, 12, 16))
    assert spec.b.batch == (12 * 16,)


def test_rows_of_two_dimensions_that_are_not_one():
    a, b = whole(4, 8, 16), whole(16, 24)
    (spec,) = check(stored(a)[:, 1:6] @ stored(b), a[:, 1:6] @ b, (4, 5, 24, 16))
    assert (spec.a.batch, spec.b.batch) == ((8 * 16,), (0,))


# **** einsum ****

@pytest.mark.sampled(5)
@pytest.mark.parametrize(("formula", "wanted"), [
    ("ij,jk->ik", (6, 4, 10)), ("ij,jk->ki", (6, 4, 10)), ("ji,jk->ik", (6, 4, 10)),
    ("ij,kj->ki", (6, 4, 10)), ("bij,bjk->bik", (3, 6, 4, 10)), ("bij,bjk->ikb", (3, 6, 4, 10)),
    ("ijk,kjl->il", (6, 7, 40)), ("ijk,ijl->kl", (4, 7, 60)), ("bhid,bhjd->bhij", (6, 6, 10, 8)),
    ("ij,j->i", (1, 6, 10)), ("ijk,jk->i", (1, 6, 40)),
])
def test_einsum(formula: str, wanted: tuple[int, ...]):
    sizes = {"b": 3, "i": 6, "j": 10, "k": 4, "l": 7, "h": 2, "d": 8}
    a, b = (whole(*(sizes[c] for c in letters), seed=i)
            for i, letters in enumerate(formula.split("->")[0].split(",")))
    y = Tensor.einsum(formula, stored(a), stored(b))
    check(y, np.einsum(formula, a, b), wanted, kernels=2 if formula == "ijk,kjl->il" else 1)


# **** convolutions ****

def test_a_convolution_of_one_pixel():
    x, w = whole(2, 16, 5, 6), whole(24, 16, 1, 1)
    wanted = np.einsum("bchw,oc->bohw", x, w[:, :, 0, 0])
    (spec,) = check(stored(x).conv2d(stored(w)), wanted, (2, 24, 30, 16))
    assert spec.a.batch == (0,)


def test_patches_are_rows_after_one_copy():
    x, w = whole(2, 3, 8, 12), whole(24, 3, 4, 4)
    wanted = np.einsum("bchpwq,ocpq->bohw", x.reshape(2, 3, 2, 4, 3, 4), w)
    check(stored(x).conv2d(stored(w), stride=4), wanted, (2, 24, 6, 48), kernels=2)


# **** operands that are not in memory ****

def test_padding_and_flips_are_copied():
    a, b = whole(24, 46), whole(48, 40)
    wanted = np.pad(a, ((0, 0), (1, 1))) @ b
    check(stored(a).pad(((0, 0), (1, 1))) @ stored(b), wanted, (24, 40, 48), kernels=2)
    c = whole(24, 48)
    check(stored(c).flip(0) @ stored(b), c[::-1] @ b, (24, 40, 48), kernels=2)


def test_computed_operands_are_stored_once():
    a, b, c = whole(24, 48), whole(48, 40), whole(48, 32)
    x = stored(a) * 2 + 1
    y, z = x @ stored(b), x @ stored(c)
    assert len(explain(y, z).kernels) == 3
    assert len(taken(y, z)) == 2
    Tensor.realize(y, z)
    np.testing.assert_array_equal(y.float().numpy(), (2 * a + 1) @ b)
    np.testing.assert_array_equal(z.float().numpy(), (2 * a + 1) @ c)


def test_a_cast_of_the_operand_is_stored():
    a, b = whole(24, 48), whole(48, 40)
    check(stored(a, dtypes.float).cast(BF16) @ stored(b), a @ b, (24, 40, 48), kernels=2)


def test_chained_products():
    a, b, c = whole(24, 8, most=2), whole(8, 16, most=2), whole(16, 8, most=2)
    check((stored(a) @ stored(b)) @ stored(c), a @ b @ c, (24, 16, 8), (24, 8, 16))


def test_two_products_of_one_operand():
    a, b, c = whole(24, 16), whole(16, 8), whole(16, 32)
    x = stored(a)
    check(x @ stored(b) + (x @ stored(c))[:, :8], a @ b + (a @ c)[:, :8], (24, 8, 16), (24, 8, 16))


@st.composite
def formulas(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """Letters in both and kept (batch), in one (rows, columns), in both and summed."""
    batch, rows, columns, summed = (
        "".join(draw(st.permutations(letters)))[:draw(st.integers(least, most))]
        for letters, least, most in (("ab", 0, 2), ("ij", 1, 2), ("mn", 0, 2), ("kl", 1, 2)))
    left, right = ("".join(draw(st.permutations(list(batch + own + summed)))) for own in (rows, columns))
    out = "".join(draw(st.permutations(list(batch + rows + columns))))
    sizes = {c: draw(st.integers(2, 6 if c in "abkl" else 9)) for c in batch + rows + columns + summed}
    return f"{left},{right}->{out}", sizes


def view(draw: st.DataObject, values: np.ndarray, seed: int) -> Tensor:
    """A tensor that is a slice of a larger one, or a permutation in memory."""
    kind = draw.draw(st.sampled_from(("dense", "slice", "permuted")))
    if kind == "slice":
        around = whole(*(n + 3 for n in values.shape), seed=seed + 10)
        place = tuple(slice(i % 3 + 1, i % 3 + 1 + n) for i, n in enumerate(values.shape))
        around[place] = values
        return stored(around)[place]
    if kind == "permuted":
        order = draw.draw(st.permutations(range(values.ndim)))
        return stored(values.transpose(order)).permute(tuple(np.argsort(order).tolist()))
    return stored(values)


def test_any_einsum():
    """Most are a GEMM of ours. The others sum over two dimensions that do not lie as one, in operands too
    little used to be copied."""
    ours: Counter[bool] = Counter()

    @settings(max_examples=14, deadline=None, derandomize=True)
    @given(formulas(), st.data())
    def check(case: tuple[str, dict[str, int]], data: st.DataObject) -> None:
        formula, sizes = case
        with Context(DEV="EMU"):
            arrays = [whole(*(sizes[c] for c in letters), seed=i)
                      for i, letters in enumerate(formula.split("->")[0].split(","))]
            y = Tensor.einsum(formula, *(view(data, a, i) for i, a in enumerate(arrays)))
            ours[len(taken(y)) == 1] += 1
            if not taken(y): assert any(kernel.reason.startswith("gemm: ") for kernel in explain(y).kernels)
            np.testing.assert_array_equal(y.float().numpy(), rounded(np.einsum(formula, *arrays)))

    check()
    assert ours[True] > ours[False]


M, N, K = 12, 8, 16
ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.relu(), "negated": lambda x: -x, "shifted": lambda x: x + 3,
    "halves": lambda x: (x * 0.5).trunc(), "clipped": lambda x: x.clip(-20, 20),
    "transposed": lambda x: x.T.reshape(M, N), "turned": lambda x: x.flip(0),
    "half": lambda x: x.clip(-99, 99).half().float(), "rows": lambda x: x.sum(1, keepdim=True) + x,
    "largest": lambda x: x - x.max(0), "stored": lambda x: x.contiguous(),
    "cut": lambda x: x[:, :N // 2].cat(x[:, N // 2:], dim=1),
    "swapped": lambda x: x[:, N // 2:].repeat(1, 2),
    "gate": lambda x: (x[:, :N // 2].relu() + x[:, N // 2:]).repeat(1, 2),
    "padded": lambda x: x[1:].pad(((1, 0), (0, 0))),
    "product": lambda x: (x.clip(-2, 2).cast(dtypes.bfloat16) @ stored(whole(N, N, most=1))).float(),
}
TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: x + y, "difference": lambda x, y: x - y, "larger": lambda x, y: x.maximum(y),
    "chosen": lambda x, y: (x < y).where(x, y + 1), "times": lambda x, y: x.clip(-9, 9) * y.clip(-9, 9),
    "bias": lambda x, y: x + y[0], "column": lambda x, y: x - y[:, :1],
}
STEPS = st.lists(st.one_of(st.tuples(st.sampled_from(sorted(ONE)), st.integers(0, 99), st.just(0)),
                           st.tuples(st.sampled_from(sorted(TWO)), st.integers(0, 99), st.integers(0, 99))),
                 min_size=1, max_size=7)


def made(steps: list[tuple[str, int, int]], outputs: tuple[int, int]) -> list[Tensor]:
    """Each step takes values that there are already, and adds one."""
    a, b, c = stored(whole(M, K, most=1)), stored(whole(K, N, most=1)), stored(whole(N, K, most=1))
    values = [(a.float() @ b.float()), stored(whole(M, N), dtypes.float), (a @ c.T).float()]
    for name, i, j in steps:
        x, y = values[-1 - i % len(values)], values[j % len(values)]
        values.append(ONE[name](x) if name in ONE else TWO[name](x, y))
    return [values[-1], *(values[i % len(values)] * 1 for i in outputs)]


@pytest.mark.slow
@settings(max_examples=16, deadline=None)
@given(STEPS, st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_random_graphs(steps: list[tuple[str, int, int]], outputs: tuple[int, int]):
    with Context(DEV="EMU"):
        ours = made(steps, outputs)
        taken(*ours)
        Tensor.realize(*ours)
        with disabled():
            theirs = made(steps, outputs)
            Tensor.realize(*theirs)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
