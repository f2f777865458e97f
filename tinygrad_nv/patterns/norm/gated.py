"""Gated activations of gate | up in one matrix, as a function known by name, whose gradient is one too.

Protocol. `gated(both, activation)` is act(gate) · up. Forward and backward are one kernel each
(tile/norm/spec.py); the backward kernel writes the gradient of gate | up as it lies, where tinygrad's own
code computes gate' and up' in two kernels and puts them side by side in a third. Everything is computed in
float32 and rounded once. NV_NORM=0 leaves both to tinygrad.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.helpers import prod
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.gemm.spec import FLOAT16S
from tinygrad_nv.tile.norm import spec as specs

NAME = "gated"
FLOATS = (dtypes.float32, *FLOAT16S)


@dataclass(frozen=True)
class Gated:
    """act(gate) · up: (…, W) of gate | up (…, 2 W)."""
    activation: str


@dataclass(frozen=True)
class GatedGradient:
    """The gradient of gate | up (…, 2 W), from it and from the result's gradient (…, W)."""
    activation: str


def gate_up(both: Tensor, activation: str) -> Tensor:
    """Returns act(gate) · up of gate | up: (…, W) of `both` (…, 2 W), float32, bfloat16 or float16.
    `activation` is "silu", "gelu_tanh" or "gelu" (with erf). Raises `SpecError`."""
    if activation not in specs.ACTIVATIONS:
        raise SpecError(f"activation={activation!r}", f"one of {', '.join(specs.ACTIVATIONS)}")
    width = both.shape[-1] if both.ndim else 0
    if not isinstance(width, int) or width < 2 or width % 2:
        raise SpecError(f"gate | up of shape {both.shape}", "(…, 2 W): gate, then up")
    if both.dtype not in FLOATS:
        raise SpecError(f"gate | up of {both.dtype.name}", "float32, bfloat16 or float16", "cast it")
    return call(Gated(activation), activate, both, grad=_gradient)[0]


def _gradient(grad: UOp, call_: UOp) -> tuple[UOp | None, ...]:
    what = GatedGradient(call_.arg.aux.activation)
    return (call(what, derive, Tensor(call_.src[1]), Tensor(grad))[0].uop,)


# **** in plain tinygrad ****

def activate(what: Gated, both: Tensor) -> tuple[Tensor, ...]:
    """Returns the gated rows in plain tinygrad."""
    gate, up = (each.float() for each in both.chunk(2, -1))
    p, _ = _factor(gate, what.activation)
    return ((gate * p * up).cast(both.dtype),)


def derive(what: GatedGradient, both: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Returns the gradient in plain tinygrad."""
    gate, up = (each.float() for each in both.chunk(2, -1))
    g, (p, slope) = grad.float(), _factor(gate, what.activation)
    return (Tensor.cat(g * up * (p + gate * slope), g * gate * p, dim=-1).cast(both.dtype),)


def _factor(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Returns the activation's factor of x and its slope, as tile/norm/spec.py has them."""
    if activation == "silu":
        s = x.sigmoid()
        return s, s * (1 - s)
    if activation == "gelu_tanh":
        near = x.clip(-specs.MOST_GELU, specs.MOST_GELU)
        s = (near * (1 + specs.CUBIC * near.square()) * (2 * specs.ROOT)).sigmoid()
        return s, s * (1 - s) * (1 + 3 * specs.CUBIC * near.square()) * (2 * specs.ROOT)
    return 0.5 * (1 + (x * math.sqrt(0.5)).erf()), (x.square() * -0.5).exp() * math.sqrt(0.5 / math.pi)


# **** kernels ****

def lower_gated(what: Gated, target: Target, both: UOp) -> tuple[UOp, ...]:
    """Returns the result by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    rows, width = _extents(both)
    spec = specs.apply_gate(rows, width, both.dtype, what.activation)
    out = program.Output((*both.shape[:-1], width), both.dtype)
    return choose(spec, target).call(both.device, [out], [_memory(both)], NAME, flops=spec.flops)


def lower_gradient(what: GatedGradient, target: Target, both: UOp, grad: UOp) -> tuple[UOp, ...]:
    """Returns the gradient by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    rows, width = _extents(both)
    spec = specs.gate_gradient(rows, width, both.dtype, what.activation)
    out = program.Output(both.shape, both.dtype)
    return choose(spec, target).call(both.device, [out], [_memory(both), _memory(grad)], NAME,
                                       " gradient", flops=spec.flops)


def _extents(both: UOp) -> tuple[int, int]:
    """Rows, and columns of the result."""
    if isinstance(both.device, tuple): raise Unsupported("shards")
    if any(isinstance(extent, UOp) for extent in both.shape): raise Unsupported("symbolic extents")
    if not (rows := prod(both.shape[:-1])): raise Unsupported("no rows")
    return rows, int(both.shape[-1]) // 2


def _memory(x: UOp) -> UOp:
    """A value in memory, in order."""
    return x if x.has_buffer_identity(after_ok=True) else x.contiguous()


lower(Gated, NAME, lower_gated, setting="NV_NORM")
lower(GatedGradient, NAME, lower_gradient, setting="NV_NORM")
