"""The sum over ranks with what follows it in a transformer: a residual is added, and rows are normalized, by
one kernel over the memory of peers (tile/all_reduce/spec.py has the formula).

Protocol: `all_reduce_norm(…)` is a named function of the three tensors, or None where the sum is NCCL's, or
no kernel has such rows: callers have the separate steps for that. Its reference implementation is the sum as
`all_reduce` makes it, and the rest in plain tinygrad. Gradients are those of that; the sum's is passed on as
it is, as every rank computes one loss (functions.py: `replicated`).
"""
from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tinygrad import Device, Tensor
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv.dist.collectives import peer_ranks
from tinygrad_nv.dist.collectives.device import ready, serves
from tinygrad_nv.dist.group import Group
from tinygrad_nv.dist.transports.nccl import CollectiveCall
from tinygrad_nv.errors import DistError
from tinygrad_nv.patterns import named
from tinygrad_nv.patterns.contraction import Unsupported


@dataclass(frozen=True)
class ReduceNorm:
    """Over the group of this key: a sum of this shape and dtype, and `eps` of the norm."""
    group: str
    order: CollectiveCall
    shape: tuple[int, ...]
    dtype: DType
    eps: float
    name: str


def all_reduce_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: Group,
                    name: str = "") -> tuple[Tensor, Tensor] | None:
    """The normalized rows, and the residual with the sum of x added. Raises `DistError`."""
    device, alike = str(x.device), {x.dtype, residual.dtype, weight.dtype} == {x.dtype}
    known = all(isinstance(extent, int) for extent in x.shape)
    if not serves(device) or group.size == 1 or not alike or not known: return None
    shape = tuple(int(extent) for extent in x.shape)
    order = CollectiveCall("all_reduce", prod(shape), x.dtype, name=name)
    ready(group, order, device)
    what = ReduceNorm(group.key, order, shape, x.dtype, eps, f"all_reduce over ranks {group.name} of {name}")
    found = peer_ranks.choose_kernel(what.group, order, Device.canonicalize(device), shape[-1], eps)
    if isinstance(found, str): return None

    def grad(*given: UOp, call: UOp | None = None) -> tuple[UOp | None, ...]:
        if call is None:    # of one result tinygrad does not say which
            raise DistError("the gradient of one result of all_reduce_norm", "that of both",
                            "call all_reduce, and what is behind it")
        of_rows, of_new = map(Tensor, given)
        f, scale = Tensor(call.gettuple(1)).float(), Tensor(call.src[3])
        inverse = (f.square().mean(-1, keepdim=True) + eps).rsqrt()
        g = (of_rows * scale).float()
        behind = g * inverse - f * inverse * inverse * inverse * (g * f).mean(-1, keepdim=True)
        both = (behind.cast(x.dtype) + of_new).uop
        of_scale = (of_rows.float() * f * inverse).sum(tuple(range(len(shape) - 1))).cast(x.dtype)
        return both, both, of_scale.uop
    first, second = named.call(what, _body, x.contiguous(), residual.contiguous(), weight, grad=grad)
    return first, second


def _normalize(new: Tensor, weight: Tensor, eps: float) -> Tensor:
    f = new.float()
    return (f * (f.square().mean(-1, keepdim=True) + eps).rsqrt()).cast(new.dtype) * weight


def _body(what: ReduceNorm, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    made = peer_ranks.lower(what.group, what.order, what.shape, what.dtype, x.uop, what.name)
    assert isinstance(made, tuple), made
    new = (Tensor(made[0]) + residual).contiguous()
    return _normalize(new, weight, what.eps), new


def _lower(what: ReduceNorm, _: object, x: UOp, residual: UOp, weight: UOp) -> tuple[UOp, ...]:
    made = peer_ranks.lower(what.group, what.order, what.shape, what.dtype, x, what.name,
                              (residual, weight), what.eps)
    if isinstance(made, str): raise Unsupported(made)
    return made


named.lower(ReduceNorm, "collectives", _lower)
