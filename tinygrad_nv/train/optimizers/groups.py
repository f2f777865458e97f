"""Groups of parameters: those that decay, the rates at which they learn, and those that are hidden matrices.

Protocol. A `ParameterGroup` names parameters that share weight decay and a multiple of the learning rate.
`decay_groups(parameters, weight_decay)` makes the usual two: matrices decay; norms, biases and embeddings do
not. The rule is `decays(name, tensor)`, of the name in the checkpoint and the number of dimensions; other
rules are functions of these two. A parameter of no group is an error, as is one of two groups.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tinygrad import Tensor

from tinygrad_nv.errors import ConfigError

NOT_DECAYED = ("bias", "norm", "embed", "lm_head.bias")
NOT_HIDDEN = ("embed", "lm_head", "score")
Rule = Callable[[str, Tensor], bool]


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
