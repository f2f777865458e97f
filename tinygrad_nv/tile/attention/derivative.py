"""The derivative of a score by its sum, as an expression.

Protocol: `derivative(score)` is ∂score/∂sum in float32, an expression of the same sum, loads and positions; a
`Constant` where it is the same for all elements. Rules of sums, products, chains and choices, node by node;
roundings of nodes to their dtypes count as exact. Three things are said in a form of their own:

    1 / (c + 2^w)        −r (1 − c r) ln 2 · w′ with r the value itself: 2^w may be infinite, r cannot
    where(m, x, −inf)    x′, also where m does not hold: there p is 0, whatever the derivative
    max, min             that of the argument that is chosen; of the first of equal ones

A condition counts as constant. Raises `SpecError` for a sum that becomes an integer on its way.
"""
from __future__ import annotations

import math

from tinygrad.dtype import dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Sum, show, walk, where

ZERO, ONE, LN2 = Constant(0.0), Constant(1.0), math.log(2)


def derivative(score: Expression) -> Expression:
    """∂score/∂sum. Raises `SpecError` where there is none."""
    made: dict[Expression, Expression] = {}
    for node in walk(score): made[node] = _of(node, made)
    return made[score]


def _of(node: Expression, made: dict[Expression, Expression]) -> Expression:
    """That of a node, from those of its arguments."""
    if isinstance(node, Sum): return ONE
    if not isinstance(node, Apply): return ZERO
    slopes = [made[arg] for arg in node.args]
    if all(slope == ZERO for slope in slopes) or node.dtype == dtypes.bool: return ZERO
    if not dtypes.is_float(node.dtype):
        raise SpecError(f"the derivative of {show(node)}", "floats from the sum to the score")
    values = [arg if arg.dtype == dtypes.bool else arg.cast(dtypes.float32) for arg in node.args]
    if node.op in ("add", "sub"): return _sum(node.op, *slopes)
    if node.op == "mul": return _sum("add", product(slopes[0], values[1]), product(values[0], slopes[1]))
    if node.op in ("max", "min"):
        low, high = values if node.op == "max" else values[::-1]
        return where(low < high, slopes[1], slopes[0]) if slopes[0] != slopes[1] else slopes[0]
    if node.op == "where": return _chosen(node, slopes)
    if (logistic := _logistic(node, made)) is not None: return logistic
    return product(_outer(node, values[0]), slopes[0])


def _logistic(node: Apply, made: dict[Expression, Expression]) -> Expression | None:
    """That of 1 / (c + 2^w), None for other nodes."""
    if node.op != "reciprocal" or not isinstance(node.args[0], Apply) or node.args[0].op != "add": return None
    for constant, power in (node.args[0].args, node.args[0].args[::-1]):
        if isinstance(constant, Constant) and isinstance(power, Apply) and power.op == "exp2":
            value = node.cast(dtypes.float32)
            rest = product(value, Constant(float(constant.value))) * -1.0 + 1.0
            return product(product(product(value, rest), Constant(-LN2)), made[power.args[0]])
    return None


def _chosen(node: Apply, slopes: list[Expression]) -> Expression:
    condition, yes, no = node.args
    if slopes[1] == slopes[2] or no == Constant(-math.inf, node.dtype): return slopes[1]
    if yes == Constant(-math.inf, node.dtype): return slopes[2]
    return where(condition, slopes[1], slopes[2])


def _outer(node: Apply, x: Expression) -> Expression:
    """The derivative of an operation by its one argument."""
    value = node.cast(dtypes.float32)
    if node.op == "cast": return ONE
    if node.op == "exp2": return product(value, Constant(LN2))
    if node.op == "log2": return product(x.reciprocal(), Constant(1 / LN2))
    if node.op == "sqrt": return product(value.reciprocal(), Constant(0.5))
    if node.op == "sin": return Apply("sin", (x + math.pi / 2,), dtypes.float32)
    assert node.op == "reciprocal"
    return product(product(value, value), Constant(-1.0))


def product(a: Expression, b: Expression) -> Expression:
    """a · b, without multiplications by constants that can be done here."""
    if isinstance(a, Constant): a, b = b, a
    if isinstance(b, Constant):
        number = float(b.value)
        if number in (0.0, 1.0): return a if number else ZERO
        if isinstance(a, Constant): return Constant(float(a.value) * number)
        if isinstance(a, Apply) and a.op == "mul" and isinstance(a.args[1], Constant):
            return product(a.args[0], Constant(float(a.args[1].value) * number))
    return Apply("mul", (a, b), dtypes.float32)


def _sum(op: str, a: Expression, b: Expression) -> Expression:
    if b == ZERO: return a
    if a == ZERO: return b if op == "add" else product(b, Constant(-1.0))
    if isinstance(a, Constant) and isinstance(b, Constant):
        return Constant(float(a.value) + (float(b.value) if op == "add" else -float(b.value)))
    return Apply(op, (a, b), dtypes.float32)
