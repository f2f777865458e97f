"""Precision of training as recipes: what is computed and kept in how many bits, and which state that needs.

Read in this order:
  policy.py        policies of a dtype, bf16 @accum(f32) @stochastic_round
  meet.py          what two operands of an operation come to
  recipes.py       `PrecisionRecipe` by name: dtypes, master weights, loss scaling, FP8 and its scales
  fp8.py           a model's matrices in FP8: scales, histories and counters, and their state
"""
from tinygrad_nv.numerics.recipes import (
    RECIPES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    HighPrecision,
    LossScaling,
    PrecisionRecipe,
)

__all__ = ["RECIPES", "DelayedScaling", "Float8BlockScaling", "Float8CurrentScaling", "HighPrecision",
           "LossScaling", "PrecisionRecipe"]
