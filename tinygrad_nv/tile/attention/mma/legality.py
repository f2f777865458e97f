"""What `flash_mma` asks of a schedule, and how much a schedule takes."""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.attention.mma.copy import LEAST_BYTES
from tinygrad_nv.tile.attention.score import multiple
from tinygrad_nv.tile.attention.spec import EVERY, OPERANDS, AttentionSpec
from tinygrad_nv.tile.expression import Sum, short
from tinygrad_nv.tile.gemm import legality
from tinygrad_nv.tile.gemm.spec import Result, Stored
from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.store_plan import StorePlan, store_plan, warp_tile

BLOCKS_N = (16, 32, 64, 128)
HELD = 180           # registers for sums, scores and q that leave room for addresses and fragments
HELD_BESIDE = 150    # the same, where scores are more than multiples of sums, or dropped
MOST_SUMS = 192      # registers for sums and probabilities, with fragments of q read each time


def padded(d: int) -> int:
    """Elements of a row in shared memory: whole steps of a product."""
    return -(-d // 16) * 16


def stage_bytes(s: Schedule, spec: AttentionSpec) -> int:
    """Keys and values of a block of columns."""
    return s.block_n * (padded(spec.d) + padded(spec.d_v)) * 2


def sums(s: Schedule, spec: AttentionSpec) -> int:
    """Registers a thread that hold sums: of the result, and scores of a block."""
    return s.block_m // s.warps_m * (padded(spec.d_v) + s.block_n) // 32


def held(s: Schedule, spec: AttentionSpec) -> bool:
    """Whether fragments of q stay in registers."""
    most = HELD_BESIDE if multiple(spec.score) is None or spec.kept < EVERY else HELD
    return sums(s, spec) + s.block_m // s.warps_m * padded(spec.d) // 64 <= most


def stored(spec: AttentionSpec) -> Stored:
    """The result, for its store."""
    out = Result(spec.out.dtype, spec.out.row, 1, spec.out.batch, spec.out.offset)
    batch = (1, *spec.batch[1:]) if spec.ragged else spec.batch  # one sequence's
    symbolic = spec.ragged or "s_q" in spec.symbolic
    return Stored(out, spec.s_q, spec.d_v, batch, Sum().cast(out.dtype), symbolic)


def plan_of(s: Schedule, spec: AttentionSpec) -> StorePlan:
    """How the result is stored."""
    return store_plan(stored(spec), warp_tile(s.block_m, padded(spec.d_v), s.warps_m))


def smem_bytes(s: Schedule, spec: AttentionSpec) -> int:
    """Shared memory: the ring, which is where the result is stored from, and q where it does not fit in the
    ring's last stage for a while."""
    q, stage = s.block_m * padded(spec.d) * 2, stage_bytes(s, spec)
    return max(s.depth * stage, plan_of(s, spec).smem_bytes) + (0 if held(s, spec) and q <= stage else q)


def problems(schedule: Schedule, spec: AttentionSpec, arch: str) -> list[str]:
    """Why `flash_mma` cannot have this schedule; empty when it can."""
    s = schedule
    if arch not in legality.SMEM_BYTES: return [f"{arch} is not {', '.join(legality.SMEM_BYTES)}"]
    if min(s.block_m, s.block_n, s.warps_m, s.warps_n, s.depth) < 1: return [f"{s}: extents below 1"]
    out = _spec_problems(spec)
    out += [f"{word} is of other templates" for word, on in (
        (f"template {s.template}", s.template != "flash_mma"), ("stream-K", s.stream),
        ("ping-pong", s.mode == "pingpong"), ("swap", s.swap), (f"split {s.splits}", s.splits > 1),
        (f"{s.warps_n} warps along columns", s.warps_n > 1),
        (f"cluster {s.cluster_m}x{s.cluster_n}", s.cluster_m * s.cluster_n > 1)) if on]
    if s.block_m % (16 * s.warps_m):
        out.append(f"block_m={s.block_m} is not a multiple of {s.warps_m} warps × 16 = {16 * s.warps_m}")
    if s.block_n not in BLOCKS_N:
        out.append(f"block_n={s.block_n} is not {', '.join(map(str, BLOCKS_N))}")
    if s.warps_m not in (1, 2, 4, 8, 16): out.append(f"{s.warps_m} warps are not 1, 2, 4, 8 or 16")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    return out or [*_resource_problems(s, spec, arch), *epilogue.problems(spec.score, arch)]


def _spec_problems(spec: AttentionSpec) -> list[str]:
    """Of the operands, whatever the schedule."""
    if spec.q.dtype not in OPERANDS:
        other = "flash_fma" if spec.q.dtype == dtypes.float32 else "flash_wgmma, for sm_90a"
        return [f"operands of {short(spec.q.dtype)} are of {other}"]
    out = [f"{name}={d} is not a multiple of 8" for name, d in (("d", spec.d), ("d_v", spec.d_v)) if d % 8]
    out += [f"rows of {name} are aligned to {rows.aligned_bytes} B, cp.async copies {LEAST_BYTES} and more"
            for name, rows in (("q", spec.q), ("k", spec.k), ("v", spec.v))
            if rows.aligned_bytes < LEAST_BYTES]
    heads = spec.batch[1] * spec.batch[2]
    return out + [f"{count} {name} are above {MOST_GRID}, a grid's" for name, count in
                  (("heads", heads), ("batches", spec.batch[0] + spec.ragged)) if count > MOST_GRID]


def _resource_problems(s: Schedule, spec: AttentionSpec, arch: str) -> list[str]:
    out, most = [], legality.SMEM_BYTES[arch]
    if (needed := smem_bytes(s, spec)) > most:
        out.append(f"{s.depth} stages × {stage_bytes(s, spec)} B and q are {needed} B of shared memory, "
                   f"{arch} has {most}")
    if (count := sums(s, spec)) > MOST_SUMS:
        out.append(f"{s.block_m // s.warps_m} rows of a warp × ({padded(spec.d_v)} + {s.block_n}) / 32 lanes "
                   f"= {count} sums a thread, at most {MOST_SUMS}")
    return out


def require(schedule: Schedule, spec: AttentionSpec, arch: str) -> None:
    """Raises `ScheduleError` with all that is wrong."""
    if found := problems(schedule, spec, arch):
        raise ScheduleError(f"{schedule} cannot be: " + "; ".join(found), "a schedule without these problems",
                            "change the blocks, the warps or the stages")
