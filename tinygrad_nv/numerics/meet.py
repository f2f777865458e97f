"""The policy of an operation, from those of its two operands, checked before anything runs.

Protocol: `meet(a, b, operation, names)` is the `Policied` of the result, or a `NumericsError` that names both
operands with what each says. `operation` is "multiply" (matmul, attention) or "add" (sums, selections).

    dtype         that of the two which holds every number of the other; of two formats of FP8 float16, which
                  holds both. Integers meet integers: codes become floats by a scale, never by themselves
    accum         the one that is given; two that differ are refused
    rounding      stochastic_round and saturate of either side, where they mean something for the result
    loss_scale    a product has the scale of the side that has one, of both sides it would have k · k'; a sum
                  has it only where both sides have the same, as else scaled and unscaled values are added
    deterministic of either side
"""
from __future__ import annotations

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import NumericsError
from tinygrad_nv.numerics.policy import (
    FP8,
    NARROW,
    REACH,
    Accumulate,
    Deterministic,
    LossScale,
    Policied,
    Policy,
    Saturate,
    StochasticRound,
    contradiction,
    holds,
    holds_sums,
    with_policies,
)
from tinygrad_nv.tile.expression import short

OPERATIONS = ("multiply", "add")


def meet(a: DType | Policied, b: DType | Policied, operation: str = "multiply",
         names: tuple[str, str] = ("the left operand", "the right operand")) -> Policied:
    """The dtype and policies of a result. Raises `NumericsError`, naming both operands."""
    if operation not in OPERATIONS: raise NumericsError(f"operation {operation!r}", ", ".join(OPERATIONS))
    left, right = with_policies(a), with_policies(b)
    origins = f"{names[0]} is {left}, {names[1]} is {right}"
    dtype = _dtype(left.dtype, right.dtype, origins)
    found: list[Policy] = []
    for kind in (Accumulate, StochasticRound, Saturate, Deterministic):
        one, other = left.get(kind), right.get(kind)
        if one is not None and other is not None and one != other:
            raise NumericsError(f"{origins}: {one} and {other} in one operation", "one of them",
                                "cast one operand, or give both the same policy")
        if (policy := one or other) is not None and _means(policy, dtype): found.append(policy)
    scale = _scale(left.get(LossScale), right.get(LossScale), operation, origins)
    if scale is not None and dtype in NARROW: found.append(scale)
    return _check(dtype, found, origins)


def _dtype(a: DType, b: DType, origins: str) -> DType:
    if a == b: return a
    if a in REACH and b in REACH:
        if holds(a, b): return a
        if holds(b, a): return b
        if a in FP8 and b in FP8: return dtypes.float16
        raise NumericsError(f"{origins}: neither {short(a)} nor {short(b)} holds every number of the other",
                            "operands of which one holds the other", "cast both to f32")
    if dtypes.is_int(a) and dtypes.is_int(b):
        if holds_sums(a, b): return a
        if holds_sums(b, a): return b
        raise NumericsError(f"{origins}: neither integer holds the other", "one dtype", "cast one of them")
    raise NumericsError(f"{origins}: codes meet floats", "floats, or codes on both sides",
                        "dequantise the codes with their scale first")


def _means(policy: Policy, dtype: DType) -> bool:
    """Rounding and clamping of a narrow operand mean nothing where the result is wide; what sums are kept in
    must be right for it, and is checked."""
    if isinstance(policy, StochasticRound): return dtype in NARROW
    if isinstance(policy, Saturate): return dtype in NARROW or dtype.itemsize < dtypes.int32.itemsize
    return True


def _scale(a: LossScale | None, b: LossScale | None, operation: str, origins: str) -> LossScale | None:
    if operation == "multiply":
        if a is not None and b is not None:
            raise NumericsError(f"{origins}: their product has a scale of {a.scale * b.scale:g}",
                                "a loss scale on one side", "divide one operand by its scale")
        return a or b
    if a != b:
        raise NumericsError(f"{origins}: values of different scales are added", "one loss scale for both",
                            "divide by the scale before the sum")
    return a


def _check(dtype: DType, found: list[Policy], origins: str) -> Policied:
    for policy in found:
        try: policy.check(dtype)
        except NumericsError as error:
            raise NumericsError(f"{origins}: {error.found}", error.expected, error.fix) from error
    if why := contradiction(dtype, tuple(found)):
        raise NumericsError(f"{origins}: {why[0]}", why[1], why[2])
    return Policied(dtype, tuple(found))
