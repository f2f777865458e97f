"""Predictions of grids that draw work tiles of different lengths from a counter, beside tiles dealt here."""
from __future__ import annotations

import heapq

import numpy as np
import pytest

from tinygrad_nv.ptx.emulator import Emulator

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
