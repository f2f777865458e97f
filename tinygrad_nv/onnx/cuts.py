"""Long expressions as several kernels.

Protocol: tinygrad makes one kernel of all that is computed element by element, and the time to compile it
grows with the square of its length: 50 Tanh in a row take some ten times as long as 16. `Cuts` counts the
UOps between an output and the last reduction or memory. An output of more than `LONGEST` is written to
memory, and so are the inputs of a node that have more together. The numbers are those of the whole
expression. Repeated parts become equal kernels, which are compiled once.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad import Device, Tensor
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.onnx.elements import Narrow

LONGEST = 256       # UOps: a norm, an activation and a residual sum have some 100
ENDS = {Ops.REDUCE, Ops.CONTIGUOUS, Ops.BUFFER, Ops.PARAM, Ops.CONST, Ops.COPY, Ops.AFTER, Ops.CALL}

# what compilers make of them
WEIGHTS = {Ops.SIN: 128, Ops.EXP2: 24, Ops.LOG2: 24, Ops.POW: 64, Ops.THREEFRY: 64}


class Cuts:
    """The lengths of the expressions of one call."""

    def __init__(self) -> None:
        self.lengths: dict[UOp, int] = {}   # of outputs of nodes
        self.seen: set[UOp] = set()

    def inputs(self, given: Sequence[Any]) -> list[Any]:
        """A node's inputs, in memory where they are too long together."""
        lengths = [self.lengths.get(each.uop, 0) if isinstance(each, Tensor) else 0 for each in given]
        if sum(lengths) <= 2 * LONGEST: return list(given)
        mean = LONGEST / len(given)
        return [_store(each) if n > mean else each for each, n in zip(given, lengths, strict=True)]

    def output(self, made: Any) -> Any:
        """A node's output, in memory if it is too long."""
        if isinstance(made, Narrow): return Narrow(self.output(made.tensor), made.kind)
        if not isinstance(made, Tensor): return made
        length, parts, open_ = 0, set[UOp](), [made.uop]
        while open_:
            u = open_.pop()
            if u.op in ENDS: continue
            if (known := self.lengths.get(u)) is not None:
                length += 0 if u in parts else known
                parts.add(u)
            elif u not in self.seen:
                self.seen.add(u)
                length += WEIGHTS.get(u.op, 1)
                open_ += u.src
        if length <= LONGEST:
            self.lengths[made.uop] = length
            return made
        return _store(made)


def _store(x: Tensor) -> Tensor:
    """A Tensor that is written to memory; one of constants alone has no device yet."""
    return x.contiguous() if x.device is not None else x.to(Device.DEFAULT).contiguous()
