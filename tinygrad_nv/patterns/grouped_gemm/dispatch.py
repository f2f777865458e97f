"""A mixture of experts in one call: tokens to their experts, and what these make of them added up.

Protocol (Switch Transformer, arXiv 2101.03961; Mixtral, arXiv 2401.04088). `dispatch` is three functions of
this package after each other: `route` the router's logits; `grouped_matmul` gate | up of the tokens' rows, as
they lie, with the activation; `grouped_matmul` down, weighted, each slot to its place. The k results of a
token are added. `dispatch_plain` is the same in plain tinygrad.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns.grouped_gemm.named import grouped_matmul
from tinygrad_nv.patterns.quant_grouped import quant_grouped_matmul
from tinygrad_nv.patterns.router.named import Routing, route
from tinygrad_nv.quant.stack import QStack
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.grouped_gemm.reference import activate
from tinygrad_nv.tile.router.reference import route_tokens
from tinygrad_nv.tile.router.spec import Policy


@dataclass(frozen=True)
class Experts:
    """E gated feed-forward networks of I columns, down(act(gate) · up) of rows of H, and the router that
    chooses among them. As in transformers, `gate_up` has an expert's gate above its up. `activation`: "silu",
    "gelu", "gelu_tanh" or "swiglu_clamped". `choice_bias`, float32, is added to scores where experts are
    chosen, and not to weights (DeepSeek-V3). Quantised matrices are a `QStack`: of gate and up of each expert
    in turn, [2 E, I, H], and of down, [E, H, I]. Raises `SpecError` for shapes that do not fit each other."""
    router: Tensor                          # (E, H)
    gate_up: Tensor | QStack                # (E, 2 I, H)
    down: Tensor | QStack                   # (E, H, I)
    activation: str = "silu"
    router_bias: Tensor | None = None       # (E)
    choice_bias: Tensor | None = None       # (E)
    gate_up_bias: Tensor | None = None      # (E, 2 I)
    down_bias: Tensor | None = None         # (E, H)

    def __post_init__(self) -> None:
        if self.router.ndim != 2 or any(len(each.shape) != 3 for each in (self.gate_up, self.down)):
            raise SpecError(self._words(), "router (E, H), gate_up (E, 2 I, H), down (E, H, I)")
        (count, hidden), width = self.router.shape, self.down.shape[2]
        both = (2 * count, width) if isinstance(self.gate_up, QStack) else (count, 2 * width)
        shapes = ((count, hidden), (*both, hidden), (count, hidden, width), (count,), (count,),
                  (count, 2 * width), (count, hidden))
        names = [each.name for each in fields(self) if each.name != "activation"]
        for name, shape in zip(names, shapes, strict=True):
            if (one := getattr(self, name)) is not None and one.shape != shape:
                raise SpecError(f"{name} of shape {one.shape} beside {self._words()}", f"{shape}")

    def _words(self) -> str:
        return f"router {self.router.shape}, gate_up {self.gate_up.shape}, down {self.down.shape}"


def policy_of(policy: Policy | str) -> Policy:
    """A policy by name: "top1" weights an expert with its softmax (Switch Transformer), "top2", "top8", …
    with those of the chosen divided by their sum (Mixtral). Raises `SpecError`."""
    if isinstance(policy, Policy): return policy
    if (found := re.fullmatch(r"top([1-9]\d*)", policy)) is None:
        raise SpecError(f"policy={policy!r}", 'a Policy, or "top1", "top2", "top8", …')
    return Policy(k := int(found[1]), renormalize=k > 1)


def dispatch(tokens: Tensor, experts: Experts, policy: Policy | str = "top2") -> Tensor:
    """Returns what a mixture of experts makes of tokens (…, H): (…, H) in their dtype, with the gradients of
    tokens and of all that `experts` has but `choice_bias` and quantised matrices. Raises `SpecError`."""
    policy, x = policy_of(policy), _flat(tokens, experts)
    routing = route(_logits(x, experts).contiguous(), policy, experts.choice_bias)
    inner = _multiply(x, experts.gate_up, routing, gather=policy.k, activation=experts.activation,
                        bias=experts.gate_up_bias)
    made = _multiply(inner, experts.down, routing, scatter=True, weights=routing.weights.flatten(),
                       bias=experts.down_bias)
    return made.reshape(-1, policy.k, x.shape[1]).sum(1).reshape(tokens.shape)


def dispatch_plain(tokens: Tensor, experts: Experts, policy: Policy | str = "top2") -> Tensor:
    """Returns the result of `dispatch` in plain tinygrad: every expert for every token, those not chosen
    weighted 0."""
    policy, x = policy_of(policy), _flat(tokens, experts)
    chosen, weights, *_ = route_tokens(policy, _logits(x, experts), experts.choice_bias)
    numbers = Tensor.arange(int(experts.router.shape[0]), dtype=dtypes.int32).to(x.device)
    own = (chosen.unsqueeze(-1) == numbers).where(weights.unsqueeze(-1), 0).sum(1)      # (T, E)
    both = x.float().unsqueeze(0) @ _dense(experts.gate_up, 2).transpose(1, 2)          # (E, T, 2 I)
    if experts.gate_up_bias is not None: both = both + experts.gate_up_bias.float().unsqueeze(1)
    made = activate(experts.activation, both) @ _dense(experts.down, 1).transpose(1, 2)
    if experts.down_bias is not None: made = made + experts.down_bias.float().unsqueeze(1)
    return (made * own.T.unsqueeze(-1)).sum(0).cast(x.dtype).reshape(tokens.shape)


def _flat(tokens: Tensor, experts: Experts) -> Tensor:
    """Tokens (T, H). Raises `SpecError` for others than the experts take."""
    hidden = experts.router.shape[1]
    dtype = (experts.router if isinstance(experts.down, QStack) else experts.down).dtype
    if tokens.ndim < 2 or tokens.shape[-1] != hidden or tokens.dtype != dtype:
        raise SpecError(f"tokens of {short(tokens.dtype)} {tokens.shape}",
                        f"{short(dtype)} (…, {hidden}), as the experts have")
    return tokens.reshape(-1, hidden)


def _multiply(x: Tensor, w: Tensor | QStack, routing: Routing, **more: Any) -> Tensor:
    """Returns rows times the matrices of their experts."""
    multiply: Any = quant_grouped_matmul if isinstance(w, QStack) else grouped_matmul
    return multiply(x, w, routing.offsets, routing.order, **more)


def _dense(w: Tensor | QStack, parts: int) -> Tensor:
    """The matrices of each expert in float32, `parts` one below the other."""
    if not isinstance(w, QStack): return w.float()
    count, n, k = w.shape
    return w.dequantize().reshape(count // parts, parts * n, k)


def _logits(x: Tensor, experts: Experts) -> Tensor:
    made = x @ experts.router.T
    return made if experts.router_bias is None else made + experts.router_bias
