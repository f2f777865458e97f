"""How a product is computed: tiles, warps, stages. One predicate says whether it can be, and why not.

Protocol: `Schedule()` is a default to derive from, `Schedule().block(128, 256).k(64).warps(2, 4).stages(4)`;
each call gives a new schedule. `problems(schedule, spec, arch)` lists what is wrong, with the arithmetic;
templates refuse a schedule that has any with a `ScheduleError`.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile.spec import GemmSpec

SMEM_BYTES = {"sm_80": 163 << 10, "sm_89": 99 << 10, "sm_90a": 227 << 10}


@dataclass(frozen=True)
class Schedule:
    """A CTA makes `block_m` × `block_n` of the result, `block_k` of the sum at a time, with `warps_m` ×
    `warps_n` warps, from a ring of `depth` stages."""
    block_m: int = 128
    block_n: int = 128
    block_k: int = 32
    warps_m: int = 2
    warps_n: int = 2
    depth: int = 3

    def block(self, m: int, n: int) -> Schedule:
        """The tile of the result."""
        return replace(self, block_m=m, block_n=n)

    def k(self, k: int) -> Schedule:
        """Elements of the sum in a stage."""
        return replace(self, block_k=k)

    def warps(self, m: int, n: int) -> Schedule:
        """Warps along the rows and the columns of the tile."""
        return replace(self, warps_m=m, warps_n=n)

    def stages(self, count: int) -> Schedule:
        """Stages of the ring."""
        return replace(self, depth=count)

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.warps_m * self.warps_n

    def stage_bytes(self, itemsize: int) -> int:
        """Bytes of one stage: a tile of A and one of B."""
        return (self.block_m + self.block_n) * self.block_k * itemsize

    def __str__(self) -> str:
        return (f"{self.block_m}x{self.block_n}x{self.block_k}, {self.warps_m}x{self.warps_n} warps, "
                f"{self.depth} stages")


def problems(schedule: Schedule, spec: GemmSpec, arch: str) -> list[str]:
    """Why `gemm_mma` cannot have this schedule; empty when it can."""
    s, out = schedule, []
    if min(s.block_m, s.block_n, s.block_k, s.warps_m, s.warps_n, s.depth) < 1:
        return [f"{s}: extents below 1"]
    for name, extent, warps in (("block_m", s.block_m, s.warps_m), ("block_n", s.block_n, s.warps_n)):
        out += _extent_problems(name, extent, warps, spec.a.dtype.itemsize)
    if s.block_k not in (16, 32, 64, 128): out.append(f"block_k={s.block_k} is not 16, 32, 64 or 128")
    if s.threads > 1024: out.append(f"{s.warps_m}x{s.warps_n} warps are {s.threads} threads, at most 1024")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    needed = s.depth * s.stage_bytes(spec.a.dtype.itemsize)
    if needed > SMEM_BYTES[arch]:
        stage = f"({s.block_m} + {s.block_n}) × {s.block_k} × {spec.a.dtype.itemsize} B"
        out.append(f"{s.depth} stages × {stage} = {needed} B of shared memory, {arch} has {SMEM_BYTES[arch]}")
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


def require(schedule: Schedule, spec: GemmSpec, arch: str) -> None:
    """Raises `ScheduleError` with all that is wrong."""
    if found := problems(schedule, spec, arch):
        raise ScheduleError(f"{schedule} cannot be: " + "; ".join(found), "a schedule without these problems",
                            "change the tile, the warps or the stages")
