"""Plan of `sparse_mma`, which follows from a spec and a schedule.

Protocol: that of gemm/mma/plan.py, of the transposed matmul: rows are those of the sparse matrix. A stage has
`block_k` of its columns: half as many values, then the activations, then metadata.

`problems` is what the template asks of a schedule; `candidates` are tiles worth trying first.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tinygrad_nv.quant.sparse import UNIT
from tinygrad_nv.tile.fragments import NAMES, STEP_BYTES
from tinygrad_nv.tile.gemm.mma import template as mma
from tinygrad_nv.tile.gemm.mma.plan import MmaPlan
from tinygrad_nv.tile.gemm.spec import FP8
from tinygrad_nv.tile.sparse_gemm.schedules import SparseMma
from tinygrad_nv.tile.sparse_gemm.spec import SparseGemmSpec, metadata_bytes
from tinygrad_nv.tile.template import GPU

MOST_SUMS = 128     # of a thread, beside operands of twice as many columns


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


def problems(spec: SparseGemmSpec, s: SparseMma, arch: str) -> list[str]:
    """Why the template cannot have this schedule; empty when it can."""
    if spec.gemm.symbolic: return ["rows known at launch, which would be columns"]
    if s.swap: return ["swapped: the sparse matrix is operand A"]
    if spec.gemm.a.dtype in FP8 and arch != "sm_89":
        return [f"8-bit floats: their mma.sp begins with sm_89, {arch} has none in its tensor cores"]
    if spec.gemm.a.dtype.itemsize == 1 and spec.gemm.a.major == "MN":
        return ["activations of 8 bits that lie along rows: ldmatrix turns 16 bits"]
    plan = SparseMmaPlan.of(spec, s)
    out = mma.extent_problems("block_m", s.block_m, s.warps_m, 1, spec.values)
    out += mma.extent_problems("block_n", s.block_n, s.warps_n, 1, plan.spec.b)
    if s.threads > 1024 or s.threads & (s.threads - 1):
        out.append(f"{s.threads} threads are above 1024, or not a power of 2")
    if s.block_k % UNIT or s.block_k * plan.size not in (64, 128, 256):
        out.append(f"block_k={s.block_k} × {plan.size} B: a multiple of {UNIT} columns of 64 to 256 B")
    elif spec.gemm.k % s.block_k: out.append(f"k={spec.gemm.k} is not a multiple of block_k={s.block_k}")
    if not 2 <= s.depth <= 8: out.append(f"{s.depth} stages are not 2 to 8")
    if s.splits > plan.iterations: out.append(f"{s.splits} splits of {plan.iterations} steps")
    if out: return out
    return [*_copy_problems(plan), *mma.room_problems(plan, arch, plan.stage_bytes, MOST_SUMS)]


def _copy_problems(plan: SparseMmaPlan) -> list[str]:
    """How threads divide the tiles."""
    s, size = plan.schedule, plan.size
    half = s.k(s.block_k // 2)
    if s.block_k // 2 * size > 128: return [f"block_k={s.block_k}: values of {s.block_k // 2 * size} B a row"]
    return mma.copy_problems(half, "block_m", s.block_m, plan.sparse.values) + \
        mma.copy_problems(s, "block_n", s.block_n, plan.spec.b)


# rows of the matrix, rows of activations, warps along both
TILES = ((128, 128, 2, 4), (128, 64, 4, 2), (64, 128, 2, 2), (64, 64, 2, 2), (128, 32, 4, 1), (64, 32, 4, 1),
         (128, 16, 4, 1), (64, 16, 4, 1), (32, 16, 2, 1), (16, 16, 1, 1))
STAGES = (4, 3, 2)


def candidates(spec: SparseGemmSpec, gpu: GPU) -> Iterator[SparseMma]:
    """Yields the candidates that are not twice as large as the matmul, with splits where tiles are few."""
    m, n = spec.gemm.n, spec.gemm.m
    sms, size = gpu.sm_count or 108, spec.gemm.a.dtype.itemsize
    for rows, columns, along_m, along_n in TILES:
        if (rows >= 2 * m and rows > 16) or (columns >= 2 * n and columns > 16): continue
        for block_k in (128 // size, 64):
            for stages in STAGES:
                s = SparseMma().block(rows, columns).k(block_k).warps(along_m, along_n).stages(stages)
                tiles = -(-m // rows) * -(-n // columns)
                splits = min(sms // tiles, SparseMmaPlan.of(spec, s).iterations // 4)
                if splits > 1: yield s.split(splits)
                yield s
