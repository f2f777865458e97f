"""The gated delta rule with short convolutions (Gated DeltaNet, arXiv 2412.06464), as Qwen3-Next and OLMo
Hybrid have it.

    q, k, v = silu(conv(projections)), q and k of length 1
    β = most · σ(b), decay = −exp(A) · softplus(a + bias)
    out = norm(delta rule(q, k, v, decay, β)) · silu(z), projected

Decays, states and their sums are float32.
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import DType

from ..config import ModelConfig
from ..layers import Linear, RMSNorm, StoredLinear, TensorRows
from .config import GatedDeltaConfig
from .sequences import Batch, LayerStates, Run, States, over_runs

UNIT_EPS = 1e-6     # of lengths of queries and keys


class GatedDelta:
    """A layer's delta rule."""

    def __init__(self, config: ModelConfig, own: GatedDeltaConfig, dtype: DType,
                 device: str | None) -> None:
        def linear(outputs: int) -> Linear: return Linear(config.hidden_size, outputs, False, dtype, device)
        def empty(*shape: int) -> Tensor: return Tensor.empty(*shape, dtype=dtype, device=device)
        self.own, self.dtype, self.activation = own, dtype, config.activation
        self.qkvz, self.ba = linear(own.channels + own.values), linear(2 * own.heads)
        self.output = Linear(own.values, config.hidden_size, False, dtype, device)
        self.weight = empty(own.channels, 1, own.taps)
        self.decay, self.bias = empty(own.heads), empty(own.heads)
        self.norm = RMSNorm(own.d_v, config.norm_eps if own.norm_eps is None else own.norm_eps, dtype, device)

    @property
    def linears(self) -> list[StoredLinear]:
        """Its matrices as a checkpoint stores them."""
        own, heads = self.own, self.own.heads
        made = [(self.qkvz, ["qkvz"], [own.channels + own.values]), (self.ba, ["ba"], [2 * heads])]
        if not own.fused: made = [(self.qkvz, ["qkv", "z"], [own.channels, own.values]),
                                  (self.ba, ["b", "a"], [heads, heads])]
        if own.apart: made = [(self.qkvz, ["q", "k", "v", "g"], [own.keys, own.keys, own.values, own.values]),
                              (self.ba, ["b", "a"], [heads, heads])]
        stored = [(each, tuple(f"{name}_proj" if own.apart else f"in_proj_{name}" for name in names),
                   tuple(rows)) for each, names, rows in made]
        output = "o_proj" if own.apart else "out_proj"
        every = [*stored, (self.output, (output,), (int(self.output.weight.shape[0]),))]
        return [(each, tuple(f"linear_attn.{name}" for name in names), rows) for each, names, rows in every]

    @property
    def norms(self) -> dict[str, RMSNorm]:
        """Its norm of each head."""
        return {"linear_attn.o_norm" if self.own.apart else "linear_attn.norm": self.norm}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its other parameters by their names in a checkpoint."""
        made = {} if self.own.apart else {"linear_attn.conv1d.weight": self.weight}
        return {**made, "linear_attn.A_log": self.decay, "linear_attn.dt_bias": self.bias}

    @property
    def parts(self) -> dict[str, TensorRows]:
        """The parts of its convolution that are tensors of their own in a checkpoint."""
        own = self.own
        return convolution_parts(self.weight, "linear_attn", own.keys, own.values) if own.apart else {}

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens (B, T, hidden) as rows: q|k|v (R, channels), z (R, H, D_v), b and a (R, H)."""
        own, both, rates = self.own, self.qkvz(x).contiguous(), self.ba(x).contiguous()
        rows = int(x.shape[0]) * int(x.shape[1])
        if not own.fused:
            qkv, z = both.reshape(rows, -1).split([own.channels, own.values], dim=-1)
            b, a = rates.reshape(rows, -1).split([own.heads, own.heads], dim=-1)
            return qkv.contiguous(), z.reshape(rows, own.heads, own.d_v), b, a
        each, groups = own.values // own.key_heads, own.heads // own.key_heads
        q, k, v, z = both.reshape(rows, own.key_heads, -1).split([own.d_k, own.d_k, each, each], dim=-1)
        b, a = rates.reshape(rows, own.key_heads, -1).split([groups, groups], dim=-1)
        qkv = Tensor.cat(*(part.reshape(rows, -1) for part in (q, k, v)), dim=-1)
        return (qkv.contiguous(), z.reshape(rows, own.heads, own.d_v), b.reshape(rows, own.heads),
                a.reshape(rows, own.heads))

    def __call__(self, x: Tensor, batch: Batch, cache: LayerStates | States | None) -> Tensor:
        own, (rows, z, b, a) = self.own, self.split(x)
        decay = -self.decay.float().exp() * (a.float() + self.bias.float()).softplus()
        decay, beta = decay.contiguous(), (b.sigmoid() * own.most).float().contiguous()

        def attend(run: Run, states: States) -> tuple[Tensor, States]:
            made, windows = run.convolve(rows, self.weight, None, states[0], silu=True)
            q, k, v = made.split([own.keys, own.keys, own.values], dim=-1)
            q, k = (unit(each.reshape(-1, own.key_heads, own.d_k)) for each in (q, k))
            out, after = run.attend(q, k, v.reshape(-1, own.heads, own.d_v), decay, beta, states[1],
                                    own.d_k ** -0.5)
            return out, (windows, after)
        made = over_runs(batch, x, cache, own.states, attend, self.dtype)
        gated = self.norm(made) * z.reshape(made.shape).float().silu()
        return self.output(gated.cast(x.dtype).reshape(*x.shape[:2], own.values).contiguous())


def convolution_parts(weight: Tensor, module: str, keys: int, values: int) -> dict[str, TensorRows]:
    """The rows of a convolution over queries, keys and values, by their names in a checkpoint."""
    return {f"{module}.{name}_conv1d.weight": TensorRows(weight, first, count)
            for name, first, count in (("q", 0, keys), ("k", keys, keys), ("v", 2 * keys, values))}


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1, float32."""
    f = x.float()
    return (f * (f.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()).contiguous()
