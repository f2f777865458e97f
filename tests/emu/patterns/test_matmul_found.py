"""DEV=EMU: products in graphs that were once in the way: constants, conditions, functions of so many rows."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.patterns.matmul_case import BF16, check, extents, rounded, stored, taken, whole
from tests.support.patterns.on_emu import emu  # noqa: F401
from tinygrad_nv import Tensor, Variable, function

A, B = whole(24, 48), whole(48, 40)
SUM = A @ B


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
