"""Optimisers by the names of transformers' `--optim` and of the papers: `adamw`, `sgd`, `lion`, `muon`,
`adafactor`. Each takes parameters by name, a learning rate, the rule's hyperparameters, and what all share:
`weight_decay`, `groups` and `options` (optimizer.py)."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.train.optimizers.matrix_rules import AdafactorRule, AdjustLR, MuonRule
from tinygrad_nv.train.optimizers.optimizer import Optimizer
from tinygrad_nv.train.optimizers.rules import AdamWRule, LionRule, SGDRule, UpdateRule, is_hidden_matrix

Parameters = Mapping[str, Tensor]
Betas = tuple[float, float]


def adamw(parameters: Parameters, lr: float = 1e-3, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
          weight_decay: float = 0.01, **shared: Any) -> Optimizer:
    """AdamW with torch's defaults. Raises `ConfigError`."""
    _check_betas(betas)
    return Optimizer(parameters, lr, AdamWRule(*betas, eps), weight_decay=weight_decay, **shared)


def sgd(parameters: Parameters, lr: float = 1e-3, momentum: float = 0.0, nesterov: bool = False,
        weight_decay: float = 0.0, **shared: Any) -> Optimizer:
    """SGD with torch's defaults; weight decay is part of the gradient. Raises `ConfigError`."""
    if not momentum >= 0: raise ConfigError(f"momentum {momentum}", "a number from 0")
    if nesterov and not momentum: raise ConfigError("nesterov without momentum", "a momentum above 0")
    return Optimizer(parameters, lr, SGDRule(momentum, nesterov), weight_decay=weight_decay, **shared)


def lion(parameters: Parameters, lr: float = 1e-4, betas: Betas = (0.9, 0.99), weight_decay: float = 0.0,
         **shared: Any) -> Optimizer:
    """Lion with the paper's defaults. Raises `ConfigError`."""
    _check_betas(betas)
    return Optimizer(parameters, lr, LionRule(*betas), weight_decay=weight_decay, **shared)


def adafactor(parameters: Parameters, lr: float = 1e-2, beta2_decay: float = -0.8,
              eps: tuple[float | None, float] = (None, 1e-3), d: float = 1.0, weight_decay: float = 0.0,
              **shared: Any) -> Optimizer:
    """Adafactor with torch's defaults. Raises `ConfigError`."""
    if beta2_decay > 0: raise ConfigError(f"beta2_decay {beta2_decay}", "a number up to 0")
    if d < 1: raise ConfigError(f"d {d}", "a number from 1")
    return Optimizer(parameters, lr, AdafactorRule(beta2_decay, eps[0] or 0.0, eps[1], d),
                     weight_decay=weight_decay, **shared)


def muon(parameters: Parameters, lr: float = 1e-3, momentum: float = 0.95, nesterov: bool = True,
         weight_decay: float = 0.1, ns_steps: int = 5, adjust_lr: AdjustLR = "match_rms_adamw",
         dtype: DType = dtypes.bfloat16, betas: Betas = (0.9, 0.999), eps: float = 1e-8,
         **shared: Any) -> Optimizer:
    """Muon for hidden matrices (`is_hidden_matrix`), AdamW of `betas` and `eps` for the others, with one
    learning rate: "match_rms_adamw" keeps that of AdamW. Raises `ConfigError`."""
    _check_betas(betas)
    if not 0 < ns_steps < 100: raise ConfigError(f"{ns_steps} steps of Newton-Schulz", "1 to 99")
    hidden = MuonRule(momentum, nesterov, ns_steps, adjust_lr=adjust_lr, dtype=dtype)
    others = AdamWRule(*betas, eps)

    def rule(name: str, tensor: Tensor) -> UpdateRule:
        return hidden if is_hidden_matrix(name, tensor) else others
    return Optimizer(parameters, lr, rule, weight_decay=weight_decay, **shared)


OPTIMIZERS = {"adamw": adamw, "sgd": sgd, "lion": lion, "muon": muon, "adafactor": adafactor}


def _check_betas(betas: Betas) -> None:
    if not all(0 <= beta < 1 for beta in betas): raise ConfigError(f"betas {betas}", "two numbers in [0, 1)")
