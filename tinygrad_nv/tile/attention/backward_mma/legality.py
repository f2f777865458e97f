"""What `flash_backward_mma` asks of a schedule, and how much a schedule takes."""
from __future__ import annotations

from dataclasses import replace

from tinygrad_nv.errors import ScheduleError, SpecError
from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.derivative import derivative
from tinygrad_nv.tile.attention.mma.copy import LEAST_BYTES
from tinygrad_nv.tile.attention.score import multiple
from tinygrad_nv.tile.attention.spec import EVERY, OPERANDS, AttentionSpec, Rows
from tinygrad_nv.tile.expression import Sum, short
from tinygrad_nv.tile.gemm import legality
from tinygrad_nv.tile.gemm.spec import Result, Stored
from tinygrad_nv.tile.limits import MOST_GRID
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.store_plan import StorePlan, store_plan, warp_tile

TOLD_BYTES = 16     # of shared memory, for the number of a CTA
BLOCKS = (16, 32, 64, 128)
TILE_BYTES = 1024   # tiles are multiples of it: swizzled, they begin at such
MOST_SUMS = 192     # registers for dk and dv, and for p and ds of a block
# the same, where scores are more than multiples of sums, or dropped, with turns, and where query heads of a
# group have windows
MOST_BESIDE = 160


