"""The layers of a model as regions: `checkpoint_blocks(model, policy, parameters)`.

Protocol: each layer is a region of its own, in training alone. What a step keeps is thus each layer's input,
what the policy keeps, and for the time of its backward pass all of one layer.
"""
from __future__ import annotations

from collections.abc import Iterable

from tinygrad import Tensor

from tinygrad_nv.models.llama import Llama
from tinygrad_nv.train.regions.policy import Policy
from tinygrad_nv.train.regions.region import checkpoint


def checkpoint_blocks(model: Llama, policy: Policy, parameters: Iterable[Tensor]) -> None:
    """Makes layers regions, or with the policy "none" no longer. Gradients go to the layers' inputs and to
    `parameters`."""
    own = tuple(parameters)
    for block in model.blocks:
        block.region = None if policy.keeps_all else \
            checkpoint(block.computed, policy.name, budget=policy.budget, parameters=own)
