"""Plan of `grouped_outer_wgmma`, which follows from a spec and a schedule: the matmul of each group, yᵀ x
over its rows, what is legal, what is tried first, and what it takes."""
from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache

from tinygrad_nv.tile.gemm.cost import CostModel, Prediction
from tinygrad_nv.tile.gemm.schedules import Wgmma
from tinygrad_nv.tile.gemm.spec import FLOAT16S
from tinygrad_nv.tile.gemm.wgmma import template as wgmma
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.grouped_gemm.cost import tiles_of_group
from tinygrad_nv.tile.grouped_gemm.outer import GroupedOuterSpec
from tinygrad_nv.tile.grouped_gemm.outer_mma.plan import matmul_of
from tinygrad_nv.tile.grouped_gemm.schedules import GroupedOuterWgmma
from tinygrad_nv.tile.layout import OperandTile
from tinygrad_nv.tile.limits import MOST
from tinygrad_nv.tile.template import GPU

SPAN = 128                  # bytes of a row of a box
LOADERS = 64                # threads that copy rows: eight rows of a box at once
MOST_BYTES = 1 << 32        # of an operand, whose rows have 32-bit places


@dataclass(frozen=True)
class OuterPlan(WgmmaPlan):
    """The plan of gemm/wgmma, of operands that both lie along their columns."""
    outer: GroupedOuterSpec

    @staticmethod
    @lru_cache(1024)
    def for_groups(outer: GroupedOuterSpec, s: GroupedOuterWgmma) -> OuterPlan:
        """The plan."""
        a, b = (OperandTile(outer.dtype, "MN", extent, s.block_k, SPAN) for extent in (s.block_m, s.block_n))
        return OuterPlan(matmul_of(outer, outer.rows), s, a, b, outer)

    @property
    def gather_slots(self) -> tuple[int, int]:
        """How many slots a row of y, and of x, has; 0 where its rows lie in order."""
        return self.outer.gather_y, self.outer.gather_x

    @property
    def copy_bytes(self) -> int:
        """Bytes of a whole stage that TMA copies."""
        return sum(tile.nbytes for tile, gather in zip((self.a, self.b), self.gather_slots, strict=True)
                   if not gather)


def problems(spec: GroupedOuterSpec, s: GroupedOuterWgmma, arch: str) -> list[str]:
    """Why the template cannot have a schedule; empty when it can."""
    if arch != "sm_90a": return [f"wgmma needs sm_90a, the target is {arch}"]
    out = [] if spec.dtype in FLOAT16S else [f"operands of {spec.dtype.name}: float16 and bfloat16"]
    for name, columns, rows in (("y", spec.n, spec.of_y), ("x", spec.k, spec.of_x)):
        if (pitch := columns * spec.dtype.itemsize) % 16:
            out.append(f"rows of {name} have {pitch} B, not a multiple of 16 B: no TMA")
        if rows * pitch >= MOST_BYTES:
            out.append(f"{name} has {rows} × {pitch} B, rows lie below {MOST_BYTES} B")
    both = bool(spec.gather_y and spec.gather_x)
    if both or (spec.has_order and s.consumers > 2):
        out.append(f"{'y and x' if both else 'rows'} gathered beside {s.consumers} consumers: the producer "
                   "has no registers for their places")
    if out: return out
    matmul = matmul_of(spec, spec.rows)
    if found := wgmma.warps(s) or wgmma.extents(s, matmul) or _tile(s): return found
    return [*wgmma.room(plan := OuterPlan.for_groups(spec, s)),
            *([f"{plan.tiles} tiles are above {MOST}"] if plan.tiles > MOST else [])]


def _tile(s: GroupedOuterWgmma) -> list[str]:
    out = []
    if s.mode == "pingpong" or s.swap or s.stream or s.cluster_ctas > 1:
        out.append("ping-pong, the transposed matmul, clusters, splits and stream-K: a CTA has a tile")
    if s.block_n % 64 or s.block_k > LOADERS:
        out.append(f"{s.block_n} columns, {s.block_k} rows of a stage: multiples of 64, and up to {LOADERS}")
    return out


def candidates(spec: GroupedOuterSpec, gpu: GPU) -> list[GroupedOuterWgmma]:
    """Returns the candidates of a matmul, where they can be; the first one where none can."""
    matmul = matmul_of(spec, spec.rows)
    made = [GroupedOuterWgmma(**asdict(each)) for each in wgmma.candidates(matmul, gpu)]
    return [s for s in made if not _tile(s)] or made[:1]


def cost(spec: GroupedOuterSpec, s: GroupedOuterWgmma, gpu: GPU) -> Prediction:
    """Returns the time of matmuls over the usual number of rows, one for each group; those without rows store
    zeros."""
    steps = max(1, round(tiles_of_group(spec.rows / spec.groups, s.block_k)))
    usual = matmul_of(spec, steps * s.block_k)
    return CostModel(usual, gpu_model_for(gpu.arch, gpu.sm_count)).predict(Wgmma(**asdict(s)))
