"""Models of fewer layers, from which the memory of a model of many is extrapolated.

Protocol: layers come in a period of kinds (window, rotation, experts), after some that differ. Programs of
models of more than `WHOLE` layers are scheduled for two prefixes, one period of layers apart. Each further
period adds as much as the second has more than the first: the bytes of a step are an affine function of the
number of periods, but for gaps between buffers.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad_nv.models.config import ModelConfig

WHOLE = 8       # layers that are scheduled one by one
FIRST = 3       # layers at least of the shorter prefix: in fewer, other moments may be the peak


@dataclass(frozen=True)
class Shortened:
    """A prefix of so many layers."""
    layers: int

    @staticmethod
    def of(config: ModelConfig) -> tuple[Shortened, ...]:
        """The prefixes to schedule: the whole model, or two."""
        count, kinds = config.num_layers, _kinds(config)
        for period in range(1, count):
            start = next(i for i in range(count) if all(kinds[j] == kinds[j + period]
                                                        for j in range(i, count - period)))
            low = max(FIRST, start + period)
            if low + period < count and low + period <= max(WHOLE, count // 2) and count > WHOLE:
                return Shortened(low), Shortened(low + period)
        return Shortened(count),

    def at(self, layers: int, before: Shortened, low: float, high: float) -> float:
        """Returns what `low` of the prefix before and `high` of this one come to with so many layers."""
        return low + (high - low) * (layers - before.layers) / (self.layers - before.layers)


def shorten(config: ModelConfig, layers: int) -> ModelConfig:
    """The model of the first layers alone."""
    moe = config.moe
    if moe is not None: moe = replace(moe, layers=moe.layers[:layers])
    return replace(config, num_layers=layers, ropes=config.ropes[:layers], windows=config.windows[:layers],
                   moe=moe)


def _kinds(config: ModelConfig) -> list[tuple[object, ...]]:
    mixtures = (False,) * config.num_layers if config.moe is None else config.moe.layers
    return list(zip(config.windows, config.ropes, mixtures, strict=True))
