"""The producer's copies: boxes of values, of activations, and of metadata."""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.quant.types import TILE
from tinygrad_nv.tile.gemm.wgmma.load import GemmLoads
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import Corner
from tinygrad_nv.tile.sparse_gemm.metadata import UNIT_WORDS
from tinygrad_nv.tile.sparse_gemm.wgmma.plan import SparseWgmmaPlan


class SparseLoads(GemmLoads):
    """Copies of a stage. Of the kernel's pointers activations are number 1, values 2, metadata 3."""

    def __init__(self, kb: Kernel, plan: SparseWgmmaPlan) -> None:
        self.kb, self.plan, self.sparse = kb, plan, plan
        self.maps = []
        spec, s = plan.spec, plan.schedule
        a_bytes, b_bytes = (-(-tile.nbytes * s.depth // 1024) * 1024 for tile in (plan.a, plan.b))
        self.ring = kb.shared("ring", a_bytes + b_bytes + plan.metadata_bytes * s.depth, align=1024)
        self.a = self._side("a", 0, plan.sparse.values, plan.a, 2, spec.m, plan.a_rows, s.cluster_n,
                            k=spec.k // 2)
        self.b = self._side("b", a_bytes, spec.b, plan.b, 1, spec.n, plan.b_rows, s.cluster_m)
        self.maps.append(plan.metadata_map)
        self.metadata_map = kb.tensor_map("map_metadata")
        self.metadata = self.ring.address(a_bytes + b_bytes)
        self.tile, self.word = kb.reg("s32"), kb.reg("s32")

    @property
    def tensor_maps(self) -> list[Value]: return [*super().tensor_maps, self.metadata_map]

    def begin(self, corner: Corner, first: Value | int = 0) -> None:
        super().begin(corner, first)
        self.kb.emit("mov.b32", self.tile, corner.m // TILE)
        self.kb.emit("mov.b32", self.word, first * (self.sparse.units * UNIT_WORDS))

    def issue(self, stage: Value, full: MemoryOperand) -> None:
        super().issue(stage, full)
        place = self.metadata + stage * self.sparse.metadata_bytes
        self.kb.tma_load(place.at(), self.metadata_map, [self.word, self.tile], full)
        self.word += self.sparse.units * UNIT_WORDS
