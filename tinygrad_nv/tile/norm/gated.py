"""Gated activations (GLU variants, arXiv 2002.05202) and their gradients, as rows without statistics.

Protocol: gate | up lie in one matrix (m, 2 n), gate first. Everything is computed in float32 and rounded
once.

    forward     out[m, n] = act(gate) · up
    backward    gate' = g · up · act'(gate), up' = g · act(gate), beside each other as gate | up are

Activations are x · p(x), and their slopes p + x · p', in forms that stay finite for every finite x:

    silu        p = σ(x)                                    p' = σ (1 − σ)
    gelu_tanh   p = σ(2 u), u = √(2/π) (x + 0.044715 x³)     p' = 2 σ (1 − σ) u'
    gelu        p = Φ(x) = (1 + erf(x / √2)) / 2             p' = e^(−x²/2) / √(2π)

(1 + tanh u) / 2 is σ(2 u). The cube overflows beyond 1e12: u is kept below `MOST_GELU` on either side, where
σ is 0 or 1 in float32 already.
"""
from __future__ import annotations

import math

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.expression import Expression, Load, erf, exp, sigmoid
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.norm.spec import Computed, NormSpec

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
CUBIC, ROOT = 0.044715, math.sqrt(2 / math.pi)
MOST_GELU = 20.0    # of |x|: tanh(u) is ±1 to the last bit from 6 on


def apply_gate(m: int, n: int, dtype: DType, activation: str) -> NormSpec:
    """act(gate) · up of gate | up (m, 2 n): (m, n)."""
    gate, up = _halves(n, dtype)
    p, _ = _factor(gate, activation)
    return NormSpec(m, n, (), (Computed(Result(dtype, n, 1), (gate * p * up).cast(dtype)),))


def gate_gradient(m: int, n: int, dtype: DType, activation: str) -> NormSpec:
    """The gradient of gate | up (m, 2 n), from gate | up and the gradient g (m, n) of the result."""
    (gate, up), g = _halves(n, dtype), Load(1, dtype, n, 1).cast(dtypes.float32)
    p, slope = _factor(gate, activation)
    values = g * up * (p + gate * slope), g * (gate * p)
    places = (Result(dtype, 2 * n, 1, (), i * n) for i in range(2))
    return NormSpec(m, n, (), tuple(Computed(place, value.cast(dtype), beside=i > 0) for i, (place, value) in
                                    enumerate(zip(places, values, strict=True))))


def _halves(n: int, dtype: DType) -> tuple[Expression, Expression]:
    """Gate and up in float32."""
    gate, up = (Load(0, dtype, 2 * n, 1, (), i * n).cast(dtypes.float32) for i in range(2))
    return gate, up


def _factor(x: Expression, activation: str) -> tuple[Expression, Expression]:
    """p(x) and its slope."""
    if activation == "silu":
        s = sigmoid(x)
        return s, s * (1.0 + s * -1.0)
    if activation == "gelu_tanh":
        near = (x.maximum(-MOST_GELU) * -1.0).maximum(-MOST_GELU) * -1.0
        square = near * near
        s = sigmoid(near * (1.0 + CUBIC * square) * (2 * ROOT))
        return s, s * (1.0 + s * -1.0) * (1.0 + 3 * CUBIC * square) * (2 * ROOT)
    assert activation == "gelu", activation
    return 0.5 * (1.0 + erf(x * math.sqrt(0.5))), exp(x * x * -0.5) * math.sqrt(0.5 / math.pi)
