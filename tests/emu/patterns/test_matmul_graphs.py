"""DEV=EMU: random graphs around two products, with values used once, twice and outside, against tinygrad's
own kernels: bit for bit, as all values are small integers in float32."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.helpers import Context

from tests.support.patterns.matmul_case import stored, taken, whole
from tests.support.patterns.on_emu import emu  # noqa: F401
from tinygrad_nv import Tensor, disabled, dtypes

M, N, K = 12, 8, 16
ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.relu(), "negated": lambda x: -x, "shifted": lambda x: x + 3,
    "halves": lambda x: (x * 0.5).trunc(), "clipped": lambda x: x.clip(-20, 20),
    "transposed": lambda x: x.T.reshape(M, N), "turned": lambda x: x.flip(0),
    "half": lambda x: x.clip(-99, 99).half().float(), "rows": lambda x: x.sum(1, keepdim=True) + x,
    "largest": lambda x: x - x.max(0), "stored": lambda x: x.contiguous(),
    "cut": lambda x: x[:, :N // 2].cat(x[:, N // 2:], dim=1),
    "swapped": lambda x: x[:, N // 2:].repeat(1, 2),
    "gate": lambda x: (x[:, :N // 2].relu() + x[:, N // 2:]).repeat(1, 2),
    "padded": lambda x: x[1:].pad(((1, 0), (0, 0))),
    "product": lambda x: (x.clip(-2, 2).cast(dtypes.bfloat16) @ stored(whole(N, N, most=1))).float(),
}
TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: x + y, "difference": lambda x, y: x - y, "larger": lambda x, y: x.maximum(y),
    "chosen": lambda x, y: (x < y).where(x, y + 1), "times": lambda x, y: x.clip(-9, 9) * y.clip(-9, 9),
    "bias": lambda x, y: x + y[0], "column": lambda x, y: x - y[:, :1],
}
STEPS = st.lists(st.one_of(st.tuples(st.sampled_from(sorted(ONE)), st.integers(0, 99), st.just(0)),
                           st.tuples(st.sampled_from(sorted(TWO)), st.integers(0, 99), st.integers(0, 99))),
                 min_size=1, max_size=7)


def made(steps: list[tuple[str, int, int]], outputs: tuple[int, int]) -> list[Tensor]:
    """Each step takes values that there are already, and adds one."""
    a, b, c = stored(whole(M, K, most=1)), stored(whole(K, N, most=1)), stored(whole(N, K, most=1))
    values = [(a.float() @ b.float()), stored(whole(M, N), dtypes.float), (a @ c.T).float()]
    for name, i, j in steps:
        x, y = values[-1 - i % len(values)], values[j % len(values)]
        values.append(ONE[name](x) if name in ONE else TWO[name](x, y))
    return [values[-1], *(values[i % len(values)] * 1 for i in outputs)]


@pytest.mark.slow
@settings(max_examples=16, deadline=None)
@given(STEPS, st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_random_graphs(steps: list[tuple[str, int, int]], outputs: tuple[int, int]):
    with Context(DEV="EMU"):
        ours = made(steps, outputs)
        taken(*ours)
        Tensor.realize(*ours)
        with disabled():
            theirs = made(steps, outputs)
            Tensor.realize(*theirs)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one.numpy(), other.numpy())
