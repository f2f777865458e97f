"""Schedules of attention, by template, the better known ones before the others."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.attention.schedules import FlashFma, FlashMma, FlashWgmma
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.template import GPU

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
         128: ((128, 128), (128, 176), (128, 112)),
         192: ((128, 112), (128, 96), (128, 64)),
         256: ((128, 64), (128, 80), (128, 48))}
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


def fma(spec: AttentionSpec, gpu: GPU) -> Iterator[FlashFma]:
    """Yields the schedules of float32: no more rows than there are, in blocks of 16."""
    for m, n, along_m, along_n in (*_upto(FMA, _widest(spec)), *FEW_FMA) if _exact(spec) else ():
        if m < 2 * spec.s_q or m == 16: yield FlashFma().block(m, n).warps(along_m, along_n)


def wgmma(spec: AttentionSpec, gpu: GPU) -> Iterator[FlashWgmma]:
    """Yields the schedules of sm_90a: no more rows than there are, in blocks of 64."""
    if _exact(spec) or gpu.arch != "sm_90a": return
    tiles, few = (WGMMA8, FEW_WGMMA8) if spec.scales is not None else (WGMMA, FEW_WGMMA)
    # those of which more than a tenth of the rows are none come after the others
    ordered = sorted(_upto(tiles, _widest(spec)), key=lambda tile: -spec.s_q % tile[0] > spec.s_q // 10)
    for m, n in (*ordered, *few):
        if m >= 64 + spec.s_q or (n > 128 and not spec.band.full): continue
        schedule = FlashWgmma().block(m, n).warps(m // 16 + 4)
        yield schedule.pingpong() if m > 64 and not _one_scale(spec) else schedule


def mma(spec: AttentionSpec, gpu: GPU) -> Iterator[FlashMma]:
    """Yields the schedules of 16-bit operands: no more rows than there are, in blocks of 16."""
    for m, n, warps, stages in () if _exact(spec) else (*_upto(MMA, _widest(spec)), *FEW):
        if m < 2 * spec.s_q or m == 16: yield FlashMma().block(m, n).warps(warps).stages(stages)


def _one_scale(spec: AttentionSpec) -> bool:
    """Tells whether operands of 8 bits have a scale for each head: softmax takes longer than the matmuls that
    it would lie under in ping-pong. Scales of blocks add float32 instructions, which ping-pong spreads."""
    return spec.scales is not None and not any(each.block for each in spec.scales)


def _exact(spec: AttentionSpec) -> bool: return spec.q.dtype == dtypes.float32


def _widest(spec: AttentionSpec) -> int: return max(spec.d, spec.d_v)


def _upto(table: dict[int, tuple[Tile, ...]], d: int) -> tuple[Tile, ...]:
    """The entry of the narrowest heads that have `d` elements."""
    return next(tiles for most, tiles in table.items() if d <= most)
