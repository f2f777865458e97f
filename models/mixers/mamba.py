"""Mamba (arXiv 2312.00752): a state-space layer with a decay for each state of each channel.

    x, gate of one projection; x = silu(conv(x))
    δ, B, C of another, of x, in some families normalised; Δ = softplus(projected δ + bias)
    y = C S + D · x with S ← exp(Δ A) S + Δ B x, A = −exp(A_log)
    out = y · silu(gate), projected

Steps, decays, states and their sums are float32.
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import DType

from ..config import ModelConfig
from ..layers import Linear, RMSNorm, StoredLinear, normalise
from .config import MambaConfig
from .sequences import Batch, LayerStates, Run, States, over_runs


class Mamba:
    """A layer's state-space model."""

    def __init__(self, config: ModelConfig, own: MambaConfig, dtype: DType, device: str | None) -> None:
        def linear(inputs: int, outputs: int, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, bias, dtype, device)

        def empty(*shape: int) -> Tensor: return Tensor.empty(*shape, dtype=dtype, device=device)
        self.own, self.dtype = own, dtype
        self.input = linear(config.hidden_size, 2 * own.channels, own.bias)
        self.select = linear(own.channels, own.selection)
        self.step = linear(own.rank, own.channels)
        self.output = linear(own.channels, config.hidden_size, own.bias)
        self.weight = empty(own.channels, 1, own.taps)
        self.conv_bias = empty(own.channels) if own.conv_bias else None
        self.bias, self.skip = empty(own.channels), empty(own.channels)
        self.decay = empty(own.channels, own.state)
        self.norms = {f"{own.name}.{name}": RMSNorm(size, own.norm_eps, dtype, device) for name, size in (
            ("dt_layernorm", own.rank), ("b_layernorm", own.state), ("c_layernorm", own.state))
            if own.norm_eps is not None and own.has_norms}

    @property
    def linears(self) -> list[StoredLinear]:
        """Its matrices as a checkpoint stores them."""
        return [(each, (f"{self.own.name}.{name}",), (int(each.weight.shape[0]),))
                for each, name in ((self.input, "in_proj"), (self.select, "x_proj"), (self.step, "dt_proj"),
                                   (self.output, "out_proj"))]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its other parameters by their names in a checkpoint."""
        made = {"conv1d.weight": self.weight, "A_log": self.decay, "D": self.skip, "dt_proj.bias": self.bias}
        if self.conv_bias is not None: made["conv1d.bias"] = self.conv_bias
        return {f"{self.own.name}.{name}": each for name, each in made.items()}

    def __call__(self, x: Tensor, batch: Batch, cache: LayerStates | States | None) -> Tensor:
        own, both = self.own, self.input(x).contiguous().reshape(-1, 2 * self.own.channels)
        rows, gate = both.split([own.channels, own.channels], dim=-1)
        decay = (-self.decay.float().exp()).transpose(0, 1).contiguous()

        def scan(run: Run, states: States) -> tuple[Tensor, States]:
            made, windows = run.convolve(rows, self.weight, self.conv_bias, states[0], silu=True)
            step, keys, queries = self.choose(made)
            out, after = run.scan(made, step, decay, keys, queries, states[1])
            return (out + made.float() * self.skip.float()).contiguous(), (windows, after)
        made = over_runs(batch, x, cache, own.states, scan, self.dtype)
        made = made * gate.float().silu().reshape(made.shape)
        return self.output(made.cast(x.dtype).contiguous())

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps, float32, B and C of the convolution's results (R, channels)."""
        own, chosen = self.own, self.select(x).contiguous()
        made = chosen.split([own.rank, own.state, own.state], dim=-1)
        if own.norm_eps is not None:
            eps = own.norm_eps
            made = tuple(norm(each) for each, norm in zip(made, self.norms.values(), strict=True)) \
                if own.has_norms else tuple(normalise(each, eps).cast(x.dtype).contiguous() for each in made)
        step = self.step(made[0].contiguous()).float() + self.bias.float()
        return step.softplus().contiguous(), made[1], made[2]
