"""Elementwise UOps as ONNX nodes.

Protocol: `emit(b, node, names, dtypes)` adds what computes a node from its sources' values, which have been
brought to one dtype by `operands`. tinygrad broadcasts as ONNX does.
"""
from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx import helper
from tinygrad import dtypes
from tinygrad.dtype import DType, least_upper_dtype
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.errors import OnnxError
from tinygrad_nv.onnx.exporting.builder import DEFAULTS, Builder, type_of

PLAIN = {Ops.ADD: "Add", Ops.SUB: "Sub", Ops.MUL: "Mul", Ops.MAX: "Max", Ops.FDIV: "Div", Ops.CDIV: "Div",
         Ops.POW: "Pow", Ops.SQRT: "Sqrt", Ops.RECIPROCAL: "Reciprocal", Ops.NEG: "Neg", Ops.SIN: "Sin",
         Ops.CMPLT: "Less", Ops.CMPEQ: "Equal", Ops.WHERE: "Where"}
BOOLS = {Ops.ADD: "Or", Ops.MAX: "Or", Ops.MUL: "And", Ops.AND: "And", Ops.OR: "Or", Ops.XOR: "Xor",
         Ops.CMPNE: "Xor"}
BITS = {Ops.AND: "BitwiseAnd", Ops.OR: "BitwiseOr", Ops.XOR: "BitwiseXor"}
COMPARISONS = (Ops.CMPLT, Ops.CMPEQ, Ops.CMPNE)
OPS = {*PLAIN, *BOOLS, *BITS, Ops.EXP2, Ops.LOG2, Ops.TRUNC, Ops.CMOD, Ops.FLOORMOD, Ops.FLOORDIV, Ops.SHL,
       Ops.SHR, Ops.MULACC, Ops.CAST}


def strong(dtype: DType) -> DType:
    """A dtype of elements in memory."""
    return DEFAULTS.get(dtype, dtype)


def operand_dtype(node: UOp) -> DType:
    """The dtype in which the sources of an elementwise node are taken, the condition of WHERE left out."""
    values = node.src[1:] if node.op is Ops.WHERE else node.src
    if node.op not in COMPARISONS: return strong(node.dtype)
    kinds = [each.dtype for each in values if each.dtype not in DEFAULTS] or [each.dtype for each in values]
    made = strong(kinds[0] if len(set(kinds)) == 1 else least_upper_dtype(*kinds))
    # ONNX compares no bools by size
    return dtypes.int32 if made == dtypes.bool and node.op is Ops.CMPLT else made


def emit(b: Builder, node: UOp, names: Sequence[str]) -> str:
    """Adds an elementwise node; `names` are its sources, brought to `operand_dtype`."""
    dtype = operand_dtype(node)
    if dtype == dtypes.bool and node.op in BOOLS: return b.node(BOOLS[node.op], *names)
    if node.op in BITS: return b.node(BITS[node.op], *names)
    match node.op:
        case Ops.CMPNE: return b.node("Not", b.node("Equal", *names))
        case Ops.EXP2: return b.node("Pow", number(b, 2.0, dtype), *names)
        case Ops.LOG2: return b.node("Div", b.node("Log", *names), number(b, math.log(2), dtype))
        case Ops.TRUNC:
            negative = b.node("Less", *names, number(b, 0, dtype))
            return b.node("Where", negative, b.node("Ceil", *names), b.node("Floor", *names))
        case Ops.CMOD: return b.node("Mod", *names, fmod=1)
        case Ops.FLOORMOD: return b.node("Mod", *names, fmod=0 if dtypes.is_int(dtype) else 1)
        case Ops.FLOORDIV: return _floor_div(b, names, dtype)
        case Ops.MULACC: return b.node("Add", b.node("Mul", *names[:2]), names[2])
        case Ops.SHL | Ops.SHR: return _shift(b, node, names, dtype)
    return b.node(PLAIN[node.op], *names)


def number(b: Builder, value: float | bool, dtype: DType) -> str:
    """A constant of one element."""
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(type_of(dtype)))
    return b.constant(np.array(value).astype(kind), "number")


def _floor_div(b: Builder, names: Sequence[str], dtype: DType) -> str:
    if not dtypes.is_int(dtype): return b.node("Floor", b.node("Div", *names))
    rest = b.node("Mod", *names, fmod=0)
    return b.node("Div", b.node("Sub", names[0], rest), names[1])


def _shift(b: Builder, node: UOp, names: Sequence[str], dtype: DType) -> str:
    """A shift: of unsigned integers as ONNX has it, of others by a constant as arithmetic."""
    if dtype in dtypes.uints:
        return b.node("BitShift", *names, direction="LEFT" if node.op is Ops.SHL else "RIGHT")
    if node.src[1].op is not Ops.CONST:
        raise OnnxError(f"a shift of {dtype} by a number that is computed", "unsigned integers")
    by = number(b, 1 << int(node.src[1].arg), dtype)
    return b.node("Mul", names[0], by) if node.op is Ops.SHL else _floor_div(b, [names[0], by], dtype)
