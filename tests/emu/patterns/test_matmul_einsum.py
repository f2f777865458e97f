"""DEV=EMU: einsums of two tensors with any letters in any order, over views, against numpy: bit for bit."""
from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.helpers import Context

from tests.support.patterns.matmul_case import rounded, stored, taken, whole
from tests.support.patterns.on_emu import emu  # noqa: F401
from tinygrad_nv import Tensor, explain


@st.composite
def formulas(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """Letters in both and kept (batch), in one (rows, columns), in both and summed."""
    batch, rows, columns, summed = (
        "".join(draw(st.permutations(letters)))[:draw(st.integers(least, most))]
        for letters, least, most in (("ab", 0, 2), ("ij", 1, 2), ("mn", 0, 2), ("kl", 1, 2)))
    left, right = ("".join(draw(st.permutations(list(batch + own + summed)))) for own in (rows, columns))
    out = "".join(draw(st.permutations(list(batch + rows + columns))))
    sizes = {c: draw(st.integers(2, 6 if c in "abkl" else 9)) for c in batch + rows + columns + summed}
    return f"{left},{right}->{out}", sizes


def view(draw: st.DataObject, values: np.ndarray, seed: int) -> Tensor:
    """A tensor that is a slice of a larger one, or a permutation in memory."""
    kind = draw.draw(st.sampled_from(("dense", "slice", "permuted")))
    if kind == "slice":
        around = whole(*(n + 3 for n in values.shape), seed=seed + 10)
        place = tuple(slice(i % 3 + 1, i % 3 + 1 + n) for i, n in enumerate(values.shape))
        around[place] = values
        return stored(around)[place]
    if kind == "permuted":
        order = draw.draw(st.permutations(range(values.ndim)))
        return stored(values.transpose(order)).permute(tuple(np.argsort(order).tolist()))
    return stored(values)


def test_any_einsum():
    """Most are a GEMM of ours. The others sum over two dimensions that do not lie as one, in operands too
    little used to be copied."""
    ours: Counter[bool] = Counter()

    @settings(max_examples=14, deadline=None, derandomize=True)
    @given(formulas(), st.data())
    def check(case: tuple[str, dict[str, int]], data: st.DataObject) -> None:
        formula, sizes = case
        with Context(DEV="EMU"):
            arrays = [whole(*(sizes[c] for c in letters), seed=i)
                      for i, letters in enumerate(formula.split("->")[0].split(","))]
            y = Tensor.einsum(formula, *(view(data, a, i) for i, a in enumerate(arrays)))
            ours[len(taken(y)) == 1] += 1
            if not taken(y): assert any(kernel.reason.startswith("gemm: ") for kernel in explain(y).kernels)
            np.testing.assert_array_equal(y.float().numpy(), rounded(np.einsum(formula, *arrays)))

    check()
    assert ours[True] > ours[False]
