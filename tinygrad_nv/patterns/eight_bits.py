"""Values of FP8 on devices whose code has no such dtype: rounded where they are cast, as torch rounds.

Protocol. tinygrad computes such values in float16 while it generates code, rounds them twice, has 0 for
numbers below the least normal one, whether they are cast, loaded or stored, and ±57344 for infinity. Its
patterns stay, over conversions of ours, between codes and float32, in integers: `lower` goes before the rule
that applies them (hooks.install_decomposition).

A code is the nearest, ties to even, with subnormals. e4m3 ends at ±448; e5m2 goes on to infinity; NaN stays
NaN.
"""
from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

from tinygrad.codegen.decomp import dtype as theirs
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import EMULATED_DTYPES
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import PatternMatcher, UOp, graph_rewrite

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
        """Smallest subnormal, which all subnormals are multiples of."""
        return 2.0 ** (1 - self.bias - self.mantissa)


CODES = {dtypes.fp8e4m3: Code(3, 7, 0x7E, 0x7F), dtypes.fp8e5m2: Code(2, 15, 0x7C, 0x7C)}


def lower(sink: UOp, found: set[DType], renderer: Renderer) -> UOp | None:
    """A kernel without the dtypes of 8 bits in `found` that a renderer lacks, which are taken out of it."""
    emulated = [dtype for dtype in CODES if dtype in found and (
        dtype not in renderer.supported_dtypes() or dtype in EMULATED_DTYPES.tolist(dtypes))]
    found.difference_update(emulated)
    for dtype in emulated:
        sink = graph_rewrite(sink, PATTERNS, (dtype, dtypes.float32), bottom_up=True, name=f"decomp {dtype}")
    return sink if emulated else None


def _convert(v: UOp, source: DType, to: DType) -> UOp:
    """Replaces `f2f`: returns codes of the bits of float32 values, or values of codes."""
    if to in CODES: return code_of(CODES[to], v.bitcast(dtypes.float32))
    return value_of(CODES[source], v)


def _round(value: UOp, dtype: DType) -> UOp:
    """Replaces `f2f_clamp`."""
    return value_of(CODES[dtype], code_of(CODES[dtype], value))


def _patterns() -> PatternMatcher:
    """tinygrad's, over these two."""
    names: dict[str, Any] = {**vars(theirs), "f2f": _convert, "f2f_clamp": _round}
    for name in ("f2f_load", "f2f_store"): names[name] = FunctionType(getattr(theirs, name).__code__, names)
    names["pm_float_decomp"] = made = PatternMatcher([
        (pattern, FunctionType(fn.__code__, names)) for pattern, fn in theirs.pm_float_decomp.patterns])
    return made


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
    return (made.bitcast(dtypes.uint32) | ((bits & 0x80) << 24)).bitcast(dtypes.float32)



PATTERNS = _patterns()
