"""What the tests of backward passes are held against: the formulas, against torch's derivatives."""
from __future__ import annotations

import math

import pytest
import torch
from tinygrad.dtype import dtypes

from tests.support.tile.attention_case import attended, matrix
from tests.support.tile.backward_case import Gradients, arguments, backward, lies, near, plain, reference
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.expression import Constant, Expression, Load, Sum, tanh, where

SCORES: dict[str, Expression] = {
    "scale": Sum() * 0.125, "soft-cap": tanh(Sum() * 0.02) * 6.0,
    "bias": Sum() * 0.1 + Load(0, dtypes.float32, 40, 1),
    "mask": where(Load(0, dtypes.bool, 40, 1), Sum() * 0.1, Constant(-math.inf))}


@pytest.mark.parametrize("band", [FULL, Band(None, -3), Band(-8, 1)], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_the_formulas_are_the_derivatives(name: str, band: Band):
    """Of operands in float64, so that nothing is rounded but l and delta; rows may see nothing."""
    spec = backward(30, 40, 16, batch=2, heads=2, group=2, band=band, d_v=24, score=SCORES[name])
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
