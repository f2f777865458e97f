"""Reductions, scans and gathers across the lanes and warps of a program on the emulated GPU: by which
instructions, and the same numbers as the interpreter has."""
from __future__ import annotations

import re

import numpy as np
import pytest
from tinygrad.dtype import DType, dtypes

from tests.support.tile.language_gpu_case import checked, program, ref
from tinygrad_nv.language import *
from tinygrad_nv.tile.language import reductions as R
from tinygrad_nv.tile.language.gpu import build
from tinygrad_nv.tile.language.ir import Program
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

F32, S32, U32 = dtypes.float32, dtypes.int32, dtypes.uint32
NARROW = TileSchedule(vector=1)


def text(made: Program, schedule: TileSchedule) -> str: return build(made, schedule, GPU("sm_80")).ptx


def reduced(x, o, *, fn): o[:] = getattr(R, fn)(x[:, :], 1)


@pytest.mark.parametrize("dtype", [S32, U32], ids=str)
@pytest.mark.parametrize("fn", ["sum_", "max_", "min_"])
@pytest.mark.parametrize("columns", [32, 60, 160])
def test_integers_of_a_warp_are_reduced_by_one_instruction(columns: int, fn: str, dtype: DType) -> None:
    made = program(reduced, [ref("o", dtype, 4, out=True), ref("x", dtype, 4, columns)], more={"fn": fn})
    assert "redux.sync" in text(made, NARROW)
    assert "shfl" not in text(made, NARROW)
    checked(made, NARROW)


@pytest.mark.parametrize(("columns", "fn"), [(8, "sum_"), (64, "prod")])
def test_other_reductions_are_by_shuffles(columns: int, fn: str) -> None:
    made = program(reduced, [ref("o", S32, 4, out=True), ref("x", S32, 4, columns)], more={"fn": fn})
    assert "redux" not in text(made, NARROW)
    checked(made, NARROW)


def reduce_columns(x, o, apart, *, fn):
    found = getattr(R, fn)(x[:, :, :], 1)
    o[:, :] = found
    apart[:, :, :] = x[:, :, :] - found[:, None, :]


@pytest.mark.parametrize(("shape", "shuffles"), [((5, 64, 32), 10 + 5), ((3, 64, 16), 8 + 4 + 2),
                                                 ((3, 64, 40), 6), ((1, 16, 512), 0)], ids=str)
