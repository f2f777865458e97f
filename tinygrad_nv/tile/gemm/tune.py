"""Tuning of matmuls for tile/tune.py: which schedules are worth trying, and what one takes by counters.

Protocol: `counters(spec, schedule, arch)` runs a small matmul twice on the emulator, which differ in K alone,
and gives the two runs' counters; `work_from_trial` makes the cost model's `Work` of them: the difference is
what steps cost, the rest what a tile costs beside them. What is small: as many tiles as a cluster has, two
for each CTA in ping-pong, and sums of few steps and of `STEPS_MORE` more. Splits and stream-K change which
CTA does a step, not the step, and are left out. Operands are zeros; checks are off.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from tinygrad_nv.ptx.emulator.report import Site, Stats
from tinygrad_nv.tile.emulated import launch_all
from tinygrad_nv.tile.gemm.analytic import analytic, space
from tinygrad_nv.tile.gemm.cost import CostModel, cost_of
from tinygrad_nv.tile.gemm.schedules import GemmSchedule
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand
from tinygrad_nv.tile.gemm.work import (
    INSTRUCTION_BYTES,
    SCHEDULERS,
    SMEM_BYTES_PER_CYCLE,
    STORE_LATENCY,
    Work,
    epilogue_cycles,
)
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

RINGS = 2   # of schedules that differ in stages alone
STEPS, STEPS_MORE = 3, 4            # the first of kernels without a ring; beyond the first


def candidates(spec: GemmSpec, gpu: GPU, count: int) -> list[GemmSchedule]:
    """Returns the schedule that the cost model chooses, and so many others that it likes; of those that
    differ in stages alone, two."""
    model = CostModel(spec, gpu_model_for(gpu.arch, gpu.sm_count))
    favourite = analytic(spec, gpu.arch, model.gpu_model.sm_count)
    if favourite is None: return []
    ranked = sorted(space(spec, GPU(gpu.arch, model.gpu_model.sm_count)),
                    key=lambda s: model.predict(s).seconds)
    made, alike = [favourite], Counter([favourite.without_stages])
    for s in ranked:
        if len(made) > count: break
        if s == favourite or alike[s.without_stages] >= RINGS: continue
        alike[s.without_stages] += 1
        made.append(s)
    return made


def counter_cost(spec: GemmSpec, s: GemmSchedule, gpu: GPU, registers: int) -> float:
    """The cost model's seconds, of the emulator's counters and of registers as they are."""
    model = CostModel(spec, gpu_model_for(gpu.arch, gpu.sm_count))
    done = work_from_trial(counters(spec, s, gpu.arch), model, s)
    return model.predict_work(s, done, registers).seconds


@dataclass(frozen=True)
class Trial:
    """Two runs of `tiles` tiles each, with sums of so many steps."""
    short: Stats
    long: Stats
    steps: tuple[int, int]
    tiles: int


def counters(spec: GemmSpec, schedule: GemmSchedule, arch: str) -> Trial:
    """Returns the emulator's counts of a schedule's kernel."""
    s = schedule.without_splits
    first = (s.depth or STEPS) + 2
    steps, cluster = (first, first + STEPS_MORE), prod(s.cluster_shape)
    runs = []
    for count in steps:
        small = shrink(spec, s, count * s.block_k, s.turns)
        runs.append(emulate(TABLE.build(small, s, GPU(arch, cluster)), small, arch))
    return Trial(runs[0], runs[1], steps, s.turns * cluster)


def shrink(spec: GemmSpec, s: GemmSchedule, k: int, rounds: int) -> GemmSpec:
    """The same kind of product: one matrix of so much K, and as many rows and columns as a cluster's tiles
    have (`rounds` times), at most those it has. Strides are the same where sums fit between them."""
    tile, clusters = s.tile(spec), s.cluster_shape
    m, n = tile.rows, tile.columns
    if s.swap: m, n, clusters = n, m, clusters[::-1]
    m, n = min(spec.m, m * clusters[0]), min(spec.n, n * clusters[1])
    if m < spec.m: m = min(spec.m, m * rounds)
    else: n = min(spec.n, n * rounds)
    batch = (1,) * len(spec.batch)
    return replace(spec, m=m, n=n, k=k, batch=batch, a=_longer(spec.a, k), b=_longer(spec.b, k))


def _longer(operand: Operand, k: int) -> Operand:
    """An operand whose rows have room for so much K, with the alignment it had."""
    if operand.k != 1 or operand.mn >= k: return operand
    return replace(operand, mn=operand.mn + -(-(k - operand.mn) // 64) * 64)


def emulate(kernel: GemmKernel, spec: GemmSpec, arch: str) -> Stats:
    """Counters of one launch with operands of zeros."""
    (report,) = launch_all(kernel, spec, arch)
    return report.stats


def work_from_trial(trial: Trial, model: CostModel, s: GemmSchedule) -> Work:
    """The work of a CTA by the counters of a trial."""
    few, many = (_cycles(stats, model, s) for stats in (trial.short, trial.long))
    more = trial.tiles * (trial.steps[1] - trial.steps[0])
    tensor, shared, issue = ((b - a) / more for a, b in zip(few, many, strict=True))
    busy = max((a / trial.tiles - trial.steps[0] * step
                for a, step in zip(few[1:], (shared, issue), strict=True)))
    tile = s.tile(model.spec)
    ends = STORE_LATENCY + max(busy, epilogue_cycles(tile.rows * tile.columns, model.ending))
    return Work(tensor, shared, issue, ends, model.plan_work(s).ahead)


def _cycles(stats: Stats, model: CostModel, s: GemmSchedule) -> tuple[float, float, float]:
    """Cycles of a whole launch on one SM: tensor cores, shared memory, schedulers."""
    cost = cost_of(s)
    read = float(sum(map(_operand_bytes, stats.sites))) + cost.copy_bytes(stats, s)
    passes = sum(site.passes for site in stats.sites)
    return (stats.tensor_flops / 2 / cost.multiply_rate(model.spec, model.gpu_model),
            passes + read / SMEM_BYTES_PER_CYCLE, stats.warp_instructions / SCHEDULERS)


def _operand_bytes(site: Site) -> int:
    """Bytes that a wgmma reads from shared memory: both operands, for each warpgroup."""
    if not site.opcode.startswith("wgmma.mma_async"): return 0
    columns = next(int(word[4:].partition("k")[0]) for word in site.opcode.split(".") if word[:4] == "m64n")
    return site.warps // 4 * (64 + columns) * INSTRUCTION_BYTES
