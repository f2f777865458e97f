"""Matmuls with gathered matrices become grouped matmuls on a GPU, too: whole numbers, the same bits, and
zeros for numbers of no expert."""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.helpers import Context

from tinygrad_nv import explain


def test_experts_of_tokens():
    random, (experts, n, k) = np.random.default_rng(0), (3, 32, 64)
    with Context(DEV="EMU"):
        x, w = (Tensor(random.integers(-3, 4, shape).astype(np.float32)).cast(dtypes.bfloat16).realize()
                for shape in ((4, 1, k), (experts, n, k)))
        chosen = np.array([[0, 2], [2, -1], [1, 2], [experts, 0]], np.int32)
        sel = Tensor(chosen).realize()
        made = (x.unsqueeze(-2) @ w[sel].transpose(-1, -2)).contiguous()
        assert "grouped_gemm" in [each.template for each in explain(made).kernels], explain(made)
        got, rows, matrices = (each.float().numpy() for each in (made, x, w))
    wanted = np.einsum("tk,tsnk->tsn", rows[:, 0], matrices[np.clip(chosen, -1, experts - 1)])
    wanted[3, 0] = 0
    near = Tensor(wanted, device="CPU").cast(dtypes.bfloat16).float().numpy()
    np.testing.assert_array_equal(got.reshape(wanted.shape), near)
