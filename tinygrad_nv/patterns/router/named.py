"""The router of a mixture of experts, as a function known by name.

Protocol. `route(logits, policy, bias)` says which experts each token gets, with which weights, and in
which order slots are computed (tile/router/spec.py). All of it stays on the device: no extent depends on
the logits. The gradient is that of weights with respect to logits; experts have none.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.named import call, lower
from tinygrad_nv.patterns.target import Target, choose
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.router.reference import route_tokens, score, weigh_experts
from tinygrad_nv.tile.router.spec import FLOATS, Policy, RouterSpec, check
from tinygrad_nv.tile.templates import TABLE

NAME = "router"


@dataclass(frozen=True)
class Routing:
    """`experts` int32 and `weights` float32 (T, k); `order` int32 (T · k): slots t · k + j by expert;
    `offsets` int32 (E + 1): expert e has order[offsets[e]:offsets[e + 1]]."""
    experts: Tensor
    weights: Tensor
    order: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class Route:
    """Logits (T, E), and a bias (E) of choices if `biased`."""
    policy: Policy
    biased: bool


def route(logits: Tensor, policy: Policy, bias: Tensor | None = None) -> Routing:
    """The routing of logits (T, E) by a policy; `bias`, float32 (E), is added to scores where experts are
    chosen, and not to weights. Raises `SpecError`."""
    if logits.ndim != 2 or not all(isinstance(each, int) for each in logits.shape):
        raise SpecError(f"logits of shape {logits.shape}", "(T, E), both known")
    if logits.dtype not in FLOATS: raise SpecError(f"logits of {short(logits.dtype)}", "floats")
    check(policy, count := int(logits.shape[1]))
    if bias is not None and (bias.shape != (count,) or bias.dtype != dtypes.float32):
        raise SpecError(f"bias of {short(bias.dtype)} {bias.shape}", f"float32 ({count},)")
    given = [logits] if bias is None else [logits, bias]
    return Routing(*call(Route(policy, bias is not None), _route, *given, grad=_gradient))


def _route(what: Route, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
    return route_tokens(what.policy, logits, bias)


def _gradient(grad: UOp, call_: UOp) -> tuple[UOp | None, ...]:
    """Returns the gradient of logits, through the weights: the only floats among the results."""
    what, logits, experts = call_.arg.aux, Tensor(call_.src[1]), Tensor(call_.gettuple(0)).detach()
    wide = logits.float().detach()
    numbers = Tensor.arange(int(logits.shape[1]), dtype=dtypes.int32).to(logits.device)
    chosen = (experts.unsqueeze(-1) == numbers).where(score(what.policy, wide).unsqueeze(1), 0).sum(-1)
    made = weigh_experts(what.policy, chosen).gradient(wide,
                                                       gradient=Tensor(grad).float())[0].cast(logits.dtype)
    return made.uop, *[None] * what.biased


def lower_route(what: Route, target: Target, *arguments: UOp) -> tuple[UOp, ...] | None:
    """Returns a routing by one kernel; None on targets without one. Raises `Unsupported` or `SpecError` where
    there is none."""
    if TABLE.family(target.kind, RouterSpec) is None: return None
    logits = arguments[0]
    tokens, count = map(int, logits.shape)
    spec = RouterSpec(tokens, count, what.policy, logits.dtype, what.biased)
    chosen = tokens, what.policy.k
    outputs = [program.Output(chosen, dtypes.int32), program.Output(chosen, dtypes.float32),
               program.Output((spec.slots,), dtypes.int32), program.Output((count + 1,), dtypes.int32)]
    return choose(spec, target).call(logits.device, outputs, arguments, NAME)


lower(Route, NAME, lower_route)
