"""Numbers that are not finite, and results out of their range: the words."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor

from tinygrad_nv import layer
from tinygrad_nv.errors import NumericsError
from tinygrad_nv.numerics.verify import numerics, sentinels


def test_a_number_that_is_not_finite():
    w = Tensor(np.array([1e30, np.nan], np.float32)).realize()
    with pytest.raises(NumericsError) as caught, sentinels({"head.weight": w}), layer("head"):
        (w * 2).contiguous().realize()
    for words in ("NaN in element 1 of a tensor of 2 f32, written by", "layer head)",
                  "head.weight had 1 of 2 that are not finite",
                  "operand   head.weight: f32, 2 elements, 1e+30",
                  "expected: finite numbers", "to fix:   look at the operand of the largest magnitude first"):
        assert words in str(caught.value)


def test_a_result_out_of_its_range(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DEBUG", "1")

    @numerics(bounded=[-1, 1])
    def doubled(x: Tensor) -> Tensor: return x * 2
    with pytest.raises(NumericsError) as caught: doubled(Tensor([3.0, -0.5]))
    for words in ("doubled has elements of -1 … 6", "by its graph alone they lie in",
                  "expected: numbers of -1 … 1", "to fix:   scale its operands, or state a wider range"):
        assert words in str(caught.value)
