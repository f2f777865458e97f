"""Epilogue of an element's sums: bias, activation, weight, and the place of a row (spec.py).

Protocol: a `GroupedEpilogue` knows the pointers that a spec has. `slot(i)` is the slot of row i, `source(i)`
its row of x, `place(i, slot)` that of the result.

`activate` is act(gate) · up in instructions, float32 in and out; exp2 and reciprocal are the approximations
of the hardware. A NaN stays one.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log2, pi

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.ptx.builder.values import Number
from tinygrad_nv.tile.access import advance, read
from tinygrad_nv.tile.grouped_gemm.spec import ALPHA, LIMIT, GroupedGemmSpec

LOG2_E = log2(2.718281828459045)
# erf by Abramowitz and Stegun 7.1.26, highest power first, as tinygrad has it
ERF_T, ERF = 0.3275911, (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


class GroupedEpilogue:
    """The kernel's parameters after out: x, the `matrices`, offsets, and those there are of order, weights,
    bias."""

    def __init__(self, kb: Kernel, spec: GroupedGemmSpec, matrices: Iterable[str] = ("w",)) -> None:
        self.kb, self.spec = kb, spec
        self.x = kb.pointer("x")
        self.matrices = {name: kb.pointer(name) for name in matrices}
        self.offsets = kb.pointer("offsets")
        self.order = kb.pointer("order") if spec.has_order else None
        self.weights = kb.pointer("weights") if spec.weighted else None
        self.bias = kb.pointer("bias") if spec.biased else None

    def slot(self, row: Value) -> Value:
        """u32; the row itself where there is no order."""
        if self.order is None: return row
        return self.kb.ld("global", "u32", advance(self.kb, self.order, row, 4).at())[0]

    def source(self, row: Value, guard: Value | None = None) -> Value:
        """u32; of rows that are not there 0."""
        if not self.spec.gather or self.order is None: return row
        slot = self.kb.reg("u32", 0)
        self.kb.emit("ld.global.u32", slot, advance(self.kb, self.order, row, 4).at(), guard=guard)
        return slot // self.spec.gather

    def place(self, row: Value, slot: Value) -> Value:
        """u32."""
        return slot if self.spec.scatter else row

    def weight(self, slot: Value) -> Value | None:
        """f32; None where rows have none."""
        if self.weights is None: return None
        return self.kb.ld("global", "f32", advance(self.kb, self.weights, slot, 4).at())[0]

    def biases(self, group: Value, column: Value, inside: Sequence[Value | None],
               pairs: bool) -> list[list[Value]]:
        """f32 of a column, or of two side by side, where they are inside, for each half; together where
        `pairs`. Nothing where there is none."""
        if self.bias is None: return []
        spec, size = self.spec, self.spec.dtype.itemsize
        at = advance(self.kb, advance(self.kb, self.bias, group, spec.n * size), column, size)
        made = []
        for half in range(spec.halves):
            start = half * spec.columns * size
            if pairs:
                both = read(self.kb, at, start, spec.dtype, 2, inside[0])
                some = [both.register(i) for i in range(2)]
            else: some = [read(self.kb, at, start + i * size, spec.dtype, 1, guard).register()
                          for i, guard in enumerate(inside)]
            made.append(some)
        return made

    def value(self, sums: Sequence[Value], bias: Sequence[Value], weight: Value | None) -> Value:
        """One element of the result, f32, of sums and biases of each half."""
        if bias: sums = [x + more for x, more in zip(sums, bias, strict=True)]
        made = activate(self.kb, self.spec.activation, sums[0], sums[1]) if self.spec.activation else sums[0]
        return made if weight is None else made * weight


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
