"""How a grouped matmul with quantised matrices is computed on a CPU: its schedule, and what follows from it
and a spec.

Protocol: matrices lie in tiles (quant/types.py). Parts share out tiles of columns, the same of every group's
matrix, so that all have as much to do whatever the routing is.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tinygrad_nv.cpu.gemm.layout import PER, kind_of
from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.cpu.kernel import up
from tinygrad_nv.cpu.quant_gemm import byte_panels, pairs, panels, tiles
from tinygrad_nv.cpu.quant_gemm.dots import BYTES_OF_PART
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.cpu.template import CPUSchedule
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.quant_gemm.spec import INT8_BLOCK, QuantGemmSpec
from tinygrad_nv.tile.quant_grouped.spec import QuantGroupedSpec

MOST_M = 256            # rows of a block


@dataclass(frozen=True)
class CPUQuantGrouped(CPUSchedule):
    """`block_m` rows of a group are multiplied with its matrix at a time, `rows` of them by one loop."""
    block_m: int = MOST_M
    rows: int = 1
    template: ClassVar[str] = "quant_grouped"

    def words(self) -> list[str]:
        return [*super().words(), f"blocks of {self.block_m} rows", f"{self.rows} rows at a time"]


@dataclass(frozen=True)
class Layout:
    """Layout that follows from a spec and an instruction set."""
    spec: QuantGroupedSpec
    isa: ISA

    @property
    def matrix(self) -> QuantGemmSpec:
        """Rows times one matrix."""
        return self.spec.matrix

    @property
    def across(self) -> int:
        """Tiles of columns of a matrix."""
        return -(-self.spec.grouped.columns // TILE)

    @property
    def pairs(self) -> bool:
        """Whether few rows stay pairs of bfloat16."""
        return pairs.takes(self.matrix, self.isa)

    @property
    def kind(self) -> str:
        """Kind of units of many rows."""
        return kind_of(self.matrix.gemm, self.isa)

    @property
    def by_tiles(self) -> bool:
        """Whether AMX multiplies many rows."""
        return not self.spec.int8 and panels.multiplies_tiles(self.matrix, self.isa)

    @property
    def few(self) -> int:
        """Rows of a group up to which it is multiplied by dot products; 0: all are."""
        looked_up = self.pairs and self.spec.type.bits < 8
        most = (panels.FEWEST_OF_PAIRS if looked_up and not self.by_tiles else panels.FEWEST_ROWS) - 1
        return 0 if self.spec.int8 or self.spec.grouped.rows <= most else most

    @property
    def byte_panels(self) -> bool:
        """Whether many rows in bytes are multiplied with panels."""
        return self.spec.int8 and self.spec.grouped.rows >= byte_panels.FEWEST_ROWS

    @property
    def strip(self) -> int:
        """Rows of a strip of many."""
        return panels.STRIP if self.by_tiles else panels.TALLEST[self.isa.lanes]

    @property
    def pitch(self) -> int:
        """Units from a row to the next: distances of a power of two would share sets of the cache."""
        return up(self.spec.grouped.k // PER[self.kind], 16) + 16

    @property
    def copies(self) -> int:
        """Times that rows are brought: each matrix may have columns in another order."""
        return self.spec.grouped.halves if self.spec.type.permuted else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that was copied for dot products."""
        k, type = self.spec.grouped.k, self.spec.type
        if self.spec.int8: return k + 4 * (k // INT8_BLOCK) + 8 * (k // tiles.step_of(type))
        return 2 * k + 4 * (k // tiles.run_of(type, k)) if self.pairs else 4 * k

    def own_bytes(self, block_m: int) -> int:
        """A part's workspace: a block's sums, then its rows."""
        most = max(self.row_bytes, 4 * self.pitch if self.few else 0)
        return up(block_m * (4 * TILE * self.spec.grouped.halves + self.copies * most), 64)


def default(spec: QuantGroupedSpec, target: CPU) -> CPUQuantGrouped:
    """The default schedule: a block's rows take half of the second cache."""
    l = Layout(spec, target.isa)
    step = l.strip if l.few else 1
    most = min(MOST_M, target.l2_bytes // 2 // l.own_bytes(1), up(spec.grouped.rows, step))
    parts = max(1, min(target.threads, l.across, spec.active_bytes // BYTES_OF_PART))
    return CPUQuantGrouped(target.isa, parts, max(step, most // step * step),
                           min(spec.grouped.rows, target.isa.registers // 4))


def problems(spec: QuantGroupedSpec, s: CPUQuantGrouped) -> list[str]:
    """Why a matmul cannot have a schedule; empty when it can."""
    l = Layout(spec, s.isa)
    if out := tiles.problems(spec.matrix): return out
    if not s.rows: out.append("rows 0")
    if not s.block_m or (l.few and s.block_m % l.strip):
        out.append(f"block_m {s.block_m}, a multiple of {l.strip if l.few else 1} is needed")
    return out
