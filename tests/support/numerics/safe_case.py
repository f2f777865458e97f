"""Rows that break norms and softmax, and the right answers in float64.

Protocol: `rows(n, dtype, seed)` is a float32 array of rows of `n` numbers that the dtype has: constant ones
of every size, ± the largest, one among others, near numbers far from 0, subnormal ones, all exponents mixed.
The functions give results and, for a gradient g of them, gradients, in float64 with no number too large.
"""
from __future__ import annotations

import numpy as np
import torch
from tinygrad.dtype import DType, dtypes

TORCH = {dtypes.float32: torch.float32, dtypes.bfloat16: torch.bfloat16, dtypes.float16: torch.float16}
Array = np.ndarray


def rows(n: int, dtype: DType, seed: int) -> Array:
    """(rows, n)."""
    rng, info = np.random.default_rng(seed), torch.finfo(TORCH[dtype])
    most, least, steps = info.max, info.smallest_normal, 1 / info.eps
    sizes = [least / 4, least, 1e-3, 1.0, 1e3, 3e4, most,
             *[2.0 ** power for power in (29, 31, 62, 64, 95, 97, 120) if 2.0 ** power < most]]
    made = [np.full(n, sign * size) for size in sizes for sign in (1, -1)]
    made += [np.where(np.arange(n) % 2, size, -size) for size in sizes]
    made += [np.where(np.arange(n) == n // 2, size, 0) for size in sizes]
    made += [np.where(np.arange(n) == n - 1, size, rng.standard_normal(n)) for size in sizes]
    made += [size * (1 + rng.integers(0, 4, n) * 2 / steps) / 2 for size in sizes]
    made += [rng.standard_normal(n) * size / 8 for size in sizes]
    made += [np.ldexp(rng.standard_normal(n), rng.integers(-140, 126, n)) for _ in range(4)]
    made += [rng.choice([most, -most, 0.0, least, 1.0], n) for _ in range(4)]
    clipped = np.clip(np.stack(made), -most, most)
    return torch.from_numpy(clipped).to(TORCH[dtype]).float().numpy()


def softmax(x: Array) -> Array:
    with np.errstate(invalid="ignore"):
        wide = np.where(x == np.inf, np.finfo(np.float32).max, x.astype(np.float64))
        largest = wide.max(-1, keepdims=True)
        exps = np.exp(wide - np.where(largest == -np.inf, 0, largest))
        total = exps.sum(-1, keepdims=True)
        return exps / np.where(total == 0, 1, total)


def softmax_gradient(x: Array, g: Array) -> Array:
    y = softmax(x)
    return np.where(x == np.inf, 0, y * (g - (g * y).sum(-1, keepdims=True)))


def logsumexp(x: Array) -> Array:
    wide = x.astype(np.float64)
    largest = wide.max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isinf(largest), largest, largest + np.log(np.exp(wide - largest[:, None]).sum(-1)))


def _deviations(x: Array, eps: float) -> tuple[Array, Array]:
    """What is normalised, and what it is divided by. The mean of near numbers is one of their differences."""
    wide = x.astype(np.float64)
    shifted = wide - wide[:, :1]
    centred = shifted - shifted.mean(-1, keepdims=True)
    return centred, np.sqrt((centred ** 2).mean(-1, keepdims=True) + eps)


def layernorm(x: Array, eps: float) -> Array:
    centred, root = _deviations(x, eps)
    return centred / root


def layernorm_gradient(x: Array, g: Array, eps: float) -> tuple[Array, Array]:
    """The gradient, and the numbers' scale: 1 / √(variance + eps)."""
    centred, root = _deviations(x, eps)
    y = centred / root
    return (g - g.mean(-1, keepdims=True) - y * (g * y).mean(-1, keepdims=True)) / root, 1 / root


def rmsnorm(x: Array, eps: float) -> Array:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide ** 2).mean(-1, keepdims=True) + eps)


def rmsnorm_gradient(x: Array, g: Array, eps: float) -> tuple[Array, Array]:
    wide = x.astype(np.float64)
    root = np.sqrt((wide ** 2).mean(-1, keepdims=True) + eps)
    y = wide / root
    return (g - y * (g * y).mean(-1, keepdims=True)) / root, 1 / root
