"""Plan of `quant_wgmma`, which follows from a spec and a schedule.

Protocol: that of gemm/wgmma/plan.py, of the transposed matmul: rows are those of the matrix, whose codes and
factors are boxes of a stage, columns are rows of activations. `MatrixStages` is what a plan has beside, whose
operand A is made of a quantised matrix.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tinygrad_nv.quant.types import TILE, QType
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.quant_gemm.schedules import QuantWgmma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.stages import Box, boxes
from tinygrad_nv.tile.wgmma_tiles import OperandTile, choose_major, natural_span

PENDING = 2     # groups of wgmmas in flight while the next operands are made
MAP_DTYPES = {1: "u8", 2: "u16", 4: "u32"}  # by size


class MatrixStages(WgmmaPlan):
    """Stages of a quantised matrix, and of activations. `a` is the operand as registers have it. A tile has
    rows of `halves` matrices, those of one after those of the other."""
    quant: QuantGemmSpec

    @property
    def halves(self) -> int: return 1

    @property
    def stagger_stages(self) -> int: return 0

    @property
    def type(self) -> QType: return self.quant.type

    @property
    def has_row_scales(self) -> bool:
        """Whether a row has several scales, which are multiplied with elements."""
        return bool(self.type.scale.columns)

    # **** shared memory ****

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Codes and factors of a stage."""
        return boxes(self.quant, self.schedule.block_m, self.schedule.block_k)

    @property
    def matrix_bytes(self) -> int:
        """Shared memory of a stage's boxes."""
        return self.boxes[-1].end

    @property
    def arriving_bytes(self) -> int:
        """Bytes of a stage that are copied."""
        return sum(box.nbytes for box in self.boxes)

    @property
    def b_start(self) -> int:
        """Offset at which stages of activations begin."""
        return -(-self.matrix_bytes * self.schedule.depth // 1024) * 1024

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all stages: boxes first, then activations."""
        return self.b_start + self.schedule.depth * self.b.nbytes

    def map(self, box: Box, shape: tuple[int, ...], pointer: int) -> MapArgument:
        """The tensor map of a box of a buffer of a shape: that of one of the matrices."""
        tiles, *inner = shape
        count = 1
        for extent in inner: count *= extent
        if box.codes: count //= 4
        return MapArgument(pointer, MAP_DTYPES[box.size], (count, tiles), (count * box.size,),
                           (box.inner, box.tiles // self.halves), "none")

    # **** tiles of a warp ****

    @property
    def tiles_apart(self) -> int:
        """Tiles of 16 rows of a stage between those of a consumer and of the next one."""
        return self.rows // self.halves // TILE if self.readers > 1 else 0

    @property
    def warp_tiles(self) -> tuple[int, ...]:
        """Tiles of a warp, one for each 64 rows of its consumer, after the first."""
        each, half = self.subtiles // self.halves, self.schedule.block_m // self.halves // TILE
        return tuple(number // each * half + number % each * 4 for number in range(self.subtiles))


@dataclass(frozen=True)
class QuantWgmmaPlan(MatrixStages):
    """See above."""
    schedule: QuantWgmma
    quant: QuantGemmSpec

    @staticmethod
    @lru_cache(1024)
    def of(quant: QuantGemmSpec, s: QuantWgmma) -> QuantWgmmaPlan:
        """The plan."""
        spec = quant.gemm.swap_operands()
        major = choose_major(spec.b, spec.n, spec.k)[0] or "K"
        row = (s.block_k if major == "K" else s.block_n) * spec.b.dtype.itemsize
        a = OperandTile(spec.a.dtype, "K", s.block_m, s.block_k, 128)
        b = OperandTile(spec.b.dtype, major, s.block_n, s.block_k, natural_span(row))
        return QuantWgmmaPlan(spec, s, a, b, quant)

    @property
    def stage_bytes(self) -> int:
        """Bytes that arrive."""
        return self.arriving_bytes + self.b.nbytes
