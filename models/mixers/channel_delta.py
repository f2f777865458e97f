"""The delta rule with a decay for each channel of keys (Kimi Delta Attention, arXiv 2510.26692), as Kimi
Linear and Ling 3 have it.

    q, k, v = silu(conv(projections)), q and k of length 1
    β = σ(b), decay = −exp(A) · softplus(f + bias), or least · σ(exp(A) · (f + bias))
    out = norm(delta rule(q, k, v, decay, β)) · σ(g), projected

Decays, states and their sums are float32.
"""
from __future__ import annotations

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from ..config import ModelConfig
from ..layers import Linear, RMSNorm, StoredLinear, TensorRows
from .config import ChannelDeltaConfig
from .gated_delta import convolution_parts, unit
from .sequences import Batch, LayerStates, Run, States, over_runs

MODULE = "self_attn"


class ChannelDelta:
    """A layer's delta rule."""

    def __init__(self, config: ModelConfig, own: ChannelDeltaConfig, dtype: DType,
                 device: str | None) -> None:
        def linear(inputs: int, outputs: int) -> Linear: return Linear(inputs, outputs, False, dtype, device)
        def empty(*shape: int) -> Tensor: return Tensor.empty(*shape, dtype=dtype, device=device)
        self.own, self.dtype, hidden = own, dtype, config.hidden_size
        inner = own.size if own.narrow else own.keys
        self.rows = (own.keys, own.keys, own.keys, own.heads, inner, inner)
        self.input = linear(hidden, sum(self.rows))
        self.wide = (linear(own.size, own.keys), linear(own.size, own.keys)) if own.narrow else ()
        self.output = linear(own.keys, hidden)
        self.weight = empty(3 * own.keys, 1, own.taps)
        # whatever the model's dtype is, as in transformers: what they round to decides over all tokens
        self.decay, self.bias = (Tensor.empty(*shape, dtype=dtypes.float32, device=device)
                                 for shape in (own.shape, (own.keys,)))
        self.norm = RMSNorm(own.size, config.norm_eps, dtype, device, rounds_last=True)

    @property
    def linears(self) -> list[StoredLinear]:
        """Its matrices as a checkpoint stores them."""
        names = ("q", "k", "v", "b", "f_a", "g_a") if self.own.narrow else ("q", "k", "v", "b", "f", "g")
        made: list[StoredLinear] = [(self.input, names, self.rows)]
        made += [(each, (name,), (self.own.keys,))
                 for each, name in zip(self.wide, ("f_b", "g_b"), strict=False)]
        made.append((self.output, ("o",), (int(self.output.weight.shape[0]),)))
        return [(each, tuple(f"{MODULE}.{name}_proj" for name in own), rows) for each, own, rows in made]

    @property
    def norms(self) -> dict[str, RMSNorm]:
        """Its norm of each head."""
        return {f"{MODULE}.o_norm": self.norm}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its other parameters by their names in a checkpoint."""
        return {f"{MODULE}.A_log": self.decay, f"{MODULE}.dt_bias": self.bias}

    @property
    def parts(self) -> dict[str, TensorRows]:
        """The parts of its convolution that are tensors of their own in a checkpoint."""
        return convolution_parts(self.weight, MODULE, self.own.keys, self.own.keys)

    def decays(self, f: Tensor) -> Tensor:
        """Decays (R, H, D), float32, of their logits (R, H·D)."""
        own, rate = self.own, self.decay.float().reshape(-1, 1).exp()
        given = (f.float() + self.bias.float()).reshape(-1, own.heads, own.size)
        if own.least is None: return (-rate * given.softplus()).contiguous()
        return (own.least * (rate * given).sigmoid()).contiguous()

    def __call__(self, x: Tensor, batch: Batch, cache: LayerStates | States | None) -> Tensor:
        own, rows = self.own, int(x.shape[0]) * int(x.shape[1])
        every = self.input(x).contiguous().reshape(rows, -1)
        qkv, b, f, g = every.split([3 * own.keys, *self.rows[3:]], dim=-1)
        if self.wide: f, g = (each(part.contiguous()) for each, part in zip(self.wide, (f, g), strict=True))
        decay, beta = self.decays(f), b.sigmoid().float().contiguous()

        def attend(run: Run, states: States) -> tuple[Tensor, States]:
            made, windows = run.convolve(qkv, self.weight, None, states[0], silu=True)
            q, k, v = (each.reshape(-1, own.heads, own.size) for each in made.split([own.keys] * 3, dim=-1))
            out, after = run.attend(unit(q), unit(k), v, decay, beta, states[1], own.size ** -0.5)
            return out, (windows, after)
        made = over_runs(batch, x, cache, own.states, attend, self.dtype)
        gated = self.norm(made.float()) * g.reshape(made.shape).float().sigmoid()
        return self.output(gated.cast(x.dtype).reshape(*x.shape[:2], own.keys).contiguous())
