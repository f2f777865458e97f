"""Specs of norms and other kernels of rows: statistics of a row, and elements made with them. A spec does not
know its target.

Protocol: as gemm/spec.py. A row has `n` elements; there are `m` of them in each of a batch of up to three
dimensions.

    s_i[b, m]     = reduce_i over n of term_i[b, m, n]       term_i may use s_j of j < i
    out_j[b, m, n] = value_j[b, m, n]                         value_j may use every s_i

Terms and values are expressions: `Load`s of parameters, `Position`s, and `Sum(part=i)` for s_i. That is

    RMSNorm        s_0 = Σ x²                   out = x · 1 / √(s_0 / n + eps) · w
    LayerNorm      s_0 = Σ x, s_1 = Σ (x - s_0 / n)²
    softmax        s_0 = max x, s_1 = Σ 2^((x - s_0) log2 e)
    argmax         s_0 = max x, s_1 = max (x = s_0) · (n - position), out = n - s_1, one number of a row
    to e4m3        s_0 = max |x| of each group of 128, out_0 = x / (s_0 / 448), out_1 = s_0 / 448 of groups

with every rounding and every residual that the graph has: RMSNorm of Llama rounds x / rms to the model's
dtype before it multiplies by w, that of Gemma after. Sums are of float32 or int32. A maximum is of numbers:
NaN among them is passed over, and a row of nothing else gives the least value of the dtype. A statistic of
groups has a number for each `group` elements of a row; results of groups are made of such alone.

Gated activations (GLU variants, arXiv 2002.05202) and their gradients, as rows without statistics.

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
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Literal

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.expression import (
    Apply,
    Expression,
    Load,
    Sum,
    erf,
    exp,
    parameters,
    short,
    show,
    sigmoid,
    walk,
)
from tinygrad_nv.tile.gemm.spec import FLOAT16S, MOST_BATCH_DIMENSIONS, Result

SUMMED = (dtypes.float32, dtypes.int32)
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
CUBIC, ROOT = 0.044715, math.sqrt(2 / math.pi)
MOST_GELU = 20.0    # of |x|: tanh(u) is ±1 to the last bit from 6 on


@dataclass(frozen=True)
class Statistic:
    """A number of each row, or of each `group` elements of it: the terms added up, or the largest of them.
    Raises `SpecError` for dtypes that are not reduced."""
    op: Literal["add", "max"]
    term: Expression
    group: int = 0

    def __post_init__(self) -> None:
        allowed = SUMMED if self.op == "add" else (*SUMMED, *FLOAT16S)
        if self.dtype not in allowed:
            raise SpecError(f"{self.op} of {short(self.dtype)}", f"of {', '.join(map(short, allowed))}")

    @property
    def dtype(self) -> DType:
        """The dtype of the terms and of the number."""
        return self.term.dtype


@dataclass(frozen=True)
class Computed:
    """A result: where it lies, and its elements. One number of a row, where `result.n` is 0; of a `group`
    of elements, where that is not 0: `result.n` is the stride between groups. `beside`: in the storage of the
    result before, with its strides."""
    result: Result
    value: Expression
    group: int = 0
    beside: bool = False


@dataclass(frozen=True)
class NormSpec:
    """Rows, their statistics and results. `symbolic`: `m` is the most rows there can be, how many there are
    is the kernel's last integer. Raises `SpecError` for what cannot be."""
    m: int
    n: int
    statistics: tuple[Statistic, ...]
    results: tuple[Computed, ...]
    batch: tuple[int, ...] = ()
    symbolic: bool = False

    def __post_init__(self) -> None:
        if min(self.m, self.n, *self.batch) < 1:
            raise SpecError(f"{self.m} rows of {self.n}, batch {self.batch}", "extents ≥ 1")
        if not self.results: raise SpecError("no result", "one or more")
        if len(self.batch) > MOST_BATCH_DIMENSIONS:
            raise SpecError(f"{len(self.batch)} dimensions of batch", f"at most {MOST_BATCH_DIMENSIONS}")
        for i, each in enumerate(self.statistics): self._check(each.term, i)
        for computed in self.results:
            self._check(computed.value, len(self.statistics))
            if computed.value.dtype != computed.result.dtype:
                raise SpecError(f"a value of {computed.value.dtype}", f"the result's {computed.result.dtype}",
                                "end it with a cast")
            if len(computed.result.batch) != len(self.batch):
                raise SpecError(f"{len(computed.result.batch)} batch strides of a result",
                                f"{len(self.batch)}, as the batch has")
        for before, computed in zip((None, *self.results), self.results, strict=False):
            if not computed.beside: continue
            if before is None or replace(before.result, offset=0) != replace(computed.result, offset=0) or \
                    before.group or computed.group or computed.result.offset <= before.result.offset:
                raise SpecError(f"{computed.result} beside {before and before.result}",
                                "elements that lie as those of the result before, at a higher offset")
        for group in self.groups:
            if group < 0 or self.n % group:
                raise SpecError(f"groups of {group} in rows of {self.n}", "a divisor")
        _ = self.parameters

    def _check(self, root: Expression, known: int) -> None:
        for node in walk(root):
            if not isinstance(node, Sum): continue
            if node.part >= known or node.dtype != self.statistics[node.part].dtype:
                raise SpecError(f"{node}", f"one of {known} statistics, of its dtype")

    @property
    def groups(self) -> set[int]:
        """The sizes of groups that there are."""
        return {*(each.group for each in self.statistics), *(each.group for each in self.results)} - {0}

    @property
    def outputs(self) -> tuple[int, ...]:
        """The number of each result's storage."""
        return tuple(accumulate((int(not each.beside) for each in self.results[1:]), initial=0))

    @property
    def expressions(self) -> tuple[Expression, ...]:
        """Terms, then values."""
        return (*(each.term for each in self.statistics), *(each.value for each in self.results))

    @property
    def parameters(self) -> tuple[DType, ...]:
        """The dtypes of what is loaded, by number."""
        return parameters(*self.expressions)

    @property
    def rows(self) -> int:
        """How many rows there are at most."""
        return self.m * prod(self.batch)

    @property
    def integers(self) -> tuple[int, ...]:
        """The kernels' integer arguments, each at its most."""
        return (self.m,) if self.symbolic else ()

    @property
    def flops(self) -> int:
        """Operations, one for each node of an expression and each addition or comparison of a statistic."""
        each = sum(sum(isinstance(node, Apply) and node.op != "cast" for node in walk(root))
                   for root in self.expressions)
        return self.rows * self.n * (each + len(self.statistics))

    def __str__(self) -> str:
        extents = "x".join(map(str, (*self.batch, f"{'≤' if self.symbolic else ''}{self.m}", self.n)))
        words = [f"s{i} = {each.op}{_of(each.group)} {_show_named(each.term)}"
                 for i, each in enumerate(self.statistics)]
        words += [f"{short(each.result.dtype)}{_of(each.group)} {_show_named(each.value)}"
                  for each in self.results]
        return f"{extents}: {'; '.join(words)}"


def _show_named(root: Expression) -> str:
    return show(root, {node: f"s{node.part}" for node in walk(root) if isinstance(node, Sum)})


def _of(group: int) -> str: return f" of {group}" if group else ""


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
