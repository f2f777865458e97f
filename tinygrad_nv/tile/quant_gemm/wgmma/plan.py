"""What follows from a spec and a schedule of `quant_wgmma`.

Protocol: that of gemm/wgmma/plan.py, of the transposed matmul: rows are those of the matrix, whose codes and
factors are boxes of a stage, columns are rows of activations.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from tinygrad_nv.quant.types import QType
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.quant_gemm.schedules import QuantWgmma
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.quant_gemm.stages import Box, boxes
from tinygrad_nv.tile.wgmma_tiles import OperandTile, natural_span, taken

PENDING = 2     # groups of wgmmas in flight while the next operands are made
MAP_DTYPES = {1: "u8", 2: "u16", 4: "u32"}  # by size


@dataclass(frozen=True)
class QuantWgmmaPlan(WgmmaPlan):
    """See above. `a` is the operand as registers have it."""
    schedule: QuantWgmma
    quant: QuantGemmSpec

    @staticmethod
    @lru_cache(1024)
    def of(quant: QuantGemmSpec, s: QuantWgmma) -> QuantWgmmaPlan:
        """The plan."""
        spec = quant.gemm.swapped()
        major = taken(spec.b, spec.n, spec.k)[0] or "K"
        row = (s.block_k if major == "K" else s.block_n) * spec.b.dtype.itemsize
        a = OperandTile(spec.a.dtype, "K", s.block_m, s.block_k, 128)
        b = OperandTile(spec.b.dtype, major, s.block_n, s.block_k, natural_span(row))
        return QuantWgmmaPlan(spec, s, a, b, quant)

    @property
    def type(self) -> QType: return self.quant.type

    @cached_property
    def boxes(self) -> tuple[Box, ...]:
        """Codes and factors of a stage."""
        return boxes(self.quant, self.schedule.block_m, self.schedule.block_k)

    @property
    def matrix_bytes(self) -> int:
        """Shared memory of a stage's boxes."""
        return self.boxes[-1].end

    @property
    def stage_bytes(self) -> int:
        """Bytes that arrive."""
        return sum(box.nbytes for box in self.boxes) + self.b.nbytes

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all stages: boxes first, then activations."""
        s = self.schedule
        return self.activations_start + s.depth * self.b.nbytes

    @property
    def activations_start(self) -> int: return -(-self.matrix_bytes * self.schedule.depth // 1024) * 1024

    def map(self, box: Box, pointer: int) -> MapArgument:
        """The tensor map of a box."""
        tiles, *inner = self.quant.buffers[box.name].shape
        count = 1
        for extent in inner: count *= extent
        if box.codes: count //= 4
        return MapArgument(pointer, MAP_DTYPES[box.size], (count, tiles), (count * box.size,),
                           (box.inner, box.tiles), "none")

    @property
    def staggered(self) -> int: return 0

    @property
    def grouped(self) -> bool:
        """Whether a row has several scales, which are multiplied with elements."""
        return bool(self.type.scale.columns)
