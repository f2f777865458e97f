"""Schedules of attention, by architecture, the better known ones before the others.

Protocol: `default(spec, arch)` is the first that is legal.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.fma import legality as legal_flash_fma
from tinygrad_nv.tile.attention.mma import legality as legal_flash_mma
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.attention.wgmma import legality as legal_flash_wgmma
from tinygrad_nv.tile.schedule import Schedule

Tile = TypeVar("Tile")

# of heads up to so many elements: rows, columns, warps, stages
MMA = {64: ((128, 64, 4, 2), (64, 64, 4, 2)),
       128: ((128, 64, 8, 2), (64, 64, 4, 2)),
       192: ((64, 64, 4, 2),),
       256: ((64, 64, 4, 2), (64, 32, 4, 2))}
FEW = ((64, 32, 4, 2), (32, 32, 2, 2), (16, 32, 1, 2))

# rows, columns: 64 rows for each consumer. FlashAttention-3's tiles as far as registers go; those after the
# first are for scores that are evaluated. More than 128 columns are for what has no mask, where no block is
# half empty
WGMMA = {64: ((192, 128), (192, 80), (128, 128), (128, 112)),
         96: ((128, 128), (128, 112)),
         128: ((128, 176), (128, 128), (128, 112)),
         192: ((128, 112), (128, 96), (128, 64)),
         256: ((128, 80), (128, 48))}
FEW_WGMMA = ((64, 128), (64, 112), (64, 80), (64, 48))
# of 8 bits, where blocks of 128 keys often have a scale
WGMMA8 = {64: ((128, 192), (128, 128), (128, 64)),
          192: ((128, 128), (128, 64)),
          256: ((128, 64),)}
FEW_WGMMA8 = ((64, 128), (64, 64), (64, 32))
# float32. Rows, columns, warps along rows and along columns: 32 rows of a warp as far as registers go
FMA = {64: ((128, 32, 4, 1),),
       96: ((128, 32, 4, 1),),
       128: ((128, 16, 4, 1), (64, 16, 2, 1)),
       256: ((64, 32, 4, 1), (64, 16, 4, 1))}
FEW_FMA = ((64, 64, 2, 2), (32, 64, 1, 4), (32, 32, 2, 2), (32, 16, 2, 1), (16, 64, 1, 4), (16, 32, 1, 4),
           (16, 16, 1, 2))
PROBLEMS = {"flash_mma": legal_flash_mma.problems, "flash_wgmma": legal_flash_wgmma.problems,
            "flash_fma": legal_flash_fma.problems}


def starts(spec: AttentionSpec, arch: str) -> Iterator[Schedule]:
    """Those to choose from, in the order of preference: no more rows than there are, in blocks of 16 (64)."""
    d = max(spec.d, spec.d_v)
    if spec.q.dtype == dtypes.float32:
        for m, n, along_m, along_n in (*_upto(FMA, d), *FEW_FMA):
            if m < 2 * spec.s_q or m == 16:
                yield Schedule(template="flash_fma").block(m, n).warps(along_m, along_n).stages(2)
        return
    if arch == "sm_90a":
        tiles, few = (WGMMA8, FEW_WGMMA8) if spec.scales is not None else (WGMMA, FEW_WGMMA)
        for m, n in (*_upto(tiles, d), *few):
            if m >= 64 + spec.s_q or (n > 128 and not spec.band.full): continue
            schedule = Schedule().using("flash_wgmma").block(m, n).warps(m // 16 + 4)
            yield schedule.pingpong() if m > 64 else schedule
    for m, n, warps, stages in (*_upto(MMA, d), *FEW):
        if m < 2 * spec.s_q or m == 16:
            yield Schedule(template="flash_mma").block(m, n).warps(warps).stages(stages)


def _upto(table: dict[int, tuple[Tile, ...]], d: int) -> tuple[Tile, ...]:
    """The entry of the narrowest heads that have `d` elements."""
    return next(tiles for most, tiles in table.items() if d <= most)


def default(spec: AttentionSpec, arch: str) -> Schedule | None:
    """The schedule for an attention; None where no template has it."""
    return next((s for s in starts(spec, arch) if not PROBLEMS[s.template](s, spec, arch)), None)
