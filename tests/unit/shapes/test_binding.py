"""Sizes of names from real shapes: in any order, through products, and what does not agree."""
from __future__ import annotations

import pytest
from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import ShapeError
from tinygrad_nv.shapes.binding import Bindings

f32 = dtypes.float32


def bound(*given) -> Bindings:
    made = Bindings()
    for i, (type, shape) in enumerate(given): made.tensor(f"argument {'xyz'[i]}", type, shape)
    return made


def test_names_are_found():
    assert bound((Tensor["B", "S", "2D"], (2, 3, 8)), (Tensor["D"], (4,))).sizes == {"B": 2, "S": 3, "D": 4}


def test_a_product_waits_for_a_name():
    made = bound((Tensor["B*H", "S"], (12, 5)))
    assert made.sizes == {"S": 5}
    made.scalar("H", 4, "H=4")
    assert made.sizes == {"S": 5, "H": 4, "B": 3}
    made = bound((Tensor["A*B"], (6,)), (Tensor["B*C"], (15,)), (Tensor["A"], (2,)))
    assert made.sizes == {"A": 2, "B": 3, "C": 5}


def test_equal_products_agree_without_names():
    assert bound((Tensor["B*H"], (12,)), (Tensor["H*B"], (12,))).sizes == {}
    with pytest.raises(ShapeError, match=r"argument y: dimension 0 of Tensor\[\"H\*B\"\] is 13, not 12"):
        bound((Tensor["B*H"], (12,)), (Tensor["H*B"], (13,)))


def test_what_waited_is_checked_when_its_names_are_known():
    with pytest.raises(ShapeError, match=r"argument x: dimension 0 of .* is 12, not 20"):
        bound((Tensor["B*H"], (12,)), (Tensor["B", "H"], (4, 5)))
    with pytest.raises(ShapeError, match="a whole number B with"):
        bound((Tensor["B*H"], (12,)), (Tensor["H"], (5,)))


def test_a_quotient_is_checked_and_not_solved():
    assert bound((Tensor["D//2"], (4,)), (Tensor["D"], (9,))).sizes == {"D": 9}
    with pytest.raises(ShapeError, match="is 4, not 5"): bound((Tensor["D//2"], (4,)), (Tensor["D"], (10,)))


def test_leading_dimensions_are_free():
    assert bound((Tensor[..., "D"], (2, 3, 4)), (Tensor[..., "D"], (4,))).sizes == {"D": 4}
    with pytest.raises(ShapeError, match="1 or more"): bound((Tensor[..., "D"], ()))


def test_numbers_are_held():
    assert bound((Tensor["B", 4], (2, 4))).sizes == {"B": 2}
    with pytest.raises(ShapeError, match="is 5, not 4"): bound((Tensor["B", 4], (2, 5)))


def test_dtypes_are_held_where_there_are_any():
    made = Bindings()
    made.tensor("argument x", Tensor["B"], (2,), dtypes.int8)
    made.tensor("argument x", Tensor["B", f32], (2,), f32)
    with pytest.raises(ShapeError, match="argument x is of s8"):
        made.tensor("argument x", Tensor["B", f32], (2,), dtypes.int8)


def test_symbolic_extents_are_left_alone():
    n = UOp.variable("n", 1, 8)
    assert bound((Tensor["B", "S"], (n, 3)), (Tensor["B"], (5,))).sizes == {"S": 3, "B": 5}


def test_the_error_says_where_sizes_are_from():
    with pytest.raises(ShapeError) as error:
        bound((Tensor["B", "S", "D"], (2, 8, 64)), (Tensor["D", "3D"], (64, 190)))
    assert str(error.value).splitlines() == [
        'argument y: dimension 1 of Tensor["D", "3D"] is 190, not 192; its shape is (64, 190)',
        '  expected: 3D=192: D=64 from argument x: dimension 2 of Tensor["B", "S", "D"], of shape (2, 8, 64)']
