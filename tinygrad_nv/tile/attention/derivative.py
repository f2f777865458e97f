"""The derivative of a score by its sum, as an expression.

Protocol: `derivative(score)` is ∂score/∂sum in float32, an expression of the same sum, loads and positions; a
`Constant` where it is the same for all elements. Rules of sums, products, chains and choices, node by node;
roundings of nodes to their dtypes count as exact. Three things are said in a form of their own:

    1 / (c + 2^w)        −r (1 − c r) ln 2 · w′ with r the value itself: 2^w may be infinite, r cannot.
                         `precise`: −r (r · 2^w) ln 2 · w′, which keeps its bits where c r is near 1, and 2^w
                         beside r; 2^w is at most 2^126, of more r is 0
    where(m, x, −inf)    x′, also where m does not hold: there p is 0, whatever the derivative
    max, min             that of the argument that is chosen; of the first of equal ones

A condition counts as constant. Raises `SpecError` for a sum that becomes an integer on its way.
"""
from __future__ import annotations

import math

from tinygrad.dtype import dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import ZERO, Apply, Constant, Expression, Sum, show, walk
from tinygrad_nv.tile.operations import LN2, OPERATIONS

MOST_POWER = Constant(2.0**126)


def derivative(score: Expression, precise: bool = False) -> Expression:
    """∂score/∂sum. Raises `SpecError` where there is none."""
    made: dict[Expression, Expression] = {}
    for node in walk(score): made[node] = _of(node, made, precise)
    return made[score]


def _of(node: Expression, made: dict[Expression, Expression], precise: bool) -> Expression:
    """Returns the derivative of a node, from those of its arguments."""
    if isinstance(node, Sum): return Constant(1.0)
    if not isinstance(node, Apply): return ZERO
    slopes = [made[arg] for arg in node.args]
    if all(slope == ZERO for slope in slopes) or node.dtype == dtypes.bool: return ZERO
    rule = OPERATIONS[node.op].slope
    if rule is None or not dtypes.is_float(node.dtype):
        raise SpecError(f"the derivative of {show(node)}", "floats from the sum to the score")
    known = _logistic(node, made, precise) or _differentiate_mask(node, slopes)
    if known is not None: return known
    values = [arg if arg.dtype == dtypes.bool else arg.cast(dtypes.float32) for arg in node.args]
    found: Expression = rule(node.cast(dtypes.float32), *values, *slopes)
    return found


def _logistic(node: Apply, made: dict[Expression, Expression], precise: bool) -> Expression | None:
    """Returns the derivative of 1 / (c + 2^w), None for other nodes."""
    if node.op != "reciprocal" or not isinstance(node.args[0], Apply) or node.args[0].op != "add": return None
    for constant, power in (node.args[0].args, node.args[0].args[::-1]):
        if isinstance(constant, Constant) and isinstance(power, Apply) and power.op == "exp2":
            value = node.cast(dtypes.float32)
            if precise: rest = Apply("min", (power.cast(dtypes.float32), MOST_POWER), dtypes.float32) * value
            else: rest = value.times(Constant(float(constant.value))) * -1.0 + 1.0
            return value.times(rest).times(Constant(-LN2)).times(made[power.args[0]])
    return None


def _differentiate_mask(node: Apply, slopes: list[Expression]) -> Expression | None:
    """Returns the derivative of a choice between x and -inf, None for other nodes."""
    if node.op != "where": return None
    least = Constant(-math.inf, node.dtype)
    if node.args[2] == least: return slopes[1]
    return slopes[2] if node.args[1] == least else None
