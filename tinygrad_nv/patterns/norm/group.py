"""Group norm of channels-last images, as a function known by name.

Protocol. `group_norm(x, groups, weight, bias, eps, activation)` normalises each image's channels in groups of
neighbours (arXiv 1803.08494), over all positions. Statistics and all that follows are computed in float32,
and rounded once. NV_NORM=0 leaves it to tinygrad.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor
from tinygrad.helpers import prod
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.contraction import Unsupported
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.group_norm import reference
from tinygrad_nv.tile.group_norm.spec import FLOATS, GroupNormSpec

NAME = "group_norm"


@dataclass(frozen=True)
class GroupNorm:
    """Group norm of x (B, …, C), with weight and bias (C,)."""
    groups: int
    eps: float
    activation: str


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5,
               activation: str = "", shift: Tensor | None = None) -> Tensor:
    """act((x − mean) / √(variance + eps) · weight + bias) of x (B, …, C), mean and variance of each image
    over all positions and the C / groups channels of a group; weight and bias (C,). `activation` is "" or
    "silu"; `shift` (B, C) is added to x. float32, bfloat16 or float16, the result in x's dtype. Raises
    `SpecError`."""
    channels = x.shape[-1] if x.ndim > 1 else 0
    if not isinstance(channels, int) or groups < 1 or channels < 1 or channels % groups:
        raise SpecError(f"{groups} groups of x {x.shape}", "x (B, …, C), C a multiple of groups")
    if weight.shape != (channels,) or bias.shape != (channels,):
        raise SpecError(f"weight {weight.shape}, bias {bias.shape}", f"({channels},) both")
    if x.dtype not in FLOATS:
        raise SpecError(f"x of {x.dtype.name}", "float32, bfloat16 or float16", "cast it")
    if activation not in ("", "silu"): raise SpecError(f"activation={activation!r}", '"" or "silu"')
    if shift is not None and shift.shape != (x.shape[0], channels):
        raise SpecError(f"shift {shift.shape}", f"{(x.shape[0], channels)}")
    return call(GroupNorm(groups, eps, activation), normalise, x, weight, bias,
                *([] if shift is None else [shift]))[0]


# **** in plain tinygrad ****

def normalise(what: GroupNorm, x: Tensor, weight: Tensor, bias: Tensor,
               *shift: Tensor) -> tuple[Tensor, ...]:
    """Returns the group norm in plain tinygrad."""
    f = x.float()
    for each in shift: f = f + each.float().reshape(x.shape[0], *(1,) * (x.ndim - 2), x.shape[-1])
    silu = what.activation == "silu"
    made = reference.normalise(f, what.groups, weight.float(), bias.float(), what.eps, silu)
    return made.cast(x.dtype),


# **** kernels ****

def lower_group_norm(what: GroupNorm, target: Target, x: UOp, weight: UOp, bias: UOp,
            *shift: UOp) -> tuple[UOp, ...]:
    """Returns the result by a kernel. Raises `Unsupported` or `SpecError` where there is none."""
    if isinstance(x.device, tuple): raise Unsupported("shards")
    if any(isinstance(extent, UOp) for extent in x.shape): raise Unsupported("symbolic extents")
    batch, *positions, channels = map(int, x.shape)
    if weight.dtype != bias.dtype: raise Unsupported("weight and bias of two dtypes")
    spec = GroupNormSpec(batch, prod(positions), channels, what.groups, what.eps, what.activation == "silu",
                         x.dtype, weight.dtype, *(each.dtype for each in shift))
    out = program.Output(tuple(x.shape), x.dtype)
    return choose(spec, target).call(x.device, [out], [_memory(each) for each in (x, weight, bias, *shift)],
                                       NAME, flops=spec.flops, nbytes=spec.nbytes)


def _memory(x: UOp) -> UOp:
    """A value in memory, in order."""
    return x if x.has_buffer_identity(after_ok=True) else x.contiguous()


lower(GroupNorm, NAME, lower_group_norm, setting="NV_NORM")
