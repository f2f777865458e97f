"""What `flash_fma` asks of a schedule, and how much a schedule takes."""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.errors import ScheduleError
from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.attention.score import multiple
from tinygrad_nv.tile.attention.spec import EVERY, AttentionSpec
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm import legality
from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.schedule import Schedule

SIZE = 4                   # bytes of a float
COLUMNS = (8, 16, 32, 64)  # of a warp, in a block
MOST_SUMS = 152            # registers for sums and scores that leave room for operands and addresses
MOST_BESIDE = 150          # the same, where scores are more than multiples of sums


def padded(d: int) -> int:
    """Elements of a row of q and keys in shared memory."""
    return -(-d // 16) * 16


def padded_values(d_v: int) -> int:
    """Elements of a row of values in shared memory: eight lanes have four of each 32."""
    return -(-d_v // 32) * 32


def warp_columns(s: Schedule) -> int:
    """Columns of a warp, in a block."""
    return s.block_n // s.warps_n


def pitch(s: Schedule) -> int:
    """Elements between rows of a warp's probabilities in shared memory: 8 or 24 more than a multiple of 32,
    so that four rows of pairs lie in 32 banks."""
    columns = warp_columns(s)
    return columns if columns % 16 else columns + 8


def stage_bytes(s: Schedule, spec: AttentionSpec) -> int:
    """Keys and values of a block of columns."""
    return s.block_n * (padded(spec.d) + padded_values(spec.d_v)) * SIZE


def weight_bytes(s: Schedule) -> int:
    """Probabilities of a warp."""
    return s.block_m // s.warps_m * pitch(s) * SIZE


def meeting_bytes(s: Schedule, spec: AttentionSpec) -> int:
    """What warps with the same rows tell each other at the end: tops and totals of each, then the sums of all
    but the first."""
    if s.warps_n == 1: return 0
    tops = s.warps_m * s.warps_n * (s.block_m // s.warps_m // 8) * 32 * 2 * SIZE
    return max(tops, (s.warps_n - 1) * s.block_m * padded_values(spec.d_v) * SIZE)


def sums(s: Schedule, spec: AttentionSpec) -> int:
    """Registers a thread that hold sums: of the result, and scores of a block."""
    return s.block_m // s.warps_m * (padded_values(spec.d_v) + warp_columns(s)) // 32


def chains(s: Schedule, spec: AttentionSpec) -> int:
    """By how many sums, of every second or fourth element, a lane adds up a score: four have half the
    rounding error of one. As many as there are registers for."""
    rows, d_v, columns = s.block_m // s.warps_m, padded_values(spec.d_v), warp_columns(s)
    return next((n for n in (4, 2) if rows * (d_v + n * columns) // 32 <= MOST_SUMS), 1)


def ring_bytes(s: Schedule, spec: AttentionSpec) -> int:
    """The ring, which is where warps meet at the end."""
    return max(s.depth * stage_bytes(s, spec), meeting_bytes(s, spec))


def smem_bytes(s: Schedule, spec: AttentionSpec) -> int:
    """Shared memory: the ring, q, and probabilities of all warps."""
    weights = s.warps_m * s.warps_n * weight_bytes(s)
    return ring_bytes(s, spec) + s.block_m * padded(spec.d) * SIZE + weights


def problems(schedule: Schedule, spec: AttentionSpec, arch: str) -> list[str]:
    """Why `flash_fma` cannot have this schedule; empty when it can."""
    s = schedule
    if arch not in legality.SMEM_BYTES: return [f"{arch} is not {', '.join(legality.SMEM_BYTES)}"]
    if min(s.block_m, s.block_n, s.warps_m, s.warps_n, s.depth) < 1: return [f"{s}: extents below 1"]
    out = _spec_problems(spec)
    out += [f"{word} is of other templates" for word, on in (
        (f"template {s.template}", s.template != "flash_fma"), ("stream-K", s.stream),
        ("ping-pong", s.mode == "pingpong"), ("swap", s.swap), (f"split {s.splits}", s.splits > 1),
        (f"cluster {s.cluster_m}x{s.cluster_n}", s.cluster_m * s.cluster_n > 1)) if on]
    if s.block_m % (16 * s.warps_m) or s.block_m & (s.block_m - 1):
        out.append(f"block_m={s.block_m} is not a power of two, {s.warps_m} warps × 16 = {16 * s.warps_m} or "
                   "more")
    if s.block_n % s.warps_n or warp_columns(s) not in COLUMNS:
        out.append(f"block_n={s.block_n} of {s.warps_n} warps is not {', '.join(map(str, COLUMNS))} for each")
    if s.threads not in (32, 64, 128, 256, 512):
        out.append(f"{s.warps_m} x {s.warps_n} warps are not 1, 2, 4, 8 or 16")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    return out or [*_resource_problems(s, spec, arch), *epilogue.problems(spec.score, arch)]


def _spec_problems(spec: AttentionSpec) -> list[str]:
    """Of the operands, whatever the schedule."""
    out = [] if spec.q.dtype == dtypes.float32 else [f"operands of {short(spec.q.dtype)} are not float32"]
    if spec.ragged: out.append("a ragged batch")
    if spec.kept < EVERY: out.append("dropout")
    heads = spec.batch[1] * spec.batch[2]
    return out + [f"{count} {name} are above {MOST_GRID}, a grid's" for name, count in
                  (("heads", heads), ("batches", spec.batch[0])) if count > MOST_GRID]


def _resource_problems(s: Schedule, spec: AttentionSpec, arch: str) -> list[str]:
    out, most = [], legality.SMEM_BYTES[arch]
    if (needed := smem_bytes(s, spec)) > most:
        out.append(f"{s.depth} stages × {stage_bytes(s, spec)} B, q and probabilities are {needed} B of "
                   f"shared memory, {arch} has {most}")
    room = MOST_BESIDE if multiple(spec.score) is None else MOST_SUMS
    if (count := sums(s, spec)) > room:
        columns = f"{padded_values(spec.d_v)} + {warp_columns(s)}"
        out.append(f"{s.block_m // s.warps_m} rows of a warp × ({columns}) / 32 lanes = {count} sums a "
                   f"thread, at most {room}")
    return out


def require(schedule: Schedule, spec: AttentionSpec, arch: str) -> None:
    """Raises `ScheduleError` with all that is wrong."""
    if found := problems(schedule, spec, arch):
        raise ScheduleError(f"{schedule} cannot be: " + "; ".join(found), "a schedule without these problems",
                            "change the blocks, the warps or the stages")
