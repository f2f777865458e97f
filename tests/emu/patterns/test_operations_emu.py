"""Every method of Tensor that computes, forward and gradient, on the emulated GPU: operations_case.py."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.patterns.on_emu import emu  # noqa: F401
from tests.support.patterns.operations_case import (
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
from tinygrad_nv import Tensor


@pytest.mark.sampled(2)
@pytest.mark.parametrize("each", plan(), ids=named)
def test_values_and_gradients_of_sums(each: Any): assert wrong(*each, "EMU") == ""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("each", groups(), ids=named)
def test_many_together(each: Any): assert wrong_together(*each, "EMU") == []


@pytest.mark.slow
@pytest.mark.parametrize("case", [*LOSSES, *MATRICES], ids=lambda case: case.name)
def test_all_widths_and_dtypes(case: Case): assert wrongs(case, "EMU") == []


def test_a_maximum_is_of_numbers():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    x[0, ::5] = x[1, 0] = x[2, 63] = x[3] = np.nan
    assert Tensor(x).argmax(-1).tolist() == [*np.nanargmax(x[:3], -1), 64]
    assert Tensor(x).softmax(-1).isnan().all().item()
