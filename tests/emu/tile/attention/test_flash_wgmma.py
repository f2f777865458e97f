"""The wgmma template of attention on the emulator: heads, bands, rings, schedules, layouts; what is exact
comes out bit for bit."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from attention_case import arguments, attention, launched, matrix, near, run
from attention_exact import equal_scores_are_a_mean, one_column_is_its_value
from flash_wgmma_case import BF16, CAUSAL, F16, F32, SMALL, W, close
from tinygrad.dtype import DType

from tinygrad_nv.tile.attention.schedules import FlashWgmma
from tinygrad_nv.tile.attention.spec import FULL, Band
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

TURNS = [SMALL.pingpong(), W.block(192, 64).warps(16).pingpong()]

# **** heads ****

@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("d", [8, 16, 40, 64, 72, 96, 128, 192, 256])
def test_heads(d: int, dtype: DType):
    """The band is a window that begins and ends within blocks; 200 keys are 7 blocks."""
    schedule = W.block(128, 32)
    close(attention(40, 200, d, dtype, band=Band(-90, 3), start=100, lse=True), schedule, seed=d % 4)
    close(attention(40, 200, d, dtype, out=F32), schedule, seed=d % 4)


@pytest.mark.parametrize(("d", "d_v"), [(64, 128), (128, 64), (192, 128), (72, 40), (16, 256), (24, 8)])
def test_values_of_another_width_than_keys(d: int, d_v: int):
    """The result's rows fit where the queries were, or have their own shared memory."""
    close(attention(50, 150, d, d_v=d_v, band=CAUSAL, start=90, heads=2, lse=True))


