"""Schedules of attention's backward pass, by architecture, the better known ones before the others.

Protocol: `default(spec, arch)` is the first that is legal.
"""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.tile.attention.backward_mma import legality as legal_flash_backward_mma
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.backward_wgmma import legality as legal_flash_backward_wgmma
from tinygrad_nv.tile.schedule import Schedule

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
         128: ((64, 128, 12, 2), (64, 64, 12, 2), (64, 64, 8, 2)), 256: ((64, 64, 12, 2),)}
PROBLEMS = {"flash_backward_mma": legal_flash_backward_mma.problems,
            "flash_backward_wgmma": legal_flash_backward_wgmma.problems}


def starts(spec: BackwardSpec, arch: str) -> Iterator[Schedule]:
    """Those to choose from, in the order of preference: no more keys than there are, in blocks of 32 (64)."""
    one, d = spec.forward, max(spec.forward.d, spec.forward.d_v)
    if arch == "sm_90a":
        for m, n, warps, stages in next((tiles for most, tiles in WGMMA.items() if d <= most), ()):
            if n < 64 + one.s_kv:
                yield Schedule().using("flash_backward_wgmma").block(m, n).warps(warps).stages(stages)
    for m, n, warps, sharing in (*next(tiles for most, tiles in MMA.items() if d <= most), *FEW):
        if n < 2 * one.s_kv or n == 32:
            yield Schedule(template="flash_backward_mma").block(m, n).warps(warps, sharing).stages(2)


def default(spec: BackwardSpec, arch: str) -> Schedule | None:
    """The schedule for a backward pass; None where no template has it."""
    return next((s for s in starts(spec, arch) if not PROBLEMS[s.template](s, spec, arch)), None)
