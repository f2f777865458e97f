"""Lightning attention (arXiv 2401.04658), sums with a constant decay for each head, as MiniMax-01 has it
(arXiv 2501.08313).

    q, k, v = act(projection), by heads
    out = σ(gate) · norm(qᵀ S) with S ← exp(−slope) S + k vᵀ, projected

States and their sums are float32.
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import DType

from ..config import ModelConfig
from ..layers import Linear, RMSNorm, StoredLinear, activate
from .config import LightningConfig
from .sequences import Batch, LayerStates, Run, States, over_runs

NORM_EPS = 1e-6     # whatever rms_norm_eps is


class Lightning:
    """A layer's sums."""

    def __init__(self, config: ModelConfig, own: LightningConfig, dtype: DType, device: str | None) -> None:
        def linear(inputs: int, outputs: int) -> Linear: return Linear(inputs, outputs, False, dtype, device)
        self.own, self.dtype, self.activation = own, dtype, config.activation
        self.qkv, self.gate = (linear(config.hidden_size, n * own.inner) for n in (3, 1))
        self.output = linear(own.inner, config.hidden_size)
        self.norm = RMSNorm(own.inner, NORM_EPS, dtype, device)

    @property
    def linears(self) -> list[StoredLinear]:
        """Its matrices as a checkpoint stores them."""
        made = ((self.qkv, "qkv_proj"), (self.gate, "output_gate"), (self.output, "out_proj"))
        return [(each, (f"self_attn.{name}",), (int(each.weight.shape[0]),)) for each, name in made]

    @property
    def norms(self) -> dict[str, RMSNorm]:
        """Its norm of all heads."""
        return {"self_attn.norm": self.norm}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """It has no others."""
        return {}

    def __call__(self, x: Tensor, batch: Batch, cache: LayerStates | States | None) -> Tensor:
        own, rows = self.own, int(x.shape[0]) * int(x.shape[1])
        every = activate(self.qkv(x), self.activation).contiguous().reshape(rows, own.heads, 3 * own.size)
        slopes = ((Tensor.arange(own.heads).float() + 1) * (-8 / own.heads)).exp2() * own.slope
        decay = (-slopes).reshape(1, -1).expand(rows, own.heads).contiguous()

        def attend(run: Run, states: States) -> tuple[Tensor, States]:
            q, k, v = every[run.first:run.end].split([own.size] * 3, dim=-1)
            out, after = run.attend(q, k, v, decay, None, states[0])
            return out, (after,)
        made = over_runs(batch, x, cache, own.states, attend, self.dtype)
        made = self.norm(made.reshape(*x.shape[:2], own.inner))
        return self.output((self.gate(x).sigmoid() * made).contiguous())
