"""Groups of parameters; update rules, and those that treat elements alike: AdamW, SGD, Lion.

Protocol. A rule is a frozen dataclass of hyperparameters. `slots(shape)` names the numbers that it keeps of a
parameter. An update is two steps, in float32:

    advance(x, g, slots, at)           the slots' new numbers, of parameter, gradient and old numbers
    move(x, g, old, new, at)           the parameter's new numbers

`At` has what an update needs besides: the learning rate of the parameter's group, its weight decay, and the
number of the step, all on the device, so that one captured step serves every step. Scalars that are small
differences (1 − β₂ᵗ) or that torch computes in double are float64.

A `ParameterGroup` names parameters that share weight decay and a multiple of the learning rate.
`decay_groups(parameters, weight_decay)` makes the usual two: matrices decay; norms, biases and embeddings do
not. The rule is `decays(name, tensor)`, of the name in the checkpoint and the number of dimensions; other
rules are functions of these two. A parameter of no group is an error, as is one of two groups.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import ConfigError

Shapes = dict[str, tuple[int, ...]]
Numbers = Mapping[str, Tensor]
NOT_DECAYED = ("bias", "norm", "embed", "lm_head.bias")
NOT_HIDDEN = ("embed", "lm_head", "score")
Rule = Callable[[str, Tensor], bool]


@dataclass(frozen=True)
class At:
    """`lr` and `step` are float64 of one element; `step` counts from 1. `rows` are the extents of matrices
    that lie one below the other in the parameter; () for one."""
    lr: Tensor
    step: Tensor
    weight_decay: float
    rows: tuple[int, ...] = ()

    @staticmethod
    def of(group: ParameterGroup, lr: Tensor, step: Tensor, rows: tuple[int, ...] = ()) -> At:
        """For parameters of a group."""
        lr, step = lr.cast(dtypes.float64), step.cast(dtypes.float64)
        return At(lr * group.lr_scale, step, group.weight_decay, rows)

    @property
    def decay(self) -> Tensor:
        """1 − lr · weight decay, by which parameters are multiplied."""
        return narrow(1 - self.lr * self.weight_decay)

    def correction(self, beta: float) -> Tensor:
        """1 − betaᵗ, float64."""
        return 1 - (self.step * math.log2(beta)).exp2() if beta else self.step * 0 + 1


class UpdateRule(Protocol):
    """A rule."""
    name: ClassVar[str]
    elementwise: ClassVar[bool]     # elements are treated alike: any part of a parameter is a parameter

    def slots(self, shape: tuple[int, ...]) -> Shapes: ...

    def advance(self, x: Tensor, g: Tensor, slots: Numbers, at: At) -> dict[str, Tensor]: ...

    def move(self, x: Tensor, g: Tensor, old: Numbers, new: Numbers, at: At) -> Tensor: ...


def narrow(scalar: Tensor) -> Tensor:
    """A scalar as the elements' dtype."""
    return scalar.cast(dtypes.float32)


def lerp(start: Tensor, end: Tensor, weight: float) -> Tensor:
    """start + weight · (end − start), from the end that is nearer, as torch has it."""
    return start + weight * (end - start) if weight < 0.5 else end - (1 - weight) * (end - start)


