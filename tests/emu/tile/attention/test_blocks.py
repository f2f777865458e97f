"""Blocks of tiles in registers: what a kernel computes of its own tile is what numbers say."""
from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tile.band_case import NAMES, Tile, tiles, told
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.tile.attention.score import Extents, registers

EXTENTS = ("s_q", "s_kv", "start")


@settings(max_examples=40, deadline=None)
@given(tiles(), st.sets(st.sampled_from(EXTENTS)))
def test_registers(tile: Tile, symbolic: set[str]):
    """A CTA for each tile of a side, with extents that are known or a launch's."""
    kb = Kernel("blocks", arch="sm_80", threads=32)
    out = kb.pointer("out")
    s_q, s_kv, start = (kb.param(name, "u32") if name in symbolic else getattr(tile, name)
                        for name in EXTENTS)
    first = (kb.ctaid.x * tile.count).to("s32")
    made = told(tile.range_of(registers(kb), first, *Extents(s_q, s_kv, start).s32))
    at = out + kb.ctaid.x.to("u64") * (4 * len(NAMES))
    for i, each in enumerate(made): kb.emit("st.global.s32", at.at(4 * i), kb.reg("s32", each))
    count = -(-(tile.s_kv if tile.of_keys else tile.s_q) // tile.count)
    emu = Emulator("sm_80")
    results = emu.alloc(np.full((count, len(NAMES)), -1, np.int32))
    numbers = [np.uint32(getattr(tile, name)) for name in EXTENTS if name in symbolic]
    report = emu.launch(kb.ptx(), (count, 1, 1), 32, [results, *numbers])
    assert not report.findings
    for number, row in enumerate(results.numpy().reshape(count, len(NAMES))):
        assert row.tolist() == [int(each) for each in told(tile.range_of(first=number * tile.count))]
