"""Schedules of `gemm_mma`: `problems`, what it asks of one; `candidates`, tiles worth trying first: 128×256
and 256×128 with eight warps, 128×128 with four, are what CUTLASS uses on Ampere; `MmaCost`."""
from __future__ import annotations

import functools

from tinygrad.dtype import dtypes

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.cost import Cost, resident_ctas
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan, needs_promotion
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.gemm.spec import FP8, GemmSpec, Operand
from tinygrad_nv.tile.gemm.work import (
    INSTRUCTION_BYTES,
    SCHEDULERS,
    SMEM_BYTES_PER_CYCLE,
    Ending,
    Work,
    chunk_bytes,
    ending_cycles,
)
from tinygrad_nv.tile.gpu import GPUModel
from tinygrad_nv.tile.template import GPU

K_BYTES = (32, 64, 128, 256)
MOST_SUMS = 192
MOST_SUMS_TWICE = 64     # beside as many of 128 of K
MOST_SUMS_UNPACKED = 64  # they take 242 registers, 128 spill: ptxas makes two HMMA of one of 8-bit floats


def problems(spec: GemmSpec, schedule: Mma, arch: str) -> list[str]:
    """Why `gemm_mma` cannot have this schedule; empty when it can."""
    s, out = schedule, _spec_problems(spec, arch)
    if s.swap and (spec.parts > 1 or spec.symbolic):
        return [*out, "swap of several parts, or of symbolic rows"]
    plan = MmaPlan.of(spec, s)
    spec = plan.spec
    size = spec.a.dtype.itemsize
    out += extent_problems("block_m", s.block_m, s.warps_m, 1, spec.a)
    out += extent_problems("block_n", s.block_n, s.warps_n, spec.parts, spec.b)
    if s.block_k * size not in K_BYTES:
        out.append(f"block_k={s.block_k} × {size} B = {s.block_k * size} B are not 32, 64, 128 or 256")
    if s.threads > 1024: out.append(f"{s.warps_m}x{s.warps_n} warps are {s.threads} threads, at most 1024")
    elif s.threads & (s.threads - 1):
        out.append(f"{s.warps_m}x{s.warps_n} warps are {s.threads} threads, not a power of 2")
    elif not out: out += _copy_problems(s, spec)
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    if s.splits > plan.iterations:
        out.append(f"{s.splits} splits of {spec.k} / {s.block_k} = {plan.iterations} steps")
    if not out and (staged := plan.store.smem_bytes) > limits.SMEM_BYTES[arch]:
        out.append(f"{staged} B of shared memory to store from, {arch} has {limits.SMEM_BYTES[arch]}")
    return out + _resource_problems(plan, arch)


def _spec_problems(spec: GemmSpec, arch: str) -> list[str]:
    """Returns the problems of the operands, whatever the schedule."""
    if spec.a.dtype in FP8 and arch < "sm_89":
        return [f"operands of {spec.a.dtype.name}: their mma.sync begins with sm_89, this is {arch}"]
    if spec.a.dtype == dtypes.float32 and not spec.tf32:
        return ["operands of float without tf32: tensor cores multiply 10 bits of mantissa"]
    return []


def extent_problems(name: str, extent: int, warps: int, parts: int, operand: Operand) -> list[str]:
    """Returns the problems of a tile's rows or columns, and of a warp's share of them."""
    out, least = [], 16 * warps * parts
    if extent % least:
        words = f"{warps} warps × " + (f"{parts} parts × " if parts > 1 else "")
        out.append(f"{name}={extent} is not a multiple of {words}16 = {least}")
    if operand.major != "MN": return out
    size, extent = operand.dtype.itemsize, extent // parts
    row, share = extent * size, extent // warps * size
    # tiles have rows of 16, 32 and 64 bytes and of columns of 128; a warp's share may not straddle columns
    if row not in (16, 32, 64) and row % 128:
        out.append(f"{name}={extent}: {extent} × {size} B = {row} B are not 16, 32, 64 or a multiple of 128")
    elif share % 128 and 128 % max(share, 1):
        out.append(f"{name}={extent} / {warps} warps × {size} B = {share} B neither divide 128 nor are a "
                   "multiple of it")
    return out


