"""The gated short convolution of LFM2 (arXiv 2511.23404, 2.1): C · conv(B · x), with B, C and x of one
projection.
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import DType

from ..config import ModelConfig
from ..layers import Linear, RMSNorm, StoredLinear
from .config import ShortConvConfig
from .sequences import Batch, LayerStates, Run, States, over_runs


class ShortConv:
    """A layer's convolution."""

    def __init__(self, config: ModelConfig, own: ShortConvConfig, dtype: DType, device: str | None) -> None:
        self.own, self.dtype = own, dtype
        self.input = Linear(config.hidden_size, 3 * own.channels, own.bias, dtype, device)
        self.output = Linear(own.channels, config.hidden_size, own.bias, dtype, device)
        self.weight = Tensor.empty(own.channels, 1, own.taps, dtype=dtype, device=device)
        self.bias = Tensor.empty(own.channels, dtype=dtype, device=device) if own.bias else None

    @property
    def linears(self) -> list[StoredLinear]:
        """Its matrices as a checkpoint stores them."""
        return [(each, (f"conv.{name}",), (int(each.weight.shape[0]),))
                for each, name in ((self.input, "in_proj"), (self.output, "out_proj"))]

    @property
    def norms(self) -> dict[str, RMSNorm]:
        """It has none."""
        return {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its other parameters by their names in a checkpoint."""
        made = {"conv.conv.weight": self.weight}
        return made if self.bias is None else {**made, "conv.conv.bias": self.bias}

    def __call__(self, x: Tensor, batch: Batch, cache: LayerStates | States | None) -> Tensor:
        gate, other, value = self.input(x).split([self.own.channels] * 3, dim=-1)
        rows = (gate * value).reshape(-1, self.own.channels).contiguous()

        def convolve(run: Run, states: States) -> tuple[Tensor, States]:
            out, windows = run.convolve(rows, self.weight, self.bias, states[0])
            return out, (windows,)
        made = over_runs(batch, x, cache, self.own.states, convolve, self.dtype)
        return self.output((other * made).contiguous())
