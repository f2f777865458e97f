"""Plan of `sparse_wgmma`, which follows from a spec and a schedule.

Protocol: that of gemm/wgmma/plan.py, of the transposed matmul: rows are those of the sparse matrix. A stage
has `block_k` of its columns: half as many values, all of the activations, and metadata.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.quant.sparse import UNIT
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.sparse_gemm.schedules import SparseWgmma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec, metadata_bytes, steps_of_unit
from tinygrad_nv.tile.wgmma_tiles import K_BYTES, OperandTile, choose_major, natural_span


@dataclass(frozen=True)
class SparseWgmmaPlan(WgmmaPlan):
    """See above. `a` are values."""
    schedule: SparseWgmma
    sparse: SparseGemmSpec

    @staticmethod
    @lru_cache(1024)
    def of(sparse: SparseGemmSpec, s: SparseWgmma) -> SparseWgmmaPlan:
        """The plan."""
        spec = sparse.gemm.swap_operands()
        major = choose_major(spec.b, spec.n, spec.k)[0] or "K"
        size = spec.a.dtype.itemsize
        row = (s.block_k if major == "K" else s.block_n) * size
        a = OperandTile(spec.a.dtype, "K", s.block_m, s.block_k // 2, natural_span(s.block_k // 2 * size))
        b = OperandTile(spec.b.dtype, major, s.block_n, s.block_k, natural_span(row))
        return SparseWgmmaPlan(spec, s, a, b, sparse)

    @property
    def steps(self) -> int: return self.a.k * self.a.size // K_BYTES

    @property
    def unit_steps(self) -> int:
        """wgmmas of a unit of 64 columns."""
        return steps_of_unit(self.a.size)

    @property
    def units(self) -> int:
        """Units of a stage."""
        return self.schedule.block_k // UNIT

    @property
    def shape(self) -> str: return f"m64n{self.schedule.block_n}k{2 * K_BYTES // self.a.size}"

    @property
    def pending(self) -> int:
        """Groups of wgmmas in flight while the next metadata is read."""
        return min(self.units - 1, 1)

    @property
    def metadata_bytes(self) -> int:
        """Bytes of a stage's metadata."""
        return metadata_bytes(self.schedule.block_m, self.schedule.block_k)

    @property
    def stage_bytes(self) -> int: return self.a.nbytes + self.b.nbytes + self.metadata_bytes

    @property
    def metadata_map(self) -> MapArgument:
        """The tensor map of metadata, the third of the kernel's operands."""
        tiles, units, lanes = self.sparse.buffers["metadata"].shape
        return MapArgument(3, "u32", (units * lanes, tiles), (units * lanes * 4,),
                           (self.units * lanes, self.schedule.block_m // 16), "none")

    @property
    def stagger_stages(self) -> int: return 0
