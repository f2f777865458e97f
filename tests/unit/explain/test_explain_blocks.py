"""Equal layers of a model are one block of explain's table, and the totals are those of all."""
from __future__ import annotations

import random

import numpy as np
import pytest

from tinygrad_nv import Tensor, explain
from tinygrad_nv.explain import repetitions


@pytest.mark.parametrize(("text", "found"), [
    ("", []),
    ("abc", [(0, 1, 1), (1, 1, 1), (2, 1, 1)]),
    ("aab", [(0, 1, 2), (2, 1, 1)]),
    ("eabcabcabcz", [(0, 1, 1), (1, 3, 3), (10, 1, 1)]),
    ("aabaab", [(0, 3, 2)]),
    ("abababab", [(0, 2, 4)]),
])
def test_repetitions(text: str, found: list[tuple[int, int, int]]):
    assert repetitions(text) == found


def test_repetitions_are_the_sequence():
    numbers = random.Random(0)
    for _ in range(200):
        row = numbers.choices("ab", k=numbers.randrange(20))
        assert [each for start, length, times in repetitions(row)
                for each in row[start:start + length] * times] == row


def test_layers_are_one_block():
    x = Tensor(np.ones((4, 64), np.float32), device="CPU").realize()
    weights = [Tensor(np.ones((64, 64), np.float32), device="CPU").realize() for _ in range(6)]
    for weight in weights: x = (x.softmax() @ weight).contiguous()
    lowering = explain(x)
    assert len(lowering.kernels) == 12
    assert [(len(block), times) for block, times in lowering.blocks] == [(2, 6)]
    lines = str(lowering).splitlines()
    assert lines[1].strip() == "2 kernels × 6:"
    assert lines[2].startswith("  ")
    total = next(line for line in lines if line.startswith("12 in all"))
    assert f"{sum(kernel.flops for kernel in lowering.kernels):,}" in total
    assert "12 ours" in total


def test_one_kernel_again_and_again():
    x = Tensor(np.ones((4, 64), np.float32), device="CPU").realize()
    for _ in range(5): x = x.softmax().contiguous()
    assert " × 5 " in str(explain(x)).splitlines()[1]
