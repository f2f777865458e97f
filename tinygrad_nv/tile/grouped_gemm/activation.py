"""act(gate) · up of sums, in instructions: what all kernels of GPUs share (spec.py has the formulas).

Protocol: float32 in, float32 out; exp2 and reciprocal are the approximations of the hardware. A NaN stays
one.
"""
from __future__ import annotations

from math import log2, pi

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.builder.values import Number
from tinygrad_nv.tile.grouped_gemm.spec import ALPHA, LIMIT

LOG2_E = log2(2.718281828459045)
# erf by Abramowitz and Stegun 7.1.26, highest power first, as tinygrad has it
ERF_T, ERF = 0.3275911, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def activate(kb: Kernel, name: str, gate: Value, up: Value) -> Value:
    """One element."""
    if name == "silu": return gate * _sigmoid(kb, gate, 1.0) * up
    if name == "swiglu_clamped":
        gate, up = _op(kb, "min.NaN", gate, LIMIT), _op(kb, "min.NaN", up, LIMIT)
        up = _op(kb, "max.NaN", up, -LIMIT)
        return (up + 1.0) * (gate * _sigmoid(kb, gate, ALPHA))
    if name == "gelu_tanh":     # (1 + tanh z) / 2 = sigmoid(2 z)
        inner = gate + gate * gate * gate * 0.044715
        return gate * _sigmoid(kb, inner, 2 * (2 / pi) ** 0.5) * up
    return gate * 0.5 * (_erf(kb, gate * 0.5 ** 0.5) + 1.0) * up


def _sigmoid(kb: Kernel, x: Value, scale: float) -> Value:
    """sigmoid(scale · x)."""
    return _op(kb, "rcp.approx", _op(kb, "ex2.approx", x * (-scale * LOG2_E)) + 1.0)


def _erf(kb: Kernel, x: Value) -> Value:
    size = _op(kb, "abs", x)
    t = _op(kb, "rcp.approx", size * ERF_T + 1.0)
    sum_ = t * ERF[0]
    for factor in ERF[1:]: sum_ = (sum_ + factor) * t
    made = _op(kb, "ex2.approx", x * x * -LOG2_E) * sum_
    return _op(kb, "copysign", x, _op(kb, "sub", 1.0, made))


def _op(kb: Kernel, opcode: str, *args: Number) -> Value:
    made = kb.reg("f32")
    kb.emit(f"{opcode}.f32", made, *args)
    return made
