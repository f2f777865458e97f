"""Plan of `grouped_wgmma`, which follows from a spec and a schedule: tiles, boxes, bytes. Numbers only.

Protocol: that of gemm/wgmma/plan.py, of the matmul of one group. A tile has `tokens` rows of a group and
`tile_columns` columns of the result. Without `swap` rows are the left operand, and gate and up lie side by
side in the right one. With it each consumer has 64 columns, or a multiple, of gate and then of up, so that a
thread holds both of its elements.

`problems` is what the template asks of a schedule; `candidates` are tiles worth trying first: many rows a
group as in gemm/wgmma, few rows as columns of wgmma.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import ClassVar, NamedTuple, TypeVar

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.spec import FLOAT16S, GemmSpec, Operand, Result
from tinygrad_nv.tile.gemm.wgmma import template as wgmma
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.gemm.work import INSTRUCTION_BYTES, SMEM_BYTES_PER_CYCLE
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.grouped_gemm.cost import Prediction, active, hbm_seconds, tiles
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedScaledWgmma, GroupedTransposedWgmma, GroupedWgmma
from tinygrad_nv.tile.grouped_gemm.spec import (
    GROUP,
    GroupedGemmSpec,
    ScaledGroupedGemmSpec,
    TransposedGroupedSpec,
)
from tinygrad_nv.tile.layout import MOST_BOX, OperandTile
from tinygrad_nv.tile.scaled_gemm.plan import MOST_FINE_COLUMNS
from tinygrad_nv.tile.store_plan import Panel, span_of
from tinygrad_nv.tile.template import GPU

ROW_BYTES = 128     # of K in a box
LOADERS = 96        # threads that gather rows: those of the producer's warpgroup beside TMA's warp
CHUNK = 16          # bytes that a thread copies
CHUNKS = ROW_BYTES // CHUNK
LANES = 32
MOST_EACH = 32      # groups that a lane counts
ALIGNED = 16                # bytes that TMA, cp.async and stores of 16 bytes ask of a row
MOST_BYTES = 1 << 32        # of rows, which have 32-bit places
MOST_GATHERED = 192         # rows of a tile: a loader keeps the place of each of its copies


class Box(NamedTuple):
    """Part of a tile of a matrix: from `mn` of the tile on, `column` columns after the tile's first, of gate
    (`half` 0) or up. That of a matrix (K, N) has rows of K."""
    mn: int
    half: int
    column: int


def matrix_of(grouped: GroupedGemmSpec) -> Operand:
    """How a matrix lies in memory."""
    return Operand(grouped.dtype, *((1, grouped.n) if grouped.transposed else (grouped.k, 1)))


@dataclass(frozen=True)
class GroupedPlan(WgmmaPlan):
    """See above."""
    schedule: GroupedWgmma
    grouped: GroupedGemmSpec
    MOST_BOXES: ClassVar[int] = 1       # of K side by side in a stage
    MOST_ROWS: ClassVar[int] = MOST_BOX     # of the left operand's tile
    # sums a thread that ptxas keeps beside weights and places of the columns' rows
    MOST_SWAPPED: ClassVar[int] = 128

    @staticmethod
    @lru_cache(1024)
    def of(grouped: GroupedGemmSpec, s: GroupedWgmma) -> GroupedPlan:
        """The plan."""
        rows, matrix = Operand(grouped.dtype, grouped.k, 1), matrix_of(grouped)
        if s.swap:
            out = Result(grouped.out, 1, grouped.n)
            spec = GemmSpec(grouped.n, grouped.rows, grouped.k, matrix, rows, out)
        else:
            out = Result(grouped.out, grouped.columns, 1)
            spec = GemmSpec(grouped.rows, grouped.columns, grouped.k, rows, matrix, out,
                            parts=grouped.halves, part=grouped.columns * grouped.k)
        major = "MN" if grouped.transposed else "K"
        a, b = (OperandTile(grouped.dtype, major if s.swap == left else "K", extent, s.block_k, ROW_BYTES)
                for left, extent in ((True, s.block_m), (False, s.block_n)))
        return GroupedPlan(spec, s, a, b, grouped)

    # **** tiles ****

    @property
    def row_tile(self) -> OperandTile:
        """The operand that rows are."""
        return self.b if self.schedule.swap else self.a

    @property
    def matrix_tile(self) -> OperandTile: return self.a if self.schedule.swap else self.b

    @property
    def tokens(self) -> int:
        """Rows of a tile."""
        return self.row_tile.mn

    @property
    def tile_columns(self) -> int:
        """Columns of the result that a tile has."""
        return self.matrix_tile.mn // self.grouped.halves

    @property
    def tiles_across(self) -> int:
        """Tiles of one matrix's columns."""
        return -(-self.grouped.columns // self.tile_columns)

    @property
    def most_tiles(self) -> int:
        """Tiles there can be: each group may have one that is not full."""
        spec = self.grouped
        partial = min(spec.groups, spec.rows)
        return (partial + (spec.rows - partial) // self.tokens) * self.tiles_across

    @property
    def each(self) -> int:
        """Groups that a lane counts the tiles of."""
        return -(-self.grouped.groups // LANES)

    # **** loads ****

    @property
    def box_rows(self) -> int:
        """Rows of a box of a matrix."""
        if self.grouped.transposed: return self.matrix_tile.k
        shares = self.readers if self.schedule.swap and self.grouped.activation else 1
        return self.matrix_tile.mn // (self.grouped.halves * shares)

    @property
    def matrix_boxes(self) -> list[Box]:
        """Boxes of a tile of a matrix."""
        if self.grouped.transposed:
            inner = self.matrix_tile.inner
            return [Box(at, 0, at) for at in range(0, self.matrix_tile.mn, inner)]
        rows, halves = self.box_rows, self.grouped.halves
        return [Box((share * halves + half) * rows, half, share * rows)
                for share in range(self.matrix_tile.mn // (halves * rows)) for half in range(halves)]

    @property
    def gathers_rows(self) -> bool:
        """Whether threads copy rows from where they lie; else they are boxes."""
        return bool(self.grouped.gather)

    @property
    def arriving_bytes(self) -> int:
        """Bytes of a matrix that TMA brings to a stage."""
        return self.matrix_tile.nbytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of a stage that TMA brings."""
        return self.arriving_bytes + (0 if self.gathers_rows else self.row_tile.nbytes)

    @property
    def b_start(self) -> int:
        """Offset at which the right operand's stages begin, behind the left one's."""
        return -(-self.a.nbytes * self.schedule.depth // 1024) * 1024

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all stages."""
        return self.b_start + self.schedule.depth * self.b.nbytes

    @property
    def loaders(self) -> int:
        """Threads beside TMA's warp that copy: gathered rows, and scales. Where all do not divide the copies
        of rows, 64 do: one that is predicated would be a branch in each stage."""
        if not self.gathers_rows and not self.grouped.scaled: return 0
        return LOADERS if not self.gathers_rows or self.tokens * CHUNKS % LOADERS == 0 else LOADERS - LANES

    @property
    def scale_bytes(self) -> int:
        """Bytes of a stage's scales: scales of its rows, and one of gate and of up, or of the matrix; in
        pairs."""
        return 4 * (self.tokens + 2) if self.grouped.scaled else 0

    @property
    def passes(self) -> int:
        """Copies that a thread makes of a tile of gathered rows."""
        return self.tokens * CHUNKS // self.loaders

    # **** stores ****

    @property
    def panel(self) -> Panel:
        """Results on their way: 16 rows of a warp, or with `swap` all rows and 64 columns of a consumer."""
        size = self.grouped.out.itemsize
        if self.schedule.swap: return Panel("N", self.tokens, 64 * size, 4)
        return Panel("N", 16, span_of(self.tile_columns * size), 1)

    @property
    def staging_bytes(self) -> int:
        """Shared memory of all panels."""
        return self.panel.nbytes * self.consumers * (1 if self.schedule.swap else 4)

    @property
    def table_bytes(self) -> int:
        """Shared memory of what is known of groups: three arrays, each at a multiple of 16."""
        return 4 * (2 * (LANES * self.each + 4) + LANES)


def problems(spec: GroupedGemmSpec, schedule: GroupedWgmma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    return operands(spec) or of_plan(GroupedPlan.of(spec, schedule))


def of_plan(plan: GroupedPlan) -> list[str]:
    """The schedule against the matmul's tiles, shared memory and registers."""
    s = plan.schedule
    return wgmma.warps(s) or wgmma.extents(s, plan.spec, plan.MOST_ROWS) or [*_tile(plan), *_room(plan)]


def operands(spec: GroupedGemmSpec) -> list[str]:
    """Operands and results that the kernel cannot have."""
    out, size = [], spec.dtype.itemsize
    if spec.out not in FLOAT16S:
        out.append(f"{'results' if spec.scaled else 'operands'} of {spec.out.name}: float16 and bfloat16")
    for name, extent, one in (("x and w", spec.k, size), ("the result", spec.columns, spec.out.itemsize)):
        if extent * one % ALIGNED:
            out.append(f"rows of {name} have {extent} × {one} B = {extent * one} B, not a multiple of "
                       f"{ALIGNED}")
    if spec.transposed and spec.activation: out.append("gate and up of matrices (K, N)")
    if spec.groups > LANES * MOST_EACH: out.append(f"{spec.groups} groups, at most {LANES * MOST_EACH}")
    if spec.gather and spec.x_rows * spec.k * size >= MOST_BYTES:
        out.append(f"x has {spec.x_rows} × {spec.k} × {size} B, gathered rows are below {MOST_BYTES} B")
    return out


def _tile(plan: GroupedPlan) -> list[str]:
    """Tiles whose boxes and panels cannot be."""
    s, out = plan.schedule, []
    if s.block_k * plan.a.size not in range(ROW_BYTES, (plan.MOST_BOXES + 1) * ROW_BYTES, ROW_BYTES):
        rows = " or ".join(f"{count * ROW_BYTES} B" for count in range(1, plan.MOST_BOXES + 1))
        out.append(f"block_k={s.block_k} × {plan.a.size} B: a stage has rows of {rows}")
    if s.cluster_ctas > 1 or s.stream: out.append("clusters, splits and stream-K: one CTA has a tile")
    if plan.box_rows > plan.MOST_ROWS or plan.tokens > MOST_BOX: out.append(f"boxes above {MOST_BOX} rows")
    if s.swap and plan.rows % (64 * plan.grouped.halves):
        out.append(f"{plan.rows} columns of gate and up for a consumer are no multiple of "
                   f"{64 * plan.grouped.halves}")
    if not s.swap and plan.tile_columns % 16:
        out.append(f"{plan.tile_columns} columns of a tile are no multiple of 16")
    if plan.gathers_rows and plan.tokens > MOST_GATHERED:
        out.append(f"{plan.tokens} gathered rows of a tile, at most {MOST_GATHERED}")
    if plan.grouped.scaled: out += _scale_problems(plan)
    if plan.most_tiles > limits.MOST: out.append(f"{plan.most_tiles} tiles are above {limits.MOST}")
    return out


def _scale_problems(plan: GroupedPlan) -> list[str]:
    """Scales of blocks against the tile: one of a half of its columns."""
    out = []
    if GROUP % plan.tile_columns:
        out.append(f"{plan.tile_columns} columns of a tile do not divide the {GROUP} of a scale")
    if plan.grouped.activation and plan.grouped.columns % GROUP:
        out.append(f"up begins at column {plan.grouped.columns}, not at a multiple of the {GROUP} of a scale")
    if plan.schedule.swap and plan.tokens > MOST_FINE_COLUMNS:
        out.append(f"{plan.tokens} rows with a scale each, swapped at most {MOST_FINE_COLUMNS}")
    return out


def _room(plan: GroupedPlan) -> list[str]:
    """Shared memory and registers."""
    s, out, most = plan.schedule, [], limits.SMEM_BYTES["sm_90a"]
    # in the kernel's order: what is swizzled, the ring and what is stored from, begins at a multiple of 1024
    ring = _above(plan.table_bytes) + plan.ring_bytes
    needed = _above(ring + plan.barrier_bytes + plan.scale_bytes * s.depth) + plan.staging_bytes
    if needed > most:
        out.append(f"{s.depth} stages × {plan.stage_bytes} B + {plan.staging_bytes} B to store from + "
                   f"{plan.table_bytes} B of groups + {plan.scale_bytes * s.depth} B of scales + "
                   f"{plan.barrier_bytes} B of barriers, aligned, = {needed} B of shared memory, sm_90a has "
                   f"{most}")
    most_sums = min(plan.most_sums, plan.MOST_SWAPPED) if s.swap else plan.most_sums
    if plan.sums > most_sums:
        out.append(f"{plan.sums} sums a thread, at most {most_sums} with {plan.consumers} consumers"
                   f"{', swapped' if s.swap else ''}")
    return out


def _above(nbytes: int) -> int: return -(-nbytes // 1024) * 1024


Tile = tuple[int, int, int, bool, bool]     # rows, columns, warps, ping-pong, swapped
# those that an H100 took less for than for others of the same prediction come first
TILES: tuple[Tile, ...] = (
    *((128, tokens, 12, True, True) for tokens in (8, 16, 24, 32, 48, 64)), (256, 96, 12, False, True),
    (128, 256, 12, False, False), (64, 256, 12, True, False), (128, 128, 12, True, False),
    (64, 128, 12, True, False), (256, 128, 12, False, False), (64, 128, 8, False, False),
    *((256, tokens, 12, False, True) for tokens in (8, 16, 24, 32, 48, 64, 128)),
    *((128, tokens, 12, False, True) for tokens in (8, 16, 24, 32, 48, 64, 96, 128, 160, 192)))
SCALED_TILES: tuple[Tile, ...] = (
    (128, 128, 12, False, False), (64, 128, 12, True, False), (64, 128, 8, False, False),
    *((rows, tokens, 12, rows == 64, True) for rows in (256, 128, 64) for tokens in (8, 16, 24, 32, 48, 64)),
    *((128, tokens, 12, True, True) for tokens in (8, 16, 24, 32, 48, 64)))
DEPTHS = range(8, 1, -1)


S = TypeVar("S", bound=GroupedWgmma)


def candidates(spec: GroupedGemmSpec, gpu: GPU) -> list[GroupedWgmma]:
    """The tiles, each with as many stages as fit; none where there is no wgmma."""
    return _deepest(GroupedWgmma(), TILES, spec, gpu.arch)


def candidates_transposed(spec: TransposedGroupedSpec, gpu: GPU) -> list[GroupedTransposedWgmma]:
    """Returns the candidates for matrices (K, N)."""
    return _deepest(GroupedTransposedWgmma(), TILES, spec, gpu.arch)


def candidates_with_scales(spec: ScaledGroupedGemmSpec, gpu: GPU) -> list[GroupedScaledWgmma]:
    """Returns the candidates for operands with scales."""
    return _deepest(GroupedScaledWgmma(), SCALED_TILES, spec, gpu.arch)


def _deepest(kind: S, tiles: Sequence[Tile], spec: GroupedGemmSpec, arch: str) -> list[S]:
    made = []
    for m, n, warps, pingpong, swap in tiles if arch == "sm_90a" else ():
        schedule = kind.block(m, n).k(ROW_BYTES // spec.dtype.itemsize).warps(warps)
        if pingpong: schedule = schedule.pingpong()
        if swap: schedule = schedule.swap_operands()
        depths = [schedule.stages(depth) for depth in DEPTHS]
        made.append(next((s for s in depths if not problems(spec, s, arch)), depths[-1]))
    return made


PROMOTED = 0.3          # of wgmmas' time that sums of fp8 take, which are added in float32
L2_IN_STEP = 1.05       # times the rate of L2: neighbours read the same columns in step; fitted, too
STEP = 60               # cycles of a stage's barriers and issue that nothing hides
FEW = 4         # rows of a group below which what HBM brings goes to other SMs when one has no more tiles
# until CTAs know their tiles and groups, and the first is there: six matmuls of one token on an H100, of 26
# to 81 us, took 2.2 to 3.9 us longer than their bytes and a launch
BEGIN_S = 3e-6
LINES = 400             # cycles until the first lines of an epilogue are stored
STORED = 32             # bytes of results a cycle of an epilogue
# of HBM, where gathered rows are wgmma's rows or `MANY` of them a tile. With this and `L2_IN_STEP` six
# matmuls of gathered rows, 1024 and 4096 tokens, get schedules within 3 % of the best that an H100 timed
MANY, GATHERED_HBM = 128, 1.05


def cost(spec: GroupedGemmSpec, s: GroupedWgmma, gpu: GPU) -> Prediction:
    """The prediction of a schedule."""
    plan, model = GroupedPlan.of(spec, s), gpu_model_for(gpu.arch, gpu.sm_count)
    count = tiles(spec, plan.tokens) * plan.tiles_across
    rate = model.tensor_fma * model.tensor_scale(spec.dtype, False)
    left = ceil(s.block_m / 64) * (64 + s.block_n) * plan.steps * INSTRUCTION_BYTES
    multiplied = s.block_m * s.block_n * s.block_k / rate * (1 + PROMOTED * plan.needs_promotion)
    step = max(multiplied, (left + plan.stage_bytes) / SMEM_BYTES_PER_CYCLE,
               STEP)
    ending = 0 if plan.pingpong else LINES + plan.tokens * plan.tile_columns * spec.out.itemsize / STORED
    # an SM has whole tiles, and at most a ring of them on its way
    waves = ceil(count / model.sm_count)
    computing = waves * (plan.iterations * step + ending) / model.clock_hz / model.sustained
    fed = waves * plan.iterations * model.load_s / s.depth
    many = spec.rows >= FEW * active(spec)
    uneven = waves * model.sm_count / count if many and count > model.sm_count else 1.0
    hbm = max(hbm_seconds(spec, model) * uneven, fed)
    if plan.gathers_rows and (not s.swap or plan.tokens >= MANY): hbm *= GATHERED_HBM
    l2 = count * plan.iterations * plan.stage_bytes / (L2_IN_STEP * model.l2_bytes_per_s)
    return Prediction(computing, hbm, l2, model.launch_s + model.load_s + BEGIN_S)
