"""Predictions of grids that draw work tiles from a counter, and of launches in a row: gaps, what PDL hides,
what the host submits."""
from __future__ import annotations

import heapq
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.ptx.timing.sequence import in_row, marks, seconds, seconds_of_each

CTAS, TILES = 132, 1100
FMAS = 32               # of a step of a tile
LATENCY = 4             # of an FFMA
# each CTA begins with the tile of its own number, and draws further ones
DRAWING = """.version 8.0
.target sm_90
.address_size 64
.visible .entry drawing(.param .u64 counter, .param .u64 out) {{
    .reg .pred %p; .reg .b32 %r<9>; .reg .b64 %rd<4>; .reg .f32 %f<2>;
    ld.param.u64 %rd1, [counter]; ld.param.u64 %rd2, [out];
    mov.f32 %f0, 0f3f800000;
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %nctaid.x;
TILE: setp.ge.u32 %p, %r1, {tiles};
    @%p bra DONE;
    rem.u32 %r3, %r1, {rows};
    {order}
    mad.lo.u32 %r3, %r3, {steps}, {steps};
STEP: {fmas}
    sub.u32 %r3, %r3, 1;
    setp.ne.u32 %p, %r3, 0;
    @%p bra STEP;
    atom.global.add.u32 %r1, [%rd1], 1;
    add.u32 %r1, %r1, %r2;
    bra TILE;
DONE: st.global.f32 [%rd2], %f0;
    ret;
}}
"""
ORDERS = {"short rows first": "", "long rows first": "sub.u32 %r3, {last}, %r3;",
          "equal": "mov.u32 %r3, {half};"}


# each CTA has one tile, as long as its place in the row says; a row is one of the grid
ONE = DRAWING.replace("drawing", "rows") \
    .replace("atom.global.add.u32 %r1, [%rd1], 1;", "mov.u32 %r1, {tiles};") \
    .replace("add.u32 %r1, %r1, %r2;", "")
ROWS = ONE.replace("rem.u32 %r3, %r1, {rows};", "mov.u32 %r3, %r1;")


def dealt(lengths: np.ndarray) -> float:
    """When the last tile ends."""
    ends = [0.0] * CTAS
    for length in lengths: heapq.heappush(ends, heapq.heappop(ends) + float(length))
    return max(ends)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [4, 37, 64])
