"""Legality of `gemm_mma`: what it asks of a schedule."""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan, needs_promotion
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.gemm.spec import FP8, GemmSpec, Operand

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
