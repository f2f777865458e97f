"""Softmaxes, and norms, as each opset has them.

Protocol: before opset 13 a softmax is over all dimensions from `axis` on, flattened into one. Statistics of
norms are in the type that `stash_type` names; what is normalised is rounded to the type of the input, before
it is scaled.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tinygrad import Tensor, dtypes

from tinygrad_nv.onnx.elements import dtype_of
from tinygrad_nv.onnx.table import op


def _hardmax(x: Tensor, axis: int) -> Tensor:
    """1 at the first maximum along a dimension, 0 elsewhere."""
    d = axis % x.ndim
    places = Tensor.arange(int(x.shape[d])).reshape([-1 if i == d else 1 for i in range(x.ndim)])
    return (places == x.argmax(d, keepdim=True)).cast(x.dtype)


def _register(name: str, function: Callable[[Tensor, int], Tensor]) -> None:
    @op(name, since=13)
    def along(x: Tensor, axis: int = -1) -> Tensor: return function(x, axis)

    @op(name)
    def flatten(x: Tensor, axis: int = 1) -> Tensor:
        first = axis + x.ndim if axis < 0 else axis
        # of one dimension it is the same, and stays a softmax that patterns find
        if math.prod(x.shape[first + 1:]) == 1 and first < x.ndim: return function(x, first)
        return function(x.reshape(math.prod(x.shape[:first]), -1), 1).reshape(x.shape)


for each, body in (("Softmax", Tensor.softmax), ("LogSoftmax", Tensor.log_softmax), ("Hardmax", _hardmax)):
    _register(each, body)


# **** norms ****

@op("LayerNormalization")
def layer_norm(x: Tensor, scale: Tensor, bias: Tensor | None = None, axis: int = -1, epsilon: float = 1e-5,
               stash_type: int = 1) -> tuple[Tensor, ...]:
    """The norm over the dimensions from `axis` on, its mean, and 1 / its standard deviation."""
    dims, f = tuple(range(axis % x.ndim, x.ndim)), x.cast(dtype_of(stash_type))
    mean = f.mean(dims, keepdim=True)
    inverse = (f - mean).square().mean(dims, keepdim=True).add(epsilon).rsqrt()
    made = ((f - mean) * inverse).cast(x.dtype) * scale
    return (made if bias is None else made + bias), mean, inverse


@op("RMSNormalization")
def rms_norm(x: Tensor, scale: Tensor, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Tensor:
    """x / rms(x) · scale over the dimensions from `axis` on, in the type of the scale."""
    f = x.cast(dtype_of(stash_type))
    square = f.square().mean(tuple(range(axis % x.ndim, x.ndim)), keepdim=True)
    return (f * (square + epsilon).rsqrt()).cast(scale.dtype) * scale


def _normalise_groups(x: Tensor, groups: int, epsilon: float, stash_type: int) -> Tensor:
    """x [N, C, …] normalised within groups of channels: [N, groups, elements]."""
    f = x.reshape(x.shape[0], groups, -1).cast(dtype_of(stash_type))
    return f.layernorm(eps=epsilon).cast(x.dtype)


@op("GroupNormalization", since=21)
def group_norm(x: Tensor, scale: Tensor, bias: Tensor, num_groups: int, epsilon: float = 1e-5,
               stash_type: int = 1) -> Tensor:
    """The norm within groups of channels, with a scale and a bias for each channel."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    return _normalise_groups(x, num_groups, epsilon, stash_type).reshape(x.shape) * scale.reshape(shape) + \
        bias.reshape(shape)


@op("GroupNormalization", since=18)
def group_norm_18(x: Tensor, scale: Tensor, bias: Tensor, num_groups: int, epsilon: float = 1e-5) -> Tensor:
    """Normalises as `group_norm` does, with a scale and a bias for each group."""
    made = _normalise_groups(x, num_groups, epsilon, 1)
    return (made * scale.reshape(1, -1, 1) + bias.reshape(1, -1, 1)).reshape(x.shape)


@op("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    """The norm of each channel."""
    return group_norm(x, scale, bias, int(x.shape[1]), epsilon)


@op("BatchNormalization")
def batch_norm(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, epsilon: float = 1e-5,
               momentum: float = 0.9, training_mode: int = 0, spatial: int = 1, is_test: int = 0
               ) -> Tensor | tuple[Tensor, ...]:
    """The norm of each channel by given statistics. While training (since opset 14) statistics are those of
    x, and their running means are outputs. `spatial=0` (before opset 9): of each element of a row."""
    shape = (1, *x.shape[1:]) if not spatial else (1, -1, *[1] * (x.ndim - 2))
    if not training_mode: return _scale(x, scale, bias, mean, var, epsilon, shape)
    dims, f = tuple(i for i in range(x.ndim) if i != 1), x.cast(dtypes.float32) if x.dtype.itemsize < 4 else x
    own = f.mean(dims)
    spread = (f - own.reshape(shape)).square().mean(dims)
    running = ((old * momentum + new * (1 - momentum)).cast(old.dtype)
               for old, new in ((mean, own), (var, spread)))
    return _scale(x, scale, bias, own, spread, epsilon, shape).cast(x.dtype), *running


def _scale(x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor, epsilon: float,
            shape: Sequence[object]) -> Tensor:
    """(x - mean) / √(var + epsilon) · scale + bias, as a factor and a summand, which constants make once."""
    f = [each.cast(dtypes.float32) if each.dtype.itemsize < 4 else each
         for each in (x, scale, bias, mean, var)]
    by = ((f[4] + epsilon).rsqrt() * f[1]).contiguous()
    more = (f[2] - f[3] * by).contiguous()
    return (f[0] * by.reshape(shape) + more.reshape(shape)).cast(x.dtype)


@op("MeanVarianceNormalization")
def mean_variance(x: Tensor, axes: Sequence[int] = (0, 2, 3), across_channels: int = 0,
                  normalize_variance: int = 1) -> Tensor:
    """x less its mean, divided by its standard deviation."""
    dims = tuple(axes)
    rest = x - x.mean(dims, keepdim=True)
    return rest / (rest.square().mean(dims, keepdim=True).sqrt() + 1e-9)
