"""Data parallel training: every rank has all parameters and its own part of the batch.

Protocol: after `loss.backward()`, `average_gradients(parameters, group)` puts the mean over ranks in place
of each gradient, if the loss is a mean over a rank's batch (`mean=False`: the sum). Gradients of the last
layers are computed first, so buckets go from the last parameter to the first, and the all_reduce of a
bucket depends on its own gradients alone: where a device has streams it runs beside the rest of the backward
pass. The collectives run when the gradients are realized, for instance by the optimiser's step.

Source of buckets: PyTorch Distributed, arXiv 2006.15704, section 3.2.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinygrad_nv.dist.collectives.functions import BUCKET_BYTES, all_reduce_many, broadcast
from tinygrad_nv.dist.group import Group
from tinygrad_nv.errors import DistError


def average_gradients(parameters: Sequence[Tensor], group: Group, *, mean: bool = True,
                      bucket_bytes: int = BUCKET_BYTES, wire: DType | None = None) -> None:
    """Gradients over all ranks in place of this rank's. Raises `DistError` for one that has none."""
    last_first = list(reversed(parameters))
    summed = all_reduce_many(gradients_of(last_first), group, bucket_bytes=bucket_bytes, wire=wire,
                             name="gradients")
    for parameter, grad in zip(last_first, summed, strict=True):
        parameter.grad = grad / group.size if mean else grad


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Their gradients. A parameter that a rank did not use has none, and its ranks' collectives would differ:
    raises `DistError`."""
    missing = [i for i, each in enumerate(parameters) if each.grad is None]
    if missing:
        shape = parameters[missing[0]].shape
        raise DistError(f"{len(missing)} of {len(parameters)} parameters have no gradient, the first of "
                        f"shape {shape}", "a gradient of each, on every rank",
                        "call backward() before, and leave out parameters that the loss does not use")
    return [each.grad for each in parameters if each.grad is not None]


def same_parameters(parameters: Sequence[Tensor], group: Group, root: int = 0) -> None:
    """Puts the root's parameters on all ranks: those drawn at random begin alike."""
    for i, each in enumerate(parameters):
        each.assign(broadcast(each.detach(), group, root, name=f"parameter {i}"))
    Tensor.realize(*parameters)
