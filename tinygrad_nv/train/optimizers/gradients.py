"""Gradients before the update: their global norm, clipping, and sums over micro-batches; an average of
weights.

Protocol. `square_and_sum(gradients)` is one pass over all gradients (patterns/optimizer): sums of squares of
chunks, added up in an order that no number of threads changes. `clip_scale` is torch's clip_grad_norm_
formula; the scale goes into the update, and gradients are not written. A sum of squares that is no finite
number (a NaN, an infinity, or magnitudes beyond 1.8e19) says that the step is to be skipped.

`GradientSums` keeps float32 sums of gradients between micro-batches, in memory of their own:

    loss.backward(); Tensor.realize(loss, *sums.schedule_add(1 / n))      each micro-batch
    Tensor.realize(*optimizer.schedule_step(sums.gradients), *sums.schedule_zero())
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.patterns.optimizer import sum_squares

CLIP_EPS = 1e-6     # torch.nn.utils.clip_grad_norm_


def square_and_sum(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of squares of all elements, float64 (1)."""
    return sum_squares(gradients).cast(dtypes.float64).sum().reshape(1)


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all gradients as one vector, float32 (1)."""
    return square_and_sum(gradients).sqrt().cast(dtypes.float32)


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """Returns the factor of gradients with which their norm is at most `max_norm`: min(1, max_norm / (norm +
    1e-6)), float32 (1)."""
    return (max_norm / (norm + CLIP_EPS)).minimum(1.0)


def gradients_of(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradient of each parameter. Raises `ConfigError` where there is none."""
    for name, parameter in parameters.items():
        if parameter.grad is None:
            raise ConfigError(f"{name} has no gradient", "a loss that depends on every parameter",
                              "call backward() first, or leave the parameter out of the optimizer")
    return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}


class GradientSums:
    """Float32 sums of the gradients of parameters."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.gradients = {name: Tensor.zeros(*each.shape, dtype=dtypes.float32, device=each.device)
                          .contiguous().is_param_(False) for name, each in parameters.items()}
        Tensor.realize(*self.gradients.values())

    def schedule_add(self, scale: float | Tensor = 1.0, names: Iterable[str] | None = None) -> list[Tensor]:
        """Adds `scale` times the gradients, which are taken from the parameters, of all or of some by name;
        what is to be realized. Raises `ConfigError` where there is none."""
        chosen = {name: self.parameters[name] for name in (self.parameters if names is None else names)}
        for name, gradient in gradients_of(chosen).items():
            own = self.gradients[name]
            own.assign(own + gradient.cast(dtypes.float32) * scale)
            self.parameters[name].grad = None
        return [self.gradients[name] for name in chosen]

    def schedule_zero(self) -> list[Tensor]:
        """Sets all sums to zero, after what reads them; what is to be realized."""
        for each in self.gradients.values(): each.assign(each.zeros_like())
        return list(self.gradients.values())


class WeightAverage:
    """An exponential moving average of parameters by name, in float32 memory of its own.
    `Tensor.realize(*average.schedule_update())` after each step: a ← d a + (1 − d) w. Before the first update
    the average is the weights. `tensors` are checkpointed by the parameters' names. Raises `ConfigError` for
    a decay out of [0, 1)."""

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
