"""The epilogue in instructions: an expression of expression.py over values of one element.

Protocol: `Finish` evaluates the expression for an element whose sums are in registers, given its row and
column; each node once. Floats are computed in float32 and rounded to the node's dtype, unless that changes
nothing; integers and booleans in 32-bit registers.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum

NAMES = {dtypes.bfloat16: "bf16", dtypes.float16: "f16"}
# results that are among the arguments, or whose rounding cannot change them
EXACT = ("max", "min", "where")


def finished(k: Kernel, root: Expression, sums: Sequence[Value], load: Callable[[Load], Value],
             position: Callable[[str | int], Value]) -> Value:
    """The value of `root`: f32 for floats (already rounded to its dtype), s32 for integers, a predicate for
    booleans. `load` gives a load's element in the same form, `position` an index as s32."""
    known: dict[Expression, Value] = {}

    def value(node: Expression) -> Value:
        if node not in known: known[node] = _made(k, node, value, sums, load, position)
        return known[node]

    return value(root)


def _made(k: Kernel, node: Expression, value: Callable[[Expression], Value], sums: Sequence[Value],
          load: Callable[[Load], Value], position: Callable[[str | int], Value]) -> Value:
    if isinstance(node, Sum): return sums[node.part]
    if isinstance(node, Load): return load(node)
    if isinstance(node, Position): return position(node.axis)
    if isinstance(node, Constant):
        return k.reg("f32", float(node.value)) if dtypes.is_float(node.dtype) else k.reg("s32", node.value)
    assert isinstance(node, Apply)
    args = [value(arg) for arg in node.args]
    if node.op == "cast": return converted(k, args[0], node.args[0].dtype, node.dtype)
    made = _applied(k, node, args)
    return made if node.op in EXACT else rounded(k, made, node.dtype)


def _applied(k: Kernel, node: Apply, args: list[Value]) -> Value:
    """An operation before rounding."""
    compared = node.args[-1].dtype
    kind = "f32" if dtypes.is_float(compared) else "s32"
    if node.op in ("less", "not_equal"):
        made = k.reg("pred")
        # a NaN is not equal to anything, itself included
        test = "lt" if node.op == "less" else "neu" if kind == "f32" else "ne"
        k.emit(f"setp.{test}.{kind}", made, *args)
        return made
    if node.op == "where": return k.select(args[0], args[1], args[2], kind)
    if node.op in ("and", "or", "xor"):
        width = "pred" if node.dtype == dtypes.bool else "b32"
        made = k.reg(width)
        k.emit(f"{node.op}.{width}", made, *args)
        return made
    names = {"add": f"add.{kind}", "sub": f"sub.{kind}", "max": f"max.{kind}", "min": f"min.{kind}",
             "mul": "mul.f32" if kind == "f32" else "mul.lo.s32", "reciprocal": "rcp.rn.f32",
             "exp2": "ex2.approx.f32", "log2": "lg2.approx.f32", "sqrt": "sqrt.rn.f32",
             "sin": "sin.approx.f32"}
    made = k.reg(kind)
    k.emit(names[node.op], made, *args)
    return made


def rounded(k: Kernel, value: Value, dtype: DType) -> Value:
    """A float32 rounded to `dtype` and widened again; other values as they are."""
    if dtype not in NAMES: return value
    return widened(k, narrowed(k, value, dtype), dtype)


def narrowed(k: Kernel, value: Value, dtype: DType) -> Value:
    """A float32 as the b16 of `dtype`."""
    half = k.reg("b16")
    k.emit(f"cvt.rn.{NAMES[dtype]}.f32", half, value)
    return half


def widened(k: Kernel, half: Value, dtype: DType) -> Value:
    """A b16 of `dtype` as float32."""
    made = k.reg("f32")
    k.emit(f"cvt.f32.{NAMES[dtype]}", made, half)
    return made


def converted(k: Kernel, value: Value, source: DType, target: DType) -> Value:
    """A value of `source` as one of `target`."""
    if dtypes.is_float(target):
        if dtypes.is_float(source): return rounded(k, value, target)
        made = k.reg("f32")
        if source == dtypes.bool: made.set(k.select(value, 1.0, 0.0, "f32"))
        else: k.emit("cvt.rn.f32.s32", made, value)
        return rounded(k, made, target)
    made = k.reg("s32")
    if dtypes.is_float(source): k.emit("cvt.rzi.s32.f32", made, value)
    elif source == dtypes.bool: made.set(k.select(value, 1, 0, "s32"))
    else: made.set(value)
    return made


def loaded(k: Kernel, pointer: Value, index: Value, dtype: DType) -> Value:
    """Element `index` (u64) of `dtype` in the form `finished` wants."""
    place = (pointer + index * dtype.itemsize).at()
    if dtype == dtypes.float32: return k.ld("global", "f32", place)[0]
    if dtype == dtypes.int32: return k.ld("global", "s32", place)[0]
    return widened(k, k.ld("global", "b16", place)[0], dtype)


def stored(k: Kernel, address: Value, value: Value, dtype: DType) -> None:
    """Stores a value of `finished` as one element of `dtype`."""
    if dtype == dtypes.float32: return k.st("global", "f32", address.at(), value)
    if dtype == dtypes.int32: return k.st("global", "s32", address.at(), value)
    return k.st("global", "b16", address.at(), narrowed(k, value, dtype))
