"""explain() on what it cannot explain."""
from __future__ import annotations

import pytest

from tinygrad_nv import Tensor, Variable, explain
from tinygrad_nv.errors import NVError


@pytest.mark.parametrize("thing", [3, [Tensor.ones(2)], None])
def test_something_that_is_no_tensor(thing):
    words = f"explain\\(\\) was given a {type(thing).__name__}"
    with pytest.raises(NVError, match=words) as caught:
        explain(thing)
    assert "call explain(a, b)" in str(caught.value)


def test_a_variable_without_a_value():
    rows = Tensor.ones(8, 4, device="CPU").contiguous().realize()[:Variable("n", 1, 8)]
    with pytest.raises(NVError, match="depends on a variable without a value"): explain(rows.sum(0))
