"""Convolutions of channels-last images, as a function known by name.

Protocol. `convolution(x, weight, bias, …)` is an implicit GEMM (tile/conv/spec.py): rows are the positions of
the output, columns the output channels, and the sum runs over taps of the filter and channels of the input,
which lie side by side. Bias, a residual and SiLU are its epilogue. Filters of one tap are a matmul of ours as
they are. Where a target has no template (a GPU), patches are laid out in memory, and multiplied by one.
Gradients are tinygrad's. `method` is `Tensor.conv2d` while tinygrad_nv is enabled: it brings images and
filters into this layout. NV_GEMM=0 leaves all to tinygrad.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType, DTypeLike
from tinygrad.helpers import ALLOW_TF32, IMAGE, WINO, make_tuple, resolve_pool_pads
from tinygrad.uop.ops import UOp

from tinygrad_nv import config
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose, takes
from tinygrad_nv.tile.conv.reference import patches
from tinygrad_nv.tile.conv.spec import FLOATS, ConvSpec
from tinygrad_nv.tile.expression import Expression, Load, Sum, silu

NAME = "conv"
ACTIVATIONS = ("", "silu")
SMALL = 1 << 18     # flops of a Tensor.conv2d below which its layout costs more than it gains


@dataclass(frozen=True)
class Convolution:
    """A convolution. `padding`: rows above and below, columns left and right. `extras`: which of bias and
    residual come behind x and weight."""
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    activation: str
    extras: tuple[str, ...]


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: tuple[int, int] = (1, 1),
                padding: tuple[int, int, int, int] = (0, 0, 0, 0), residual: Tensor | None = None,
                activation: str = "") -> Tensor:
    """act(conv(x, weight) + bias + residual): (B, OH, OW, O) in x's dtype, of x (B, H, W, C) and weight
    (O, KH, KW, C). bias (O,), residual (B, OH, OW, O); `padding` is (above, below, left, right), `activation`
    "" or "silu". Sums, and all that follows them, in float32, rounded once. float32, bfloat16 or float16.
    Raises `SpecError`."""
    if x.ndim != 4 or weight.ndim != 4 or x.shape[3] != weight.shape[3]:
        raise SpecError(f"images {x.shape}, filters {weight.shape}", "(B, H, W, C) and (O, KH, KW, C)")
    if x.dtype not in FLOATS or weight.dtype != x.dtype:
        raise SpecError(f"images of {x.dtype.name}, filters of {weight.dtype.name}",
                        "float32, bfloat16 or float16, the same of both", "cast them")
    if activation not in ACTIVATIONS: raise SpecError(f"activation={activation!r}", '"" or "silu"')
    if min(stride) < 1 or min(padding) < 0:
        raise SpecError(f"stride {stride}, padding {padding}", "strides ≥ 1, padding ≥ 0")
    out = _output_shape(x.shape, weight.shape, stride, padding)
    if any(isinstance(extent, UOp) for each in (x, weight) for extent in each.shape):
        raise SpecError(f"images {x.shape}, filters {weight.shape}", "extents that are known",
                        "bind variables before")
    if bias is not None and bias.shape != (out[3],): raise SpecError(f"bias {bias.shape}", f"({out[3]},)")
    if residual is not None and residual.shape != out: raise SpecError(f"residual {residual.shape}", f"{out}")
    given = {"bias": bias, "residual": residual}
    extras = {name: each for name, each in given.items() if each is not None}
    what = Convolution(stride, padding, activation, tuple(extras))
    return call(what, convolve, x, weight, *extras.values())[0]


def _output_shape(x: tuple[int, ...], weight: tuple[int, ...], stride: tuple[int, int],
                  padding: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """(B, OH, OW, O). Raises `SpecError` where a filter is larger than the padded image."""
    above, below, left, right = padding
    high, wide = x[1] + above + below - weight[1], x[2] + left + right - weight[2]
    if min(high, wide) < 0:
        raise SpecError(f"filters {weight[1]}x{weight[2]} over images {x[1]}x{x[2]} with padding {padding}",
                        "filters no larger than padded images")
    return x[0], high // stride[0] + 1, wide // stride[1] + 1, weight[0]


def method(theirs: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None,
           groups: int = 1, stride: int | Sequence[int] = 1, dilation: int | Sequence[int] = 1,
           padding: int | Sequence[int] = 0, dtype: DTypeLike | None = None) -> Tensor:
    """Tensor.conv2d while enabled: of two or one dimensions in space, as long as kernels of ours do it."""
    space = x.ndim - 2
    steps = make_tuple(stride, space)
    if dtype is not None or groups != 1 or set(make_tuple(dilation, max(space, 1))) != {1} \
            or not _is_worthwhile(x, weight, bias, steps):
        return theirs(x, weight, bias, groups, stride, dilation, padding, dtype)
    pads = resolve_pool_pads(padding, space)
    if min(pads) < 0: return theirs(x, weight, bias, groups, stride, dilation, padding, dtype)
    if space == 1:      # an image of one row
        x, weight, steps, pads = x.unsqueeze(2), weight.unsqueeze(2), (1, *steps), (*pads, 0, 0)
    images, filters = (each.permute(0, 2, 3, 1) for each in (x, weight))
    left, right, above, below = pads
    made = convolution(images, filters, bias, stride=(steps[0], steps[1]),
                       padding=(above, below, left, right)).permute(0, 3, 1, 2)
    return made.squeeze(2) if space == 1 else made


def _is_worthwhile(x: Tensor, weight: Tensor, bias: Tensor | None, steps: tuple[int, ...]) -> bool:
    """Whether a convolution is worth bringing into another layout. One of one tap, or whose patches do not
    overlap, is a matmul as it is."""
    if x.ndim not in (3, 4) or weight.ndim != x.ndim or not config.get("NV_GEMM") or WINO or IMAGE:
        return False
    given = [x, weight, *([] if bias is None else [bias])]
    if any(not isinstance(extent, int) or extent < 1 for each in given for extent in each.shape): return False
    if {each.dtype for each in given} != {x.dtype}: return False
    if x.dtype not in FLOATS or x.shape[1] != weight.shape[1]: return False
    if tuple(weight.shape[2:]) == steps: return False
    if isinstance(x.device, tuple) or x.device != weight.device or not takes(x.device): return False
    taps = math.prod(weight.shape[2:])
    return taps > 1 and 2 * math.prod(x.shape) * taps * weight.shape[0] // math.prod(steps) >= SMALL


# **** in plain tinygrad ****

def convolve(what: Convolution, x: Tensor, weight: Tensor, *extras: Tensor) -> tuple[Tensor, ...]:
    """Returns the convolution in plain tinygrad."""
    spec = _spec(what, x.uop, weight.uop)
    taps = patches(x.float(), spec).unsqueeze(3)
    sums = (taps * weight.float()).sum((-3, -2, -1))
    return apply_epilogue(what, sums, extras).cast(x.dtype),


def apply_epilogue(what: Convolution, sums: Tensor, extras: tuple[Tensor, ...]) -> Tensor:
    """Returns what the epilogue makes of sums, float32."""
    for each in extras: sums = sums + each.float()
    return sums.silu() if what.activation else sums


# **** kernels ****

def lower_conv(what: Convolution, target: Target, x: UOp, weight: UOp, *extras: UOp) -> tuple[UOp, ...]:
    """Returns the result by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    if isinstance(x.device, tuple): raise Unsupported("shards")
    spec = _spec(what, x, weight, *extras)
    try: how = choose(spec, target)
    except Unsupported: return by_patches(what, spec, target, x, weight, *extras)
    out = program.Output((spec.batch, spec.out_height, spec.out_width, spec.outputs), x.dtype)
    return how.call(x.device, [out], [_memory(each) for each in (x, weight, *extras)], NAME,
                      flops=spec.flops, nbytes=spec.nbytes)


