"""The producer's copies: tensor maps, and the boxes of one stage.

Protocol: `begin(corner, first)` at each tile, then `issue(stage, full)` for each stage of its K in turn.
Boxes reach beyond the matrix where the tile does; TMA brings zeros for what lies outside, and counts them.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.gemm.spec import Operand
from tinygrad_nv.tile.gemm.wgmma.plan import WgmmaPlan
from tinygrad_nv.tile.gemm.wgmma.tile_scheduler import Corner
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import OperandTile, map_argument, map_dimensions


@dataclass
class OperandLoads:
    """One operand: its tile and ring, where this CTA's boxes go (the ring's beginning, but for those of a
    cluster that bring a later part of each tile), its maps (one for each part), the rows of a box, this CTA's
    number among those that share the operand and the mask of all of them."""
    operand: Operand
    tile: OperandTile
    ring: Value
    target: Value
    maps: list[Value]
    rows: int
    number: Value | None
    mask: Value | None
    mn: Value
    at_k: Value
    batch: list[Value] = field(default_factory=list)


class GemmLoads:
    """Copies of A and B. `first_pointer` is the number of A's pointer among the kernel's."""

    def __init__(self, kb: Kernel, plan: WgmmaPlan, first_pointer: int) -> None:
        self.kb, self.plan = kb, plan
        self.maps: list[MapArgument] = []
        spec, s = plan.spec, plan.schedule
        a, b = (first_pointer + which for which in plan.pointers)
        a_bytes = -(-plan.a.nbytes * s.depth // 1024) * 1024
        self.ring = kb.shared("ring", a_bytes + plan.b.nbytes * s.depth, align=1024)
        self.a = self._side("a", 0, spec.a, plan.a, a, spec.m, plan.a_rows, s.cluster_n, spec.symbolic)
        self.b = self._side("b", a_bytes, spec.b, plan.b, b, spec.n, plan.b_rows, s.cluster_m)

    @property
    def tensor_maps(self) -> list[Value]:
        """All of them."""
        return [*self.a.maps, *self.b.maps]

    @property
    def starts(self) -> tuple[Value, Value]:
        """Returns where the stages of both operands begin."""
        return self.a.ring, self.b.ring

    def _side(self, name: str, start: int, operand: Operand, tile: OperandTile, pointer: int, extent: int,
              rows: int, peers: int, symbolic: bool = False, k: int = 0) -> OperandLoads:
        """`k`: the operand's own, where it has less than the matmul."""
        kb, spec = self.kb, self.plan.spec
        maps = []
        for part in range(tile.parts):
            self.maps.append(self.map_of(name, operand, tile, pointer, extent, k or spec.k, rows,
                                         part * spec.part, symbolic))
            maps.append(kb.tensor_map(f"map_{name}{part or ''}"))
        ring = self.ring.address(start)
        number, mask = self._among(name) if peers > 1 else (None, None)
        target = ring if number is None else ring + number * (rows * tile.span)
        return OperandLoads(operand, tile, ring, target, maps, rows, number, mask, kb.reg("s32"),
                            kb.reg("s32"))

    def map_of(self, name: str, operand: Operand, tile: OperandTile, pointer: int, extent: int, k: int,
               rows: int, part_offset: int, symbolic: bool) -> MapArgument:
        """The map of a part of an operand."""
        return map_argument(operand, tile, pointer, extent, k, self.plan.spec.batch, rows, part_offset,
                            symbolic)

    def _among(self, name: str) -> tuple[Value, Value]:
        """Returns the CTA's number among those of its cluster that share the operand, and their mask: A is
        shared along a row of the cluster, whose ranks are `cluster_m` apart."""
        kb, s, rank = self.kb, self.plan.schedule, self.kb.special("cluster_ctarank")
        row, column = rank % s.cluster_m, rank // s.cluster_m
        mask = kb.reg("b16")
        if name == "a":
            bits = kb.reg("u32", sum(1 << i * s.cluster_m for i in range(s.cluster_n))) << row
            number = column
        else:
            bits = kb.reg("u32", (1 << s.cluster_m) - 1) << column * s.cluster_m
            number = row
        kb.emit("cvt.u16.u32", mask, bits)
        return number, mask

    def begin(self, corner: Corner, first: Value | int = 0) -> None:
        """The next stages are of the tile at `corner`, from the K of its stage number `first` on."""
        starts = {k: first * k for k in dict.fromkeys((self.a.tile.k, self.b.tile.k))}
        for side, mn in ((self.a, corner.m), (self.b, corner.n)):
            self.start_at(side, mn, starts[side.tile.k])
            side.batch = [to_signed(self.kb, corner.batch[i])
                          for i in map_dimensions(side.operand, self.plan.spec.batch)]

    def start_at(self, side: OperandLoads, mn: Value, start: Value | int) -> None:
        """The next boxes of an operand are of rows from `mn` on, and of K from `start` on."""
        side.mn.set(to_signed(self.kb, mn))
        side.at_k.set(start if isinstance(start, int) else to_signed(self.kb, start))
        if side.number is not None:  # this CTA's rows of the boxes
            along = side.mn if side.tile.major == "K" else side.at_k
            along += to_signed(self.kb, side.number * side.rows)

    def issue(self, stage: Value, full: MemoryOperand) -> None:
        """Copies of one stage, which arrive at the barrier `full`; K moves on."""
        for side in (self.a, self.b):
            target = side.target + stage * side.tile.nbytes
            for part, each in enumerate(side.maps): self.copy_boxes(side, part, each, target, full)
            self.advance(side)

    def advance(self, side: OperandLoads) -> None:
        """To the operand's next stage."""
        side.at_k += side.tile.k

    def copy_boxes(self, side: OperandLoads, part: int, tensor_map: Value, target: Value,
                   full: MemoryOperand) -> None:
        """The columns of a part of a tile."""
        tile, k_major = side.tile, side.tile.major == "K"
        columns = tile.columns if k_major else tile.columns // tile.parts
        for column in range(columns):
            inner, outer = (side.at_k, side.mn) if k_major else (side.mn, side.at_k)
            if column: inner = inner + column * tile.inner
            place = column * tile.column_bytes + tile.at_mn(part * (tile.mn // tile.parts))
            self.kb.tma_load(target.at(place), tensor_map, [inner, outer, *side.batch], full,
                            multicast=side.mask)


def to_signed(kb: Kernel, value: Value) -> Value:
    """The same bits as an s32, which coordinates are."""
    made = kb.reg("s32")
    kb.emit("mov.b32", made, value)
    return made
