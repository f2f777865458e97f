"""The layers of a model as regions: `checkpoint_blocks(model, policy, parameters)`.

Protocol: each layer is a region of its own, in training alone. What a step keeps is thus each layer's input,
what the policy keeps, and for the time of its backward pass all of one layer.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tinygrad import Tensor
from tinygrad.helpers import TRAINING

from tinygrad_nv.models.llama import Llama
from tinygrad_nv.train.regions.policy import Policy
from tinygrad_nv.train.regions.region import checkpoint


def checkpoint_blocks(model: Llama, policy: Policy, parameters: Iterable[Tensor]) -> None:
    """Makes layers regions, or with the policy "none" no longer. Gradients go to the layers' inputs and to
    `parameters`."""
    own = tuple(parameters)
    for block in model.blocks:
        block.region = None if policy.keeps_all else \
            _in_training(block.compute, checkpoint(block.compute, policy.name, budget=policy.budget,
                                                    parameters=own))


def _in_training(fn: Callable[..., Tensor], region: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The region in training, else the function."""
    def call(*args: Any) -> Tensor: return region(*args) if TRAINING else fn(*args)
    return call
