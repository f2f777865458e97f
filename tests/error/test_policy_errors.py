"""Policies that mean nothing for a dtype, or contradict each other: the words."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tinygrad import dtypes

from tinygrad_nv.errors import NumericsError
from tinygrad_nv.numerics.meet import meet
from tinygrad_nv.numerics.policy import (
    accum,
    deterministic,
    loss_scale,
    saturate,
    stochastic_round,
    with_policies,
)

f16, bf16, f32 = dtypes.float16, dtypes.bfloat16, dtypes.float32
e4m3, int8, int32 = dtypes.fp8e4m3, dtypes.int8, dtypes.int32


@pytest.mark.parametrize(("make", "words"), [
    (lambda: bf16 @ accum(f32) @ accum(bf16), r"(?s)accum\(f32\) and accum\(bf16\).*one of them"),
    (lambda: bf16 @ accum(f16), r"(?s)bf16 @accum\(f16\): sums overflow from 2\^16 on.*accum\(bf16\)"),
    (lambda: f32 @ accum(bf16), r"(?s)8 bits of significand for operands of 24.*accum\(f64\), accum\(f32\)"),
    (lambda: f16 @ accum(bf16), "8 bits of significand for operands of 11"),
    (lambda: int8 @ accum(int8), r"(?s)s8 @accum\(s8\).*integers of 32 bits or more"),
    (lambda: int8 @ accum(f32), r"accum\(int32\), and a scale after the sum"),
    (lambda: dtypes.int8 @ accum(dtypes.uint32), "integers of 32 bits"),
    (lambda: dtypes.bool @ accum(f32), "floats or integers"),
    (lambda: bf16 @ accum(int32), "a float that holds every bf16"),
    (lambda: f32 @ stochastic_round, r"(?s)f32 @stochastic_round: nothing is rounded.*f16, bf16, e4m3, e5m2"),
    (lambda: f32 @ saturate, "f32 @saturate: sums reach no further"),
    (lambda: int32 @ saturate, "s32 @saturate"),
    (lambda: f32 @ loss_scale(8), r"f32 @loss_scale\(8\): small gradients"),
    (lambda: loss_scale(3), r"(?s)loss_scale\(3\).*a power of two"),
    (lambda: loss_scale(float("inf")), "a power of two"), (lambda: loss_scale(-2), "a power of two"),
    (lambda: stochastic_round(seed=-1), "an integer of 64 bits"),
    (lambda: bf16 @ stochastic_round(seed=1) @ stochastic_round(seed=2), "seed=1.*and.*seed=2"),
    (lambda: bf16 @ stochastic_round @ deterministic, r"(?s)drawn anew.*stochastic_round\(seed=…\)"),
    (lambda: f16 @ saturate @ loss_scale(8), "(?s)hides the overflow.*leave saturate out"),
    (lambda: bf16 @ accum(f32) @ 3, "@ 3"), (lambda: 3 @ accum(f32), r"(?s)3 @accum\(f32\).*a dtype"),
])
def test_words(make: Callable[[], Any], words: str):
    with pytest.raises(NumericsError, match=words): make()


@pytest.mark.parametrize(("a", "b", "operation", "words"), [
    (bf16 @ accum(f32), bf16 @ accum(bf16), "multiply", r"accum\(f32\) and accum\(bf16\) in one operation"),
    (bf16, f16, "add", "neither bf16 nor f16 holds"),
    (int8, bf16, "multiply", "(?s)codes meet floats.*dequantise"),
    (int8, dtypes.uint8, "multiply", "neither integer holds"),
    (f16 @ loss_scale(8), f16 @ loss_scale(4), "multiply", "a scale of 32"),
    (f16 @ loss_scale(8), f16, "add", "(?s)different scales are added.*divide"),
    (f16 @ loss_scale(8), f16 @ saturate, "multiply", "hides the overflow"),
    (bf16 @ deterministic, bf16 @ stochastic_round, "add", "drawn anew"),
    (bf16 @ accum(bf16), f32, "multiply", "8 bits of significand for operands of 24")])
def test_operands_that_do_not_meet(a: Any, b: Any, operation: str, words: str):
    with pytest.raises(NumericsError, match=words) as caught: meet(a, b, operation, ("q", "k"))
    assert f"q is {with_policies(a)}, k is {with_policies(b)}" in str(caught.value)


def test_an_operation_that_is_none():
    with pytest.raises(NumericsError, match=r"(?s)operation 'power'.*multiply, add"):
        meet(bf16, bf16, "power")