@dataclass(frozen=True)
class AdamWRule:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), as torch.optim.AdamW:

        x ← x (1 − lr λ);  m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) g²
        x ← x − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + eps)
    """
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name: ClassVar[str] = "adamw"
    elementwise: ClassVar[bool] = True

    def slots(self, shape: tuple[int, ...]) -> Shapes: return {"exp_avg": shape, "exp_avg_sq": shape}

    def advance(self, x: Tensor, g: Tensor, slots: Numbers, at: At) -> dict[str, Tensor]:
        return {"exp_avg": lerp(slots["exp_avg"], g, 1 - self.beta1),
                "exp_avg_sq": self.beta2 * slots["exp_avg_sq"] + (1 - self.beta2) * (g * g)}

    def move(self, x: Tensor, g: Tensor, old: Numbers, new: Numbers, at: At) -> Tensor:
        root = new["exp_avg_sq"].sqrt() * self.root(at) + self.eps
        return x * at.decay - self.step_size(at) * (new["exp_avg"] / root)

    def step_size(self, at: At) -> Tensor:
        """lr / (1 − β₁ᵗ)."""
        return narrow(at.lr / at.correction(self.beta1))

    def root(self, at: At) -> Tensor:
        """1 / √(1 − β₂ᵗ)."""
        return narrow(1 / at.correction(self.beta2).sqrt())


@dataclass(frozen=True)
class SGDRule:
    """Stochastic gradient descent with momentum, as torch.optim.SGD, whose weight decay is part of the
    gradient and so of the momentum:

        g ← g + λ x;  b ← μ b + g;  x ← x − lr (g + μ b with Nesterov's momentum, else b)
    """
    momentum: float = 0.0
    nesterov: bool = False
    name: ClassVar[str] = "sgd"
    elementwise: ClassVar[bool] = True

    def slots(self, shape: tuple[int, ...]) -> Shapes:
        return {"momentum_buffer": shape} if self.momentum else {}

    def decay(self, x: Tensor, g: Tensor, at: At) -> Tensor:
        """The gradient with weight decay."""
        return g + at.weight_decay * x if at.weight_decay else g

    def advance(self, x: Tensor, g: Tensor, slots: Numbers, at: At) -> dict[str, Tensor]:
        if not self.momentum: return {}
        return {"momentum_buffer": self.momentum * slots["momentum_buffer"] + self.decay(x, g, at)}

    def move(self, x: Tensor, g: Tensor, old: Numbers, new: Numbers, at: At) -> Tensor:
        change = self.decay(x, g, at)
        if self.momentum:
            buffer = new["momentum_buffer"]
            change = change + self.momentum * buffer if self.nesterov else buffer
        return x - narrow(at.lr) * change


@dataclass(frozen=True)
class LionRule:
    """Sign of an interpolated momentum (Chen et al., arXiv 2302.06675, algorithm 2):

        x ← x (1 − lr λ) − lr sign(β₁ m + (1 − β₁) g);  m ← β₂ m + (1 − β₂) g
    """
    beta1: float = 0.9
    beta2: float = 0.99
    name: ClassVar[str] = "lion"
    elementwise: ClassVar[bool] = True

    def slots(self, shape: tuple[int, ...]) -> Shapes: return {"exp_avg": shape}

    def advance(self, x: Tensor, g: Tensor, slots: Numbers, at: At) -> dict[str, Tensor]:
        return {"exp_avg": self.beta2 * slots["exp_avg"] + (1 - self.beta2) * g}

    def move(self, x: Tensor, g: Tensor, old: Numbers, new: Numbers, at: At) -> Tensor:
        direction = (self.beta1 * old["exp_avg"] + (1 - self.beta1) * g).sign()
        return x * at.decay - narrow(at.lr) * direction


# **** groups ****

@dataclass(frozen=True)
class ParameterGroup:
    """Parameters by name, their weight decay, and what the learning rate is multiplied by for them."""
    names: tuple[str, ...]
    weight_decay: float = 0.0
    lr_scale: float = 1.0


def decays(name: str, tensor: Tensor) -> bool:
    """Whether weights decay: of two dimensions at least, and no norm, bias or embedding by name."""
    return tensor.ndim >= 2 and not any(part in name.lower() for part in NOT_DECAYED)


def is_hidden_matrix(name: str, tensor: Tensor) -> bool:
    """Whether Muon takes a parameter: a matrix, or a stack of them, that is neither embedding nor head."""
    return tensor.ndim in (2, 3) and not any(part in name.lower() for part in NOT_HIDDEN)


def decay_groups(parameters: Mapping[str, Tensor], weight_decay: float,
                 rule: Rule = decays) -> tuple[ParameterGroup, ...]:
    """One group of what decays by `weight_decay`, one of what does not; without those that are empty."""
    does = {name: rule(name, tensor) for name, tensor in parameters.items()}
    if not weight_decay: return (ParameterGroup(tuple(parameters)),)
    made = (ParameterGroup(tuple(name for name in does if does[name]), weight_decay),
            ParameterGroup(tuple(name for name in does if not does[name])))
    return tuple(group for group in made if group.names)


def group_of(parameters: Mapping[str, Tensor], groups: Sequence[ParameterGroup]) -> dict[str, int]:
    """The number of the group of each parameter. Raises `ConfigError` for a name that is in no group, in two,
    or unknown, and for negative numbers."""
    found: dict[str, int] = {}
    for number, group in enumerate(groups):
        if group.weight_decay < 0 or group.lr_scale < 0:
            raise ConfigError(f"weight decay {group.weight_decay}, learning rate times {group.lr_scale}",
                              "numbers from 0")
        for name in group.names:
            if name not in parameters:
                raise ConfigError(f"a parameter group with {name!r}", "names of parameters",
                                  f"the first ones are {', '.join(list(parameters)[:3])}")
            if name in found: raise ConfigError(f"{name} in two parameter groups", "one group for each")
            found[name] = number
    if missing := [name for name in parameters if name not in found]:
        raise ConfigError(f"{missing[0]} in no parameter group ({len(missing)} in all)", "a group for each")
    return found
