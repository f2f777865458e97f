"""How a result is stored: in pairs of elements, or by panels in shared memory (staging.py), by TMA or not."""
from __future__ import annotations

from dataclasses import dataclass, replace

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import StoreTarget
from tinygrad_nv.tile.lanes import FP8
from tinygrad_nv.tile.launch import MapArgument

SPANS = (128, 64, 32)


@dataclass(frozen=True)
class Panel:
    """`lines` lines of `line_bytes` bytes along `major`; `group` warps share one."""
    major: str
    lines: int
    line_bytes: int
    group: int

    @property
    def span(self) -> int:
        """The width of a column."""
        return span_of(self.line_bytes)

    @property
    def nbytes(self) -> int: return self.lines * self.line_bytes

    def extents(self, size: int) -> tuple[int, int]:
        """Its rows and columns of the result."""
        inner = self.line_bytes // size
        return (self.lines, inner) if self.major == "N" else (inner, self.lines)


def span_of(line_bytes: int) -> int:
    """The widest swizzle that lines can have; 0 for none."""
    return next((span for span in SPANS if line_bytes % span == 0), 0)


def panel_of(major: str, rows: int, columns: int, group: int, size: int) -> Panel | None:
    """The panel for a group whose tile has `rows` × `columns` elements of `size` bytes; None where its lines
    are no multiples of 32 bytes. Of M-major ones a line has all rows of the group."""
    if major == "N":
        span = span_of(columns * size)
        return Panel("N", 16 * group, span, group) if span else None
    line = rows * size
    lines = next((lines for lines in (64, 32, 16, 8) if columns % lines == 0
                  and (lines * line <= 2048 * group or lines == 8)), 0)
    return Panel("M", lines, line, group) if span_of(line) and lines else None


@dataclass(frozen=True)
class StorePlan:
    """How the result is stored. `edges_m`, `edges_n`: whether tiles reach beyond it. `batch_dimensions`:
    those of the batch that the map has."""
    edges_m: bool
    edges_n: bool
    panel: Panel | None = None
    smem_bytes: int = 0
    map: MapArgument | None = None
    batch_dimensions: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.panel is None: return "elements"
        how = "TMA" if self.map else "16 B a thread"
        return f"{how}, panels of {self.panel.lines} x {self.panel.line_bytes} B"


@dataclass(frozen=True)
class StoreTile:
    """How the sums of a CTA lie when they are stored. The result is covered by tiles of `rows` × `columns`, a
    CTA's or those of a cluster together. A CTA has `groups` groups of `warps` warps; each group holds
    `group_rows` × `group_columns`. A group is one warp, or the 4 of a warpgroup, which have 16 rows each and
    store by TMA."""
    rows: int
    columns: int
    groups: int
    warps: int
    group_rows: int
    group_columns: int


def warp_tile(rows: int, columns: int, warps_m: int, warps_n: int = 1) -> StoreTile:
    """A CTA's tile whose warps store for themselves."""
    return StoreTile(rows, columns, warps_m * warps_n, 1, rows // warps_m, columns // warps_n)


def store_plan(stored: StoreTarget, tile: StoreTile) -> StorePlan:
    """The plan for a result and a CTA's tile."""
    out = stored.out
    plan = StorePlan(stored.symbolic or stored.m % tile.rows != 0, stored.n % tile.columns != 0)
    if not out.major or out.operand("m").alignment_bytes < 16: return plan
    panel = panel_of(out.major, tile.group_rows, tile.group_columns, tile.warps, out.dtype.itemsize)
    if panel is None: return plan
    # lines end where a chunk of 16 bytes does: by TMA, too, which an H100 lets write all of the last chunk
    along, edges = (stored.n, plan.edges_n) if out.major == "N" else (stored.m, plan.edges_m)
    if edges and (along * out.dtype.itemsize % 16 or (out.major == "M" and stored.symbolic)): return plan
    plan = replace(plan, panel=panel, smem_bytes=tile.groups * 2 * panel.nbytes)
    return with_map(plan, stored) if tile.warps == 4 else plan


def with_map(plan: StorePlan, stored: StoreTarget) -> StorePlan:
    """The plan with a tensor map of the result."""
    out, panel, size = stored.out, plan.panel, stored.out.dtype.itemsize
    assert panel is not None
    batch = tuple(i for i, extent in enumerate(stored.batch) if extent > 1)
    extents, pitch = ((stored.n, stored.m), out.m) if out.major == "N" else ((stored.m, stored.n), out.n)
    made = MapArgument(0, map_dtype(out.dtype), (*extents, *(stored.batch[i] for i in batch)),
                       (pitch * size, *(out.batch[i] * size for i in batch)),
                       (panel.span // size, panel.lines, *(1 for _ in batch)), f"{panel.span}B",
                       out.offset * size, -1 if not stored.symbolic else int(out.major == "N"))
    return replace(plan, map=made, batch_dimensions=batch)


def map_dtype(dtype: DType) -> str:
    """A dtype as tensor maps name it."""
    if dtype in (*FP8, dtypes.int8, dtypes.bool): return "u8"
    return "u16" if dtype == dtypes.int16 else short(dtype)
