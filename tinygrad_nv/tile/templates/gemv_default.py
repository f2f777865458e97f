"""The default schedule of a product with few rows.

Protocol: `default` compares a few dozen schedules by the bytes the busiest SM reads: weights, activations
once for each CTA, sums of splits, and constants for what a CTA does besides. It is a function of its
arguments alone.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator

from tinygrad_nv.tile.legality import SMEM_BYTES, problems
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.spec import GemmSpec
from tinygrad_nv.tile.templates.gemv_finish import clustered
from tinygrad_nv.tile.templates.gemv_plan import CHUNK, MOST_ROWS, Plan, turned, turns

IN_FLIGHT = 8  # chunks of 16 bytes that a lane waits for: 8 warps of them are 32 KiB, two CTAs 64 KiB an SM
CTA_BYTES = 8 << 10  # what an SM could read while a CTA starts and ends
SPLIT_BYTES = 32 << 10  # the same while CTAs meet: about 1.3 µs at 25 GB/s an SM; in a cluster half of it
# 3.35 TB/s × 0.7 µs / 132 SMs are 18 KiB in flight an SM; one CTA has them only while none starts or ends
LONELY = 1.15


@functools.lru_cache(1024)
def default(spec: GemmSpec, arch: str, sm_count: int = 132) -> Schedule | None:
    """The default schedule; None when both operands have more rows than 16."""
    first = Schedule(swap=turns(spec)).using("gemv").block(1, 1)
    few = turned(spec, first)
    if few.m > MOST_ROWS: return None
    legal = [s for s in _candidates(few, first) if not problems(s, spec, arch)]
    return min(legal, key=lambda s: _cost(Plan.of(few, s), arch, sm_count), default=None)


def _candidates(spec: GemmSpec, first: Schedule) -> Iterator[Schedule]:
    plan = Plan.of(spec, first.block(spec.m, 1))
    unit = plan.granule // plan.lanes_n if plan.along == "k" else plan.depth
    deep = max(IN_FLIGHT // (unit * spec.parts), 1)  # granules and steps of an iteration
    tall = 4 if plan.along == "k" and not plan.tensor else 1
    for granules in {min(tall, deep), max(min(tall, deep) // 2, 1)}:
        for steps in {max(deep // granules, 1), max(deep // granules // 2, 1)}:
            for warps_n in (8, 4, 2, 1):
                s = first.block(spec.m, plan.granule * granules * warps_n).k(plan.step * steps)
                iterations = -(-spec.k // s.block_k)
                for splits in (1, 2, 4, 8, 16, 32):
                    if splits == 1 or splits * 8 // warps_n <= iterations: yield s.split(splits)


def _cost(plan: Plan, arch: str, sm_count: int) -> float:
    """Bytes the busiest SM reads, with what else takes its time."""
    spec, s = plan.spec, plan.schedule
    ctas = plan.blocks_n * plan.splits * spec.matrices
    rounds = -(-plan.blocks_a_split // plan.warps_k)
    weights = s.block_n * spec.parts * rounds * plan.warps_k * s.block_k * plan.itemsize
    nbytes = weights + plan.x_bytes // 2 + CTA_BYTES  # activations come from L2, twice as fast
    if plan.splits > 1:
        meeting = SPLIT_BYTES // 2 if clustered(plan, arch) else SPLIT_BYTES
        nbytes += meeting + 2 * 4 * spec.parts * spec.m * s.block_n
    # lanes that load less than 16 bytes at a time have less in flight
    lonely = ctas < 1.9 * sm_count or 2 * plan.smem_bytes > SMEM_BYTES[arch]
    loads = plan.rows * plan.steps * plan.depth * spec.parts * plan.chunk / (IN_FLIGHT * CHUNK)
    return -(-ctas // sm_count) * nbytes * (LONELY if lonely else 1) * (1.1 if loads < 1 else 1)
