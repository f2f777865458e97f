"""Element functions of tiles, and other shapes of the same elements.

Protocol: floats are computed in float32 and rounded to their dtype; integers and numbers are taken as
float32 where a function is one of floats. On GPUs exp2, log2, sin, sqrt and reciprocal are the hardware's
approximations (PTX ISA, "Floating Point Instructions"): 2 units of float32 for exp2 and log2, 2^-20.5
absolute for sin within ±pi; others are made of these.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numpy import broadcast_shapes
from tinygrad.dtype import dtypes

from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.language.ir import TileType
from tinygrad_nv.tile.language.trace import check_dtype, current, fail
from tinygrad_nv.tile.language.values import (
    Operand,
    Tile,
    apply,
    binary,
    broadcast,
    cast,
    describe,
    full,
    scalar,
    together,
    unary,
)

INF = math.inf
SIMPLE = {"constant", "apply", "cast", "bitcast", "iota", "broadcast", "interleave"}  # of where_needed
SMALL_TANH = 0.02   # below it x - x^3/3 has a relative error of 2 x^4/15, 2e-8


def zeros(shape: Any, dtype: Any = dtypes.float32) -> Tile:
    """A tile of zeros."""
    return full(shape, 0, check_dtype(dtype))


def ones(shape: Any, dtype: Any = dtypes.float32) -> Tile:
    """A tile of ones."""
    return full(shape, 1, check_dtype(dtype))


def fill(shape: Any, value: Operand, dtype: Any = dtypes.float32) -> Tile:
    """A tile of one value."""
    return full(shape, value, check_dtype(dtype))


def where(condition: Operand, x: Operand, y: Operand) -> Tile:
    """x where the condition holds, else y."""
    test = scalar(condition, dtypes.bool)
    if test.dtype != dtypes.bool: fail(f"a condition of {describe(test)}", "bool", "compare it: x != 0")
    a, b = together(x, y)
    test, a, b = broadcast(test, a, b)
    return apply("where", test, a, b)


def fma(x: Operand, y: Operand, z: Operand) -> Tile:
    """x · y + z in float32, rounded once; twice by CPUs without such an instruction."""
    wide = (cast(scalar(each, dtypes.float32), dtypes.float32) for each in (x, y, z))
    return apply("fma", *broadcast(*wide))


def maximum(x: Operand, y: Operand) -> Tile:
    """The larger of two, element by element."""
    return binary("max", x, y)


def minimum(x: Operand, y: Operand) -> Tile:
    """The smaller of two, element by element."""
    return binary("min", x, y)


def clamp(x: Operand, low: Operand, high: Operand) -> Tile:
    """x, at least `low` and at most `high`."""
    return minimum(maximum(x, low), high)


def exp2(x: Operand) -> Tile:
    """2 to the power of x."""
    return unary("exp2", x)


def exp2_nonpositive(x: Operand) -> Tile:
    """2 to the power of what is at most about 1, as in a softmax: below 2^-126 it is 0."""
    return unary("exp2_small", x)


def exp(x: Operand) -> Tile:
    """e to the power of x, as exp2(x · log2 e)."""
    made = _wide(x)
    return cast(exp2(made * (1 / math.log(2))), _float_of(x))


def log2(x: Operand) -> Tile:
    """The logarithm to base 2."""
    return unary("log2", x)


def log(x: Operand) -> Tile:
    """The natural logarithm."""
    return cast(log2(_wide(x)) * math.log(2), _float_of(x))


def log_normal(x: Operand) -> Tile:
    """The natural logarithm of positive normal numbers, of others anything: `log` without their cases. On
    GPUs its error is 2^-22 at least, which is large beside a result near 0."""
    return unary("log_normal", x)


def log_near_one(x: Operand) -> Tile:
    """The natural logarithm of positive normal numbers, some units of the last place off near 1, too."""
    return unary("log_near_one", x)


def sqrt(x: Operand) -> Tile:
    """The square root."""
    return unary("sqrt", x)


def rsqrt(x: Operand) -> Any:
    """1 / sqrt(x). Of a Python number a Python number."""
    if isinstance(x, (int, float)): return 1 / math.sqrt(x)
    return cast(1.0 / sqrt(_wide(x)), _float_of(x))


def reciprocal(x: Operand) -> Tile:
    """1 / x."""
    return 1.0 / (x if isinstance(x, Tile) else scalar(x, dtypes.float32))


def sin(x: Operand) -> Tile:
    """The sine of radians."""
    return unary("sin", x)


def cos(x: Operand) -> Tile:
    """The cosine of radians, as sin(x + pi / 2)."""
    return cast(sin(_wide(x) + math.pi / 2), _float_of(x))


def sigmoid(x: Operand) -> Tile:
    """1 / (1 + exp(-x))."""
    return cast(1.0 / (1.0 + exp(-_wide(x))), _float_of(x))


def tanh(x: Operand) -> Tile:
    """1 - 2 / (exp(2 x) + 1), and x - x^3/3 near 0."""
    wide = _wide(x)
    near = wide - wide * wide * wide * (1 / 3)
    return cast(where(abs_(wide) < SMALL_TANH, near, 1.0 - 2.0 / (exp(wide * 2.0) + 1.0)), _float_of(x))


# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: within 1.5e-7 absolute
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def erf(x: Operand) -> Tile:
    """The error function, within 2e-7 absolute."""
    wide = _wide(x)
    size = abs_(wide)
    t = 1.0 / (1.0 + size * 0.3275911)
    total: Any = 0.0
    for factor in reversed(_ERF): total = (total + factor) * t
    made = 1.0 - total * exp(-(size * size))
    return cast(where(wide < 0, -made, made), _float_of(x))


def silu(x: Operand) -> Tile:
    """x · sigmoid(x)."""
    wide = _wide(x)
    return cast(wide * sigmoid(wide), _float_of(x))


def relu(x: Operand) -> Tile:
    """x, or 0 where it is negative."""
    return maximum(x, 0)


def gelu(x: Operand) -> Tile:
    """x / 2 · (1 + erf(x / sqrt 2))."""
    wide = _wide(x)
    return cast(wide * 0.5 * (1.0 + erf(wide * math.sqrt(0.5))), _float_of(x))


def abs_(x: Operand) -> Tile:
    """Without its sign."""
    return unary("abs", x, floats=False)


def floor(x: Operand) -> Tile:
    """The integer at or below x, as a float."""
    return unary("floor", x)


def ceil(x: Operand) -> Tile:
    """The integer at or above x, as a float."""
    return -floor(-scalar(x, dtypes.float32))


def round_(x: Operand) -> Tile:
    """The nearest integer, of two the even one, as a float."""
    return unary("round", x)


def bitcast(x: Tile, dtype: Any) -> Tile:
    """The same 32 bits as float32, int32 or uint32; or as two float16 or bfloat16, which are a new last axis,
    the lower bits first."""
    plain = check_dtype(dtype)
    words, halves = (dtypes.float32, dtypes.int32, dtypes.uint32), (dtypes.float16, dtypes.bfloat16)
    if not isinstance(x, Tile) or x.dtype not in words or plain not in (*words, *halves):
        fail(f"a bitcast of {describe(x)} to {plain.name}",
             "float32, int32 and uint32 to each other, or to two float16 or bfloat16")
    if x.dtype == plain: return x
    if plain in halves:
        if not x.shape:
            fail(f"a bitcast of {describe(x)} to two {short(plain)}", "a tile of one axis or more")
        return Tile(current().emit("halves", [x.value], [TileType(plain, (*x.shape, 2))])[0])
    return Tile(current().emit("bitcast", [x.value], [TileType(plain, x.shape)])[0])


def mul_high(x: Operand, y: Operand) -> Tile:
    """The upper 32 bits of a product of 32-bit integers."""
    return binary("mul_high", x, y)


def rotate_left(x: Tile, bits: Operand) -> Tile:
    """Words of 32 bits turned left by the lowest five bits of a number."""
    if not isinstance(x, Tile) or x.dtype not in (dtypes.int32, dtypes.uint32):
        fail(f"{describe(x)} turned", "int32 or uint32")
    return apply("funnel_left", *broadcast(x, x, cast(scalar(bits, x.dtype), x.dtype)))


def interleave(x: Operand, y: Operand) -> Tile:
    """Elements of two tiles in turn along the last axis, which is twice as long: x[0], y[0], x[1], …"""
    a, b = broadcast(*together(x, y))
    if not a.shape: fail("tile.interleave of scalars", "tiles of one axis or more")
    shape = (*a.shape[:-1], 2 * a.shape[-1])
    return Tile(current().emit("interleave", [a.value, b.value], [TileType(a.dtype, shape)])[0])


def deinterleave(x: Tile) -> tuple[Tile, Tile]:
    """The elements of even indices along the last axis, and those of odd ones: the real and the imaginary
    numbers of pairs."""
    if not isinstance(x, Tile) or not x.shape or x.shape[-1] % 2:
        fail(f"tile.deinterleave of {describe(x)}",
             "a tile with an even number of elements along its last axis")
    to = TileType(x.dtype, (*x.shape[:-1], x.shape[-1] // 2))
    even, odd = (Tile(current().emit("deinterleave", [x.value], [to], {"odd": odd})[0]) for odd in (0, 1))
    return even, odd


def where_needed(condition: Operand, compute: Callable[[], Operand], other: Operand) -> Tile:
    """`compute()` where the condition holds, else `other`. Threads of a GPU and vectors of a CPU for no
    element of which it holds leave the computation out: one of elements, without loads, reductions, loops."""
    test, trace = scalar(condition, dtypes.bool), current()
    if test.dtype != dtypes.bool: fail(f"a condition of {describe(test)}", "bool", "compare it: x != 0")
    with trace.region() as region: found = scalar(compute(), dtypes.float32)
    if found_ops := sorted({op.name for op in region.walk()} - SIMPLE):
        fail(f"{', '.join(found_ops)} in what tile.where_needed computes", "operations on elements",
             "do that before it")
    kept = cast(scalar(other, found.dtype), found.dtype)
    shape = broadcast_shapes(test.shape, found.shape, kept.shape)
    with trace.inside(region): region.yields = found.broadcast_to(shape).value,
    operands = [each.broadcast_to(shape).value for each in (test, kept)]
    return Tile(trace.emit("where_needed", operands, [TileType(found.dtype, shape)], {}, [region])[0])


def cdiv(x: Any, y: Any) -> Any:
    """x / y rounded up, of Python's integers or of a kernel's."""
    if isinstance(x, int) and isinstance(y, int): return -(-x // y)
    return (x + y - 1) // y


def _wide(x: Operand) -> Tile: return cast(scalar(x, dtypes.float32), dtypes.float32)


def _float_of(x: Operand) -> Any:
    return x.dtype if isinstance(x, Tile) and dtypes.is_float(x.dtype) else dtypes.float32


def transpose(x: Tile, *axes: int) -> Tile:
    """Axes in another order; without them the last two change places."""
    return x.transpose(*axes)


def reshape(x: Tile, *shape: Any) -> Tile:
    """The same elements in row-major order."""
    return x.reshape(*shape)


def broadcast_to(x: Tile, *shape: Any) -> Tile:
    """Repeated along axes of extent 1 and along new leading ones."""
    return x.broadcast_to(*shape)


def expand_dims(x: Tile, axis: int) -> Tile:
    """A new axis of extent 1 at `axis`."""
    at = axis + x.ndim + 1 if axis < 0 else axis
    return x.reshape(*x.shape[:at], 1, *x.shape[at:])
