"""Methods of Tensor that are wrong for some numbers in tinygrad 0.14.0: ours while enabled, in values and in
derivatives as torch has them.

* layernorm, var, std of float16 and bfloat16: in float32, forward and backward. gelu, quick_gelu and
  hardswish of float16, too, where x³ and 6 x are infinite.
* logsumexp, logcumsumexp, logaddexp: rows with infinities were NaN.
* elu, celu, selu: the derivative was NaN where exp x is infinite, from 89 up.
* erf, asin, acos, atan: the derivative at 0 was 0; leaky_relu: it was that of positive numbers.
* max_pool2d: NaN wins.
* sparse_categorical_crossentropy and nll_loss with nothing but ignored targets: the mean is NaN, as in
  torch, and so was its gradient, which is 0.
* item and tolist of float16: Python's buffers have no such numbers before 3.12.
"""
from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

from tinygrad import Tensor, UOp, dtypes
from tinygrad.helpers import make_tuple, resolve_pool_pads

from tinygrad_nv import hooks

NARROW = (dtypes.float16, dtypes.bfloat16)


def _wide(narrow: tuple[Any, ...], theirs: Callable[..., Tensor], x: Tensor, *args: Any,
          **kwargs: Any) -> Tensor:
    if x.dtype not in narrow: return theirs(x, *args, **kwargs)
    return theirs(x.float(), *args, **kwargs).cast(x.dtype)


# **** sums of exponentials ****

def _finite(x: Tensor) -> Tensor:
    """x, 0 where it is infinite: what exponents are counted from."""
    return x.isinf().where(0, x)


def _logsumexp(_: Any, x: Tensor, axis: Any = None, keepdim: bool = False) -> Tensor:
    most = _finite(x.max(axis=axis, keepdim=True).detach())
    return (x - most).exp().sum(axis=axis, keepdim=keepdim).log() + (most if keepdim else most.squeeze(axis))


def _logaddexp(theirs: Callable[..., Tensor], x: Tensor, other: Any) -> Tensor:
    if not isinstance(other, Tensor): return theirs(x, other)    # softplus: finite
    x, y = x._broadcasted(other)
    most = _finite(x.maximum(y))
    return ((x - most).exp() + (y - most).exp()).log() + most


def _logcumsumexp(_: Any, x: Tensor, axis: int = 0) -> Tensor:
    if x.ndim == 0: return x
    along = x.transpose(axis, -1)
    most = _finite(along.cummax(-1)[0].detach()).unsqueeze(-1)
    seen = Tensor.ones(along.shape[-1], along.shape[-1], dtype=dtypes.bool, device=x.device).tril()
    terms = seen.where((along.unsqueeze(-2) - most), -float("inf")).exp()
    return (terms.sum(-1).log() + most.squeeze(-1)).transpose(-1, axis)


# **** activations ****

def _exponential(x: Tensor, below: Tensor, alpha: float, by: float = 1.0) -> Tensor:
    """x, and alpha · (exp(x / by) - 1) where `below`: of 0 elsewhere, whose slope is finite."""
    return below.where(alpha * ((below.where(x, 0) / by).exp() - 1), x)


def _elu(_: Any, x: Tensor, alpha: float = 1.0) -> Tensor:
    return _exponential(x, x < 0 if alpha == 1 else x <= 0, alpha)


def _celu(_: Any, x: Tensor, alpha: float = 1.0) -> Tensor: return _exponential(x, x < 0, alpha, alpha)


def _selu(_: Any, x: Tensor, alpha: float = 1.67326, gamma: float = 1.0507) -> Tensor:
    return gamma * _exponential(x, x <= 0, alpha)


def _at_zero(slope: float, theirs: Callable[..., Tensor], x: Tensor) -> Tensor:
    """An odd function that tinygrad has as x.sign() · f(x.abs()), both of slope 0 at 0."""
    zero = x == 0
    return zero.where(x * slope, theirs(zero.where(0.5, x)))


def _leaky_relu(_: Any, x: Tensor, neg_slope: float = 0.01) -> Tensor: return (x > 0).where(x, neg_slope * x)


# **** maxima of windows ****

