"""Dots of operands that a loop makes, and loads of such loops by TMA, on the emulated GPU: against the
interpreter, with early and late copies."""
from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from tinygrad.dtype import DType, dtypes

from bench.lib.kernels_language import dequantise
from tests.support.tile.language_gpu_case import checked, program, ref
from tinygrad_nv.ptx.emulator import LATE
from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language import control as K
from tinygrad_nv.tile.language import elements as E
from tinygrad_nv.tile.language import linear as L
from tinygrad_nv.tile.language import values as V
from tinygrad_nv.tile.language.gpu import build
from tinygrad_nv.tile.language.ir import Program
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

F32, F16, BF16 = dtypes.float32, dtypes.float16, dtypes.bfloat16
SEEDS, ARCH = (0, 1, 2, LATE), "sm_90a"
FROM_REGISTERS = re.compile(r"wgmma\.mma_async[^;]*\}, \{%r")     # a left operand of four registers


def codes(x, packed, scales, o, bm, bn, bk):
    """x wᵀ of codes of 4 bits (bench/lib/kernels_language.py); words are loaded one block ahead."""
    m, n = C.block(C.program_id(0) * bm, bm), C.block(C.program_id(1) * bn, bn)
    acc = E.zeros((bm, bn), F32)
    words, scale = packed[n, C.block(0, bk // 8)], scales[0, n]
    for k in K.blocks(x.shape[1], bk):
        after = packed[n, C.block(k.start // 8 + bk // 8, bk // 8)]
        scale_after = scales[(k.start + bk) // 128, n]
        acc = L.dot(x[m, k], dequantise(words, scale).T, acc)
        words, scale = after, scale_after
    o[m, n] = V.cast(acc, F16)


def of_codes(m: int, n: int, k: int, bm: int, bn: int, bk: int) -> tuple[Program, dict[str, np.ndarray]]:
    random = np.random.default_rng(0)
    tensors = [ref("o", F16, m, n, out=True), ref("x", F16, m, k), ref("packed", dtypes.int32, n, k // 8),
               ref("scales", F16, -(-k // 128), n)]
    made = program(codes, tensors, grid=(-(-m // bm), -(-n // bn)), more={"bm": bm, "bn": bn, "bk": bk})
    given = {"packed": random.integers(-2**31, 2**31, (n, k // 8)).astype(np.int32),
             "scales": random.choice([0.25, 0.5, 1.0], (-(-k // 128), n)).astype(np.float32)}
    return made, given


@pytest.mark.parametrize(("shape", "tile", "warps", "stages"), [
    ((128, 64, 384), (64, 64, 64), 4, 4), ((100, 192, 256), (128, 128, 64), 8, 3),
    ((48, 64, 128), (16, 64, 64), 4, 2), ((64, 256, 128), (64, 256, 32), 16, 3)])
def test_codes_go_to_wgmma_from_registers(shape: Any, tile: Any, warps: int, stages: int) -> None:
    """Rows and columns that end inside of a tile, blocks beyond K, CTAs that go through several programs."""
    made, given = of_codes(*shape, *tile)
    schedule = TileSchedule(warps=warps, stages=stages)
    checked(made, schedule, ARCH, integers=True, ulps=0.5, seeds=SEEDS, sms=1, **given)
    assert FROM_REGISTERS.search(build(made, schedule, GPU(ARCH, 1)).ptx)


def test_sides_stay_on_other_gpus_and_where_rows_do_not_fit() -> None:
    """A left operand has 64 rows for each four warps."""
    for tile, warps, arch in (((64, 64, 64), 8, "sm_90a"), ((64, 64, 64), 4, "sm_80")):
        made, given = of_codes(64, 64, 128, *tile)
        schedule = TileSchedule(warps=warps, stages=3)
        checked(made, schedule, arch, integers=True, ulps=0.5, **given)
        assert not FROM_REGISTERS.search(build(made, schedule, GPU(arch)).ptx)


def looked_at(a, b, o, sums):
    """A right operand that the loop makes, and sums that it looks at."""
    acc, total = E.zeros((64, 64), F32), E.zeros((64, 64), F32)
    for k in K.blocks(a.shape[1], 64):
        acc = L.dot(a[:, k], V.cast(b[:, k], BF16).T, acc)
        total = total + acc
    o[:, :], sums[:, :] = acc, total


def test_sums_that_are_looked_at_keep_their_sides() -> None:
    """Products are waited for in their own iteration."""
    made = program(looked_at, [ref("o", F32, 64, 64, out=True), ref("sums", F32, 64, 64, out=True),
                               ref("a", BF16, 64, 192), ref("b", dtypes.int8, 64, 192)])
    checked(made, TileSchedule(stages=3), ARCH, integers=True, ulps=0.5, seeds=SEEDS)
    assert not FROM_REGISTERS.search(build(made, TileSchedule(stages=3), GPU(ARCH)).ptx)


OPERANDS = 3        # copies of 128 bytes a row: one of `a`, two of `b`


def beside(a, b, rows, blocks, o, sums, seen, first):
    """Rows and blocks for registers beside operands; `first`: columns that blocks are behind the operands."""
    acc, total, found = E.zeros((64, 128), F32), E.zeros((64,), F32), E.zeros((64, 64), F32)
    for k in K.blocks(a.shape[1], 64):
        acc = L.dot(a[:, k], b[k, :], acc)
        total = total + rows[k]
        found = found + V.cast(blocks[:, C.block(k.start - first, 64)], F32)
    o[:, :], sums[:], seen[:, :] = acc, total, found


def around(dtype: DType, k: int, first: int) -> Program:
    """With blocks of a dtype."""
    return program(beside, [ref("o", F32, 64, 128, out=True), ref("sums", F32, 64, out=True),
                            ref("seen", F32, 64, 64, out=True), ref("a", BF16, 64, k), ref("b", BF16, k, 128),
                            ref("rows", F32, k), ref("blocks", dtype, 64, k)], more={"first": first})


@pytest.mark.parametrize("dtype", [F32, BF16, dtypes.int32, dtypes.uint32, dtypes.int8])
@pytest.mark.parametrize("first", [0, 32, -32])
def test_loads_for_registers_by_tma(dtype: DType, first: int) -> None:
    """Blocks that a loop adds up come in its stages: what is before the first column and beyond the last is
    0. Rows of one axis are loaded by the threads."""
    made = around(dtype, 240, first)
    checked(made, TileSchedule(stages=3), ARCH, integers=True, ulps=0.5, seeds=SEEDS)
    copies = build(made, TileSchedule(stages=3), GPU(ARCH)).ptx.count("cp.async.bulk.tensor")
    assert copies == OPERANDS + max(64 * dtype.itemsize // 128, 1)


def test_stages_without_room_for_them() -> None:
    """Threads load what the stages have no room for."""
    made = around(F32, 192, 0)
    for stages, count in ((5, OPERANDS + 2), (6, OPERANDS)):
        schedule = TileSchedule(stages=stages)
        checked(made, schedule, ARCH, integers=True, ulps=0.5)
        assert build(made, schedule, GPU(ARCH)).ptx.count("cp.async.bulk.tensor") == count
