"""Accesses of programs on GPUs: their guards, their order, what a thread reads."""
from __future__ import annotations

import re

import pytest
from tinygrad.dtype import dtypes

from tests.support.tile.language_gpu_case import checked, program, ref
from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language.gpu import build
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

F32, BF16, S32 = dtypes.float32, dtypes.bfloat16, dtypes.int32


def add(x, y, o):
    rows = C.block(C.program_id(0) * 256, 256)
    o[rows] = x[rows] + y[rows]


def branch(x, o):
    part = C.program_id(0)
    if part < 2: o[part, :] = x[C.block(part * 64, 64)]
    elif part < 3: o[part, :] = x[C.block((part - 2) * 64, 64)] * 2.0
    else: o[part, :] = x[C.block((part - 3) * 128 + 64, 64)] * 3.0


def test_a_branch_knows_what_its_condition_compares() -> None:
    """Blocks that only a branch reads lie inside of x, or else are guarded."""
    made = program(branch, [ref("o", F32, 4, 64, out=True), ref("x", F32, 128)], grid=(4,))
    checked(made, ulps=0)
    assert "@%p" not in build(made, TileSchedule(warps=1), GPU("sm_80")).ptx
    far = program(branch, [ref("o", F32, 5, 64, out=True), ref("x", F32, 128)], grid=(5,))
    assert "@%p" in build(far, TileSchedule(warps=1), GPU("sm_80")).ptx
    checked(far, ulps=0)


def apart(x, o):
    o[:, C.block(0, 64)] = x[:, C.block(64, 64)]
    o[:, C.block(64, 64)] = x[:, C.block(0, 64)]


def overlapping(x, o):
    o[:, C.block(0, 64)] = x[:, C.block(64, 64)]
    o[:, C.block(32, 64)] = x[:, C.block(0, 64)]


@pytest.mark.parametrize(("fn", "barriers"), [(apart, 0), (overlapping, 1)])
def test_stores_to_other_columns_do_not_wait(fn, barriers: int) -> None:
    made = program(fn, [ref("o", F32, 4, 128, out=True), ref("x", F32, 4, 128)])
    text = build(made, TileSchedule(warps=2), GPU("sm_80")).ptx
    assert text.count("bar.sync") == barriers
    assert "+256]" in text     # of blocks that differ in a known start the address is one
    checked(made, ulps=0)


def test_few_programs_save_no_registers() -> None:
    few, many = (build(program(add, [ref(name, BF16, n, out=name == "o") for name in "oxy"],
                               grid=(-(-n // 256),)), TileSchedule(warps=4), GPU("sm_90a", 132)).ptx
                 for n in (1024, 1 << 20))
    assert (".minnctapersm 1" in few, ".minnctapersm" in many) == (True, False)


def to_pages(x, at, pages, o):
    value = x[C.block(0, 8), :]
    page = pages[at[0]]
    o[page, C.block(0, 8), :] = value


def test_what_is_copied_is_loaded_ahead_of_its_place() -> None:
    """A barrier of the warp keeps it there, and it is no ld.global.nc, which ptxas would move behind it."""
    made = program(to_pages, [ref("o", BF16, 3, 8, 64, out=True), ref("x", BF16, 8, 64), ref("at", S32, 1),
                              ref("pages", S32, 4)])
    text = build(made, TileSchedule(warps=2), GPU("sm_80")).ptx
    order = re.findall(r"ld\.global[.\w]*|bar\.warp\.sync", text)
    assert order == ["ld.global.v4.b32", "bar.warp.sync", "ld.global.nc.s32", "ld.global.nc.s32"]
    checked(made, ulps=0, at=[2], pages=[1, 1, 2, 0])


def doubled(x, at, o): o[at[0], :] = x[:] * at[0]


def test_what_is_computed_with_has_no_barrier() -> None:
    made = program(doubled, [ref("o", F32, 3, 64, out=True), ref("x", F32, 64), ref("at", S32, 1)])
    assert "bar.warp" not in build(made, TileSchedule(warps=1), GPU("sm_80")).ptx
    checked(made, ulps=0, at=[2])


def third(x, o): o[:, :] = x[:, C.block(0, 48)] * 2.0


def test_padding_is_not_loaded() -> None:
    """Columns beside a block lie inside of the tensor: reading them would take time alone."""
    made = program(third, [ref("o", F32, 4, 48, out=True), ref("x", F32, 4, 144)])
    text = build(made, TileSchedule(warps=1), GPU("sm_80")).ptx
    loads = [line.strip() for line in text.splitlines() if "ld.global" in line]
    assert loads
    assert all(line.startswith("@%p") for line in loads)
    checked(made, ulps=0)
