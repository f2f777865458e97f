"""Plan of `flash_backward_wgmma`, which follows from a spec and a schedule: tiles, registers, bytes. Numbers
only.

Protocol: `BackwardWgmmaPlan.of` computes, and refuses nothing. `problems` and the kernel take
their arithmetic from here. A schedule's `block_m` are rows of queries, its `block_n` keys of a CTA. Heads are
padded to whole wgmmas, 16 elements; TMA brings zeros for what is not there and stores nothing of it.

One tile in shared memory is the right operand of two products: with rows along MN where d is summed over, as
it lies, and with rows along K, transposed. Gradients of queries have 64 rows for each consumer; where there
are 64 in all, consumers share their columns. So do they those of dk and dv where there are 64 keys in all
(halves.py), for heads of which a consumer cannot hold both.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.errors import SpecError
from tinygrad_nv.tile import epilogue
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec, dtype_problems
from tinygrad_nv.tile.attention.derivative import derivative
from tinygrad_nv.tile.attention.schedules import BackwardWgmma
from tinygrad_nv.tile.attention.spec import KEEP_ALL, Rows, multiple
from tinygrad_nv.tile.attention.wgmma.plan import ROWS, STEP, WARPGROUP, map_dimensions, no_tma, pad_head
from tinygrad_nv.tile.expression import Constant, loads, short, show
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import OperandTile, natural_span
from tinygrad_nv.tile.limits import MOST, MOST_GRID, SMEM_BYTES

__all__ = ["DQ_COLUMNS", "REGISTERS", "ROWS", "STEP", "WARPGROUP", "WARP_ROWS", "BackwardWgmmaPlan",
           "map_argument",
           "map_dimensions"]

# registers a thread of the producers and of a consumer, by the number of consumers: together what the three
# warpgroups begin with, 3 · 168; one consumer keeps what the compiler gives it
REGISTERS = {1: (0, 0), 2: (24, 240)}
HALVED_REGISTERS = (40, 232)    # of consumers that share keys: more boxes to copy, fewer sums to hold
WARP_ROWS = 16      # of a consumer's 64
DQ_COLUMNS = 32     # float32 of a row of 128 bytes
MOST_CARRIED = 64   # sums of dk and dv, beside products of dk that are in flight across the loop's end
L2_BYTES = 24 << 20     # queries, gradients and sums of heads that are under way together: half of L2
DS_BUFFERS = 2      # one is written while the other is multiplied: one barrier a block
# registers a thread that ptxas was seen to keep without spilling: those of a block, and sums of dk and dv;
# beside a derivative that is not the same for all elements, and beside one whose score has loads too
MOST_HELD, MOST_BESIDE, MOST_BESIDE_LOADS = 208, 192, 160


@dataclass(frozen=True)
class BackwardWgmmaPlan:
    """A backward pass by a schedule. Tiles in shared memory: `k` and `v` as left operands, `k_right` as the
    right one of dq; `q` and `grad` of a block of rows, `q_right` and `grad_right` the same for dk and dv;
    `ds`, and p where it is in shared memory. `dk` and `dv` are tiles of results that go by TMA."""
    spec: BackwardSpec
    schedule: BackwardWgmma
    q: OperandTile
    q_right: OperandTile
    grad: OperandTile
    grad_right: OperandTile
    k: OperandTile
    k_right: OperandTile
    v: OperandTile
    ds: OperandTile
    dk: OperandTile | None
    dv: OperandTile | None

    @property
    def heads_together(self) -> int:
        """Key heads whose blocks of keys are dealt in turn: of a band with a bound as many as fit in L2."""
        one = self.spec.forward
        each = one.s_q * one.batch[2] * ((one.d + one.d_v) * one.q.dtype.itemsize + one.d * 4)
        found = 1
        if one.band.full: return found
        while one.batch[1] % (2 * found) == 0 and 2 * found * each <= L2_BYTES: found *= 2
        return found

    @staticmethod
    @lru_cache(1024)
    def of(spec: BackwardSpec, schedule: BackwardWgmma) -> BackwardWgmmaPlan:
        """The plan."""
        dtype, m, n = spec.forward.q.dtype, schedule.block_m, schedule.block_n
        halved = n < ROWS * schedule.consumers
        (d, span), (d_v,
                    span_v) = (_layout_head(width, halved) for width in (spec.forward.d, spec.forward.d_v))
        pieces = 1 if m == ROWS * schedule.consumers else schedule.consumers
        boxes = -(-d * 2 // span)
        wide = -(-boxes // pieces) * pieces * span // 2  # whole boxes for each consumer
        slopes = OperandTile(dtype, "K", n, m, 128) if halved else OperandTile(dtype, "K", m, n, 128)

        def result(rows: Rows, elements: int, width: int, span: int) -> OperandTile | None:
            # a map does not cut off within 16 bytes
            whole = rows.dtype.itemsize == 2 and rows.alignment_bytes == 16 and elements % 8 == 0
            return OperandTile(rows.dtype, "K", n, width, span) if whole else None

        return BackwardWgmmaPlan(spec, schedule, OperandTile(dtype, "K", m, d, span),
                                 OperandTile(dtype, "MN", d, m, span),
                    OperandTile(dtype, "K", m, d_v, span_v), OperandTile(dtype, "MN", d_v, m, span_v),
                    OperandTile(dtype, "K", n, wide, span), OperandTile(dtype, "MN", wide, n, span),
                    OperandTile(dtype, "K", n, d_v, span_v), slopes,
                    result(spec.dk, spec.forward.d, d, span), result(spec.dv, spec.forward.d_v, d_v, span_v))

    @property
    def consumers(self) -> int: return self.schedule.consumers

    @property
    def splits_columns(self) -> bool:
        """Whether consumers have the same keys, and each half of the columns of dk and dv."""
        return self.schedule.block_n < ROWS * self.consumers

    @property
    def shares_rows(self) -> bool:
        """Whether consumers have the same rows of dq, and each its own columns."""
        return self.schedule.block_m < ROWS * self.consumers

    @property
    def dq_columns(self) -> int:
        """Columns of dq that a consumer has."""
        return self.k_right.mn // self.consumers if self.shares_rows else self.k_right.mn

    @property
    def dq_boxes(self) -> int:
        """Boxes of 32 columns of a warp's rows of dq."""
        return -(-self.dq_columns // DQ_COLUMNS)

    @property
    def warp_staging_bytes(self) -> int:
        """Shared memory for a warp's share of dq."""
        return WARP_ROWS * DQ_COLUMNS * 4 * self.dq_boxes

    @property
    def row_values_bytes(self) -> int:
        """Bytes of l and delta of a block."""
        return 2 * 4 * self.schedule.block_m

    @property
    def barrier_bytes(self) -> int:
        """A full and an empty one for each stage, and that of keys and values."""
        return 8 * (2 * self.schedule.depth + 1)

    @property
    def smem_parts(self) -> dict[str, int]:
        """Shared memory by what it is for; tiles begin at multiples of 1024."""
        depth, buffered = self.schedule.depth, (2 if self.splits_columns else 1) * self.ds.nbytes
        return {"keys": self.k.nbytes, "values": self.v.nbytes, "queries": self.q.nbytes * depth,
                "gradients": self.grad.nbytes * depth,
                "p and ds" if self.splits_columns else "ds": DS_BUFFERS * buffered,
                "dq": 0 if self.splits_columns else 4 * self.consumers * self.warp_staging_bytes,
                "l and delta": self.row_values_bytes * depth, "barriers": self.barrier_bytes}

    @property
    def smem_bytes(self) -> int:
        """All of it."""
        *tiles, barriers = self.smem_parts.values()
        return sum(-(-nbytes // 1024) * 1024 for nbytes in tiles) + barriers

    @property
    def parts(self) -> int:
        """Parts of 64 rows of a block."""
        return self.schedule.block_m // ROWS

    @property
    def sums(self) -> int:
        """Elements of dk and dv that a thread holds."""
        return (self.q_right.mn + self.grad_right.mn) // (4 if self.splits_columns else 2)

    @property
    def carries_products(self) -> bool:
        """Whether products of dk are in flight from one block to the next."""
        return self.sums <= MOST_CARRIED

    @property
    def reads_ahead(self) -> bool:
        """Whether there are registers for l and delta before they are needed: not beside a score that is
        evaluated, nor beside turns and a band with a beginning."""
        one = self.spec.forward
        if multiple(one.score) is None: return False
        return not self.spec.deterministic or one.band.first is None

    @property
    def live_registers(self) -> int:
        """Registers of a thread beside dk and dv, at the most. Of one part: s, dp or dq, ds of the block
        before. Of two: s, dp, p and ds of both parts. Of halves: half of s, dp, p and ds, or dq."""
        part, half = ROWS // 2, ROWS // 4
        if self.splits_columns: return max(part + half, self.dq_columns // 2)
        if self.parts == 1: return part + max(part, self.dq_columns // 2) + half
        return max(2 * part + 4 * half, part + self.dq_columns // 2 + 3 * half)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread of the producers and of a consumer; 0 where they are left as they are."""
        return HALVED_REGISTERS if self.splits_columns else REGISTERS[self.consumers]

    @property
    def kind(self) -> str:
        """The operands' dtype as PTX has it."""
        return short(self.spec.forward.q.dtype)

    @property
    def blocks_of_rows(self) -> int:
        """Most blocks of rows of a head."""
        return -(-self.spec.forward.s_q // self.schedule.block_m)

    @property
    def flags(self) -> int:
        """Turns: one for each warp's share of each block of rows."""
        if not self.spec.deterministic: return 0
        return self.spec.forward.matrices * self.blocks_of_rows * 4 * self.consumers

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of keys, key heads, batch."""
        batch, heads, _ = self.spec.forward.batch
        return -(-self.spec.forward.s_kv // self.schedule.block_n), heads, batch


def _layout_head(d: int, halved: bool) -> tuple[int, int]:
    """A head in whole wgmmas, or pairs of them, and the swizzle of its rows; halves are whole boxes."""
    if not halved: return pad_head(d), natural_span(pad_head(d) * 2)
    d = -(-d // (2 * STEP)) * 2 * STEP
    return d, natural_span(d)


def map_argument(plan: BackwardWgmmaPlan, rows: Rows, pointer: int, count: int, d: int, inner: int,
                 span: int, box: int,
                 symbol: str) -> MapArgument:
    """The tensor map of a matrix of `count` rows (the extent `symbol`): boxes of `box` rows of `inner`
    elements."""
    one, size = plan.spec.forward, rows.dtype.itemsize
    axes = map_dimensions(rows, one.batch)
    pitch = rows.row * size if count > 1 else -(-d * size // 16) * 16  # of one row never used, but needed
    symbolic = symbol in one.symbolic
    return MapArgument(pointer, short(rows.dtype), (d, count, *(one.batch[i] for i in axes)),
                       (pitch, *(rows.batch[i] * size for i in axes)), (inner, box, *(1 for _ in axes)),
                       f"{span}B", rows.offset * size, 1 if symbolic else -1,
                       one.symbolic.index(symbol) if symbolic else -1)


def problems(spec: BackwardSpec, schedule: BackwardWgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    if words := dtype_problems(spec): return words
    out = [*_operands(spec), *_count_problems(schedule, spec), *epilogue.problems(spec.forward.score, arch)]
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


def _count_problems(s: BackwardWgmma, spec: BackwardSpec) -> list[str]:
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
