"""How a dot is computed: by mma.sync, by wgmma, or in ordinary arithmetic; and where its operands come from.

Protocol: `plan_dot` chooses by dtypes, extents and architecture. Tensor cores take operands of at least 16
rows or columns, of 16 bits, bytes, and float32 where it may be rounded to TF32; products of float32 are
computed in float32. Warps stand along the rows of a result whose rows belong together (of a softmax, or the
left operand of the next dot), else as square as the tile is.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.fragments import STEP_BYTES
from tinygrad_nv.tile.language.gpu.layout import Layout, accumulator, bits_of, spread
from tinygrad_nv.tile.language.ir import Op, Value
from tinygrad_nv.tile.layout import SharedTile

Kind = Literal["mma", "wgmma", "fma"]
FP8 = (dtypes.fp8e4m3, dtypes.fp8e5m2)
LEAST = 16          # rows, and columns, of an operand of tensor cores
WARPS = 4           # of a warpgroup
GROUP_ROWS = 64     # of one wgmma
MOST_COLUMNS = 256


@dataclass(frozen=True)
class DotPlan:
    """A dot of (m, k) and (k, n), and how many warps there are along rows and columns of the result.
    `k_major`: elements of a column of the right operand lie side by side."""
    kind: Kind
    m: int
    n: int
    k: int
    warps_m: int
    warps_n: int
    step: int = LEAST       # elements of k that are multiplied at once
    k_major: bool = False

    def layout(self, thread_bits: int) -> Layout:
        """Returns the layout of the accumulator."""
        if self.kind == "fma": return spread((self.m, self.n), thread_bits, self.k_major, self.warps_m > 1)
        return accumulator((self.m, self.n), self.warps_m, self.warps_n, self.kind == "wgmma")

    @property
    def groups_m(self) -> int:
        """Warpgroups along the rows."""
        return self.warps_m // WARPS

    @property
    def groups_n(self) -> int:
        """Warpgroups along the columns."""
        return self.warps_n

    @property
    def rows(self) -> int:
        """Rows that all warps have of the left operand, those beyond it included."""
        if self.kind == "fma": return 1 << bits_of(self.m)
        return -(-self.m // (LEAST * self.warps_m)) * LEAST * self.warps_m

    @property
    def columns(self) -> int:
        """Columns that all warps have of the right operand."""
        if self.kind == "fma": return 1 << bits_of(self.n)
        return -(-self.n // (LEAST * self.warps_n)) * LEAST * self.warps_n


    @property
    def depth(self) -> int:
        """Elements of k with those that are multiplied beyond it, which are 0."""
        return -(-self.k // self.step) * self.step


@dataclass(frozen=True, eq=False)
class Role:
    """An operand of a dot: the left (0) or the right one (1), `flipped` where it is the transpose of what is
    held."""
    op: Op
    side: int
    flipped: bool

    def extents(self, plan: DotPlan) -> tuple[int, int]:
        """Rows and columns of what is held that the dot reads."""
        made = (plan.rows, plan.depth) if self.side == 0 else (plan.depth, plan.columns)
        return made[::-1] if self.flipped else made

    @property
    def mn_major(self) -> bool:
        """Whether elements lie side by side along m or n, rather than along k."""
        return self.flipped == (self.side == 0)


def source_of(value: Value, makers: Mapping[Value, Op]) -> tuple[Value, bool]:
    """Returns what an operand of a dot is, and whether it is the transpose of that."""
    flipped = False
    while (op := makers.get(value)) is not None and op.name == "transpose":
        value, flipped = op.operands[0], not flipped
    return value, flipped


def plan_dot(op: Op, roles: Sequence[Role], rows: bool, warps: int, arch: str) -> DotPlan:
    """The plan of a dot with its operands. `rows`: the elements of a row of its result belong together."""
    a, b = op.operands[:2]
    (m, k), n = a.shape, b.shape[1]
    exact = a.dtype == dtypes.float32 and not op.attributes["tf32"]
    old = a.dtype in FP8 and arch < "sm_89"
    if exact or old or min(m, n) < LEAST:
        return DotPlan("fma", m, n, k, warps if rows else 1, 1, 1, not roles[1].mn_major)
    made = _plan_wgmma(op, roles, rows, warps) if arch == "sm_90a" else None
    if made is not None: return made
    warps_m, warps_n = _warps(m, n, warps, rows)
    return DotPlan("mma", m, n, k, warps_m, warps_n, STEP_BYTES // a.dtype.itemsize)


def _plan_wgmma(op: Op, roles: Sequence[Role], rows: bool, warps: int) -> DotPlan | None:
    """A plan with wgmma; None where it does not take the operands."""
    a, b = op.operands[:2]
    (m, k), n = a.shape, b.shape[1]
    size = a.dtype.itemsize
    step = STEP_BYTES // size
    if warps % WARPS or m <= GROUP_ROWS // 2 or size == 4: return None
    if size == 1 and any(role.mn_major for role in roles): return None      # bytes along K alone
    rows_held, depth, columns = (-(-extent // unit) * unit
                                 for extent, unit in ((m, GROUP_ROWS), (k, step), (n, LEAST)))
    held = zip(roles, ((rows_held, depth), (depth, columns)), strict=True)
    if any(SharedTile(1, _row_bytes(role, extents, size)).span < STEP_BYTES for role, extents in held):
        return None
    most_m = max(1 << bits_of(m) - 6, 1)
    groups = warps // WARPS
    choices = [(i, groups // i) for i in (1 << bit for bit in range(groups.bit_length())) if i <= most_m]
    fit = [(i, j) for i, j in choices if (j == 1 or n == 1 << bits_of(n)) and n // j >= LEAST
           and -(-n // (LEAST * j)) * LEAST <= MOST_COLUMNS]
    if not fit: return None
    # of each 64 rows and their columns, what a wgmma reads of shared memory
    groups_m, groups_n = fit[-1] if rows else min(
        fit, key=lambda each: (-(-m // each[0] // GROUP_ROWS) * (GROUP_ROWS + n // each[1]), -each[0]))
    return DotPlan("wgmma", m, n, k, WARPS * groups_m, groups_n, step)


def _row_bytes(role: Role, extents: tuple[int, int], size: int) -> int:
    """Bytes of a row of an operand as it is held."""
    return extents[0 if role.flipped else 1] * size


def _warps(m: int, n: int, warps: int, rows: bool) -> tuple[int, int]:
    """Warps along rows and columns."""
    most_m, most_n = (1 << bits_of(extent) - 4 for extent in (m, n))
    choices = [(i, warps // i) for i in (1 << bit for bit in range(warps.bit_length())) if i <= most_m]
    fit = [each for each in choices if each[1] <= most_n] or choices[-1:]
    if rows: return fit[-1]
    return min(fit, key=lambda each: (m / each[0] + n / each[1], -each[0]))
