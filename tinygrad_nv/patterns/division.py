"""Quotients and remainders of integers that no processor refuses.

Protocol. `rewrite` is a rewrite of hooks/, before those of kernels. x86 ends a process by SIGFPE for a
divisor of zero, and for the least integer by -1; GPUs give some number. On every device:

    x // 0 = x % 0 = 0      the least integer // -1 = that integer      the least integer % -1 = 0

as numpy has it, for floored and truncated division alike. A divisor that is the number 0 raises
`NumericsError`, which is a ZeroDivisionError too. Other numbers, and divisors that are never 0 or -1, stay as
they are: the arithmetic of indices is made of those.
"""
from __future__ import annotations

from collections.abc import Callable

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.errors import NumericsError, as_well
from tinygrad_nv.patterns.epilogue import number
from tinygrad_nv.patterns.rewriting import rebuilt

QUOTIENTS = (Ops.FLOORDIV, Ops.CDIV)
DIVISIONS = (*QUOTIENTS, Ops.FLOORMOD, Ops.CMOD)


def rewrite(sink: UOp) -> UOp:
    """The graph with divisions that are defined for each divisor. Raises `NumericsError` for the number 0."""
    nodes = tuple(sink.toposort(enter_calls=False))
    traps = {node for node in nodes if node.op in DIVISIONS and _may_trap(node)}

    def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
        return _guard_division(node, *map(new, node.src)) if node in traps else None
    return rebuilt(nodes, change) if traps else sink


def _may_trap(node: UOp) -> bool:
    divisor = node.src[1]
    if (value := number(divisor)) == 0:
        raise as_well(NumericsError(f"an integer {'divided by' if node.op in QUOTIENTS else 'modulo'} 0",
                                    "a divisor other than 0"), ZeroDivisionError())
    least, most = (value, value) if value is not None else (divisor.vmin, divisor.vmax)
    return least <= 0 <= most or (least <= -1 <= most and not dtypes.is_unsigned(node.dtype))


def _guard_division(node: UOp, x: UOp, y: UOp) -> UOp:
    """Returns a division by a divisor in whose place there is 1 where it is 0 or -1."""
    zero, minus = y.eq(0), None if dtypes.is_unsigned(node.dtype) else y.eq(-1)
    made = node.replace(src=(x, (zero if minus is None else zero | minus).where(y.const_like(1), y)))
    if node.op not in QUOTIENTS: return made    # of 1 it is 0
    if minus is not None: made = minus.where(-made, made)
    return zero.where(made.const_like(0), made)
