"""Values of FP8 on devices whose code has no such dtype: rounded where they are cast, as torch rounds.

Protocol. `rewrite` is the last rewrite of hooks/: what kernels of ours compute with FP8 is taken by then.
tinygrad computes such values in float16, and rounds them where they are stored, so `x.cast(fp8).float()` in
one kernel was x; and a number below the least normal one was 0. Here what is cast from FP8 is computed from
codes, in integers:

    CAST[float](CAST[fp8](x))   →   value of (code of x)
    CAST[float](y)              →   value of BITCAST[uint8](y)

A code is the nearest, ties to even, with subnormals. e4m3 ends at ±448; e5m2 goes on to infinity; NaN stays
NaN. A store is tinygrad's: it has 0 for subnormals, and ±57344 for infinity.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad import Device
from tinygrad.dtype import dtypes
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv.patterns.rewriting import rebuilt

NEEDS = ({Ops.CAST},)
FLOAT_MANTISSA, FLOAT_BIAS, FLOAT_INF = 23, 127, 0x7F800000


@dataclass(frozen=True)
class Code:
    """A dtype of 8 bits: `most` is the largest code of a number, infinity included, `special` the least of
    infinity or NaN."""
    mantissa: int
    bias: int
    most: int
    special: int
    nan: int = 0x7F

    @property
    def shift(self) -> int: return FLOAT_MANTISSA - self.mantissa

    @property
    def rebias(self) -> int: return FLOAT_BIAS - self.bias

    @property
    def step(self) -> float:
        """What subnormals are multiples of."""
        return 2.0 ** (1 - self.bias - self.mantissa)


CODES = {dtypes.fp8e4m3: Code(3, 7, 0x7E, 0x7F), dtypes.fp8e5m2: Code(2, 15, 0x7C, 0x7C)}


def rewrite(sink: UOp) -> UOp:
    """The graph with casts of FP8 in integers."""
    nodes = tuple(sink.toposort(enter_calls=False))
    casts = {node for node in nodes if node.op is Ops.CAST and _is_emulated(node)}

    def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
        if node not in casts: return None
        return _value(node.src[0], new).cast(node.dtype)
    return rebuilt(nodes, change) if casts else sink


def _is_emulated(cast: UOp) -> bool:
    """Whether a cast is one of a dtype that the code of its device lacks."""
    of = cast.src[0].dtype
    if of not in CODES or cast.dtype == of or cast.device is None: return False
    device = cast.device if isinstance(cast.device, str) else cast.device[0]
    return of not in Device[device].renderer.supported_dtypes()


def _value(node: UOp, new: Callable[[UOp], UOp]) -> UOp:
    """A value in float32."""
    if (code := CODES.get(node.dtype)) is None: return new(node).cast(dtypes.float32)
    return value_of(code, _bits(node, new))


def _bits(node: UOp, new: Callable[[UOp], UOp]) -> UOp:
    """The codes, uint8, of an FP8 value."""
    if node.op in GroupOp.Movement:
        return UOp(node.op, src=(_bits(node.src[0], new), *node.src[1:]), arg=node.arg)
    if node.op is not Ops.CAST: return new(node).bitcast(dtypes.uint8)
    return code_of(CODES[node.dtype], _value(node.src[0], new))


def code_of(code: Code, x: UOp) -> UOp:
    """The codes, uint8, of float32 values."""
    bits = x.bitcast(dtypes.uint32)
    size = bits & 0x7FFFFFFF
    half = (1 << (code.shift - 1)) - 1
    rounded = size + half + ((size >> code.shift) & 1)
    normal = (rounded >> code.shift) - (code.rebias << code.mantissa)
    # a sum whose last place is a step rounds to one
    exponent = 1 - code.bias - code.mantissa + FLOAT_MANTISSA
    small = (size.bitcast(dtypes.float32) + 2.0**exponent).bitcast(dtypes.uint32)
    small = small - ((exponent + FLOAT_BIAS) << FLOAT_MANTISSA)
    made = (size < ((code.rebias + 1) << FLOAT_MANTISSA)).where(small, normal)
    made = (made < code.most).where(made, made.const_like(code.most))
    made = (size > FLOAT_INF).where(made.const_like(code.nan), made)
    return (made | ((bits >> 24) & 0x80)).cast(dtypes.uint8)


def value_of(code: Code, bits: UOp) -> UOp:
    """The float32 values of codes."""
    bits = bits.cast(dtypes.uint32)
    size = bits & 0x7F
    high = size << code.shift
    normal = (size < code.special).where(high + (code.rebias << FLOAT_MANTISSA), high | FLOAT_INF)
    made = (size < (1 << code.mantissa)).where(size.cast(dtypes.float32) * code.step,
                                               normal.bitcast(dtypes.float32))
    return (bits & 0x80).eq(0).where(made, -made)

