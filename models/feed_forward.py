"""The feed-forward half of a layer: dense, or a mixture of experts.

Protocol of a mixture (Switch Transformer, arXiv 2101.03961; Mixtral, arXiv 2401.04088): `route` chooses k
experts for each token, and sorts the T · k slots by expert. Two grouped matmuls follow: gate | up of the
tokens' rows, as they lie, with the activation; and down, weighted, each slot to its place. The k results
of a token are added. No extent depends on the routing, so a captured step serves every token.

A rank of an expert parallel network has some of the experts (`own`). Slots of the others are sorted behind
its own, no kernel computes them, and they add 0.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.helpers import TRAINING

from tinygrad_nv import functional as F
from tinygrad_nv.quant.activations import StackWeight

from .config import ModelConfig
from .layer_config import MoEConfig
from .layers import Linear, activate


class FeedForward:
    """Gated feed-forward: down(act(gate(x)) · up(x)) (arXiv 2002.05202); down(act(up(x))) where a model has
    no gates."""

    def __init__(self, config: ModelConfig, width: int, dtype: DType, device: str | None) -> None:
        self.activation, self.width, self.scales = config.activation, width, config.mlp_scales
        self.gated = config.mlp_gated
        inner = (1 + self.gated) * self.width
        self.gate_up = Linear(config.hidden_size, inner, config.mlp_bias, dtype, device)
        self.down = Linear(self.width, config.hidden_size, config.mlp_bias, dtype, device)

    def __call__(self, x: Tensor) -> Tensor:
        gate_scale, down_scale = self.scales
        if not self.gated:
            return self.down(activate(self.gate_up(x).contiguous_backward(), self.activation).contiguous())
        if TRAINING and gate_scale == down_scale == 1:
            return self.down(F.gate_up(self.gate_up(x), self.activation).contiguous())
        both = self.gate_up(x).contiguous_backward().split([self.width, self.width], dim=-1)
        # split: in one kernel each would be computed for all columns of both (15 ms against 10 on a CPU)
        gate, up = (half.contiguous_backward() for half in both)
        # realised: fused into `down` it would be computed again for every output row (212 µs against 13 + 3
        # on a CPU)
        if gate_scale != 1: gate = gate * gate_scale
        made = self.down((activate(gate, self.activation) * up).contiguous())
        return made if down_scale == 1 else made * down_scale


class MixtureOfExperts:
    """Experts of which each token has some, and a shared one that every token has, where the config has
    it. Of the experts it has those of `own`, all by default."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, dtype: DType, device: str | None,
                 own: range | None = None) -> None:
        def empty(*shape: int) -> Tensor: return Tensor.empty(*shape, dtype=dtype, device=device)
        hidden, self.moe, self.activation = config.hidden_size, moe, config.activation
        self.own = range(moe.experts) if own is None else own
        count = len(self.own)
        self.router = empty(moe.experts, hidden)
        # an expert's gate, then its up; one below the other
        self.inputs = moe.latent or hidden
        self.gate_up = empty(count * moe.inner, self.inputs)
        self.down = empty(count * self.inputs, moe.width)
        self.latents: tuple[Linear, Linear] | None = None
        if moe.latent: self.latents = (Linear(hidden, moe.latent, config.mlp_bias, dtype, device),
                                       Linear(moe.latent, hidden, config.mlp_bias, dtype, device))
        self.router_bias = self.gate_up_bias = self.down_bias = None
        if moe.biased:
            self.router_bias = empty(moe.experts)
            self.gate_up_bias, self.down_bias = empty(count, 2 * moe.width), empty(count, hidden)
        # of quantised experts instead of these: gate and up of each, and down
        self.gate_up_stack: StackWeight | None = None
        self.down_stack: StackWeight | None = None
        self.shared = FeedForward(config, moe.shared_width, dtype, device) if moe.shared_width else None
        self.shared_gate = empty(1, hidden) if moe.shared_gate else None
        self.choice_bias: Tensor | None = None
        if moe.choice_bias: self.choice_bias = Tensor.empty(moe.experts, dtype=dtypes.float32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """x (B, T, hidden)."""
        flat = x.reshape(-1, x.shape[-1])
        made = self.route(flat)
        if self.shared is not None:
            shared = self.shared(flat)
            if self.shared_gate is not None: shared = flat.linear(self.shared_gate.T).sigmoid() * shared
            made = made + shared
        return made.reshape(x.shape)

    def route(self, x: Tensor) -> Tensor:
        """Returns the sum of the experts for tokens (T, hidden)."""
        moe, (tokens, hidden) = self.moe, x.shape
        rows, router = (x.float(), self.router.float()) if moe.exact_router else (x, self.router)
        logits = rows.linear(router.T, self.router_bias).contiguous()
        routing, gather, count = F.route(logits, moe.policy, self.choice_bias), moe.policy.k, len(self.own)
        here: Tensor | None = None
        if count < moe.experts: routing, here = self._here(routing)
        weights: Tensor | None = routing.weights.flatten()
        if moe.scaled_inputs:
            slots = x.unsqueeze(1) * routing.weights.cast(x.dtype).unsqueeze(-1)
            x, gather, weights = slots.reshape(-1, hidden).contiguous(), 1, None
        if self.latents is not None: x = self.latents[0](x).contiguous()
        inner = _multiply(x, self.gate_up_stack, self.gate_up.reshape(count, moe.inner, self.inputs),
                            routing, gather=gather, activation=self.activation if moe.gated else "",
                            bias=self.gate_up_bias, partial=here is not None)
        if not moe.gated: inner = activate(inner, self.activation).contiguous()
        made = _multiply(inner, self.down_stack, self.down.reshape(count, self.inputs, moe.width), routing,
                           scatter=True, weights=weights, bias=self.down_bias, partial=here is not None)
        made = made.reshape(tokens, moe.policy.k, self.inputs)
        # rows of no expert may hold anything
        made = (made if here is None else here.unsqueeze(-1).where(made, 0)).sum(1)
        return made if self.latents is None else self.latents[1](made.contiguous())

    def _here(self, routing: F.Routing) -> tuple[F.Routing, Tensor]:
        """The routing over the experts of this rank, and which of the slots (T, k) are theirs."""
        count, number = len(self.own), routing.experts - self.own.start
        here = (number >= 0) & (number < count)
        order, offsets = F.group_rows(here.where(number, count).flatten().contiguous(), count)
        return replace(routing, order=order, offsets=offsets), here


def _multiply(x: Tensor, stack: StackWeight | None, w: Tensor, routing: F.Routing, partial: bool,
                **more: Any) -> Tensor:
    """Rows times the matrices of their experts: of a stack, where these are quantised, else of w."""
    if stack is None: return F.grouped_matmul(x, w, routing.offsets, routing.order, partial=partial, **more)
    if TRAINING:    # rounded inputs have no gradient
        return F.quant_grouped_matmul(x, stack.matrix, routing.offsets, routing.order, **more)
    if stack.codes and (how := stack.activations) is not None:
        codes, scales = F.quantize(x, how.element, how.scale)
        return F.scaled_grouped_matmul(codes, scales, stack.matrix, routing.offsets, routing.order,
                                     dtype=x.dtype, **more)
    return F.quant_grouped_matmul(stack.inputs(x), stack.matrix, routing.offsets, routing.order,
                                int8=stack.int8, **more)
