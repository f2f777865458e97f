"""How a grouped matmul is computed on a CPU: its schedule, and what follows from it and a spec.

Protocol: elements are multiplied in units of 32 bits along k (cpu/gemm.h): pairs of bfloat16 where the
processor multiplies those, else float32. A panel is 16 columns of a matrix. Panels are taken two at a time by
AMX, and where columns are gate | up: the same columns of both halves.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu.gemm.layout import PANEL, PER, UNITS
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import up
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, MixedGroupedSpec, TransposedGroupedSpec

SMALL = 1 << 21             # flops below which threads are not worth waking
FEW, FEW_OF_TILES = 8, 4
MOST_M = 256                # rows of a block
STRIP = 16                  # rows whose units lie side by side
BLOCK_UNITS = 256           # of a panel: two of them take 32 KB of the first cache
PITCH = BLOCK_UNITS + 16    # rows at distances of a power of two would share sets of the cache


@dataclass(frozen=True)
class CPUGrouped(CPUSchedule):
    """`block_m` rows of a group are multiplied with its matrix at a time. `zeroes`: rows that no group has
    become zeros."""
    block_m: int = MOST_M
    template: ClassVar[str] = "grouped_gemm"
    zeroes: ClassVar[bool] = True

    def words(self) -> list[str]: return [*super().words(), f"blocks of {self.block_m} rows"]


class CPUGroupedMixed(CPUGrouped):
    """Schedule of float32 rows and matrices of 16-bit floats."""
    template: ClassVar[str] = "grouped_mixed"


class CPUGroupedTransposed(CPUGrouped):
    """Schedule of matrices whose rows are k."""
    template: ClassVar[str] = "grouped_transposed"


@dataclass(frozen=True)
class Layout:
    """Layout that follows from a spec and an instruction set."""
    spec: GroupedGemmSpec
    isa: ISA

    @property
    def kind(self) -> str:
        """Kind of units."""
        return "pair" if self.spec.dtype == dtypes.bfloat16 and self.isa.bf16 else "fma"

    @property
    def per(self) -> int:
        """Elements of a unit."""
        return PER[self.kind]

    @property
    def by_tiles(self) -> bool:
        """Whether AMX multiplies."""
        return self.isa.level == "amx" and self.kind == "pair"

    @property
    def few(self) -> int:
        """Rows of a group that are multiplied as dot products. (48 groups of 4 rows, 1024 x 2048: 14.3 ms, by
        tiles 21.1; of 6 rows 19.5 and 16.6. Without tiles 8 rows: 22.3 ms, in registers 48.9.)"""
        if self.spec.transposed: return 0       # columns do not lie along k
        return FEW_OF_TILES if self.by_tiles else FEW

    @property
    def in_place(self) -> bool:
        """Whether tiles are loaded from a matrix as it lies."""
        return self.by_tiles and not self.spec.transposed and self.spec.k % (UNITS * self.per) == 0

    @property
    def units(self) -> int:
        """Number of units of a row, with zeros behind what there is."""
        return up(-(-self.spec.k // self.per), UNITS)

    @property
    def panels(self) -> int:
        """Number of panels that are multiplied together."""
        return 2 if self.by_tiles or self.spec.activation else 1

    @property
    def step(self) -> int:
        """Columns of the result of so many panels."""
        return PANEL * self.panels // self.spec.halves

    @property
    def shares(self) -> int:
        """Steps of all columns, which parts share out."""
        return -(-self.spec.columns // self.step)

    def own_bytes(self, block_m: int) -> int:
        """A part's workspace: a block's sums, then its rows in units."""
        return 4 * block_m * (PANEL * self.panels + self.units)


def default(spec: GroupedGemmSpec, target: CPU) -> CPUGrouped:
    """The default schedule. A block's rows and sums take half of the second cache where AMX multiplies. Else
    they may come from the third, so that a matrix is copied fewer times: 8 groups of 128 rows, 512 x 3584, on
    1 thread of an AMD EPYC take 71 ms in blocks of 48 rows, 55 in one (bfloat16; other work ran)."""
    l = Layout(spec, target.isa)
    room = target.l2_bytes // 2
    if not l.by_tiles: room = max(room, target.l3_bytes // (2 * target.threads))
    most = max(STRIP, min(MOST_M, room // l.own_bytes(1), up(spec.rows, STRIP)))
    parts = 1 if spec.flops < SMALL else min(target.threads, l.shares)
    return CPUGrouped(target.isa, parts, most // STRIP * STRIP)


def default_mixed(spec: MixedGroupedSpec, target: CPU) -> CPUGroupedMixed:
    """The default schedule of float32 rows and matrices of 16-bit floats."""
    made = default(spec, target)
    return CPUGroupedMixed(made.isa, made.parts, made.block_m)


def default_transposed(spec: TransposedGroupedSpec, target: CPU) -> CPUGroupedTransposed:
    """The default schedule of matrices whose rows are k."""
    made = default(spec, target)
    return CPUGroupedTransposed(made.isa, made.parts, made.block_m)


def problems(spec: GroupedGemmSpec, s: CPUGrouped) -> list[str]:
    """Why a matmul cannot have a schedule; empty when it can."""
    if s.block_m and not s.block_m % STRIP: return []
    return [f"block_m {s.block_m}, a multiple of {STRIP} is needed"]