@pytest.mark.parametrize(("dtype", "fn"), [(F32, "sum_"), (F32, "max_"), (S32, "prod")], ids=str)
def test_many_columns_are_shared_out(shape: tuple[int, ...], shuffles: int, dtype: DType, fn: str) -> None:
    """Lanes exchange halves of what they have, and no thread combines what all warps have of all columns."""
    made = program(reduce_columns, [ref("o", dtype, shape[0], shape[2], out=True),
                                     ref("apart", dtype, *shape, out=True), ref("x", dtype, *shape)],
                   more={"fn": fn})
    schedule = TileSchedule(vector=4, warps=8)
    x = np.random.default_rng(3).integers(-9, 10, shape).astype(np.float32 if dtype == F32 else np.int32)
    checked(made, schedule, x=x)
    columns = max(shape[0] * 4, shape[2] // 32)
    assert text(made, schedule).count("shfl") == shuffles
    assert text(made, schedule).count("ld.shared") < 8 * columns


def first_above(x, o):
    at = tile.arange(x.shape[1])[None, :]
    o[:] = tile.min(tile.where(x[:, :] > 30, at, x.shape[1]), 1)


@pytest.mark.parametrize("vector", [1, 4])
@pytest.mark.parametrize("columns", [5, 128, 160, 300])
def test_the_first_index_where_a_condition_holds(columns: int, vector: int) -> None:
    """A select for each element; rows without one have the extent."""
    made = program(first_above, [ref("o", S32, 6, out=True), ref("x", S32, 6, columns)])
    x = np.random.default_rng(columns).integers(0, 33, (6, columns), np.int32)
    x[0], x[1, -1], x[2, :] = 0, 50, 40
    found = checked(made, TileSchedule(vector=vector), x=x)["o"]
    assert found[0] == columns
    assert found[2] == 0
    if columns == 128:
        assert not re.search(r"^\s*min\.s32", text(made, TileSchedule(vector=vector, warps=1)), re.M)


def least_of_others(x, o):
    """Numbers that are no indices, and indices with a number among them."""
    at = tile.arange(x.shape[1])[None, :]
    low = tile.min(tile.where(x[:, :] > 30, x[:, :], x.shape[1]), 1)
    o[:] = low + tile.min(tile.where(x[:, :] > 30, at, 3), 1)


@pytest.mark.parametrize("columns", [8, 100])
def test_the_least_of_other_choices(columns: int) -> None:
    made = program(least_of_others, [ref("o", S32, 64, out=True), ref("x", S32, 64, columns)])
    checked(made)


def looked_up(x, i, o): o[:, :] = tile.gather(x[:, :], i[:, :], 1)


@pytest.mark.parametrize("dtype", [F32, dtypes.bfloat16, S32, dtypes.bool], ids=str)
@pytest.mark.parametrize(("columns", "count"), [(32, 8), (128, 32), (60, 5), (8, 8)])
def test_a_gather_within_a_warp_is_by_shuffles(columns: int, count: int, dtype: DType) -> None:
    tensors = [ref("o", dtype, 4, count, out=True), ref("x", dtype, 4, columns), ref("i", S32, 4, count)]
    made = program(looked_up, tensors)
    index = np.random.default_rng(0).integers(0, columns, (4, count), np.int32)
    for vector in (1, 4): checked(made, TileSchedule(vector=vector), i=index, ulps=0)
    if columns >= 32 and count == 32: assert "shfl.sync.idx" in text(made, NARROW)


def third(x, o): o[:] = tile.gather(x[:, :], tile.full((x.shape[0], 1), 2, int32), 1).reshape(x.shape[0])


def test_an_index_that_is_known() -> None:
    checked(program(third, [ref("o", F32, 4, out=True), ref("x", F32, 4, 70)]), NARROW, ulps=0)


def counted(x, o, p):
    until = tile.cumsum(x[:, :], 0)
    o[:, :] = until
    p[:] = tile.cumsum(tile.max(until, 0), 0)


@pytest.mark.parametrize("warps", [1, 4, 16])
@pytest.mark.parametrize(("rows", "columns"), [(2, 8), (16, 128), (48, 60), (32, 16)])
def test_scans_of_columns_and_of_their_ends(rows: int, columns: int, warps: int) -> None:
    """Threads have columns, warps parts of them."""
    tensors = [ref("o", S32, rows, columns, out=True), ref("p", S32, columns, out=True),
               ref("x", S32, rows, columns)]
    checked(program(counted, tensors), TileSchedule(warps=warps, vector=1))


def scanned(x, o): o[:] = tile.cumsum(x[:], 0)


@pytest.mark.parametrize("size", [33, 128, 500])
@pytest.mark.parametrize("dtype", [S32, F32], ids=str)
def test_a_scan_over_warps_has_one_barrier(dtype: DType, size: int) -> None:
    made = program(scanned, [ref("o", dtype, size, out=True), ref("x", dtype, size)])
    checked(made, NARROW, integers=True, ulps=0)
    if size <= 128: assert text(made, NARROW).count("bar.sync") == 1


def rolled(x, o, *, unroll):
    total = tile.zeros((32,), f32)
    for i in tile.range(x.shape[0], unroll=unroll): total = total * 0.5 + x[i, :]
    o[:] = total


@pytest.mark.parametrize("unroll", [False, True])
def test_a_loop_that_is_compiled_once(unroll: bool) -> None:
    made = program(rolled, [ref("o", F32, 32, out=True), ref("x", F32, 5, 32)], more={"unroll": unroll})
    assert ("nounroll" in text(made, NARROW)) is not unroll
    checked(made, NARROW)


def rank(x, o, c, *, bins):
    ranks, counts = tile.ranks(x[:], bins)
    o[:, :], c[:] = ranks[None, :] + tile.arange(4)[:, None], counts


@pytest.mark.parametrize("warps", [1, 4, 16])
@pytest.mark.parametrize(("size", "bins"), [(1000, 17), (20, 5), (12, 3), (1, 1), (32, 300), (300, 1),
                                            (900, 600)])
def test_ranks_among_equal_numbers(size: int, bins: int, warps: int) -> None:
    """Lanes and warps that hold copies count nothing twice; numbers of no bin have rank 0."""
    tensors = [ref("o", S32, 4, size, out=True), ref("c", S32, bins, out=True), ref("x", S32, size)]
    made = program(rank, tensors, more={"bins": bins})
    numbers = np.random.default_rng(0).integers(-2, bins + 2, size, np.int32)
    numbers[::7] = np.resize([bins - 1, -1 << 31, (1 << 31) - 1], len(numbers[::7]))
    checked(made, TileSchedule(warps=warps), x=numbers)


def count_alone(x, o, p):
    o[:] = tile.ranks(x[:], 100)[1] + tile.ranks(x[:] + 1, 100)[1]
    p[:] = tile.gather(x[:], 499 - tile.arange(500), 0)


def test_ranks_that_nothing_reads_are_not_made() -> None:
    """Later operations do not write where counts are still read."""
    made = program(count_alone, [ref("o", S32, 100, out=True), ref("p", S32, 500, out=True),
                                   ref("x", S32, 500)])
    checked(made, TileSchedule(warps=4), x=np.random.default_rng(0).integers(0, 100, 500, np.int32))
    both = program(rank, [ref("o", S32, 4, 500, out=True), ref("c", S32, 100, out=True),
                            ref("x", S32, 500)], more={"bins": 100})
    least, most = (text(each, NARROW).count("ld.shared") for each in (made, both))
    assert least < 2 * most
