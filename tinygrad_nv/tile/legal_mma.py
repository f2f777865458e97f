"""What `gemm_mma` asks of a schedule."""
from __future__ import annotations

from tinygrad_nv.tile import legality
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.spec import HALVES, GemmSpec


def problems(schedule: Schedule, spec: GemmSpec, arch: str) -> list[str]:
    """Why `gemm_mma` cannot have this schedule; empty when it can."""
    s, out, size = schedule, [], spec.a.dtype.itemsize
    if spec.a.dtype not in HALVES: out.append(f"operands of {spec.a.dtype.name}")
    if spec.parts > 1: out.append(f"{spec.parts} parts")
    for name, extent, warps in (("block_m", s.block_m, s.warps_m), ("block_n", s.block_n, s.warps_n)):
        out += _extent_problems(name, extent, warps, size)
    if s.block_k not in (16, 32, 64, 128): out.append(f"block_k={s.block_k} is not 16, 32, 64 or 128")
    if s.threads > 1024: out.append(f"{s.warps_m}x{s.warps_n} warps are {s.threads} threads, at most 1024")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    needed, most = s.depth * s.stage_bytes(size), legality.SMEM_BYTES[arch]
    if needed > most:
        stage = f"({s.block_m} + {s.block_n}) × {s.block_k} × {size} B"
        out.append(f"{s.depth} stages × {stage} = {needed} B of shared memory, {arch} has {most}")
    sums = s.block_m * s.block_n // s.threads
    if sums > 192:
        out.append(f"{s.block_m} × {s.block_n} / {s.threads} threads = {sums} sums a thread, at most 192")
    return out


def _extent_problems(name: str, extent: int, warps: int, itemsize: int) -> list[str]:
    """Of a tile's rows or columns, and of a warp's share of them."""
    out = []
    if extent % (16 * warps):
        out.append(f"{name}={extent} is not a multiple of {warps} warps × 16 = {16 * warps}")
    row, share = extent * itemsize, extent // warps * itemsize
    # the swizzle knows rows of 32 and 64 bytes and of columns of 128; a warp's share may not straddle columns
    if row not in (32, 64) and row % 128:
        out.append(f"{name}={extent}: {extent} × {itemsize} B = {row} B are not 32, 64 or a multiple of 128")
    elif share % 128 and 128 % max(share, 1):
        out.append(f"{name}={extent} / {warps} warps × {itemsize} B = {share} B neither divide 128 nor are a "
                   "multiple of it")
    return out
