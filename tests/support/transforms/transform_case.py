"""What tests of transforms share: random tensors, and numbers that are close."""
from __future__ import annotations

from typing import Any

import numpy as np
from tinygrad import Tensor

RNG = np.random.default_rng(0)


def random(*shape: int) -> Tensor:
    """Normal numbers, float32, in memory."""
    return Tensor(RNG.standard_normal(shape).astype(np.float32)).realize()


def close(own: Any, want: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Arrays, or Tensors of either library, are equal but for so much: some roundings of float32."""
    np.testing.assert_allclose(*(each.numpy() if hasattr(each, "numpy") else each for each in (own, want)),
                               rtol=rtol, atol=atol)
