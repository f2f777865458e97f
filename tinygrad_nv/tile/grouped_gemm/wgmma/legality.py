"""Legality of `grouped_wgmma`: what it asks of a schedule."""
from __future__ import annotations

from tinygrad_nv.tile import limits
from tinygrad_nv.tile.gemm.spec import FLOAT16S
from tinygrad_nv.tile.gemm.wgmma import legality as wgmma
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedWgmma
from tinygrad_nv.tile.grouped_gemm.spec import GROUP, GroupedGemmSpec
from tinygrad_nv.tile.grouped_gemm.wgmma.plan import LANES, MOST_EACH, ROW_BYTES, GroupedPlan
from tinygrad_nv.tile.scaled_gemm.legality import MOST_FINE_COLUMNS
from tinygrad_nv.tile.wgmma_tiles import MOST_BOX

ALIGNED = 16                # bytes that TMA, cp.async and stores of 16 bytes ask of a row
MOST_BYTES = 1 << 32        # of rows, which have 32-bit places
MOST_GATHERED = 192         # rows of a tile: a loader keeps the place of each of its copies


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
