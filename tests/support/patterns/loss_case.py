"""Losses as torch computes them, from torch.nn.functional alone, in any dtype."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinygrad import Tensor

IGNORED = -100
C = 4.0             # times the error of torch in float32, and of the roundings of a few operations:
FINE = 2.0**-21     # of the largest,
ROUNDED = 2.0**-23  # and of p and its target, up to 1, before one is taken from the other
Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class Case:
    """A loss's numbers."""
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    divisor: float = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """As our functions take them."""
        return vars(self)

    def rows(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of each row."""
        x = logits / self.divisor
        if self.softcap is not None: x = self.softcap * torch.tanh(x / self.softcap)
        made = torch.nn.functional.cross_entropy(x, labels, reduction="none", ignore_index=IGNORED,
                                                 label_smoothing=self.label_smoothing)
        return made + self.z_loss * torch.where(labels == IGNORED, 0, torch.logsumexp(x, -1) ** 2)

    def reduced(self, logits: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        """The loss."""
        made = self.rows(logits, labels)
        if reduction == "none": return made
        return made.sum() / (labels != IGNORED).sum() if reduction == "mean" else made.sum()


def distilled(x: torch.Tensor, teacher: torch.Tensor, labels: torch.Tensor,
              temperature: float) -> torch.Tensor:
    """The mean loss of a distillation."""
    x, teacher = x / temperature, teacher / temperature
    each = torch.nn.functional.kl_div(x.log_softmax(-1), teacher.log_softmax(-1), reduction="none",
                                      log_target=True)
    counted = labels != IGNORED
    return (each.sum(-1) * counted).sum() * temperature ** 2 / counted.sum()


def gradients(loss: Callable[..., torch.Tensor], arrays: Arrays, dtype: torch.dtype) -> list[np.ndarray]:
    """A loss, and the gradient of its sum with weights 1, 2, …, of each array, computed in a dtype."""
    given = [torch.tensor(each, dtype=dtype, requires_grad=True) for each in arrays]
    made = loss(*given)
    (made * torch.arange(1, made.numel() + 1).reshape(made.shape)).sum().backward()
    return [made.detach().double().numpy(), *(each.grad.double().numpy() for each in given)]  # type: ignore[union-attr]


def ours(loss: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """The same of a function of tensors."""
    for each in tensors: each.grad = None
    made = loss(*tensors)
    (made * Tensor.arange(1, made.numel() + 1).reshape(made.shape)).sum().backward()
    found = [made, *(each.grad for each in tensors)]
    Tensor.realize(*found)
    return [each.float().numpy().astype(np.float64) for each in found]


def close(got: Arrays, exact: Arrays, plain: Arrays, unit: float = 0.0) -> None:
    """Errors of at most `C` times those of the plain computation, and the rounding to a dtype of a unit."""
    for one, right, other in zip(got, exact, plain, strict=True):
        most = float(np.abs(right).max(initial=0))
        allowed = C * float(np.abs(other - right).max(initial=0)) + (FINE + 2 * unit) * most + ROUNDED
        assert float(np.abs(one - right).max(initial=0)) <= allowed
