"""Legality of `flash_backward_wgmma`: what it asks of a schedule."""
from __future__ import annotations

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec, dtype_problems
from tinygrad_nv.tile.attention.backward_wgmma.plan import REGISTERS, ROWS, BackwardWgmmaPlan
from tinygrad_nv.tile.attention.derivative import derivative
from tinygrad_nv.tile.attention.schedules import BackwardWgmma
from tinygrad_nv.tile.attention.spec import KEEP_ALL
from tinygrad_nv.tile.attention.wgmma.legality import no_tma
from tinygrad_nv.tile.expression import Constant, loads, show
from tinygrad_nv.tile.limits import MOST, MOST_GRID, SMEM_BYTES

# registers a thread that ptxas was seen to keep without spilling: those of a block, and sums of dk and dv;
# beside a derivative that is not the same for all elements, and beside one whose score has loads too
MOST_HELD, MOST_BESIDE, MOST_BESIDE_LOADS = 208, 192, 160


def problems(spec: BackwardSpec, schedule: BackwardWgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    if words := dtype_problems(spec): return words
    out = [*_operands(spec), *_counts(schedule, spec), *epilogue.problems(spec.forward.score, arch)]
    try: slope = derivative(spec.forward.score)
    except SpecError as error: return [*out, str(error.found)]
    if spec.forward.kept < KEEP_ALL and not isinstance(slope, Constant):
        out.append(f"dropout beside {show(spec.forward.score)}, whose derivative differs between elements")
    if found := _extents(schedule): return out + found
    return [*out, *_room(BackwardWgmmaPlan.of(spec, schedule))]


def _operands(spec: BackwardSpec) -> list[str]:
    """Returns the problems of strides and beginnings, as TMA asks of them."""
    one = spec.forward
    sides = (("q", one.q, one.s_q), ("k", one.k, one.s_kv), ("v", one.v, one.s_kv),
             ("grad", spec.grad, one.s_q))
    out = [each for name, rows, count in sides for each in no_tma(name, rows, count, one.batch)]
    if one.d % 4: out.append(f"dq: row stride {4 * one.d} B is not a multiple of 16 B: no TMA")
    return out


def _counts(s: BackwardWgmma, spec: BackwardSpec) -> list[str]:
    """Returns the problems of what is numbered."""
    one = spec.forward
    batch, heads, _ = one.batch
    grid = (("key heads", heads), ("elements of the batch", batch))
    out = [f"{count} {what} are above {MOST_GRID}, a grid's" for what, count in grid if count > MOST_GRID]
    far = max(one.s_q, one.s_kv, one.s_q + one.start) + 2 * (s.block_m + s.block_n)
    if far > MOST // 2: out.append(f"places up to {far} are above {MOST // 2}")
    if one.matrices * far > MOST: out.append(f"{one.matrices} heads of {far} places are above {MOST}")
    return out


def _extents(s: BackwardWgmma) -> list[str]:
    """Warpgroups and the tile."""
    if s.consumers not in REGISTERS or s.warps_m % 4:
        return [f"{s.warps_m} warps: producers and 1 or 2 consumers of 4 warps each are 8 or 12, along the "
                "rows"]
    out = []
    if s.block_n not in (ROWS, ROWS * s.consumers):
        keys = ROWS * s.consumers
        out.append(f"block_n={s.block_n} is not {s.consumers} consumers × {ROWS} = {keys} keys, nor {ROWS} "
                   "that they share")
    elif s.block_n < ROWS * s.consumers and s.block_m != ROWS:
        out.append(f"block_m={s.block_m} is not {ROWS}, of consumers that share their keys")
    if s.block_m not in (ROWS, ROWS * s.consumers):
        out.append(f"block_m={s.block_m} is not {ROWS}, or {ROWS} for each of {s.consumers} consumers: dq "
                   "has 64 rows in a wgmma")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    return out


def _room(plan: BackwardWgmmaPlan) -> list[str]:
    """Shared memory and registers."""
    out, most = [], SMEM_BYTES["sm_90a"]
    if plan.smem_bytes > most:
        parts = " + ".join(f"{nbytes} B of {name}" for name, nbytes in plan.smem_parts.items())
        out.append(f"{parts} = {plan.smem_bytes} B of shared memory, sm_90a has {most}")
    score = plan.spec.forward.score
    same = isinstance(derivative(score), Constant)
    held = MOST_HELD if same else MOST_BESIDE_LOADS if loads(score) else MOST_BESIDE
    if plan.live_registers + plan.sums > held:
        beside = "" if same else f" beside {show(score)} and its derivative"
        out.append(f"{plan.live_registers} registers of a block + {plan.sums} sums of dk and dv = "
                   f"{plan.live_registers + plan.sums} a thread, at most {held}{beside}")
    return out
