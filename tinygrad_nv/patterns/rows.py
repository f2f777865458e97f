"""Rows of a named function's argument (…, K): how many there are, and where they lie."""
from __future__ import annotations

from itertools import pairwise

from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.index import largest
from tinygrad_nv.patterns.strides import copy_dense, lay_out
from tinygrad_nv.tile.gemm.spec import Operand


def symbolic_rows(x: UOp) -> UOp | None:
    """The symbolic number of rows. Raises `Unsupported` for a symbolic extent beside others."""
    many = [extent for extent in x.shape[:-1] if largest(extent) != 1]
    symbols = [extent for extent in many if isinstance(extent, UOp)]
    if symbols and (len(many) > 1 or symbols[0].op is not Ops.PARAM):
        raise Unsupported("a symbolic extent that is not the number of rows")
    return symbols[0] if symbols else None


def place_rows(x: UOp) -> tuple[UOp, Operand]:
    """Returns where rows of x lie, in place where they are at one stride with columns side by side, else
    copied."""
    for way in (lay_out, copy_dense):
        found = way(x)
        *outer, inner = zip(x.shape, found.strides, strict=True)
        many = [(largest(extent), stride) for extent, stride in outer if largest(extent) != 1]
        even = all(stride == after * extent for (_, stride), (extent, after) in pairwise(many))
        if even and (inner[1] == 1 or inner[0] == 1):
            return found.storage, Operand(x.dtype, many[-1][1] if many else inner[0], 1, (), found.offset)
    raise Unsupported("rows of x that are not at one stride")
