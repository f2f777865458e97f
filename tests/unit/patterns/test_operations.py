"""Every method of Tensor that computes, forward and gradient, on the CPU: operations_case.py."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor
from tinygrad.helpers import Context

from tests.support.patterns.operations_case import (
    CASES,
    LEFT,
    LOSSES,
    MATRICES,
    Case,
    groups,
    named,
    plan,
    wrong,
    wrong_together,
    wrongs,
)


def test_every_method_is_a_case_or_left_for_a_reason():
    methods = {name for name in dir(Tensor) if not name.startswith("_") and callable(getattr(Tensor, name))}
    cases = {case.name for case in CASES}
    assert methods - cases - LEFT.keys() == set(), "a method that no case computes: add it to CASES or LEFT"
    assert (LEFT.keys() - methods, cases - methods, LEFT.keys() & cases) == (set(), set(), set())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("each", plan(), ids=named)
def test_values_and_gradients_of_sums(each: Any):
    with Context(DEV="CPU"): assert wrong(*each, "CPU") == ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("each", groups(), ids=named)
def test_many_together(each: Any):
    with Context(DEV="CPU"): assert wrong_together(*each, "CPU") == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [*LOSSES, *MATRICES], ids=lambda case: case.name)
def test_all_widths_and_dtypes(case: Case):
    with Context(DEV="CPU"): assert wrongs(case, "CPU") == []


def test_a_maximum_is_of_numbers():
    """tinygrad's own argmax depends on how its loop is unrolled; of a row of NaN it is the width, too."""
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    x[0, ::5] = x[1, 0] = x[2, 63] = x[3] = np.nan
    with Context(DEV="CPU"):
        assert Tensor(x).argmax(-1).tolist() == [*np.nanargmax(x[:3], -1), 64]
        assert Tensor(x).softmax(-1).isnan().all().item()
