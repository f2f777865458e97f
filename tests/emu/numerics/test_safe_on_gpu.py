"""Safe norms on the emulated GPU: one norm kernel each, and right for rows that break others."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests.support.numerics import safe_case as right
from tests.unit.numerics.test_safe import Safe, U, upstream, within
from tinygrad_nv import explain
from tinygrad_nv.numerics.safe import layernorm_safe, rmsnorm_safe, softmax_safe

N = 160


@pytest.mark.parametrize(("safe", "want", "bound"), [
    (softmax_safe, right.softmax, 4),
    (layernorm_safe, lambda x: right.layernorm(x, 1e-5), 64 * np.sqrt(2 * N)),
    (rmsnorm_safe, lambda x: right.rmsnorm(x, 1e-6), 16 * np.sqrt(N))])
def test_rows_that_break_others(safe: Safe, want: Safe, bound: float):
    x = right.rows(N, dtypes.float32, 0)
    out = safe(Tensor(x, device="EMU").realize())
    assert [each.template for each in explain(out).kernels] == ["norm"]
    within(out.numpy().astype(np.float64), want(x), bound * U, dtypes.float32)


def test_a_gradient():
    x = right.rows(N, dtypes.float32, 0)
    g, given = upstream(x), Tensor(x, device="EMU").realize()
    gradient = (layernorm_safe(given) * Tensor(g, device="EMU")).sum().gradient(given)[0]
    slope, size = right.layernorm_gradient(x, g, 1e-5)
    room = 64 * U * np.sqrt(2 * N) * (1 + np.abs(right.layernorm(x, 1e-5))) * size
    within(gradient.numpy().astype(np.float64), slope, room, dtypes.float32)
