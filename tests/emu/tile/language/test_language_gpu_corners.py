"""Programs that random ones found: few columns, short k, blocks ahead of a tensor, shared memory used
again."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinygrad_nv.language import *


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(-6, 7, shape).astype(np.float32)


def same(made: Any, want: np.ndarray, *arrays: Any, dtype: Any = f32) -> None:
    """A kernel's results on the emulated GPUs and on the CPU, without findings."""
    given = [Tensor(each).cast(dtype).realize() for each in arrays]
    np.testing.assert_array_equal(made(*given).float().numpy(), want)
    for arch in ("sm_80", "sm_90a"):
        checked = made.check(*given, arch=arch)
        assert not checked.findings, checked
        np.testing.assert_array_equal(next(iter(checked.outputs.values())), want)


@kernel(grid=(1,))
def product(a: KTile["M", "K", bf16], b: KTile["K", "N", bf16], out: OTile["M", "N", f32]):
    out[:, :] = tile.dot(a[:, :], b[:, :])


@pytest.mark.parametrize(("m", "k", "n"), [(33, 5, 17), (40, 8, 32), (33, 17, 16), (65, 3, 20)])
def test_products_of_odd_extents(m: int, k: int, n: int):
    a, b = numbers(m, k), numbers(k, n)
    same(product, a @ b, a, b, dtype=bf16)


def test_products_of_what_another_operation_reads():
    @kernel(grid=(1,))
    def both(a: KTile["M", "K", bf16], b: KTile["K", "N", bf16], out: OTile["M", "N", f32]):
        x = a[:, :]
        y = tile.cast(tile.sum(tile.cast(x, f32), 0), bf16)[:, None] + b[:, :]
        out[:, :] = tile.dot(x, y)
    a, b = numbers(40, 8), numbers(8, 32)
    same(both, a @ (a.sum(0)[:, None] + b), a, b, dtype=bf16)


def test_blocks_that_begin_ahead_of_a_tensor():
    @kernel(grid=(1,))
    def shifted(a: KTile["M", "K", int8], b: KTile[20, "N", int8], out: OTile["M", "N", int32]):
        out[:, :] = tile.dot(a[:, tile.block(-1, 20)], b[:, :])
    a, b = numbers(17, 19), numbers(20, 16)
    same(shifted, a @ b[1:], a, b, dtype=int8)


def test_operands_are_read_before_shared_memory_is_used_again():
    @kernel(grid=(1,))
    def again(a: KTile["M", "K", f32], b: KTile["K", "M", f32], out: OTile["M", "M", f32]):
        first = tile.dot(a[:, :], tile.sort(b[:, :], 1))
        out[:, :] = tile.dot(tile.sort(first, 1), first)
    a, b = numbers(5, 3), numbers(3, 5)
    first = a @ np.sort(b, 1)
    same(again, np.sort(first, 1) @ first, a, b)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(3, 2, 3), (16, 3, 1), (1, 5, 40)])
def test_sorts_beside_axes_that_are_padded(axis: int, shape: tuple[int, ...]):
    @kernel(grid=(1,))
    def ordered(x: KTile["A", "B", "C", f32], out: OTile["A", "B", "C", f32]):
        out[:, :, :] = tile.sort(x[:, :, :], axis)
    x = numbers(*shape)
    same(ordered, np.sort(x, axis), x)