def width(s: Schedule, d: int) -> int:
    """Elements of a row in shared memory: each warp of those that share keys has whole steps of a product."""
    return -(-d // (16 * s.warps_n)) * 16 * s.warps_n


def stage_bytes(s: Schedule, spec: AttentionSpec) -> int:
    """A block of rows of q and of the gradient, with −l · log2 e and −delta of each; whole TILE_BYTES."""
    nbytes = s.block_m * ((width(s, spec.d) + width(s, spec.d_v)) * 2 + 8)
    return -(-nbytes // TILE_BYTES) * TILE_BYTES


def key_bytes(s: Schedule, spec: AttentionSpec) -> int:
    """The CTA's keys and values."""
    return s.block_n * (width(s, spec.d) + width(s, spec.d_v)) * 2


def weight_bytes(s: Schedule) -> int:
    """ds of a block; and p, where warps share keys."""
    return s.block_n * s.block_m * 2 * min(s.warps_n, 2)


def shares(s: Schedule, d: int) -> tuple[int, int] | None:
    """Warps along the rows and along d of a block of dq, of which a warp has as little as possible to read:
    16 rows and 16 elements or multiples of them. None where warps cannot share it."""
    warps, wide = s.warps_m * s.warps_n, width(s, d)
    found = [(s.block_m // rows + wide // (warps // rows), rows, warps // rows) for rows in (1, 2, 4, 8, 16)
             if warps % rows == 0 and s.block_m % (16 * rows) == 0 and wide % (16 * (warps // rows)) == 0]
    return min(found)[1:] if found else None


def sums(s: Schedule, spec: AttentionSpec) -> int:
    """Registers a thread that hold dk and dv, and sums and products with v of a block."""
    keys = s.block_n // s.warps_m
    return keys * (width(s, spec.d) + width(s, spec.d_v) + 2 * s.block_m) // (32 * s.warps_n)


def stored(spec: BackwardSpec, rows: Rows, d: int) -> Stored:
    """dk or dv, for its store."""
    one, out = spec.forward, Result(rows.dtype, rows.row, 1, rows.batch, rows.offset)
    return Stored(out, one.s_kv, d, (*one.batch[:2], 1), Sum().cast(out.dtype), "s_kv" in one.symbolic)


def plan_of(s: Schedule, spec: BackwardSpec, rows: Rows, d: int) -> StorePlan:
    """How dk or dv is stored: element by element where warps share keys, as each has parts of lines."""
    plan = store_plan(stored(spec, rows, d), warp_tile(s.block_n, width(s, d), s.warps_m))
    return plan if s.warps_n == 1 else replace(plan, panel=None, smem_bytes=0)


def memory_bytes(s: Schedule, spec: BackwardSpec) -> int:
    """The keys, the ring, ds; dk and dv are stored from where all this was."""
    one = spec.forward
    loop = key_bytes(s, one) + s.depth * stage_bytes(s, one) + weight_bytes(s)
    return max(loop, sum(plan_of(s, spec, rows, d).smem_bytes for rows, d in ((spec.dk, one.d),
                                                                              (spec.dv, one.d_v))))


def smem_bytes(s: Schedule, spec: BackwardSpec) -> int:
    """Shared memory: the same, and the number of a CTA that takes turns."""
    return memory_bytes(s, spec) + (TOLD_BYTES if spec.deterministic else 0)


def problems(schedule: Schedule, spec: BackwardSpec, arch: str) -> list[str]:
    """Why `flash_backward_mma` cannot have this schedule; empty when it can."""
    s = schedule
    if arch not in legality.SMEM_BYTES: return [f"{arch} is not {', '.join(legality.SMEM_BYTES)}"]
    if min(s.block_m, s.block_n, s.warps_m, s.warps_n, s.depth) < 1: return [f"{s}: extents below 1"]
    out = _spec_problems(spec)
    out += [f"{word} is of other templates" for word, on in (
        (f"template {s.template}", s.template != "flash_backward_mma"), ("stream-K", s.stream),
        ("ping-pong", s.mode == "pingpong"), ("swap", s.swap), (f"split {s.splits}", s.splits > 1),
        (f"cluster {s.cluster_m}x{s.cluster_n}", s.cluster_m * s.cluster_n > 1)) if on]
    if s.block_n % (16 * s.warps_m):
        out.append(f"block_n={s.block_n} is not a multiple of {s.warps_m} warps × 16 = {16 * s.warps_m}")
    out += [f"{name}={block} is not {', '.join(map(str, BLOCKS))}"
            for name, block in (("block_m", s.block_m), ("block_n", s.block_n)) if block not in BLOCKS]
    out += [f"{warps} warps {of} are not 1, 2, 4 or 8" for warps, of in
            ((s.warps_m, "of keys"), (s.warps_n, "that share keys")) if warps not in (1, 2, 4, 8)]
    if s.block_m % (16 * s.warps_n):
        out.append(f"block_m={s.block_m} is not a multiple of {s.warps_n} warps × 16 = {16 * s.warps_n}")
    if s.threads < s.block_m:
        out.append(f"block_m={s.block_m} is above {s.threads} threads, one for each row")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    return out or [*_resource_problems(s, spec, arch), *epilogue.problems(spec.forward.score, arch)]


def dtype_problems(spec: BackwardSpec) -> list[str]:
    """Of operands that tensor cores have no instructions for."""
    dtype = spec.forward.q.dtype
    return [] if dtype in OPERANDS else [f"the backward pass of {short(dtype)}, not of "
                                         f"{' or '.join(map(short, OPERANDS))}"]


def _spec_problems(spec: BackwardSpec) -> list[str]:
    """Of the operands, whatever the schedule; and of a score without a derivative."""
    if words := dtype_problems(spec): return words
    one = spec.forward
    try: derivative(one.score)
    except SpecError as error: return [str(error.found)]
    out = [f"{name}={d} is not a multiple of 8" for name, d in (("d", one.d), ("d_v", one.d_v)) if d % 8]
    out += [f"rows of {name} are aligned to {rows.aligned_bytes} B, cp.async copies {LEAST_BYTES} and more"
            for name, rows in (("q", one.q), ("k", one.k), ("v", one.v), ("grad", spec.grad))
            if rows.aligned_bytes < LEAST_BYTES]
    return out + [f"{count} {name} are above {MOST_GRID}, a grid's" for name, count in
                  (("key heads", one.batch[1]), ("batches", one.batch[0])) if count > MOST_GRID]


def _resource_problems(s: Schedule, spec: BackwardSpec, arch: str) -> list[str]:
    out, most, one = [], legality.SMEM_BYTES[arch], spec.forward
    if (needed := smem_bytes(s, spec)) > most:
        out.append(f"keys of {key_bytes(s, one)} B, {s.depth} stages × {stage_bytes(s, one)} B and ds are "
                   f"{needed} B of shared memory, {arch} has {most}")
    beside = (multiple(one.score) is None, one.kept < EVERY, spec.deterministic,
              one.batch[2] > 1 and one.band.first is not None)
    room = MOST_BESIDE if any(beside) else MOST_SUMS
    if (count := sums(s, one)) > room:
        out.append(f"{s.block_n // s.warps_m} keys of a warp × ({width(s, one.d)} + {width(s, one.d_v)} + "
                   f"2 × {s.block_m}) / 32 lanes / {s.warps_n} that share them = {count} sums a thread, at "
                   f"most {room}")
    out += [f"a tile of {rows} rows x {wide} elements is not a multiple of {TILE_BYTES} B"
            for rows in (s.block_m, s.block_n) for wide in sorted({width(s, one.d), width(s, one.d_v)})
            if rows * wide * 2 % TILE_BYTES]
    if shares(s, one.d) is None:
        out.append(f"{s.warps_m * s.warps_n} warps cannot share {s.block_m} rows x {width(s, one.d)} of dq "
                   "by 16 x 16")
    return out


def require(schedule: Schedule, spec: BackwardSpec, arch: str) -> None:
    """Raises `ScheduleError` with all that is wrong."""
    if found := problems(schedule, spec, arch):
        raise ScheduleError(f"{schedule} cannot be: " + "; ".join(found), "a schedule without these problems",
                            "change the blocks, the warps or the stages")
