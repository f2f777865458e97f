"""Derivatives of scores and backward passes that tests are held against, against torch's."""
from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.tile.attention_case import attended, matrix
from tests.support.tile.backward_case import Gradients, arguments, backward, lies, near, plain, reference
from tests.support.tile.gemm_case import evaluate
from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile.attention.derivative import derivative
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.expression import (
    Apply,
    Constant,
    Expression,
    Load,
    Position,
    Sum,
    gelu,
    relu,
    silu,
    tanh,
    where,
)

X, F32 = Sum(), dtypes.float32
SCORES: dict[str, Expression] = {
    "linear": X * 0.3 + 2.0, "quotient": (X * X + 2.0).reciprocal() * X, "power": (X * 0.5).exp2(),
    "logarithm": Apply("log2", (X * X + 1.0,), F32), "root": Apply("sqrt", (X * X + 0.5,), F32),
    "sine": Apply("sin", (X * 0.7,), F32), "relu": relu(X), "silu": silu(X), "gelu": gelu(X),
    "tanh": tanh(X), "difference": Constant(1.0) - X * X, "min": Apply("min", (X, X * 2.0), F32),
    "max": (X * X).maximum(X), "choice": where(X < 0.5, X * 2.0, X * X),
    "position": X * Position("n").cast(F32)}


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("name", SCORES)
def test_derivatives_are_those_of_torch(name: str, precise: bool):
    sums = torch.randn(1, 1, 1, 20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    spec = SimpleNamespace(batch=(1, 1, 1), m=20, n=30)
    wide = sums.requires_grad_(True)
    right, = torch.autograd.grad(evaluate(spec, SCORES[name], [wide], {}).sum(), wide)  # type: ignore[arg-type]
    got = evaluate(spec, derivative(SCORES[name], precise), [sums.detach()], {})  # type: ignore[arg-type]
    assert (got - right).abs().max() < 2e-5


def test_what_is_the_same_for_all_is_a_constant():
    mask = Load(0, dtypes.bool, 1, 1)
    for score, slope in ((X, 1.0), (X * 0.5 * -3.0, -1.5), (X * 0.25 + Load(0, F32, 1, 1), 0.25),
                         (where(mask, X * 2.0, Constant(-math.inf)), 2.0), (X + X * 2.0, 3.0),
                         (where(mask, Constant(-math.inf), X * 2.0), 2.0), (Load(0, F32, 1, 1), 0.0)):
        assert derivative(score) == Constant(slope)


def test_where_a_power_is_infinite_the_derivative_is_zero():
    spec = SimpleNamespace(batch=(), m=1, n=2)
    sums = torch.tensor([[-1e4, 1e4]], dtype=torch.float64)
    for precise in (False, True):
        slopes = evaluate(spec, derivative(tanh(X), precise), [sums], {})  # type: ignore[arg-type]
        assert slopes.abs().max() < 1e-6


def test_a_precise_derivative_keeps_its_bits():
    """In float32, near 1, where 1 − tanh² has lost all of them."""
    spec, sums = SimpleNamespace(batch=(), m=1, n=64), torch.linspace(0, 10, 64, dtype=torch.float32)[None]
    plain, precise = (evaluate(spec, derivative(tanh(X), each), [sums], {})  # type: ignore[arg-type]
                      for each in (False, True))
    right = torch.cosh(sums.double()) ** -2
    assert ((precise - right).abs() < 2e-6 * right).all()
    assert ((plain - right).abs() > 0.1 * right).any()


def test_a_sum_that_becomes_an_integer_has_none():
    with pytest.raises(SpecError, match="derivative"): derivative(X.cast(dtypes.int32).cast(F32))


GRAPHS: dict[str, Expression] = {
    "scale": Sum() * 0.125, "soft-cap": tanh(Sum() * 0.02) * 6.0,
    "bias": Sum() * 0.1 + Load(0, dtypes.float32, 40, 1),
    "mask": where(Load(0, dtypes.bool, 40, 1), Sum() * 0.1, Constant(-math.inf))}


@pytest.mark.parametrize("band", [FULL, Band(None, -3), Band(-8, 1)], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_formulas_are_the_derivatives(name: str, band: Band):
    """Of operands in float64, so that nothing is rounded but l and delta; rows may see nothing."""
    spec = backward(30, 40, 16, batch=2, heads=2, group=2, band=band, d_v=24, score=GRAPHS[name])
    given = arguments(spec)
    wide = {one: given[one].double().requires_grad_(True) for one in "qkv"}
    out, _ = attended(spec.forward, given | wide, torch.float64)
    (out * lies(spec, given, "grad").double()).sum().backward()
    dq, dk, dv = (matrix(spec.forward, {one: wide[one].grad}, one) for one in "qkv")
    exact = reference(spec, given)
    for one, other in zip(exact, (dq, dk[:, :, 0], dv[:, :, 0]), strict=True):
        assert (one - other).abs().max() < 1e-5


def test_a_wrong_gradient_is_not_near():
    spec = backward(30, 40, 16, band=Band(None, 4))
    given = arguments(spec)
    good = plain(spec, given)
    near(spec, given, good)
    for name in ("dq", "dk", "dv"):
        wrong = {**good._asdict(), name: getattr(good, name) * 1.05}
        with pytest.raises(AssertionError, match=name): near(spec, given, Gradients(**wrong))
