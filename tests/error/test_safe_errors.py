"""Safe norms: what they do not take, in words."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import NumericsError
from tinygrad_nv.numerics.safe import layernorm_safe, logsumexp_safe, rmsnorm_safe, softmax_safe


@pytest.mark.parametrize(("make", "words"), [
    (lambda: softmax_safe(Tensor.empty(2, 3, dtype=dtypes.int32)),
     r"(?s)softmax_safe of s32.*f32, bf16, f16.*x.float"),
    (lambda: logsumexp_safe(Tensor.empty(2, 3, dtype=dtypes.float64)), "logsumexp_safe of f64"),
    (lambda: layernorm_safe(Tensor.empty(2, 3), eps=0.0), r"(?s)layernorm_safe with eps=0.0.*1e-13 or more"),
    (lambda: rmsnorm_safe(Tensor.empty(2, 3), eps=1e-20), r"(?s)rmsnorm_safe with eps=1e-20.*1e-13 or more"),
    (lambda: rmsnorm_safe(Tensor.empty(2, 3), eps=float("nan")), "eps=nan"),
])
def test_words(make: Callable[[], Any], words: str):
    with pytest.raises(NumericsError, match=words): make()