def _copy_problems(s: Mma, spec: GemmSpec) -> list[str]:
    """Returns the problems of how threads divide tiles: those of all passes have the same place in a row."""
    return copy_problems(s, "block_m", s.block_m, spec.a) + copy_problems(s, "block_n",
                                                                          s.block_n // spec.parts, spec.b)


def copy_problems(s: Mma, name: str, extent: int, operand: Operand) -> list[str]:
    """Returns the problems of how threads divide one operand's tile."""
    size, k_major = operand.dtype.itemsize, operand.major != "MN"
    rows, row_bytes = (extent, s.block_k * size) if k_major else (s.block_k, extent * size)
    rows_at_once = s.threads * 16 // min(row_bytes, 128)
    if row_bytes <= 128 or rows % rows_at_once == 0 or rows_at_once % rows == 0: return []
    return [f"{name}={extent}: {s.threads} threads copy {rows_at_once} rows of 128 B at once, which neither "
            f"divide the tile's {rows} nor are a multiple of them"]


def room_problems(plan: MmaPlan, arch: str, stage_bytes: int, most_sums: int) -> list[str]:
    """Returns the problems of shared memory and of a thread's sums, where a stage has more than two tiles."""
    out, most = [], limits.SMEM_BYTES[arch]
    if (needed := plan.smem_bytes) > most:
        out.append(f"{plan.schedule.depth} stages × {stage_bytes} B, or what is stored from, = {needed} B of "
                   f"shared memory, {arch} has {most}")
    if plan.sums > most_sums: out.append(f"{plan.sums} sums a thread, at most {most_sums}")
    return out


def _resource_problems(plan: MmaPlan, arch: str) -> list[str]:
    spec, s, size = plan.spec, plan.schedule, plan.spec.a.dtype.itemsize
    out, needed, most = [], plan.smem_bytes, limits.SMEM_BYTES[arch]
    if needed > most:
        stage = f"({s.block_m} + {s.block_n}) × {s.block_k} × {size} B"
        more = f", {needed} B with what is stored from and splits," if needed != plan.ring_bytes else ""
        out.append(f"{s.depth} stages × {stage} = {plan.ring_bytes} B{more} of shared memory, {arch} has "
                   f"{most}")
    allowed, beside = MOST_SUMS, ""
    if needs_promotion(spec.a.dtype, arch):
        allowed, beside = MOST_SUMS_TWICE, " beside those of 128 of K, as 8-bit floats have them"
    elif spec.a.dtype in FP8:
        allowed, beside = MOST_SUMS_UNPACKED, f" beside 8-bit floats, which {arch} unpacks to float16"
    if plan.sums > allowed:
        out.append(f"{s.block_m} × {s.block_n} / {s.threads} threads = {plan.sums} sums a thread, at most "
                   f"{allowed}{beside}")
    return out


# rows, columns, bytes of K, warps along rows and columns
TILES = (
    (128, 256, 64, 2, 4), (256, 128, 64, 4, 2), (128, 128, 64, 2, 2), (128, 128, 128, 2, 2),
    (128, 128, 64, 2, 4), (128, 64, 64, 2, 2), (64, 128, 64, 2, 2), (64, 64, 128, 2, 2), (64, 64, 64, 2, 2),
    (64, 256, 64, 2, 4), (256, 64, 64, 4, 2), (32, 128, 128, 1, 4), (32, 64, 128, 1, 2),
    (128, 32, 128, 4, 1), (64, 32, 128, 2, 1), (16, 128, 128, 1, 4), (16, 64, 128, 1, 4), (16, 64, 128, 1, 2),
    (32, 32, 128, 1, 2), (32, 32, 128, 1, 1), (64, 16, 128, 4, 1), (32, 16, 128, 2, 1), (16, 32, 128, 1, 2),
    (16, 16, 128, 1, 1), (16, 32, 64, 1, 1), (16, 16, 32, 1, 1))


def candidates(spec: GemmSpec, gpu: GPU) -> tuple[Mma, ...]:
    """The tiles, with the deepest ring that fits, the better known ones before the others."""
    return _candidates(gpu.arch, spec.a.dtype.itemsize)


@functools.cache
def _candidates(arch: str, itemsize: int) -> tuple[Mma, ...]:
    made = [Mma().block(m, n).k(k_bytes // itemsize).warps(warps_m, warps_n)
            for m, n, k_bytes, warps_m, warps_n in TILES]
    return tuple(schedule.deepest(arch, itemsize) for schedule in made)


STORE_OPERATIONS = 4.0
REGISTERS_BESIDE = 56               # those of sums


class MmaCost(Cost[Mma]):
    """Warps read their operands from shared memory, and multiply."""
    hbm_share = 0.88
    barrier_cycles = 40

    def work(self, spec: GemmSpec, s: Mma, gpu_model: GPUModel, end: Ending) -> Work:
        size = spec.a.dtype.itemsize
        products = s.block_m * s.block_n * s.block_k
        read = (s.block_m * s.warps_n + s.block_n * s.warps_m) * s.block_k * size
        issued = products / (16 * 8) / (INSTRUCTION_BYTES / size) + read / 512 + _copies(spec, s)
        return Work(products / self.multiply_rate(spec, gpu_model),
                    (read + s.stage_bytes(size)) / SMEM_BYTES_PER_CYCLE, issued / SCHEDULERS,
                    ending_cycles(s.block_m * s.tile(spec).columns, end, STORE_OPERATIONS), s.depth - 1)

    def resident(self, spec: GemmSpec, s: Mma, gpu_model: GPUModel, registers: int) -> int:
        smem = 1024 + spec.a.dtype.itemsize * (s.depth * (s.block_m + s.block_n) * s.block_k)
        beside = min(255, s.block_m * s.block_n // s.threads + REGISTERS_BESIDE)
        return resident_ctas(gpu_model, s.threads, smem, registers or beside)

    def compute(self, s: Mma, done: Work, ctas: int) -> float:
        """mma.sync waits for its operands: with one warp a scheduler a quarter of the time, with two an
        eighth. Its warps issue both, products and reads."""
        warps = s.threads / 32 / SCHEDULERS * ctas
        tensor = done.tensor / (1 - 0.25 / warps if warps > 1 else 0.75 * warps)
        return max(tensor, done.shared) + 0.2 * min(tensor, done.shared)

    def flags(self, s: Mma, arch: str) -> bool: return s.splits > 1


def _copies(spec: GemmSpec, s: Mma) -> float:
    """Instructions of warps that bring a stage: five for each chunk of a lane."""
    elements = ((spec.a, s.block_m * s.block_k), (spec.b, s.block_n * s.block_k))
    return sum(5 * count * operand.dtype.itemsize / chunk_bytes(operand) / 32 for operand, count in elements)
