"""Expressions: activations have the nodes of tinygrad's graphs, numbers are rounded as dtypes have them."""
from __future__ import annotations

import math
import random

import pytest
import torch
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv import hooks
from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile import expression
from tinygrad_nv.tile.expression import (
    Apply,
    Constant,
    Expression,
    Load,
    Position,
    Sum,
    loads,
    nearest,
    parameters,
    show,
    walk,
)

NAMES = {Ops.ADD: "add", Ops.MUL: "mul", Ops.RECIPROCAL: "reciprocal", Ops.EXP2: "exp2", Ops.CMPLT: "less",
         Ops.CMPNE: "not_equal", Ops.WHERE: "where", Ops.CAST: "cast"}
FLOATS = {dtypes.float32: torch.float32, dtypes.float16: torch.float16, dtypes.bfloat16: torch.bfloat16,
          dtypes.fp8e4m3: torch.float8_e4m3fn, dtypes.fp8e5m2: torch.float8_e5m2}


def of_graph(node: UOp, x: UOp, dtype: DType) -> Expression:
    """A graph over `x` as an expression over its sum. A third power is x x x; constants have the dtype of
    what they meet."""
    if node is x: return Sum(dtype)
    if node.op in GroupOp.Movement: return of_graph(node.src[0], x, dtype)
    if node.op is Ops.CONST: return Constant(node.arg, dtype)
    if node.op is Ops.CAST and node.src[0].op is Ops.CONST: return Constant(node.src[0].arg, node.dtype)
    if node.op is Ops.POW:
        base = of_graph(node.src[0], x, dtype)
        return base * base * base
    inside = next((each.dtype for each in node.src if each.dtype in FLOATS), dtype)
    args = tuple(of_graph(source, x, inside) for source in node.src)
    if node.op is Ops.CAST: return args[0].cast(node.dtype)
    return Apply(NAMES[node.op], args, dtypes.bool if node.op in GroupOp.Comparison else args[-1].dtype)


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16, dtypes.float16])
@pytest.mark.parametrize("name", ["relu", "sigmoid", "silu", "quick_gelu", "tanh", "gelu_tanh", "gelu", "erf",
                                  "exp"])
def test_activations_are_what_tinygrad_writes(name: str, dtype: DType):
    x = Tensor.empty(4, dtype=dtype)
    with hooks.disabled():
        made = {"gelu_tanh": lambda: x.gelu(approximate="tanh"),
                "gelu": lambda: x.gelu(approximate="none")}.get(name, lambda: getattr(x, name)())()
    assert getattr(expression, name)(Sum(dtype)) == of_graph(made.uop, x.uop, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nearest_rounds_as_the_dtype_does(dtype: DType):
    source = random.Random(1)
    values = [source.uniform(-2, 2) * 2.0**source.randint(-30, 17) for _ in range(500)]
    values += [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 2.0**-24, 2.0**-25, 2.0**-133, 2.0**-134, 447.9,
               65519.9, 65520.0]
    if dtype.itemsize == 1: values = [value for value in values if abs(value) <= expression.FLOATS[dtype][2]]
    for value in values:
        want = torch.tensor(value, dtype=torch.float64).to(FLOATS[dtype]).double().item()
        got = nearest(value, dtype)
        assert (got, math.copysign(1, got)) == (want, math.copysign(1, want)), value


def test_nearest_beyond_the_largest():
    assert nearest(1e6, dtypes.float16) == math.inf
    assert nearest(-1e39, dtypes.bfloat16) == -math.inf
    assert nearest(-1e6, dtypes.fp8e4m3) == -448.0
    assert nearest(math.inf, dtypes.fp8e5m2) == 57344.0
    assert nearest(math.inf, dtypes.float32) == math.inf
    assert math.isnan(nearest(math.nan, dtypes.fp8e4m3))


def test_nodes_are_visited_once_arguments_first():
    x = Sum().cast(dtypes.bfloat16)
    node = x * x + Load(0, dtypes.bfloat16, 0, 1)
    order = list(walk(node))
    assert len(order) == len(set(order)) == 5
    assert order[0] == Sum()
    assert order[-1] == node
    assert loads(node) == (Load(0, dtypes.bfloat16, 0, 1),)


def test_parameters_are_counted_from_0():
    node = Load(1, dtypes.float16, 0, 1) + Load(0, dtypes.float16, 1, 0)
    assert parameters(node) == (dtypes.float16, dtypes.float16)
    with pytest.raises(SpecError, match="counted from 0"): parameters(Load(1, dtypes.float16, 0, 1))
    both = Load(0, dtypes.float16, 0, 1).cast(dtypes.float32) + Load(0, dtypes.float32, 0, 1)
    with pytest.raises(SpecError, match="one dtype for a parameter"): parameters(both)


def test_an_operation_takes_its_arguments():
    with pytest.raises(SpecError, match="operation 'add' with 1 arguments"):
        Apply("add", (Sum(),), dtypes.float32)


def test_expressions_for_a_reader():
    x = (Sum() + Load(0, dtypes.float32, 0, 1)) * 0.5
    assert show(x.cast(dtypes.bfloat16)) == "((sum + x0[n]) * 0.5).bf16"
    assert show(expression.where(Position("m") < Position("n"), x, 0.0)) == \
        "where((m < n), ((sum + x0[n]) * 0.5), 0)"
    assert show(Sum(dtypes.float32, 1)) == "sum1"


def test_sums_and_products_leave_out_what_changes_nothing():
    x, y, zero, two = Sum(), Load(0, dtypes.float32, 0, 1), Constant(0.0), Constant(2.0)
    one = Constant(1.0)
    assert [x.plus(zero), zero.plus(x), x.minus(zero), x.times(one), one.times(x)] == [x] * 5
    assert x.times(zero) == zero.times(x) == zero
    assert zero.minus(x) == x * -1.0
    assert (two.plus(two), two.minus(two), two.times(two)) == (Constant(4.0), zero, Constant(4.0))
    assert (x * 3.0).times(two) == two.times(x * 3.0) == x * 6.0
    assert (x.plus(y), x.minus(y), x.times(y)) == (x + y, x - y, x * y)
    assert ((x < y).either(x, x), (x < y).either(x, y)) == (x, expression.where(x < y, x, y))


def test_nodes_that_are_used_twice_and_so_on_down():
    """As a tree it has 2⁶⁴ nodes: what compares, prints or keeps an expression sees each node once."""
    def squares(first: Expression, times: int = 64) -> Expression:
        for _ in range(times): first = first * first
        return first
    a, b, c, d = squares(Sum()), squares(Sum()), squares(Sum(part=1)), squares(Sum(), 63)
    assert a == b
    assert a is not b
    assert a not in (c, d)
    assert repr(a) == repr(b) != repr(c)
    assert show(a) == show(b) != show(d)
    assert show(a).startswith("65 operations, ")
    assert repr(squares(Sum(), 1)) == repr(Apply("mul", (Sum(), Sum()), dtypes.float32))
    assert show(squares(Sum(), 2)) == "((sum * sum) * (sum * sum))"
