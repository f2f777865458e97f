"""An output layer's loss on the emulated GPU: matmuls over two chunks that share buffers, checks on."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinygrad_nv import disabled
from tinygrad_nv.explain import explain
from tinygrad_nv.functional import linear_cross_entropy


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16], ids=str)
def test_chunks(dtype: DType):
    random = np.random.default_rng(0)
    given = [random.standard_normal(shape).astype(np.float32) for shape in ((40, 64), (200, 64))]
    hidden, weight = (Tensor(each, device="EMU").cast(dtype).realize() for each in given)
    labels = Tensor(random.integers(0, 200, 40).astype(np.int32), device="EMU").realize()

    def step() -> list[np.ndarray]:
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, labels, z_loss=1e-3, chunk=24)
        loss.backward()
        Tensor.realize(loss, hidden.grad, weight.grad)
        return [each.float().numpy() for each in (loss, hidden.grad, weight.grad)]
    assert "24x200 f32" in str(explain(linear_cross_entropy(hidden, weight, labels, chunk=24)))
    got = step()
    with disabled(): plain = step()
    assert got[0] == pytest.approx(plain[0], rel=1e-6)
    # one rounding more or less of the gradient of logits
    for one, other in zip(got[1:], plain[1:], strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2.0**-8 * np.abs(other).max())
