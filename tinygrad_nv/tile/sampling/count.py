"""Counts of chosen tokens (spec.py), in place. For sm_80 and later.

    each thread has a row:
        wait for the kernel before; the row's slot and token
        where both are in range, the number at theirs, one more
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.kernel import TileKernel
from tinygrad_nv.tile.sampling.spec import CountSpec
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.template import GPU

THREADS = 64


def count(spec: CountSpec, schedule: Schedule, gpu: GPU) -> TileKernel:
    """The kernel of counts. Parameters in this order: counts; slots of the rows; tokens."""
    kb = Kernel("count", arch=gpu.arch, threads=THREADS)
    counts, slots, tokens = (kb.pointer(name) for name in ("counts", "slots", "tokens"))
    row = kb.ctaid.x * THREADS + kb.tid.x
    if kb.hopper: kb.wait_for_previous_grid()
    with kb.if_(row < spec.rows):
        slot, token = (kb.ld("global", "u32", advance(kb, each, row, 4).at())[0] for each in (slots, tokens))
        if kb.hopper: kb.launch_dependents()
        with kb.if_((slot < spec.slots) & (token < spec.size)):
            at = advance(kb, advance(kb, counts, slot, 4 * spec.size), token, 4)
            kb.st("global", "f32", at.at(), kb.ld("global", "f32", at.at())[0] + 1.0)
    return TileKernel(kb.name, kb.ptx(), (-(-spec.rows // THREADS), 1, 1), THREADS, pdl=kb.hopper)
