"""DEV=EMU: what follows a product is computed by its kernel, exact for integers, near for activations; and
products in graphs that were once in the way."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.patterns.matmul_case import BF16, check, extents, rounded, stored, taken, whole
from tests.support.patterns.on_emu import emu, near  # noqa: F401
from tinygrad_nv import Tensor, Variable, dtypes, explain, function
from tinygrad_nv.tile.expression import Load, loads, show

A, B = whole(24, 48), whole(48, 40)
SUM = A @ B
CASES: dict[str, tuple[Callable[..., Tensor], Callable[..., np.ndarray], tuple[tuple[int, ...], ...]]] = {
    "bias": (lambda y, b: y + b, lambda y, b: y + b, ((40,),)),
    "row scale": (lambda y, s: y * s, lambda y, s: y * s, ((24, 1),)),
    "residual": (lambda y, r: y + r, lambda y, r: y + r, ((24, 40),)),
    "transposed residual": (lambda y, r: y + r.T, lambda y, r: y + r.T, ((40, 24),)),
    "scalar": (lambda y, s: y * s, lambda y, s: y * s, ((1, 1),)),
    "constant": (lambda y: y * 0.5 - 3, lambda y: y * 0.5 - 3, ()),
    "relu": (lambda y: y.relu(), lambda y: np.maximum(y, 0), ()),
    "bias, relu, residual": (lambda y, b, r: (y + b).relu() + r, lambda y, b, r: np.maximum(y + b, 0) + r,
                             ((40,), (24, 40))),
    "clipped": (lambda y: y.clip(-8, 8), lambda y: y.clip(-8, 8), ()),
    "chosen": (lambda y, c: (c < 0).where(y, -y), lambda y, c: np.where(c < 0, y, -y), ((24, 40),)),
    "not chosen": (lambda y, c: ((y < 0) | (c != 1)).logical_not().where(y, 0.0),
                   lambda y, c: np.where((y < 0) | (c != 1), 0, y), ((24, 40),)),
    "squared": (lambda y: y.square() * 0.25, lambda y: y * y * 0.25, ()),
    "computed beside": (lambda y, p, q: y + p * q, lambda y, p, q: y + p * q, ((24, 40), (24, 40))),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", CASES)
def test_exact_epilogues(name: str):
    ours, theirs, shapes = CASES[name]
    values = [whole(*shape, seed=i + 1) for i, shape in enumerate(shapes)]
    y = ours(stored(A, dtypes.half) @ stored(B, dtypes.half), *(stored(v, dtypes.half) for v in values))
    (spec,) = check(y, theirs(SUM, *values), (24, 40, 48))
    assert len(spec.parameters) == len(values)


def test_strides_of_what_is_loaded():
    y = stored(A) @ stored(B) + stored(whole(40)) + stored(whole(24, 1)) + stored(whole(30, 50))[3:27, 5:45]
    (spec,) = taken(y)
    found = {(load.m, load.n, load.offset) for load in loads(spec.epilogue)}
    assert found == {(0, 1, 0), (1, 0, 0), (50, 1, 155)}


def test_a_bias_of_each_batch():
    a, b, bias = whole(3, 8, 16), whole(3, 16, 24), whole(3, 1, 24)
    (spec,) = check(stored(a) @ stored(b) + stored(bias), a @ b + bias, (3, 8, 24, 16))
    assert loads(spec.epilogue) == (Load(0, BF16, 0, 1, (24,)),)


def test_linear_layers():
    x, w, bias = whole(2, 12, 48), whole(40, 48), whole(40)
    check(stored(x).linear(stored(w).T, stored(bias)), x @ w.T + bias, (24, 40, 48))


def test_every_node_is_rounded_to_its_dtype():
    """half((half(sum) + half) * half) differs from one rounding of the whole."""
    a, b = whole(16, 64, most=20), whole(64, 16, most=20)
    r = whole(16, 16, seed=5, most=300)
    def in_half(v: np.ndarray) -> np.ndarray: return v.astype(np.float16).astype(np.float64)
    wanted = in_half(in_half(in_half(a @ b) + r) * in_half(np.float64(1.1)))
    once = in_half((a @ b + r) * 1.1)
    assert (wanted != once).any()
    y = (stored(a, dtypes.half) @ stored(b, dtypes.half) + stored(r, dtypes.half)) * 1.1
    check(y, wanted, (16, 16, 64))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "error"), [("silu", 2e-2), ("gelu", 4e-2), ("sigmoid", 1e-2),
                                             ("tanh", 2e-2), ("erf", 3e-2), ("exp", 2e-2)])
def test_activations(name: str, error: float):
    """Within what rounding each node to bfloat16 costs: some 2^-8 for each of up to ten nodes."""
    a, b = whole(24, 48) / 4, whole(48, 40) / 16
    y = getattr(stored(a) @ stored(b), name)()
    (spec,) = taken(y)
    assert (extents(spec), len(explain(y).kernels)) == ((24, 40, 48), 1)
    reference = getattr(Tensor(rounded(a @ b)).float(), name)()
    near(y, reference.numpy(), error)


# **** gates ****

def gated(shape: tuple[int, int, int], split: Callable[[Tensor], tuple[Tensor, Tensor]]):
    m, n, k = shape
    a, w = whole(m, k), whole(2 * n, k, most=1)
    return a @ w.T, (lambda g, u: g.relu() * u)(*split(stored(a) @ stored(w).T))


def test_a_gate_of_one_weight():
    total, y = gated((24, 32, 16), lambda y: (y[:, :32], y[:, 32:]))
    (spec,) = check(y, np.maximum(total[:, :32], 0) * total[:, 32:], (24, 32, 16))
    assert (spec.parts, spec.part) == (2, 32 * 16)


def test_the_gate_may_come_second():
    total, y = gated((24, 32, 16), lambda y: (y[:, 32:], y[:, :32]))
    (spec,) = check(y, np.maximum(total[:, 32:], 0) * total[:, :32], (24, 32, 16))
    assert show(spec.epilogue).startswith("(where((0 < sum1")


def test_gates_column_by_column():
    total, y = gated((24, 32, 16), lambda y: (y[:, ::2], y[:, 1::2]))
    (spec,) = check(y, np.maximum(total[:, ::2], 0) * total[:, 1::2], (24, 32, 16))
    assert (spec.part, spec.b.mn) == (16, 32)


def test_parts_that_go_separate_ways_are_one_product():
    a, w = whole(24, 16), whole(48, 16)
    y = stored(a) @ stored(w).T
    q, k = y[:, :16].contiguous(), y[:, 16:].relu().contiguous()
    assert [extents(spec) for spec in taken(q, k)] == [(24, 48, 16)]
    Tensor.realize(q, k)
    np.testing.assert_array_equal(q.float().numpy(), (a @ w.T)[:, :16])
    np.testing.assert_array_equal(k.float().numpy(), np.maximum(a @ w.T, 0)[:, 16:])


def test_only_the_columns_that_are_used():
    y = (stored(A) @ stored(B))[:, 8:24] + 1
    check(y, SUM[:, 8:24] + 1, (24, 16, 48))


# **** where a region ends ****

def test_a_sum_that_is_used_elsewhere_is_stored():
    y = stored(A, dtypes.half) @ stored(B, dtypes.half)
    z = y.relu() + y.sum(1, keepdim=True)
    found = taken(z)
    assert [extents(spec) for spec in found] == [(24, 40, 48)]
    assert found[0].plain
    np.testing.assert_array_equal(z.numpy(), np.maximum(SUM, 0) + SUM.sum(1, keepdims=True))


def test_both_results_of_a_residual_stream():
    """The sum with its residual is what the next layer and the norm read."""
    a, b, r = stored(A), stored(B), stored(whole(24, 40, seed=3))
    h = a @ b + r
    z = h * h.float().square().mean(1, keepdim=True).cast(BF16)
    (spec,) = taken(z)
    assert show(spec.epilogue) == "(sum.bf16 + x0[mn])"


def test_a_product_with_a_vector_is_no_epilogue():
    """Its multiplication has as many elements as the sum before it, but belongs to the next one."""
    a, b, v = whole(24, 32, most=1), whole(32, 16, most=1), whole(16, most=1)
    y = (stored(a, dtypes.half) @ stored(b, dtypes.half)).relu() @ stored(v, dtypes.half)
    check(y, np.maximum(a @ b, 0) @ v, (24, 16, 32), (1, 24, 16))


def test_a_permutation_is_taken_in_where_the_result_is_stored():
    y = (stored(A) @ stored(B)).reshape(2, 12, 5, 8).transpose(1, 2).contiguous()
    check(y, SUM.reshape(2, 12, 5, 8).swapaxes(1, 2), (2, 5, 12, 8, 48))


def test_broadcasting_the_result_ends_the_region():
    r = whole(3, 24, 40)
    y = (stored(A) @ stored(B)).unsqueeze(0) + stored(r)
    (spec,) = check(y, SUM + r, (24, 40, 48), kernels=2)
    assert spec.plain


def constant(value: float) -> Tensor: return Tensor(value, dtype=BF16)


def test_the_gradient_of_a_mean_square():
    """1 / N is a constant that tinygrad casts and multiplies: it is computed, there is nothing to load."""
    x, w = stored(A), stored(B)
    (dx,) = (x @ w).float().square().mean().gradient(x)
    found = taken(dx)
    assert [extents(spec) for spec in found] == [(24, 40, 48), (24, 48, 40)]
    assert found[0].parameters == ()
    factor = rounded(2 * rounded(SUM) * np.float32(1 / SUM.size))
    np.testing.assert_array_equal(dx.float().numpy(), rounded(factor @ B.T))


def test_a_product_that_is_stored_transposed_and_used_elsewhere():
    """What is stored is a copy: the product lies the other way."""
    y = stored(A) @ stored(B)
    turned, total = y.T.contiguous(), y.float().sum()
    Tensor.realize(turned, total)
    np.testing.assert_array_equal(turned.float().numpy(), rounded(SUM).T)
    assert total.item() == rounded(SUM).sum()


CONSTANTS: dict[str, tuple[Callable[[], Tensor], float]] = {
    "product": (lambda: constant(3) * constant(2), 6),
    "stored": (lambda: (constant(3) * constant(2)).contiguous(), 6),
    "sum": (lambda: constant(3).reshape(1).expand(20).sum(), 60),
    "largest": (lambda: constant(3).reshape(1).expand(20).max(), 3),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_beside_a_sum(name: str):
    make, value = CONSTANTS[name]
    y = stored(A) @ stored(B) * make()
    assert [extents(spec) for spec in taken(y)] == [(24, 40, 48)]
    np.testing.assert_array_equal(y.float().numpy(), rounded(rounded(SUM) * value))


def test_an_operand_of_constants_is_left_to_tinygrad():
    y = stored(A) @ (constant(3).reshape(1, 1).expand(48, 40) * constant(2))
    assert taken(y) == []
    np.testing.assert_array_equal(y.float().numpy(), rounded(A @ np.full((48, 40), 6)))


# **** functions ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("stored_again", [False, True])
def test_functions_of_symbolic_rows(stored_again: bool):
    """A precompiled function stores its result in storage of a symbolic shape."""
    @function(precompile=True)
    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor: return (x @ w + b).relu()
    bias = whole(40)
    x, w, b = stored(A), stored(B), stored(bias)
    for count in (1, 7, 24):
        y = layer(x[:Variable("rows", 1, 24).bind(count)], w, b)
        if stored_again: y = y.contiguous()
        (spec,) = taken(y)
        assert (spec.symbolic, *extents(spec)) == (True, 24, 40, 48)
        np.testing.assert_array_equal(y[:count].float().numpy(), np.maximum(SUM + bias, 0)[:count])


# **** conditions ****

def test_conditions_on_small_values_are_computed():
    """A condition is no parameter: the row it is made of is."""
    row, column = whole(40, seed=1), whole(24, 1, seed=2)
    y = stored(A) @ stored(B) * (stored(row) > 0)
    z = ((stored(column) > 1) | (stored(column) < -1)).where(stored(A) @ stored(B), 1)
    check(y, SUM * (row > 0), (24, 40, 48))
    check(z, np.where(abs(column) > 1, SUM, 1), (24, 40, 48))


def test_a_target_whose_first_row_is_a_condition():
    a, b, s = whole(16, 32), whole(32, 16), whole(16, 16, seed=3)
    target = stored(s)
    target.assign(stored(a) @ stored(b) * (target[0] > 0)).realize()
    np.testing.assert_array_equal(target.float().numpy(), rounded(a @ b * (s[0] > 0)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [24, 3])
def test_a_condition_in_memory_is_a_parameter(rows: int):
    """By gemv and by tensor cores; of every element, of a column, and of both together."""
    mask, columns = (whole(*shape, seed=4) > 0 for shape in ((rows, 40), (40,)))
    m, c = Tensor(mask).realize(), Tensor(columns).realize()
    x, w = stored(A[:rows]), stored(B)
    check(m.where(x @ w, -1), np.where(mask, SUM[:rows], -1), (rows, 40, 48))
    check((c & m).where(x @ w, 0), np.where(columns & mask, SUM[:rows], 0), (rows, 40, 48))
    check(c.where(0, (x @ w) + m), np.where(columns, 0, SUM[:rows] + mask), (rows, 40, 48))
