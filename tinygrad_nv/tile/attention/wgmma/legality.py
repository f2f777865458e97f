"""Legality of `flash_wgmma`: what it asks of a schedule."""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.attention.schedules import FlashWgmma
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec, Rows, multiple
from tinygrad_nv.tile.attention.wgmma.plan import ROWS, FlashWgmmaPlan
from tinygrad_nv.tile.expression import show
from tinygrad_nv.tile.limits import MOST, MOST_GRID, SMEM_BYTES
from tinygrad_nv.tile.wgmma_tiles import K_BYTES

WARP_ROWS = 16
MOST_COLUMNS = 256
# by consumers, registers a thread that ptxas was seen to keep without spilling: scores, their 16-bit form and
# the result; and beside the evaluation of a score that is more than a multiple of the sum, with its columns
MOST_HELD, MOST_BESIDE, MOST_EVALUATED = {1: 224, 2: 212, 3: 128}, {1: 188, 2: 168, 3: 92}, 112


def problems(spec: AttentionSpec, schedule: FlashWgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    if spec.q.dtype == dtypes.float32: return ["operands of f32 are of flash_fma"]
    if (spec.is_ragged or spec.kept < KEEP_ALL) and spec.scales is not None:
        return ["ragged batches and dropout of 8 bits: no template has them"]
    out = [*_operands(spec), *_counts(schedule, spec), *epilogue.problems(spec.score, arch)]
    if found := _extents(schedule, spec.q.dtype.itemsize): return out + found
    return [*out, *_scales(schedule, spec), *_room(FlashWgmmaPlan.of(spec, schedule))]


def _scales(s: FlashWgmma, spec: AttentionSpec) -> list[str]:
    """A warp's rows and a block of columns have one scale each."""
    if spec.scales is None: return []
    sides = (("q", WARP_ROWS, "a warp's rows"), *((name, s.block_n, "a block of columns") for name in "kv"))
    return [f"{name}: scales of {each.rows} rows, not of whole times {count}, {what}"
            for each, (name, count, what) in zip(spec.scales, sides, strict=True)
            if each.block and each.rows % count]


def _operands(spec: AttentionSpec) -> list[str]:
    """Returns the problems of q, k and v, as TMA asks of them."""
    rows, keys = spec.total or (spec.s_q, spec.s_kv)
    sides = (("q", spec.q, rows), ("k", spec.k, keys), ("v", spec.v, keys))
    return [each for name, side, count in sides for each in no_tma(name, side, count, spec.batch)]


def no_tma(name: str, rows: Rows, count: int, batch: tuple[int, int, int]) -> list[str]:
    """Why TMA cannot read `count` rows of each element of a batch; empty when it can: strides of more than
    one, and beginnings, are multiples of 16 bytes."""
    size = rows.dtype.itemsize
    strides = [("row", rows.row, count), *((f"batch[{i}]", rows.batch[i], batch[i]) for i in range(3))]
    out = [f"{name}: {what} stride {stride * size} B is not a multiple of 16 B: no TMA"
           for what, stride, extent in strides if extent > 1 and stride * size % 16]
    if rows.offset * size % 16:
        out.append(f"{name}: offset {rows.offset * size} B is not a multiple of 16 B: no TMA")
    return out


def _counts(s: FlashWgmma, spec: AttentionSpec) -> list[str]:
    """Returns the problems of what is numbered."""
    batch, heads, group = spec.batch
    grid = (("heads", heads * group), ("elements of the batch", batch + spec.is_ragged))
    out = [f"{count} {what} are above {MOST_GRID}, a grid's" for what, count in grid if count > MOST_GRID]
    far = max(spec.s_q, spec.s_kv, spec.s_q + spec.start) + 2 * (s.block_m + s.block_n)
    if far > MOST: out.append(f"places up to {far} are above {MOST}")
    return out


def _extents(s: FlashWgmma, size: int) -> list[str]:
    """Warpgroups and the tile."""
    if s.warps_m not in (8, 12, 16):
        return [f"{s.warps_m} warps: a producer and 1 to 3 consumers of 4 warps each are 8, 12 or 16, along "
                "the rows"]
    out = []
    if s.mode == "pingpong" and s.consumers < 2:
        out.append(f"ping-pong with {s.consumers} consumer: {s.warps_m} warps - 4 of the producer, at least "
                   "8")
    if s.block_m != ROWS * s.consumers:
        rows = ROWS * s.consumers
        out.append(f"block_m={s.block_m} is not {s.consumers} consumers × {ROWS} = {rows} rows")
    if s.block_n % (step := K_BYTES // size) or not step <= s.block_n <= MOST_COLUMNS:
        out.append(f"block_n={s.block_n} is not a multiple of {step} up to {MOST_COLUMNS}: no such wgmma")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    return out


def _room(plan: FlashWgmmaPlan) -> list[str]:
    """Shared memory and registers."""
    out, s, most = [], plan.schedule, SMEM_BYTES["sm_90a"]
    if plan.smem_bytes > most:
        staged = f" + {plan.staging_bytes} B of the result" if plan.staging_bytes else ""
        v = plan.transposed_v
        transposed = f" + {v.nbytes} B of them turned" if v is not None else ""
        out.append(f"{plan.q.nbytes} B of queries + {s.depth} stages × ({plan.k.nbytes} B of keys + "
                   f"{plan.v.nbytes} B of values{transposed}){staged} + {plan.barrier_bytes} B of barriers = "
                   f"{plan.smem_bytes} B of shared memory, sm_90a has {most}")
    evaluated, dropped = multiple(plan.spec.score) is None, plan.spec.kept < KEEP_ALL
    if plan.live_registers > (held := (MOST_BESIDE if evaluated or dropped else MOST_HELD)[plan.consumers]):
        beside = f" beside {show(plan.spec.score)}" if evaluated else " beside dropout" if dropped else ""
        part = f" + {plan.pieces[0][1] // 2} of a block" if plan.transposed_v is not None else ""
        pairs = "fours" if plan.transposed_v is not None else "pairs"
        out.append(f"{plan.scores} scores + {plan.weights} {pairs} of weights + {plan.sums} sums{part} = "
                   f"{plan.live_registers} registers a thread, at most {held} with {plan.consumers} "
                   f"consumers{beside}")
    if evaluated and s.block_n > MOST_EVALUATED:
        out.append(f"block_n={s.block_n} beside {show(plan.spec.score)}, which is evaluated in registers: at "
                   f"most {MOST_EVALUATED}")
    return out