def _max_pool2d(theirs: Callable[..., Any], x: Tensor, kernel_size: Any = (2, 2), stride: Any = None,
                dilation: Any = 1, padding: Any = 0, ceil_mode: bool = False, return_indices: bool = False
                ) -> Tensor | tuple[Tensor, Tensor]:
    def pool(x: Tensor, return_indices: bool = False) -> Any:
        return theirs(x, kernel_size, stride, dilation, padding, ceil_mode, return_indices)
    if not dtypes.is_float(x.dtype): return pool(x, return_indices)
    kernel = make_tuple(kernel_size, 2)
    dims, pads = len(kernel), resolve_pool_pads(padding, len(kernel))
    strides, dilations = make_tuple(kernel if stride is None else stride, dims), make_tuple(dilation, dims)
    keys = _key(x)
    for i in range(dims):     # one dimension at a time: fewer comparisons, and those of columns in vectors
        along = [[each[i] if j == i else 1 for j in range(dims)] for each in (kernel, strides, dilations)]
        own = [n if j // 2 == dims - 1 - i else 0 for j, n in enumerate(pads)]
        keys = theirs(keys if i == 0 else keys.contiguous(), *map(tuple, along), tuple(own), ceil_mode)
    values = _with_gradient_of(pool, x, _number_of(keys, x.dtype))
    if not return_indices: return values
    image = x.shape[-dims:]
    numbers = Tensor.arange(1, math.prod(image) + 1).reshape(image)
    last = pool(x.isnan().where(numbers, 0))
    return values, (last > 0).where(last - 1, pool(x, True)[1])


def _key(x: Tensor) -> Tensor:
    """Integers in the order of x, NaN last and -0 before 0, so that each number can be had back."""
    whole, wide, _ = _key_dtypes(x.dtype)
    bits, most = x.cast(wide).bitcast(whole), int(whole.max)
    return x.isnan().where(most, (bits < 0).where(bits ^ most, bits))


def _number_of(keys: Tensor, dtype: Any) -> Tensor:
    """The numbers that have these keys; -infinity for less, which is in windows of padding only."""
    whole, wide, infinity = _key_dtypes(dtype)
    keys = keys.maximum(~infinity)
    return (keys < 0).where(keys ^ int(whole.max), keys).bitcast(wide).cast(dtype)


def _key_dtypes(dtype: Any) -> tuple[Any, Any, int]:
    """The dtypes of keys and of the numbers whose bits they are, and the bits of infinity."""
    if dtype == dtypes.float64: return dtypes.int64, dtype, 0x7ff << 52
    return dtypes.int32, dtypes.float32, 0xff << 23


def _with_gradient_of(fn: Callable[[Tensor], Tensor], x: Tensor, values: Tensor) -> Tensor:
    """The values, whose gradient by x is that of fn(x)."""
    def back(gradient: UOp, call: UOp) -> tuple[UOp | None, ...]:
        given = Tensor(call.src[2])
        return None, fn(given).gradient(given, gradient=Tensor(gradient))[0].uop
    node = UOp.maketuple(values.uop.param_like(0)).call(values.uop, x.uop, grad_fxn=back, name="max_pool2d")
    return Tensor(node.gettuple(0))


# **** losses ****

def _mean_over(total: Tensor, count: Tensor) -> Tensor:
    """The mean of `count` terms; of none NaN, as a number beside a sum with slope 0."""
    none = count == 0
    return total / none.where(1, count) + none.where(float("nan"), 0).cast(total.dtype)


def _sparse_categorical_crossentropy(theirs: Callable[..., Tensor], x: Tensor, Y: Tensor,
                                     ignore_index: int = -1, label_smoothing: float = 0.0,
                                     reduction: str = "mean") -> Tensor:
    if reduction != "mean" or ignore_index == -1:
        return theirs(x, Y, ignore_index, label_smoothing, reduction)
    return _mean_over(theirs(x, Y, ignore_index, label_smoothing, "sum"), Y.ne(ignore_index).sum())


def _nll_loss(theirs: Callable[..., Tensor], x: Tensor, Y: Tensor, weight: Tensor | None = None,
              ignore_index: int | None = None, reduction: str = "mean") -> Tensor:
    if reduction != "mean" or ignore_index is None: return theirs(x, Y, weight, ignore_index, reduction)
    counted = Y.ne(ignore_index)
    each = Y.const_like(1) if weight is None else weight.gather(0, counted.where(Y, 0).flatten())
    return _mean_over(theirs(x, Y, weight, ignore_index, "sum"), (each.reshape(Y.shape) * counted).sum())


# **** numbers ****

def _number(name: str, theirs: Callable[..., Any], x: Tensor) -> Any:
    return getattr(x.float(), name)() if x.dtype == dtypes.float16 else theirs(x)


METHODS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("layernorm", "var", "std"), functools.partial(_wide, NARROW)),
    **dict.fromkeys(("gelu", "quick_gelu", "hardswish"), functools.partial(_wide, NARROW[:1])),
    "logsumexp": _logsumexp, "logcumsumexp": _logcumsumexp, "logaddexp": _logaddexp,
    "elu": _elu, "celu": _celu, "selu": _selu, "leaky_relu": _leaky_relu, "max_pool2d": _max_pool2d,
    "erf": functools.partial(_at_zero, 2 / math.sqrt(math.pi)), "asin": functools.partial(_at_zero, 1.0),
    "nll_loss": _nll_loss, "sparse_categorical_crossentropy": _sparse_categorical_crossentropy}
if sys.version_info < (3, 12):
    METHODS |= {name: functools.partial(_number, name) for name in ("item", "tolist")}


def register() -> None:
    """Registers the methods."""
    for name, method in METHODS.items(): hooks.add_method(name, method)
