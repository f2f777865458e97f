"""Element operations: arithmetic in torch's promoted dtype, comparisons, activations, casts."""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tinygrad import Tensor, dtypes

from tinygrad_nv import elementary
from tinygrad_nv.torch.lowering.table import (
    Number,
    Out,
    Unsupported,
    cast,
    fill,
    lowers,
    promote,
)

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": Tensor.neg, "abs": Tensor.abs, "exp": Tensor.exp, "exp2": Tensor.exp2, "log": Tensor.log,
    "log2": Tensor.log2, "log10": Tensor.log10, "sqrt": Tensor.sqrt, "rsqrt": Tensor.rsqrt, "sin": Tensor.sin,
    "cos": Tensor.cos, "tan": Tensor.tan, "sigmoid": Tensor.sigmoid, "silu": Tensor.silu,
    "reciprocal": Tensor.reciprocal, "floor": Tensor.floor, "ceil": Tensor.ceil, "round": Tensor.round,
    "trunc": Tensor.trunc, "square": lambda x: x * x,
    **{name: getattr(elementary, name) for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erf", "expm1", "log1p", "relu", "sinh",
        "tanh")}}
COMPARISONS: dict[str, Callable[[Any, Any], Tensor]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b,
    "le": elementary.at_most, "gt": lambda a, b: a > b, "ge": elementary.at_least}
BITS: dict[str, Callable[[Any, Any], Tensor]] = {
    "bitwise_and": lambda a, b: a & b, "bitwise_or": lambda a, b: a | b, "bitwise_xor": lambda a, b: a ^ b}


