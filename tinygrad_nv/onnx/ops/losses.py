"""Losses, norms, remainders and steps of training that tinygrad computes otherwise than ONNX says."""
from __future__ import annotations

from typing import Any

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context

from tinygrad_nv.onnx.table import op


def _nll(log_probabilities: Tensor, target: Tensor, weight: Tensor | None, ignore: int | None,
         reduction: str) -> Tensor:
    """-weight · log probability of the target class along dimension 1; the mean is over weights."""
    target = target.cast(dtypes.int32)
    counted = target.const_like(1).cast(dtypes.bool) if ignore is None else target != ignore
    safe = counted.where(target, 0)
    by = counted.where(1.0 if weight is None else weight[safe], 0.0).cast(log_probabilities.dtype)
    loss = -log_probabilities.gather(1, safe.unsqueeze(1)).squeeze(1) * by
    if reduction == "none": return loss
    return loss.sum() if reduction == "sum" else loss.sum() / by.sum()


@op("NegativeLogLikelihoodLoss")
def nll_loss(x: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int | None = None,
             reduction: str = "mean") -> Tensor:
    """The loss of log probabilities x [N, C, …]."""
    return _nll(x, target, weight, ignore_index, reduction)


@op("SoftmaxCrossEntropyLoss")
def cross_entropy(x: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int | None = None,
                  reduction: str = "mean") -> tuple[Tensor, Tensor]:
    """The loss of scores x [N, C, …], and their log probabilities."""
    made = x.log_softmax(1)
    return _nll(made, target, weight, ignore_index, reduction), made


@op("LpNormalization")
def lp_normalization(x: Tensor, axis: int = -1, p: int = 2) -> Tensor:
    """x divided by its norm along a dimension; 0 where the norm is 0."""
    norm = x.abs().sum(axis, keepdim=True) if p == 1 else x.square().sum(axis, keepdim=True).sqrt()
    return (norm == 0).where(0.0, x / (norm == 0).where(1.0, norm)).cast(x.dtype)


@op("Mod")
def mod(x: Tensor, y: Tensor, fmod: int = 0) -> Tensor:
    """The remainder with y's sign, or with `fmod` with x's."""
    if not x.is_floating_point(): return x.fmod(y) if fmod else x % y
    rest = y.isinf().where(x.isinf().where(float("nan"), x), x.fmod(y))
    if fmod: return rest
    differs = (rest != 0) & ((rest < 0) != (y < 0))
    return differs.where(rest + y, rest)


def _training(name: str) -> None:
    """tinygrad's optimizers, which it wants to be called while training."""
    @op(name, domain="ai.onnx.preview.training", host=(1,))
    def step(rate: Tensor, number: np.ndarray, *inputs: Tensor, **attributes: Any) -> Any:
        from tinygrad.nn import onnx
        function: Any = onnx.onnx_ops[name]
        with Context(TRAINING=1): return function(rate, number.item(), *inputs, **attributes)


for each in ("Adam", "Adagrad", "Momentum"): _training(each)