@pytest.mark.parametrize("order", ORDERS)
def test_the_last_tiles_end_as_late_as_their_lengths_say(order: str, rows: int):
    steps, tiles = 600 // rows, -(-TILES // rows) * rows
    words = ORDERS[order].format(last=rows - 1, half=rows // 2)
    emu = Emulator()
    counter, out = emu.alloc(np.zeros(1, np.uint32)), emu.alloc(np.zeros(1, np.float32))
    found = emu.launch(DRAWING.format(tiles=tiles, rows=rows, steps=steps, order=words,
                                      fmas=FMAS * "fma.rn.f32 %f0, %f0, %f0, %f0; "), CTAS, 1,
                       [counter, out], timing="h100").timing
    at = np.arange(tiles) % rows
    length = {"short rows first": at, "long rows first": rows - 1 - at, "equal": 0 * at + rows // 2}[order]
    expected = dealt((length + 1) * steps * FMAS * LATENCY)
    assert found.cycles == pytest.approx(expected, rel=0.05)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [8, 37, 64])
@pytest.mark.parametrize("order", ["short rows first", "long rows first"])
def test_grids_whose_rows_differ_take_as_long_as_all_ctas(order: str, rows: int):
    """With so much shared memory that an SM has one CTA at a time."""
    steps, planes = 600 // rows, -(-TILES // rows)
    text = ROWS.format(tiles=rows, rows=rows, steps=steps, order=ORDERS[order].format(last=rows - 1),
                       fmas=FMAS * "fma.rn.f32 %f0, %f0, %f0, %f0; ")
    emu = Emulator()
    buffers = emu.alloc(np.zeros(1, np.uint32)), emu.alloc(np.zeros(1, np.float32))
    found = emu.launch(text, (rows, planes), 1, buffers, dynamic_smem=200_000, timing="h100").timing
    at = np.arange(rows * planes) % rows
    length = at if order == "short rows first" else rows - 1 - at
    assert found.cycles == pytest.approx(dealt((length + 1) * steps * FMAS * LATENCY), rel=0.05)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads", [4, 16])
def test_rows_that_no_extent_tells_are_found(heads: int):
    """Those of some heads in turn, the longest first, in a grid of one row."""
    length, steps = 16, 30
    row = length * heads
    tiles = 8 * row
    order = f"shr.u32 %r3, %r3, {heads.bit_length() - 1}; sub.u32 %r3, {length - 1}, %r3;"
    text = ONE.format(tiles=tiles, rows=row, steps=steps, order=order,
                      fmas=FMAS * "fma.rn.f32 %f0, %f0, %f0, %f0; ")
    emu = Emulator()
    buffers = emu.alloc(np.zeros(1, np.uint32)), emu.alloc(np.zeros(1, np.float32))
    found = emu.launch(text, tiles, 1, buffers, dynamic_smem=200_000, timing="h100").timing
    lengths = (length - np.arange(tiles) % row // heads) * steps * FMAS * LATENCY
    assert found.cycles == pytest.approx(dealt(lengths), rel=0.05)


def test_what_counts_other_things_is_no_tile_scheduler():
    """A counter that begins just below 2³², and goes round."""
    emu = Emulator()
    counter, out = emu.alloc(np.full(1, 2**32 - CTAS, np.uint32)), emu.alloc(np.zeros(1, np.float32))
    text = DRAWING.format(tiles=TILES, rows=4, steps=10, order="", fmas="fma.rn.f32 %f0, %f0, %f0, %f0;")
    found = emu.launch(text, CTAS, 1, [counter, out], timing="h100").timing
    assert 0 < found.seconds < 1e-3


GPU = figures("h200")
ROUND = 64      # multiply-adds of a round, each of which follows the one before: too many for ptxas to unroll


@cache
def timing(before: int = 0, after: int = 0, wait: bool = True, trigger: str = "end", threads: int = 128,
           ctas: int = 132, times: int = 25) -> Timing:
    """A kernel with `before` rounds of fused multiply-adds ahead of its wait, `times` behind it, and `after`
    more behind launch_dependents, unless that stands at the beginning."""
    kb = Kernel("k", threads=threads)
    out, value = kb.pointer("out"), kb.reg("f32", 1.0)
    def work(name: str) -> None:
        with kb.loop(0, kb.param(name, "u32")):
            for _ in range(ROUND): kb.emit("fma.rn.f32", value, value, value, value)
    if trigger == "begin": kb.launch_dependents()
    work("before")
    if wait: kb.wait_for_previous_grid()
    work("times")
    if trigger == "end": kb.launch_dependents()
    work("after")
    kb.st("global", "f32", (out + (kb.ctaid.x * threads + kb.tid.x).to("u64") * 4).at(), value)
    emu = Emulator("sm_90a", check=False)
    buffer = emu.alloc(np.zeros(ctas * threads, np.float32))
    found = emu.launch(kb.ptx(), ctas, threads, [buffer, before, times, after], timing="h200").timing
    assert found is not None
    return found


def run_s(one: Timing) -> float: return one.cycles / one.clock_hz


def test_without_pdl_kernels_follow_each_other_with_a_gap():
    row = in_row([timing()] * 3, GPU)
    assert row[2].begin_s - row[1].end_s == pytest.approx(GPU.gap_s)
    assert seconds(row, GPU) == pytest.approx(GPU.launch_s + 3 * run_s(timing()) + 2 * GPU.gap_s)
    assert [each.hidden_s for each in row] == [0, 0, 0]
    without = [timing(wait=False)] * 3
    assert seconds(in_row(without, GPU, pdl=True), GPU) == pytest.approx(seconds(in_row(without, GPU), GPU))


def test_a_stream_is_not_faster_than_its_host():
    assert run_s(timing(times=1)) + GPU.gap_s < GPU.submit_s
    row = in_row([timing(times=1)] * 50, GPU, graph=False)
    assert row[49].begin_s - row[48].begin_s == pytest.approx(GPU.submit_s)
    assert seconds_of_each(timing(times=1), GPU) == GPU.submit_s
    long = timing(times=250)
    assert in_row([long] * 3, GPU, graph=False) == in_row([long] * 3, GPU)
    assert seconds_of_each(long, GPU) == pytest.approx(run_s(long) + GPU.gap_s)
    assert seconds_of_each(timing(times=1), GPU, graph=True) < GPU.submit_s


def test_marks_are_where_the_instructions_are():
    found = marks(timing(before=8, after=16), GPU)
    assert found.until_wait_s == pytest.approx(8 * ROUND * 4 / GPU.clock_hz, rel=0.1)
    assert found.after_trigger_s == pytest.approx(16 * ROUND * 4 / GPU.clock_hz, rel=0.1)
    assert marks(timing(wait=False), GPU).until_wait_s is None


def test_pdl_hides_what_is_ahead_of_the_wait():
    plain, early = (in_row([timing(before=8, trigger="begin")] * 4, GPU, pdl=pdl) for pdl in (False, True))
    mine = marks(timing(before=8, trigger="begin"), GPU)
    assert mine.until_wait_s is not None
    saved = mine.until_wait_s + GPU.gap_s - GPU.pdl_gap_s
    assert plain[3].end_s - early[3].end_s == pytest.approx(3 * saved)
    assert early[3].hidden_s == pytest.approx(mine.until_wait_s)


def test_a_late_trigger_hides_what_is_left_of_the_time():
    """Nothing follows the trigger: the prologue comes behind the gap."""
    late = in_row([timing(before=8, trigger="end")] * 2, GPU, pdl=True)
    assert late[1].begin_s - late[0].end_s == pytest.approx(GPU.pdl_gap_s, rel=0.1)
    middle = in_row([timing(before=8, after=16)] * 2, GPU, pdl=True)
    early = in_row([timing(before=8, trigger="begin")] * 2, GPU, pdl=True)
    assert middle[0].end_s - middle[1].begin_s == pytest.approx(
        marks(timing(before=8, after=16), GPU).after_trigger_s - GPU.pdl_gap_s)
    assert early[1].hidden_s > middle[1].hidden_s > late[1].hidden_s == 0


def test_without_room_nothing_begins_beside_another():
    """1024 threads beside 2048."""
    full = timing(before=3, trigger="begin", threads=1024, ctas=264)
    assert in_row([full] * 2, GPU, pdl=True)[1].begin_s >= run_s(full)


def test_room_is_beside_or_on_other_sms():
    big, small = (replace(timing(ctas=60).shape, shared_bytes=nbytes) for nbytes in (200_000, 1000))
    assert big.fits_beside(big, GPU)        # 60 + 60 of 132 SMs
    many = replace(big, grid=(100, 1, 1))
    assert not big.fits_beside(many, GPU)
    assert small.fits_beside(many, GPU)     # on the same ones
