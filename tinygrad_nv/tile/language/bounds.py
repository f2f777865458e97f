"""Lower bounds of integers that are known before a kernel runs.

Protocol: `at_least(value, facts)` is a lower bound, MINUS where nothing is known. It sees constants, numbers
of
programs, `iota`, and sums, products, quotients and remainders of what is never negative; it supposes that
32-bit sums of a kernel's own indices do not wrap.
"""
from __future__ import annotations

from typing import Any, Protocol

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.language.ir import Op, Program, Value, select_numbers

MINUS = -(1 << 31)


class Known(Protocol):
    """Queries on values: a scalar's number, the operation that made a value, the least of an argument."""
    @property
    def least(self) -> dict[Value, int]: ...
    def constant_of(self, value: Value) -> Any: ...
    def defining_op(self, value: Value) -> Op | None: ...


class Facts:
    """Facts on a program that is written."""

    def __init__(self, program: Program) -> None:
        self._makers = {result: op for op in program.body.walk() for result in op.results}
        self.least: dict[Value, int] = {}
        for op in program.body.walk():
            if op.name == "for": self.least[op.regions[0].arguments[0]] = at_least(op.operands[0], self)

    def defining_op(self, value: Value) -> Op | None:
        """The operation that made a value; None of arguments of regions."""
        return self._makers.get(value)

    def constant_of(self, value: Value) -> Any:
        """The number that a scalar is known to be."""
        op = self._makers.get(value)
        return op.attributes["value"] if op is not None and op.name == "constant" else None


def at_least(value: Value, facts: Known) -> int:
    """The least that an integer can be."""
    if dtypes.is_unsigned(value.dtype) or value.dtype == dtypes.bool: return 0
    if (known := facts.constant_of(value)) is not None: return int(known)
    op = facts.defining_op(value)
    if op is not None and op.name == "select": return min(select_numbers(op, value))
    return facts.least.get(value, MINUS) if op is None else _of(op, facts)


def _of(op: Op, facts: Known) -> int:
    if op.name in ("program_id", "iota"): return 0
    if op.name in ("broadcast", "reshape", "transpose"): return at_least(op.operands[0], facts)
    if op.name == "cast":
        source = op.operands[0]
        return at_least(source, facts) if (not dtypes.is_float(source.dtype)
                                           and source.dtype.itemsize < 4) or \
            source.dtype == dtypes.int32 else MINUS
    if op.name != "apply": return MINUS
    least = [at_least(each, facts) for each in op.operands]
    fn = op.attributes["fn"]
    if fn == "add": return max(MINUS, sum(least)) if min(least) > MINUS else MINUS
    if fn in ("max",): return max(least)
    if fn in ("min", "where"): return min(least[-2:])
    if fn in ("mul", "quotient", "shift_right", "and", "remainder") and min(least) >= 0: return 0
    if fn == "and" and max(least) >= 0: return 0
    return MINUS
