"""Attention and another mixer in one layer, of the same input, whose results are added (Falcon-H1, arXiv
2507.22448).
"""
from __future__ import annotations

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.kvcache.store import LayerBoth

from ..attention import Attention, Cache
from ..config import ModelConfig
from ..layers import RMSNorm, StoredLinear
from .config import BesideConfig
from .sequences import Batch, LayerStates, Mixer, States


class Beside:
    """A layer's attention, and a `mixer`."""

    def __init__(self, config: ModelConfig, own: BesideConfig, mixer: Mixer, index: int, dtype: DType,
                 device: str | None) -> None:
        self.own, self.attention, self.mixer = own, Attention(config, index, dtype, device), mixer

    @property
    def linears(self) -> list[StoredLinear]:
        """Matrices of both."""
        return self.attention.linears + self.mixer.linears

    @property
    def norms(self) -> dict[str, RMSNorm]:
        """Norms of both."""
        return {**self.attention.norms, **self.mixer.norms}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Other parameters of the mixer."""
        return self.mixer.tensors

    def __call__(self, x: Tensor, batch: Batch, cache: LayerBoth | States | None) -> Tensor:
        own, count = self.own, len(self.own.states)
        pages: Cache | None = None
        states: LayerStates | States | None = None
        if isinstance(cache, LayerBoth): pages, states = cache.pages, cache.states
        elif cache is not None: pages, states = cache[:-count], cache[-count:]
        attended = self.attention(scale(x, own.inputs), batch, pages)
        mixed = self.mixer(x, batch, states)
        return scale(mixed, own.mixed) + scale(attended, own.outputs)


def scale(x: Tensor, factor: float) -> Tensor:
    """x times a factor."""
    return x if factor == 1 else x * factor