def _spec(what: Convolution, x: UOp, weight: UOp, *extras: UOp) -> ConvSpec:
    (b, h, w, c), (o, kh, kw, _) = (tuple(map(int, each.shape)) for each in (x, weight))
    return ConvSpec(b, h, w, c, o, (kh, kw), what.stride, what.padding, x.dtype,
                    _epilogue(what, x.dtype, o, *(each.dtype for each in extras)) if extras else Sum(),
                    x.dtype == dtypes.float32 and bool(ALLOW_TF32))


def _epilogue(what: Convolution, dtype: DType, outputs: int, *extras: DType) -> Expression:
    """The expression of a result's element."""
    made: Expression = Sum()
    for i, (name, kind) in enumerate(zip(what.extras, extras, strict=True)):
        made = made + Load(i, kind, 0 if name == "bias" else outputs, 1).cast(dtypes.float32)
    return (silu(made) if what.activation else made).cast(dtype)


def by_patches(what: Convolution, spec: ConvSpec, target: Target, x: UOp, weight: UOp,
               *extras: UOp) -> tuple[UOp, ...]:
    """The result by a matmul, whose left operand is in memory. Raises `Unsupported` where no template has
    it."""
    choose(spec.gemm, target)
    left = Tensor(x) if spec.gemm.k == spec.channels and spec.gemm.m == x.shape[0] * x.shape[1] * x.shape[2] \
        else patches(Tensor(x), spec)
    a, gemm = left.reshape(spec.gemm.m, spec.gemm.k).contiguous(), spec.gemm
    sums = a.matmul(Tensor(weight).reshape(gemm.n, gemm.k).T, dtype=dtypes.float32)
    whole = sums.reshape(spec.batch, spec.out_height, spec.out_width, spec.outputs)
    return apply_epilogue(what, whole, tuple(map(Tensor, extras))).cast(x.dtype).contiguous().uop,


def _memory(x: UOp) -> UOp:
    """A value in memory, in order."""
    return x if x.has_buffer_identity(after_ok=True) else x.contiguous()


lower(Convolution, NAME, lower_conv, setting="NV_GEMM")