def _unary(apply: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda out, x: apply(x.cast(out.dtype))


def _comparison(apply: Callable[[Any, Any], Tensor]) -> Callable[..., Tensor]:
    def compare(out: Out, x: Tensor, other: Tensor | Number) -> Tensor:
        dtype = promote(x, other)
        return apply(x.cast(dtype), cast(other, dtype))
    return compare


def _bits(apply: Callable[[Any, Any], Tensor]) -> Callable[..., Tensor]:
    return lambda out, x, other: apply(x.cast(out.dtype), cast(other, out.dtype))


for _name, _apply in UNARY.items(): lowers(f"{_name}.default")(_unary(_apply))
for _name, _test in COMPARISONS.items(): lowers(f"{_name}.Tensor", f"{_name}.Scalar")(_comparison(_test))
for _name, _bit in BITS.items(): lowers(f"{_name}.Tensor", f"{_name}.Scalar")(_bits(_bit))


@lowers("add.Tensor", "add.Scalar")
def _add(out: Out, x: Tensor | Number, other: Tensor | Number, alpha: Number = 1) -> Any:
    scaled = cast(other, out.dtype)
    return cast(x, out.dtype) + (scaled if alpha == 1 else scaled * alpha)


@lowers("sub.Tensor", "sub.Scalar")
def _sub(out: Out, x: Tensor | Number, other: Tensor | Number, alpha: Number = 1) -> Any:
    scaled = cast(other, out.dtype)
    return cast(x, out.dtype) - (scaled if alpha == 1 else scaled * alpha)


@lowers("rsub.Scalar")
def _rsub(out: Out, x: Tensor, other: Number, alpha: Number = 1) -> Any:
    return other - x.cast(out.dtype) * alpha


@lowers("mul.Tensor", "mul.Scalar")
def _mul(out: Out, x: Tensor | Number, other: Tensor | Number) -> Any:
    if isinstance(x, Tensor) and dtypes.is_float(x.dtype) and not isinstance(other, Tensor) and other == 0:
        return x.isfinite().where(0.0, math.nan).cast(out.dtype)    # which tinygrad makes 0
    return cast(x, out.dtype) * cast(other, out.dtype)


@lowers("div.Tensor", "div.Scalar")
def _div(out: Out, x: Tensor | Number, other: Tensor | Number) -> Any:
    return cast(x, out.dtype) / cast(other, out.dtype)


@lowers("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(out: Out, x: Tensor, other: Tensor | Number, rounding_mode: str | None = None) -> Tensor:
    mode: Any = rounding_mode
    return x.cast(out.dtype).div(cast(other, out.dtype), rounding_mode=mode)


@lowers("floor_divide.default")
def _floor_divide(out: Out, x: Tensor, other: Tensor | Number) -> Tensor:
    return x.cast(out.dtype).div(cast(other, out.dtype), rounding_mode="floor")


@lowers("remainder.Tensor", "remainder.Scalar")
def _remainder(out: Out, x: Tensor, other: Tensor | Number) -> Tensor:
    x, by = x.cast(out.dtype), cast(other, out.dtype)
    made = x.mod(by)
    if not dtypes.is_float(out.dtype): return made
    # tinygrad's has ∞ · 0
    by = by if isinstance(by, Tensor) else x.const_like(by)
    whole = (x == 0) | ((x < 0) == (by < 0))
    return (by.isinf() & (x.abs() < math.inf)).where(whole.where(x, by), made)


@lowers("pow.Tensor_Scalar")
def _pow(out: Out, x: Tensor, exponent: Number) -> Tensor:
    x = x.cast(out.dtype)
    return x * x if exponent == 2 else x * x * x if exponent == 3 else x.pow(exponent)


@lowers("pow.Tensor_Tensor")
def _pow_tensor(out: Out, x: Tensor, exponent: Tensor) -> Tensor:
    return x.cast(out.dtype).pow(exponent.cast(out.dtype))


@lowers("pow.Scalar")
def _pow_scalar(out: Out, x: Number, exponent: Tensor) -> Tensor:
    return exponent.cast(out.dtype).pow(x, reverse=True)


@lowers("maximum.default")
def _maximum(out: Out, x: Tensor, other: Tensor) -> Tensor:
    return elementary.maximum(x.cast(out.dtype), other.cast(out.dtype))


@lowers("minimum.default")
def _minimum(out: Out, x: Tensor, other: Tensor) -> Tensor:
    return elementary.minimum(x.cast(out.dtype), other.cast(out.dtype))


@lowers("clamp.default")
def _clamp(out: Out, x: Tensor, low: Number | None = None, high: Number | None = None) -> Tensor:
    if low is None and high is None: return x
    return x.cast(out.dtype).clamp(low, high)


@lowers("clamp_min.default")
def _clamp_min(out: Out, x: Tensor, low: Number) -> Tensor: return x.cast(out.dtype).maximum(low)


@lowers("clamp_max.default")
def _clamp_max(out: Out, x: Tensor, high: Number) -> Tensor: return x.cast(out.dtype).minimum(high)


@lowers("logical_not.default")
def _logical_not(out: Out, x: Tensor) -> Tensor: return x.cast(dtypes.bool).logical_not()


@lowers("bitwise_not.default")
def _bitwise_not(out: Out, x: Tensor) -> Tensor:
    return x.logical_not() if x.dtype == dtypes.bool else x.bitwise_not()


@lowers("logical_and.default")
def _logical_and(out: Out, x: Tensor, other: Tensor) -> Tensor:
    return x.cast(dtypes.bool) & other.cast(dtypes.bool)


@lowers("logical_or.default")
def _logical_or(out: Out, x: Tensor, other: Tensor) -> Tensor:
    return x.cast(dtypes.bool) | other.cast(dtypes.bool)


@lowers("isnan.default")
def _isnan(out: Out, x: Tensor) -> Tensor: return x.isnan()


@lowers("isinf.default")
def _isinf(out: Out, x: Tensor) -> Tensor: return x.isinf()


@lowers("sign.default")
def _sign(out: Out, x: Tensor) -> Tensor: return (x > 0).cast(out.dtype) - (x < 0).cast(out.dtype)


@lowers("elu.default")
def _elu(out: Out, x: Tensor, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1) -> Tensor:
    return elementary.elu(x, alpha, scale, input_scale)


@lowers("leaky_relu.default")
def _leaky_relu(out: Out, x: Tensor, slope: Number = 0.01) -> Tensor: return (x > 0).where(x, x * slope)


@lowers("gelu.default")
def _gelu(out: Out, x: Tensor, approximate: str = "none") -> Tensor: return elementary.gelu(x, approximate)


@lowers("gelu_backward.default")
def _gelu_backward(out: Out, grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    wide = x if x.dtype == dtypes.float64 else x.float()
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
        t = inner.tanh()
        grown = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * wide * wide)
        slope = 0.5 * (1 + t) + 0.5 * wide * (1 - t * t) * grown
    else:
        density = (-0.5 * wide * wide).exp() / math.sqrt(2 * math.pi)
        slope = 0.5 * (1 + elementary.erf(wide / math.sqrt(2))) + wide * density
    return grad.cast(wide.dtype) * slope


@lowers("silu_backward.default")
def _silu_backward(out: Out, grad: Tensor, x: Tensor) -> Tensor:
    wide = x if x.dtype == dtypes.float64 else x.float()
    s = wide.sigmoid()
    return grad.cast(wide.dtype) * s * (1 + wide * (1 - s))


@lowers("where.self")
def _where(out: Out, condition: Tensor, x: Tensor, other: Tensor) -> Tensor:
    return condition.where(x.cast(out.dtype), other.cast(out.dtype))


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def _fill_masked(out: Out, x: Tensor, mask: Tensor, value: Tensor | Number) -> Tensor:
    return mask.where(cast(value, out.dtype), x)


@lowers("_to_copy.default")
def _to_copy(out: Out, x: Tensor, **kwargs: Any) -> Tensor:
    if str(kwargs.get("device") or "cpu") != "cpu": raise Unsupported(f"a copy to {kwargs['device']}")
    return x.cast(out.dtype)


@lowers("alias.default", "detach.default", "clone.default", "lift_fresh_copy.default", "contiguous.default")
def _same(out: Out, x: Tensor, **kwargs: Any) -> Tensor: return x


@lowers("copy.default")
def _copy(out: Out, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    return source.cast(out.dtype).expand(x.shape)


# **** constants ****

@lowers("arange.default")
def _arange(out: Out, end: Number, **kwargs: Any) -> Tensor: return _range(out, 0, end, 1)


@lowers("arange.start")
def _arange_start(out: Out, start: Number, end: Number, **kwargs: Any) -> Tensor:
    return _range(out, start, end, 1)


@lowers("arange.start_step")
def _arange_step(out: Out, start: Number, end: Number, step: Number = 1, **kwargs: Any) -> Tensor:
    return _range(out, start, end, step)


def _range(out: Out, start: Number, end: Number, step: Number) -> Tensor:
    return Tensor.arange(start, end, step, dtype=out.dtype)


@lowers("zeros.default", "empty.memory_format")
def _zeros(out: Out, size: list[int], **kwargs: Any) -> Tensor: return fill(0, tuple(size), out)


@lowers("ones.default")
def _ones(out: Out, size: list[int], **kwargs: Any) -> Tensor: return fill(1, tuple(size), out)


@lowers("full.default")
def _full(out: Out, size: list[int], fill_value: Number, **kwargs: Any) -> Tensor:
    return fill(fill_value, tuple(size), out)


@lowers("scalar_tensor.default")
def _scalar_tensor(out: Out, value: Number, **kwargs: Any) -> Tensor: return fill(value, (), out)


@lowers("zeros_like.default", "empty_like.default")
def _zeros_like(out: Out, x: Tensor, **kwargs: Any) -> Tensor: return fill(0, x.shape, out)


@lowers("ones_like.default")
def _ones_like(out: Out, x: Tensor, **kwargs: Any) -> Tensor: return fill(1, x.shape, out)


@lowers("full_like.default")
def _full_like(out: Out, x: Tensor, value: Number, **kwargs: Any) -> Tensor:
    return fill(value, x.shape, out)


@lowers("new_zeros.default", "new_empty.default")
def _new_zeros(out: Out, x: Tensor, size: list[int], **kwargs: Any) -> Tensor:
    return fill(0, tuple(size), out)


@lowers("new_ones.default")
def _new_ones(out: Out, x: Tensor, size: list[int], **kwargs: Any) -> Tensor:
    return fill(1, tuple(size), out)


@lowers("new_full.default")
def _new_full(out: Out, x: Tensor, size: list[int], value: Number, **kwargs: Any) -> Tensor:
    return fill(value, tuple(size), out)


@lowers("fill.Scalar")
def _fill(out: Out, x: Tensor, value: Number) -> Tensor: return fill(value, x.shape, out)
