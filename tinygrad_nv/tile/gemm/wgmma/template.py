"""Schedules of `gemm_wgmma`: `problems`, what it asks of one; `candidates`, tiles worth trying first: 128×256
and 256×128 with two consumers, and 128×128 in turns, are what CUTLASS, DeepGEMM and FlashAttention's
matmuls use on Hopper; `WgmmaCost`."""
from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from tinygrad.dtype import dtypes

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.cost import Cost
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.gemm.spec import INT8S, GemmSpec, Operand
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.gemm.work import (
    INSTRUCTION_BYTES,
    SCHEDULERS,
    SMEM_BYTES_PER_CYCLE,
    Ending,
    Work,
    ending_cycles,
)
from tinygrad_nv.tile.gpu import GPUModel
from tinygrad_nv.tile.layout import (
    K_BYTES,
    MOST_BOX,
    SPANS,
    OperandTile,
    choose_major,
    map_dimensions,
    unreachable,
)
from tinygrad_nv.tile.template import GPU

if TYPE_CHECKING:
    from tinygrad_nv.ptx.emulator.report import Stats

BYTE_COLUMNS = (8, 16, 24, *range(32, 257, 16))  # of wgmma.s32
CLUSTERS = (1, 2, 4)


def problems(spec: GemmSpec, schedule: Wgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    if schedule.swap and (spec.parts > 1 or spec.symbolic):
        return [f"swapped: {'several parts' if spec.parts > 1 else 'rows known at launch'} cannot be columns"]
    computed = spec.swap_operands() if schedule.swap else spec
    out = _operands(computed)
    if found := warps(schedule) or extents(schedule, computed): return out + found
    plan = WgmmaPlan.of(spec, schedule)
    return [*out, *swizzle_problems("block_m", plan.a, schedule),
            *swizzle_problems("block_n", plan.b, schedule),
            *room(plan), *cluster(plan), *split_problems(plan)]


def _operands(spec: GemmSpec) -> list[str]:
    """Operands that wgmma and TMA cannot have."""
    out = []
    if spec.a.dtype == dtypes.float32 and not spec.tf32:
        out.append("float32 operands: wgmma has them cut to 10 bits of mantissa only, which tf32 allows")
    sides: tuple[tuple[str, Operand, int], ...] = (("a", spec.a, spec.m), ("b", spec.b, spec.n))
    for name, operand, extent in sides:
        major, why = choose_major(operand, extent, spec.k)
        found = [] if major else [why]
        found += unreachable(operand, spec.batch, 2 + len(map_dimensions(operand, spec.batch)))
        out += [f"{name}: {each}" for each in found]
    if spec.parts > 1 and spec.part * spec.b.dtype.itemsize % 16:
        nbytes = spec.part * spec.b.dtype.itemsize
        out.append(f"b: parts {nbytes} B apart are not a multiple of 16 B: no TMA")
    return out


def warps(s: Wgmma) -> list[str]:
    """Warpgroups: one that loads, one to three that multiply."""
    if s.warps_m not in (8, 12, 16):
        return [f"{s.warps_m} warps: a producer and 1 to 3 consumers of 4 warps each are 8, 12 or 16, along "
                "the rows"]
    if s.mode == "pingpong" and s.consumers < 2:
        return [f"ping-pong with {s.consumers} consumer: {s.warps_m} warps - 4 of the producer, at least 8"]
    return []


def extents(s: Wgmma, spec: GemmSpec, most_rows: int = MOST_BOX) -> list[str]:
    """Returns the problems of the tile, and of the ring."""
    out, size = [], spec.a.dtype.itemsize
    share = 64 if s.mode == "pingpong" else 64 * s.consumers
    if s.block_m % share or s.block_m > most_rows:
        many = "64 rows" if s.mode == "pingpong" else f"{s.consumers} consumers × 64 = {share} rows"
        out.append(f"block_m={s.block_m} is not a multiple of {many} up to {most_rows}")
    if s.block_n % 8 or s.block_n > 256:
        out.append(f"block_n={s.block_n} is not a multiple of 8 up to 256: no such wgmma")
    elif spec.a.dtype in INT8S and s.block_n not in BYTE_COLUMNS:
        out.append(f"block_n={s.block_n} for bytes is not 8, 16, 24 or a multiple of 16 up to 256")
    if s.block_n % (8 * spec.parts):
        out.append(f"block_n={s.block_n} of {spec.parts} parts is not a multiple of 8 × {spec.parts}")
    if s.block_k * size % K_BYTES or s.block_k > MOST_BOX:
        out.append(f"block_k={s.block_k} × {size} B = {s.block_k * size} B is not a multiple of {K_BYTES} B, "
                   f"or above {MOST_BOX} elements")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    if s.swizzle_width not in ("", "32B", "64B", "128B"):
        out.append(f"swizzle {s.swizzle_width!r} is not {', '.join(f'{span}B' for span in SPANS)}")
    return out


def swizzle_problems(name: str, tile: OperandTile, s: Wgmma) -> list[str]:
    """The rows of an operand's tile against its swizzle."""
    what, extent = ("block_k", tile.k) if tile.major == "K" else (name, tile.mn // tile.parts)
    row = extent * tile.size
    words = f"{what}: a row of {extent} × {tile.size} B = {row} B"
    if row < tile.span and s.swizzle_width:
        return [f"swizzle {s.swizzle_width} is wider than the box's row, {words}"]
    # a column of an MN-major tile may reach beyond it, but no part may end within one
    if row % tile.span and (tile.major == "K" or tile.parts > 1 or row % 32 == 0):
        return [f"swizzle {tile.span}B: {words} is not made of rows of {tile.span} B"]
    return []


def room(plan: WgmmaPlan) -> list[str]:
    """Shared memory and registers."""
    out, s = [], plan.schedule
    staging, most = plan.store.smem_bytes, limits.SMEM_BYTES["sm_90a"]
    needed = s.depth * plan.stage_bytes + -(-staging // 1024) * 1024 + plan.barrier_bytes
    if needed > most:
        stage = f"({plan.a.nbytes} B of A + {plan.b.nbytes} B of B)"
        staged = f" + {staging} B to store from" if staging else ""
        out.append(f"{s.depth} stages × {stage}{staged} + {plan.barrier_bytes} B of barriers = {needed} B of "
                   f"shared memory, sm_90a has {most}")
    if plan.sums > plan.most_sums:
        twice = f" + {plan.second_sums} (fp8 is summed twice)" if plan.needs_promotion else ""
        beside = " and those of other CTAs" if s.splits > 1 or s.stream else ""
        out.append(f"{plan.rows} × {s.block_n} / 128 threads{twice} = {plan.sums} sums a thread, at most "
                   f"{plan.most_sums} with {plan.consumers} consumers{beside}")
    return out


def cluster(plan: WgmmaPlan) -> list[str]:
    """Each CTA of a cluster's row or column brings an equal part of what they share, of whole eights of
    rows."""
    s, out = plan.schedule, []
    if s.cluster_m not in CLUSTERS or s.cluster_n not in CLUSTERS or plan.cluster > 8:
        return [f"cluster {s.cluster_m}x{s.cluster_n}: 1, 2 or 4 along each side, at most 8 in all"]
    b_rows = plan.b_rows * s.cluster_m
    for name, rows, count in (("A", plan.a.rows, s.cluster_n), ("B", b_rows, s.cluster_m)):
        if rows % (8 * count):
            out.append(f"cluster {s.cluster_m}x{s.cluster_n}: {rows} rows of {name} / {count} CTAs are no "
                       "multiple of 8")
    return out


def split_problems(plan: WgmmaPlan) -> list[str]:
    """Splits and stream-K: CTAs that have parts of one tile's K."""
    s, out = plan.schedule, []
    if s.splits == 1 and not s.stream: return []
    what = f"{s.splits} splits" if s.splits > 1 else "stream-K"
    if s.splits > 1 and s.stream: out.append(f"{s.splits} splits and stream-K: one of them")
    if s.mode == "pingpong": out.append(f"{what} in ping-pong: consumers share the tile's rows instead")
    if s.splits > 1 and s.cluster_m * s.cluster_n > 1:
        out.append(f"{what} with a cluster of {s.cluster_m}x{s.cluster_n}: 1x1")
    if s.splits == 1: return out
    if s.splits not in (2, 4, 8): out.append(f"{s.splits} splits: a cluster of 2, 4 or 8 CTAs shares a tile")
    if s.splits > plan.iterations:
        out.append(f"{s.splits} splits of K={plan.spec.k} / block_k={s.block_k} = {plan.iterations} stages")
    if plan.tile_bytes > (ring := s.depth * plan.stage_bytes):
        out.append(f"{s.splits} splits: {s.block_m} × {s.block_n} sums × 4 B = {plan.tile_bytes} B do not "
                   f"fit in the ring's {s.depth} × {plan.stage_bytes} = {ring} B, where they meet")
    return out


# rows, columns, warps, ping-pong, swapped; 128 bytes of K
# those for few rows first: of tiles that wait for HBM alike, on an H100 these took 2 to 8 % less
TILES = (
    (64, 8, 8, False, True), (64, 16, 8, False, True), (64, 32, 8, False, True), (128, 8, 12, False, True),
    (128, 16, 12, False, True),
    (128, 256, 12, False, False), (256, 128, 12, False, False), (128, 128, 12, True, False),
    (128, 192, 12, False, False), (128, 128, 12, False, False), (64, 256, 12, True, False),
    (128, 160, 12, False, False), (192, 128, 16, False, False), (64, 192, 12, True, False),
    (64, 128, 12, True, False), (128, 64, 12, False, False), (64, 128, 8, False, False),
    (64, 64, 8, False, True), (64, 256, 8, False, False), (64, 64, 8, False, False),
    (128, 96, 12, False, False), (64, 32, 8, False, False), (64, 16, 8, False, False),
    (128, 32, 12, False, True), (128, 64, 12, False, True))


def candidates(spec: GemmSpec, gpu: GPU) -> tuple[Wgmma, ...]:
    """The tiles, with the deepest ring that fits, the better known ones before the others; none where there
    is no wgmma."""
    return _candidates(gpu.arch, spec.a.dtype.itemsize) if gpu.arch == "sm_90a" else ()


@functools.cache
def _candidates(arch: str, itemsize: int) -> tuple[Wgmma, ...]:
    made = []
    for m, n, warps, pingpong, swap in TILES:
        schedule = Wgmma().block(m, n).k(128 // itemsize).warps(warps)
        if pingpong: schedule = schedule.pingpong()
        made.append(schedule.swap_operands() if swap else schedule)
    return tuple(schedule.deepest(arch, itemsize) for schedule in made)


STORE_OPERATIONS = 4.0
WARP_STEP = 45                      # instructions of a consumer's warp for a stage: wait, wgmmas, release


class WgmmaCost(Cost[Wgmma]):
    """One CTA stays on each SM, whose producer loads the next tile while consumers store one."""
    hbm_share = 0.90
    barrier_cycles = 10
    loads_ahead = True
    by_mma = False
    cluster_tiles = 2

    def work(self, spec: GemmSpec, s: Wgmma, gpu_model: GPUModel, end: Ending) -> Work:
        size = spec.a.dtype.itemsize
        steps_of_k = s.block_k * size / INSTRUCTION_BYTES
        read = -(-s.block_m // 64) * (64 + s.block_n) * steps_of_k * INSTRUCTION_BYTES
        issue = WARP_STEP * 4 * (1 if s.mode == "pingpong" else s.consumers) / SCHEDULERS
        return Work(s.block_m * s.block_n * s.block_k / self.multiply_rate(spec, gpu_model),
                    (read + s.stage_bytes(size)) / SMEM_BYTES_PER_CYCLE, issue,
                    ending_cycles(s.block_m * s.tile(spec).columns, end, STORE_OPERATIONS), s.depth - 1)

    def resident(self, spec: GemmSpec, s: Wgmma, gpu_model: GPUModel, registers: int) -> int: return 1

    def flags(self, s: Wgmma, arch: str) -> bool: return s.stream

    def copy_bytes(self, stats: Stats, s: Wgmma) -> float:
        """TMA has no passes, as cp.async has; what is multicast is counted once."""
        asked = s.block_m / s.cluster_n + s.block_n / s.cluster_m
        return stats.asynchronous_bytes * (s.block_m + s.block_n) / asked
