"""Schedules of attention's backward pass, by template, the better known ones before the others."""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.schedules import BackwardMma, BackwardWgmma
from tinygrad_nv.tile.template import GPU

# of heads up to so many elements: rows, keys, warps along keys, warps that share keys; two stages
MMA = {64: ((64, 128, 8, 1), (64, 64, 4, 1), (32, 64, 4, 1)),
       96: ((64, 128, 4, 2), (64, 64, 4, 1), (32, 64, 4, 1)),
       128: ((64, 128, 4, 2), (64, 64, 4, 2), (32, 64, 4, 1)),
       192: ((64, 64, 4, 2), (32, 64, 4, 2)),
       256: ((32, 64, 4, 2),)}
FEW = ((64, 64, 4, 1), (32, 32, 2, 1), (32, 32, 2, 2))
# of heads up to so many elements: rows, keys, warps, stages; the last for few keys, and for scores that take
# many registers
WGMMA = {64: ((128, 128, 12, 2), (64, 128, 12, 2), (64, 64, 8, 2)),
         128: ((64, 128, 12, 3), (64, 128, 12, 2), (64, 64, 12, 2), (64, 64, 8, 2)), 256: ((64, 64, 12, 2),)}


def wgmma(spec: BackwardSpec, gpu: GPU) -> Iterator[BackwardWgmma]:
    """Yields the schedules of sm_90a: no more keys than there are, in blocks of 64."""
    tiles = next((tiles for most, tiles in WGMMA.items() if _widest(spec) <= most), ())
    for m, n, warps, stages in tiles if gpu.arch == "sm_90a" else ():
        if n < 64 + spec.forward.s_kv: yield BackwardWgmma().block(m, n).warps(warps).stages(stages)


def mma(spec: BackwardSpec, gpu: GPU) -> Iterator[BackwardMma]:
    """Yields the schedules of mma.sync: no more keys than there are, in blocks of 32."""
    tiles = next(tiles for most, tiles in MMA.items() if _widest(spec) <= most)
    for m, n, warps, sharing in (*tiles, *FEW):
        if n < 2 * spec.forward.s_kv or n == 32: yield BackwardMma().block(m, n).warps(warps, sharing)


def _widest(spec: BackwardSpec) -> int: return max(spec.forward.d, spec.forward.d_v)
