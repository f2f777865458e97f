"""Tensors and numbers that the running kernel takes from lists (tile.select), and blocks that lie inside."""
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor

from tinygrad_nv.errors import LanguageError
from tinygrad_nv.language import KTile, OTile, f32, int32, kernel, tile
from tinygrad_nv.tile.language.batching import batch_program
from tinygrad_nv.tile.language.gpu import build
from tinygrad_nv.tile.template import GPU

LENGTHS = 3, 203, 64
RNG = np.random.default_rng(0)
NUMBERS = [RNG.integers(-8, 9, n).astype(np.float32) for n in LENGTHS]
ORDER = np.array([1, 0, 2, 7, -3], np.int32)    # beyond either end: the last, the first


@kernel(grid=lambda N: (N,))
def weighted_sums(a: KTile["A", f32], b: KTile["B", f32], c: KTile["C", f32], order: KTile["N", int32],
                  out: OTile["N", f32]):
    i = tile.program_id(0)
    x, weight = tile.select(order[i], (a, b, c), (2, 3, 5))
    total, whole = tile.zeros((32,)), x.shape[0] // 64 * 64
    for first in tile.range(0, whole, 64): total += x[tile.block(first, 32)] + x[tile.block(first + 32, 32)]
    total += x[tile.block(whole, 32)] + x[tile.block(whole + 32, 32)]
    out[i] = (tile.sum(total, 0) + x[100] + x[order[0] + 100]) * tile.cast(weight, f32)


@kernel(grid=lambda N: (N,))
def gather_tensors(a: KTile["A", f32], b: KTile["B", f32], c: KTile["C", f32], order: KTile["N", int32],
             out: OTile["N", 256, f32]):
    i = tile.program_id(0)
    x = tile.select(order[i], (a, b, c))
    out[i, :] = x[tile.arange(256)]


@kernel(grid=lambda: (2,))
def double_tensors(x: OTile["X", f32], y: OTile["Y", f32], *, step: int = 128):
    z = tile.select(tile.program_id(0), (x, y))
    for i in tile.range(0, z.shape[0], step): z[tile.block(i, 128)] = z[tile.block(i, 128)] * 2


@kernel(grid=lambda N: (N,))
def following(a: KTile["A", f32], b: KTile["B", f32], c: KTile["C", f32], order: KTile["N", int32],
              out: OTile["N", 64, f32]):
    i, total = tile.program_id(0), tile.zeros((64,))
    x = tile.select(order[i], (a, b, c))
    for first in tile.range(0, x.shape[0] // 64 * 64, 64): total += x[tile.block(first + 64, 64)]
    out[i, :] = total


@kernel(grid=lambda: (2,))
def name_twice(x: OTile["X", f32], y: OTile["Y", f32]):
    z = tile.select(tile.program_id(0), (x, y))
    z[0] = x[1]


@kernel(grid=lambda: (2,))
def unlike(x: KTile["X", f32], y: KTile["Y", int32], out: OTile["X", f32]):
    z = tile.select(tile.program_id(0), (x, y))
    out[0] = z[0]


def given() -> list[Tensor]:
    """Tensors of several lengths, and which of them each program reads."""
    return [Tensor(x, device="CPU").realize() for x in (*NUMBERS, ORDER)]


def pick_places() -> list[int]: return [min(max(int(i), 0), 2) for i in ORDER]


@pytest.mark.parametrize("arch", ["interpreted", "CPU", "sm_80", "sm_90a"])
def test_one_of_several(arch: str):
    rows = np.stack([np.pad(NUMBERS[i], (0, 256 - LENGTHS[i])) for i in pick_places()])
    sums = (rows.sum(1) + rows[:, 100] + rows[:, 101]) * [(2, 3, 5)[i] for i in pick_places()]
    next_ones = rows.reshape(-1, 4, 64)[:, 1:].sum(1)
    for made, want in ((weighted_sums, sums), (gather_tensors, rows), (following, next_ones)):
        np.testing.assert_array_equal(ran(made, arch), want)


def ran(made: Any, arch: str) -> Any:
    """The result of a kernel."""
    if arch == "interpreted": return made.interpret(*given())
    if arch == "CPU": return made(*given()).numpy()
    checked = made.check(*given(), arch=arch, emulator_seed=1)
    assert not checked.findings, str(checked)
    return checked.outputs["out"]


def ptx(made: Any, *args: Tensor, **constants: Any) -> str:
    """The text of a kernel for an H100."""
    return build(made.program(*args, **constants), made.chosen, GPU("sm_90a", 132)).ptx


def test_whole_blocks_are_not_guarded():
    """In the loop; the last ones are, and single elements."""
    loads = re.findall(r"(@\S+ )?ld\.global\S*\.[fb]32", ptx(weighted_sums, *given()))
    assert sorted(map(bool, loads)) == [False] * 2 + [True] * 4


@pytest.mark.parametrize(("step", "barriers"), [(128, 0), (64, 1)])
def test_elements_of_one_thread_need_no_barrier(step: int, barriers: int):
    """Blocks at multiples of their size; others share elements."""
    text = ptx(double_tensors, Tensor(NUMBERS[0]), Tensor(NUMBERS[1]), step=step)
    assert min(text.count("bar.sync"), 1) == barriers


@pytest.mark.parametrize("arch", ["CPU", "sm_80", "sm_90a"])
@pytest.mark.parametrize("step", [128, 64])
def test_in_place(arch: str, step: int):
    x, y = (Tensor(each, device="CPU").contiguous().realize() for each in NUMBERS[:2])
    if arch == "CPU": found = [each.numpy() for each in double_tensors(x, y, step=step)]
    else:
        checked = double_tensors.check(x, y, arch=arch, step=step, emulator_seed=1)
        assert not checked.findings, str(checked)
        found = [checked.outputs[name] for name in "xy"]
    for made, before in zip(found, NUMBERS, strict=False):
        passes = np.minimum(np.arange(before.size) // step + 1, 128 // step)
        np.testing.assert_array_equal(made, before * 2.0**passes)


def test_errors():
    x, y = Tensor(NUMBERS[0]), Tensor(NUMBERS[1])
    with pytest.raises(LanguageError, match="x, which is written, in several"): name_twice.program(x, y)
    with pytest.raises(LanguageError, match="one dtype"): unlike.program(x, y.cast(int32))
    with pytest.raises(LanguageError, match="chooses among tensors"):
        batch_program(weighted_sums.program(*given()), 2, [])
