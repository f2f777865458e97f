"""An exponential moving average of weights, in float32 memory of its own.

Protocol. `Tensor.realize(*average.schedule_update())` after each step: a ← d a + (1 − d) w. Before the first
update the average is the weights. `average.tensors` are checkpointed by the parameters' names.
"""
from __future__ import annotations

from collections.abc import Mapping

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import ConfigError


class WeightAverage:
    """The average of parameters by name. Raises `ConfigError` for a decay out of [0, 1)."""

    def __init__(self, parameters: Mapping[str, Tensor], decay: float = 0.999) -> None:
        if not 0 <= decay < 1: raise ConfigError(f"a decay of {decay}", "a number in [0, 1)")
        self.parameters, self.decay = dict(parameters), decay
        self.tensors = {name: each.detach().cast(dtypes.float32).clone().is_param_(False)
                        for name, each in parameters.items()}
        Tensor.realize(*self.tensors.values())

    def schedule_update(self) -> list[Tensor]:
        """Moves the average towards the weights; what is to be realized."""
        for name, own in self.tensors.items():
            weight = self.parameters[name].detach().cast(dtypes.float32)
            own.assign(own + (1 - self.decay) * (weight - own))
        return list(self.tensors.values())
