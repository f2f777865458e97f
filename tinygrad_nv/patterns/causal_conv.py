"""Short causal convolutions as a function known by name: sequences whose windows lie in pages, written in
place.

Protocol. `causal_conv(x, weight, bias, windows, sequences)` gives each token's result, and changes the pages
of windows as `Tensor.assign` does (tile/causal_conv/spec.py says what). Its body is the reference, and what
runs wherever no kernel does. There is no gradient. Results and pages are realized together: each alone would
run the kernel again.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.decode.paged import check_kind, check_shape
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.strides import lay_out_rows
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.causal_conv.reference import convolve
from tinygrad_nv.tile.causal_conv.spec import CausalConvSpec
from tinygrad_nv.tile.sequences import COLUMNS, FLOATS

NAME = "causal_conv"


@dataclass(frozen=True)
class CausalConv:
    """A convolution, as far as its tensors do not say it."""
    bias: bool
    silu: bool
    single: bool


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, windows: Tensor, sequences: Tensor, *,
                silu: bool = False, single: bool = False) -> tuple[Tensor, Tensor]:
    """Convolves each channel of sequences with K taps, and changes windows. Returns (T, C) in x's dtype, and
    the windows.

    x (T, C), weight (C, K), bias (C) or None, windows (P, K − 1, C), of one float dtype; sequences int32 (S,
    6) as of `linear_attention`. `single`: sequence s has at most one token, which is token s. Raises
    `SpecError`."""
    check_shape("x", x, "T, C", (None, None))
    tokens, channels = x.shape
    check_shape("weight", weight, "C, K", (channels, None))
    check_shape("windows", windows, "P, K − 1, C", (None, int(weight.shape[1]) - 1, channels))
    check_shape("sequences", sequences, "S, 6", (tokens if single else None, len(COLUMNS)))
    check_kind("x", x.dtype, FLOATS)
    given = [("weight", weight), ("windows", windows)]
    if bias is not None:
        check_shape("bias", bias, "C", (channels,))
        given.append(("bias", bias))
    for name, each in given: check_kind(name, each.dtype, (x.dtype,))
    check_kind("sequences", sequences.dtype, (dtypes.int32,))
    tensors = [windows, x, weight, *([] if bias is None else [bias]), sequences]
    out, made = call(CausalConv(bias is not None, silu, single), _compute, *tensors)
    return out, windows.assign(made)


def _compute(what: CausalConv, *given: Tensor) -> tuple[Tensor, ...]:
    *tensors, table = given
    windows, x, weight, *bias = (each.float() for each in tensors)
    return tuple(each.cast(given[0].dtype) for each in convolve(table, windows, x, weight,
                                                                bias[0] if bias else None, what.silu))


def lower_causal_conv(what: CausalConv, target: Target, *given: UOp) -> tuple[UOp, ...]:
    """Returns results and windows after the kernel. Raises `Unsupported` where there is none."""
    windows, x, *rest = given
    if not program.is_whole(windows):
        raise Unsupported("windows are no storage of their own, to be written in place")
    (T, channels), taps = map(int, x.shape), int(rest[0].shape[1])
    found = lay_out_rows(x)
    spec = CausalConvSpec(T, int(given[-1].shape[0]), channels, taps, int(windows.shape[0]), x.dtype,
                          found.strides[0], found.offset, what.bias, what.silu, what.single)
    outputs = [program.Output((T, channels), x.dtype), windows]
    inputs = [found.storage, *(each.contiguous() for each in rest[:-1]), rest[-1]]
    return choose(spec, target).call(windows.device, outputs, inputs, nbytes=spec.nbytes, flops=spec.flops)


lower(CausalConv, NAME, lower_causal_conv, "NV_ATTENTION")
