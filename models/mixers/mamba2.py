"""Mamba-2 (arXiv 2405.21060): a state-space layer with a decay for each head.

    gate, x|B|C, Δ of one projection; x|B|C = silu(conv(x|B|C))
    Δ = softplus(Δ + bias), within limits; decay = −exp(A) · Δ
    y = Cᵀ S + D · x with S ← exp(decay) S + B (Δ x)ᵀ
    out = norm(y · silu(gate)), projected

Decays, states and their sums are float32. Norms are of each group of heads.
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import DType

from ..config import ModelConfig
from ..layers import Linear, RMSNorm, StoredLinear, normalise
from .config import Mamba2Config
from .sequences import Batch, LayerStates, Run, States, over_runs


class Mamba2:
    """A layer's state-space model."""

    def __init__(self, config: ModelConfig, own: Mamba2Config, dtype: DType, device: str | None) -> None:
        def empty(*shape: int) -> Tensor: return Tensor.empty(*shape, dtype=dtype, device=device)
        self.own, self.dtype = own, dtype
        self.input = Linear(config.hidden_size, own.input_width, own.bias, dtype, device)
        biased = own.bias if own.output_bias is None else own.output_bias
        self.output = Linear(own.inner, config.hidden_size, biased, dtype, device)
        self.weight = empty(own.channels, 1, own.taps)
        self.conv_bias = empty(own.channels) if own.conv_bias else None
        self.decay, self.bias, self.skip = empty(own.heads), empty(own.heads), empty(own.heads)
        self.norm = RMSNorm(own.inner, config.norm_eps, dtype, device) if own.normalised else None

    @property
    def linears(self) -> list[StoredLinear]:
        """Its matrices as a checkpoint stores them."""
        return [(each, (f"{self.own.name}.{name}",), (int(each.weight.shape[0]),))
                for each, name in ((self.input, "in_proj"), (self.output, "out_proj"))]

    @property
    def norms(self) -> dict[str, RMSNorm]:
        """Its norm, if it has one."""
        return {} if self.norm is None else {f"{self.own.name}.norm": self.norm}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its other parameters by their names in a checkpoint."""
        made = {"conv1d.weight": self.weight, "A_log": self.decay, "dt_bias": self.bias, "D": self.skip}
        if self.conv_bias is not None: made["conv1d.bias"] = self.conv_bias
        return {f"{self.own.name}.{name}": each for name, each in made.items()}

    def __call__(self, x: Tensor, batch: Batch, cache: LayerStates | States | None) -> Tensor:
        own = self.own
        both = self.project(x).contiguous().reshape(-1, own.input_width)
        gate, rows, step = both.split([own.inner, own.channels, own.heads], dim=-1)
        step = (step.float() + self.bias.float()).softplus()
        if own.limits is not None: step = step.clip(*own.limits)
        step = step.contiguous()
        decay = (-self.decay.float().exp() * step).contiguous()

        def scan(run: Run, states: States) -> tuple[Tensor, States]:
            made, windows = run.convolve(rows, self.weight, self.conv_bias, states[0], silu=True)
            value, keys, queries = made.split([own.inner, own.key_width, own.key_width], dim=-1)
            value = value.reshape(-1, own.heads, own.head).float()
            queries, keys = (each.reshape(-1, own.groups, own.state) for each in (queries, keys))
            times = step[run.first:run.end].unsqueeze(-1)
            out, after = run.attend(queries, keys, (value * times).contiguous(), decay, None, states[1])
            return (out + value * self.skip.float().reshape(-1, 1)).contiguous(), (windows, after)
        made = over_runs(batch, x, cache, own.states, scan, self.dtype)
        return self.output(self.gate(made.reshape(*x.shape[:2], own.inner),
                                     gate.reshape(*x.shape[:2], own.inner)).cast(x.dtype).contiguous())

    def project(self, x: Tensor) -> Tensor:
        """Gate, x, B, C and time steps of tokens, with the factors that there are."""
        own = self.own
        if not own.scales: return self.input(x)
        sizes = (own.inner, own.inner, own.key_width, own.key_width, own.heads)
        parts = self.input(x * own.scales[0]).split(list(sizes), dim=-1)
        scaled = (part * factor for part, factor in zip(parts, own.scales[1:], strict=True))
        return Tensor.cat(*scaled, dim=-1)

    def gate(self, made: Tensor, gate: Tensor) -> Tensor:
        """Results (B, T, inner), float32, with their gate and norm."""
        own, silu = self.own, gate.float().silu()
        if self.norm is None: return made.cast(self.dtype).float() * silu
        if not own.gates_last: made = made.cast(self.dtype).float() * silu
        each = made.reshape(*made.shape[:2], own.groups, -1)
        made = normalise(each, self.norm.eps).reshape(made.shape).cast(self.dtype) * self.norm.weight
        return made * silu if own.gates_last else made
