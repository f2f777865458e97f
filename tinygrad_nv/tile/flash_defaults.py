"""Schedules of attention, by architecture, the better known ones before the others.

Protocol: `default(spec, arch)` is the first that is legal.
"""
from __future__ import annotations

from collections.abc import Iterator

from tinygrad_nv.tile import legal_flash_mma
from tinygrad_nv.tile.attention import AttentionSpec
from tinygrad_nv.tile.schedule import Schedule

# of heads up to so many elements: rows, columns, warps, stages
MMA = {64: ((128, 64, 4, 2), (64, 64, 4, 2)),
       128: ((128, 64, 8, 2), (64, 64, 4, 2)),
       192: ((64, 64, 4, 2),),
       256: ((64, 64, 4, 2), (64, 32, 4, 2))}
FEW = ((64, 32, 4, 2), (32, 32, 2, 2), (16, 32, 1, 2))


def starts(spec: AttentionSpec, arch: str) -> Iterator[Schedule]:
    """Those to choose from, in the order of preference: no more rows than there are, in blocks of 16."""
    mine = next(rows for d, rows in MMA.items() if max(spec.d, spec.d_v) <= d)
    for m, n, warps, stages in (*mine, *FEW):
        if m < 2 * spec.s_q or m == 16:
            yield Schedule(template="flash_mma").block(m, n).warps(warps).stages(stages)


def default(spec: AttentionSpec, arch: str) -> Schedule | None:
    """The schedule for an attention; None where no template has it."""
    return next((s for s in starts(spec, arch) if not legal_flash_mma.problems(s, spec, arch)), None)
