"""Tiles worth trying first, by architecture, the better known ones before the others.

Protocol: `starts(spec, arch)` gives them, those of rings (`tiles`) with the deepest that fits.
`choose` starts from them, and where the cost model sees no difference (`TIE`) the earlier one is taken.
128×256 and 256×128 with two consumers, and 128×128 in turns, are what CUTLASS, DeepGEMM and FlashAttention's
products use on Hopper; 128×256 and 256×128 with eight warps, 128×128 with four, what CUTLASS uses on Ampere.
"""
from __future__ import annotations

import functools

from tinygrad_nv.tile.gemm.gemv.plan import MOST_ROWS, Plan, turned, turns
from tinygrad_nv.tile.gemm.spec import GemmSpec
from tinygrad_nv.tile.limits import SMEM_BYTES
from tinygrad_nv.tile.schedule import Schedule

TIE = 1.02                          # predictions as near as this are the same
MOST_STAGES = {"wgmma": 7, "mma": 6}
BARRIER_BYTES = 1024                # of the ring: barriers, and alignment

# rows, columns, warps, ping-pong, swapped; 128 bytes of K
WGMMA = (
    (128, 256, 12, False, False), (256, 128, 12, False, False), (128, 128, 12, True, False),
    (128, 192, 12, False, False), (128, 128, 12, False, False), (64, 256, 12, True, False),
    (128, 160, 12, False, False), (192, 128, 16, False, False), (64, 192, 12, True, False),
    (64, 128, 12, True, False), (128, 64, 12, False, False), (64, 128, 8, False, False),
    (64, 16, 8, False, True), (64, 8, 8, False, True), (64, 32, 8, False, True), (64, 64, 8, False, True),
    (64, 256, 8, False, False), (64, 64, 8, False, False), (128, 96, 12, False, False),
    (64, 32, 8, False, False), (64, 16, 8, False, False), (128, 16, 12, False, True),
    (128, 32, 12, False, True), (128, 64, 12, False, True))
# rows, columns, bytes of K, warps along rows and columns
MMA = (
    (128, 256, 64, 2, 4), (256, 128, 64, 4, 2), (128, 128, 64, 2, 2), (128, 128, 128, 2, 2),
    (128, 128, 64, 2, 4), (128, 64, 64, 2, 2), (64, 128, 64, 2, 2), (64, 64, 128, 2, 2), (64, 64, 64, 2, 2),
    (64, 256, 64, 2, 4), (256, 64, 64, 4, 2), (32, 128, 128, 1, 4), (32, 64, 128, 1, 2),
    (128, 32, 128, 4, 1), (64, 32, 128, 2, 1), (16, 128, 128, 1, 4), (16, 64, 128, 1, 4), (16, 64, 128, 1, 2),
    (32, 32, 128, 1, 2), (32, 32, 128, 1, 1), (64, 16, 128, 4, 1), (32, 16, 128, 2, 1), (16, 32, 128, 1, 2),
    (16, 16, 128, 1, 1), (16, 32, 64, 1, 1), (16, 16, 32, 1, 1))


def deepest(schedule: Schedule, arch: str, itemsize: int) -> Schedule:
    """With as many stages as fit in shared memory, at most `MOST_STAGES`."""
    fit = (SMEM_BYTES[arch] - BARRIER_BYTES) // schedule.stage_bytes(itemsize)
    return schedule.stages(max(2, min(MOST_STAGES[schedule.template], fit)))


def starts(spec: GemmSpec, arch: str) -> list[Schedule]:
    """Schedules to start from for a product, in the order of preference."""
    return [*few_rows(spec, arch), *tiles(arch, spec.a.dtype.itemsize)]


@functools.cache
def tiles(arch: str, itemsize: int) -> tuple[Schedule, ...]:
    """Those of wgmma and mma.sync."""
    made = []
    for m, n, warps, pingpong, swap in WGMMA if arch == "sm_90a" else ():
        schedule = Schedule().using("wgmma").block(m, n).k(128 // itemsize).warps(warps)
        if pingpong: schedule = schedule.pingpong()
        made.append(schedule.swapped() if swap else schedule)
    for m, n, k_bytes, warps_m, warps_n in MMA:
        made.append(Schedule().block(m, n).k(k_bytes // itemsize).warps(warps_m, warps_n))
    return tuple(deepest(schedule, arch, itemsize) for schedule in made)


def few_rows(spec: GemmSpec, arch: str) -> list[Schedule]:
    """gemv's schedules to start from: warps with some columns and steps each, beside each other or along K;
    split where the activations do not fit in half of the shared memory."""
    made = []
    base = Schedule().using("gemv").block(MOST_ROWS, 64)
    if turns(spec): base = base.swapped()
    elif spec.m > MOST_ROWS: return []
    plan = Plan.of(turned(spec, base), base)
    nbytes = plan.spec.m * spec.k * spec.a.dtype.itemsize
    base = base.split(-(-nbytes * 2 // SMEM_BYTES[arch]))
    for warps in (4, 8):
        for granules in (1, 2, 4, 8, 16, 32):
            for steps in (1, 2, 4):
                made.append(base.block(MOST_ROWS, granules * plan.granule).k(steps * plan.step).warps(warps))
    return made
