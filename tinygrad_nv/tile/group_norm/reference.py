"""Group norm in plain tinygrad (tile/reference.py)."""
from __future__ import annotations

from tinygrad import Tensor, dtypes

from tinygrad_nv.tile.group_norm.spec import GroupNormSpec
from tinygrad_nv.tile.reference import Argument, Given, compute_dtype, dense, round_to


def arguments(spec: GroupNormSpec) -> tuple[Argument, ...]:
    """out, x, weight, bias, and shift, where there is one."""
    images = (dense(spec.batch, spec.positions, spec.channels),)
    made = [Argument("out", spec.dtype, images, "out"), Argument("x", spec.dtype, images),
            *(Argument(name, spec.affine, (dense(spec.channels),)) for name in ("weight", "bias"))]
    if spec.shift is not None: made.append(Argument("shift", spec.shift, (dense(spec.batch, spec.channels),)))
    return tuple(made)


def reference(spec: GroupNormSpec, given: Given, exact: bool = False) -> tuple[Tensor, ...]:
    """[B, P, C]."""
    wide = compute_dtype(dtypes.float32, exact)
    x = given["x"].reshape(spec.batch, spec.positions, spec.channels).cast(wide)
    if spec.shift is not None: x = x + given["shift"].reshape(spec.batch, 1, spec.channels).cast(wide)
    weight, bias = given["weight"].cast(wide), given["bias"].cast(wide)
    made = normalise(x, spec.groups, weight, bias, spec.eps, spec.silu)
    return made if exact else round_to(made, spec.dtype),


def normalise(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, silu: bool) -> Tensor:
    """Group norm of x (B, …, C), in its dtype."""
    f = x.reshape(x.shape[0], -1, groups, x.shape[-1] // groups)
    f = f - f.mean((1, 3), keepdim=True)
    f = f * (f.square().mean((1, 3), keepdim=True) + eps).rsqrt()
    made = f.reshape(*x.shape) * weight + bias
    return made.silu() if silu else made
