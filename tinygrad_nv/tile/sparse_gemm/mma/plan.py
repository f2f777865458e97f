"""Plan of `sparse_mma`, which follows from a spec and a schedule.

Protocol: that of gemm/mma/plan.py, of the transposed matmul: rows are those of the sparse matrix. A stage has
`block_k` of its columns: half as many values, then the activations, then metadata.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.tile.fragments import NAMES, STEP_BYTES
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan
from tinygrad_nv.tile.sparse_gemm.schedules import SparseMma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec, metadata_bytes


@dataclass(frozen=True)
class SparseMmaPlan(MmaPlan):
    """See above."""
    schedule: SparseMma
    sparse: SparseGemmSpec

    @staticmethod
    @lru_cache(1024)
    def of(sparse: SparseGemmSpec, s: SparseMma) -> SparseMmaPlan:
        """The plan."""
        return SparseMmaPlan(sparse.gemm.swap_operands(), s, sparse)

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.spec.a.dtype.itemsize

    @property
    def steps(self) -> int:
        """Instructions along the columns of a stage."""
        return self.schedule.block_k * self.size // (2 * STEP_BYTES)

    @property
    def instruction(self) -> str:
        """The instruction's shape and types, with indices in order."""
        name = NAMES[self.spec.a.dtype]
        total = "s32" if name == "s8" else "f32"
        return f"mma.sp::ordered_metadata.sync.aligned.m16n8k{2 * STEP_BYTES // self.size}.row.col." \
            f"{total}.{name}.{name}.{total}"

    @property
    def value_bytes(self) -> int:
        """Bytes of a stage's values."""
        return self.schedule.block_m * self.schedule.block_k // 2 * self.size

    @property
    def metadata_start(self) -> int:
        """Bytes of a stage before its metadata."""
        return self.value_bytes + self.schedule.block_n * self.schedule.block_k * self.size

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        nbytes = self.metadata_start + metadata_bytes(self.schedule.block_m, self.schedule.block_k)
        return -(-nbytes // 1024) * 1024

    @property
    def ring_bytes(self) -> int: return self.schedule.depth * self.stage_bytes