@pytest.mark.parametrize("out", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
def test_results(out: DType):
    close(attention(70, 130, 64, F16, out=out, heads=2, group=2, lse=True))


def test_rows_of_a_result_that_tma_cannot_have():
    """Rows that begin at odd elements are stored one by one."""
    spec = attention(70, 130, 40)
    for row, offset in ((41, 0), (40, 1), (42, 2)):
        close(replace(spec, out=replace(spec.out, row=row, batch=(70 * row,) * 3, offset=offset)))


# **** bands ****

@pytest.mark.parametrize("start", [0, 1, 63, 150])
@pytest.mark.parametrize("band", [CAUSAL, Band(-40, 0), Band(-63, 0), Band(None, 20), Band(-10, None),
                                  Band(5, 60), Band(None, -7), Band(-70, -33)], ids=str)
def test_bands(band: Band, start: int):
    """Rows may see nothing: zeros, and l = −inf."""
    close(attention(140, 330, 32, band=band, start=start, lse=True), W.block(128, 32), seed=start % 4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("s_q", [40, 128, 150])
def test_columns_that_no_row_sees_do_not_count(s_q: int, seed: int):
    """Keys and values beyond the band are NaN, within the last block too."""
    spec = attention(s_q, 500, 96, band=CAUSAL, start=150)
    given = arguments(spec, seed)
    spoilt = {name: storage.clone() for name, storage in given.items()}
    for name in "kv": matrix(spec, spoilt, name)[..., 150 + s_q:, :] = torch.nan
    near(spec, given, run(TABLE.build(spec, SMALL, GPU("sm_90a")), spec, spoilt, "sm_90a", seed))


def test_blocks_that_no_row_sees_are_skipped():
    """Bytes copied: of 4 blocks of rows, each sees its own keys and those before; of a window, three."""
    rows, nbytes = 512, 64 * 64 * 2
    found = {}
    for band in (FULL, CAUSAL, Band(-63, 0)):
        spec = attention(rows, rows, 64, band=band, out=F32)
        _, report = launched(TABLE.build(spec, SMALL, GPU("sm_90a")), spec, arguments(spec), "sm_90a")
        found[band] = report.stats.asynchronous_bytes - rows * 64 * 2
    assert found == {FULL: 32 * 2 * nbytes, CAUSAL: 20 * 2 * nbytes, Band(-63, 0): 11 * 2 * nbytes}


# **** exact ****

@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_a_row_that_sees_one_column_is_its_value(dtype: DType):
    one_column_is_its_value(lambda spec: TABLE.build(spec, SMALL, GPU("sm_90a")), "sm_90a", dtype)


@pytest.mark.parametrize("band", [FULL, Band(-63, 0)], ids=["full", "window"])
def test_equal_scores_are_a_mean(band: Band):
    equal_scores_are_a_mean(lambda spec: TABLE.build(spec, SMALL, GPU("sm_90a")), "sm_90a", band)


def test_a_rows_bits_do_not_depend_on_other_rows():
    """Nor on when a warp multiplies its result: scores grow, so that rows' tops move at different times."""
    spec = attention(37, 270, 64, heads=2, lse=True)
    given = arguments(spec, scale=2.0)
    alone = replace(spec, s_q=5)
    made = TABLE.build(alone, SMALL, GPU("sm_90a"))
    few = run(made, alone, given | {"l": given["l"][:10].clone()}, "sm_90a")
    many = run(TABLE.build(spec, SMALL, GPU("sm_90a")), spec, given, "sm_90a")
    assert torch.equal(few[0], many[0][..., :5, :])
    assert few[1] is not None
    assert many[1] is not None
    assert torch.equal(few[1], many[1][..., :5])


@pytest.mark.parametrize("order", ["rising", "falling"])
def test_scores_that_rise_or_fall_from_block_to_block(order: str):
    """Blocks come from the last to the first: where scores rise on that way, what was summed before shrinks
    each time; else never."""
    spec = attention(64, 512, 64, F16, lse=True)
    for step in (0.5, 3.0, 40.0):
        given = arguments(spec)
        block = torch.arange(512) // 64
        matrix(spec, given, "q")[..., 0] = 8.0
        matrix(spec, given, "k")[..., 0] = step * (block if order == "falling" else 7 - block)
        near(spec, given, run(TABLE.build(spec, SMALL, GPU("sm_90a")), spec, given, "sm_90a"))


# **** layouts ****

@pytest.mark.parametrize("order", ["bhr", "brh"])
@pytest.mark.parametrize("gap", [0, 8])
def test_layouts(order: str, gap: int):
    """Heads in either order, shared by a group."""
    close(attention(40, 130, 40, batch=2, heads=2, group=3, order=order, gap=gap, lse=True))


def test_offsets_and_heads_that_are_the_same():
    spec = attention(40, 130, 64, heads=3, batch=2)
    offsets = {"q": 8, "k": 16, "v": 24, "out": 8}
    close(replace(spec, **{name: replace(getattr(spec, name), offset=at) for name, at in offsets.items()}))
    once = {name: replace(getattr(spec, name), batch=(0, getattr(spec, name).batch[1], 0)) for name in "qkv"}
    close(replace(spec, **once))


# **** schedules ****

@pytest.mark.parametrize("pingpong", [False, True], ids=["cooperative", "ping-pong"])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_rings(stages: int, pingpong: bool):
    """At least `stages` + 2 blocks, fewer blocks than stages, and one."""
    schedule = W.block(128, 16).stages(stages)
    if pingpong: schedule = schedule.pingpong()
    for s_kv in (16 * (stages + 2), 16 * stages * 3 - 5, 16):
        close(attention(100, s_kv, 64), schedule)


@pytest.mark.parametrize("schedule", [
    W.block(64, 128).warps(8), W.block(128, 176), W.block(192, 128).warps(16), W.block(192, 16).warps(16),
    W.block(192, 80).warps(16).pingpong(), W.block(128, 240), W.block(64, 256).warps(8)], ids=str)
def test_blocks_and_warps(schedule: FlashWgmma):
    for d, d_v in ((48, 32), (16, 8), (64, 64)):
        close(attention(300, 700, d, d_v=d_v, band=CAUSAL, start=400, lse=True), schedule)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", [SMALL, *TURNS], ids=str)
def test_interleavings(schedule: FlashWgmma, seed: int):
    """Warps run in another order for every seed; six blocks of two stages."""
    close(attention(192, 384, 64, F16, heads=2, band=Band(-300, 0), start=192), schedule, seed=seed)


@pytest.mark.parametrize("schedule", TURNS, ids=str)
def test_turns_where_ctas_have_one_block_or_none(schedule: FlashWgmma):
    close(attention(400, 64, 64, band=Band(-30, -10), start=60, lse=True), schedule)


def test_memory_is_touched_after_the_kernel_before():
    """And the next kernel may begin when the last copies are on their way."""
    made = TABLE.build(attention(64, 128, 64, out=F32), SMALL, GPU("sm_90a"))
    waits = [found.start() for found in re.finditer(r"griddepcontrol\.wait", made.ptx)]
    copies = [found.start() for found in re.finditer(r"cp\.async\.bulk\.tensor", made.ptx)]
    done = made.ptx.index("griddepcontrol.launch_dependents")
    assert made.pdl
    assert len(waits) == 2
    assert waits[0] < copies[0] < copies[-1] < done < waits[1] < made.ptx.index("st.global")
