"""The producers: one thread brings keys and values once, and blocks of queries and gradients by TMA; a warp
beside it l and delta of their rows.

Protocol: a stage of the ring is a block of rows: its queries, its gradients, and for each row −log₂e · l and
−scale · delta, as the consumers add them, in the order in which a lane reads four of them at once: those of
rows 16c + 2q, + 1, + 8, + 9 side by side. Rows that see nothing, and rows beyond the last one, have −∞ in
place of l, whatever stands there: their p is 0. Boxes reach beyond the matrices where blocks do; TMA brings
zeros for what lies outside, and counts them.
"""
from __future__ import annotations

import math

from tinygrad_nv.ptx.builder import SINK, Kernel, MemoryOperand, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.attention.backward_mma.rows import exponent
from tinygrad_nv.tile.attention.backward_wgmma.plan import BackwardWgmmaPlan, map_argument, map_dimensions
from tinygrad_nv.tile.attention.blocks import BlockPosition, RowBlocks
from tinygrad_nv.tile.attention.score import Extents
from tinygrad_nv.tile.attention.spec import Rows
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import OperandTile
from tinygrad_nv.tile.pipeline import Pipeline, PipelineState

LANES = 32


class Stages(Pipeline):
    """A ring that a warp's lanes fill as well."""

    @property
    def full_arrivals(self) -> int:
        """The thread's of the copies, and those of the lanes."""
        return 1 + LANES

    def full(self, at: PipelineState) -> MemoryOperand:
        """The barrier of a stage that is being filled."""
        return self._full(at).at()

    def wait_empty(self, at: PipelineState) -> None:
        """Waits until the stage's readers are done."""
        self.kb.mbarrier_wait(self._full(at).at(8 * self.depth), at.parity)


class BackwardLoads:
    """Tensor maps and shared memory of q, k, v and grad; `first_pointer` is the number of q's pointer."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan, first_pointer: int) -> None:
        self.kb, self.plan = kb, plan
        one, depth = plan.spec.forward, plan.schedule.depth
        self.sources: dict[str, tuple[OperandTile, Rows]] = {
            "q": (plan.q, one.q), "k": (plan.k, one.k), "v": (plan.v, one.v),
            "grad": (plan.grad, plan.spec.grad)}
        self.maps: list[MapArgument] = []
        for i, (name, (tile, rows)) in enumerate(self.sources.items()):
            symbol = "s_q" if name in ("q", "grad") else "s_kv"
            width = one.d if name in "qk" else one.d_v
            self.maps.append(map_argument(plan, rows, first_pointer + i, getattr(one, symbol), width,
                                          tile.inner, tile.span, tile.rows, symbol))
        self.tensor_maps = {name: kb.tensor_map(f"map_{name}") for name in self.sources}
        self.keys = kb.shared("keys", plan.k.nbytes, align=1024)
        self.values = kb.shared("values", plan.v.nbytes, align=1024)
        self.queries = kb.shared("queries", plan.q.nbytes * depth, align=1024)
        self.grads = kb.shared("gradients", plan.grad.nbytes * depth, align=1024)
        self.row_values = kb.shared("row_values", plan.row_values_bytes * depth, align=1024)
        self.ring = Stages(kb, depth, plan.q.nbytes + plan.grad.nbytes, 4 * plan.consumers)
        self.kept = kb.mbarriers("keys_and_values_full")

    def init(self) -> None:
        """Makes the barriers: one thread."""
        self.ring.init()
        self.kb.mbarrier_init(self.kept[0], 1)

    def produce(self, column: Value, batch: tuple[Value, Value], blocks: RowBlocks) -> None:
        """All copies of a CTA: one thread."""
        kb, plan, at = self.kb, self.plan, self.ring.cursor(producer=True)
        queries, grads = self.queries.address(), self.grads.address()
        zero = kb.reg("u32", 0)
        kb.mbarrier_expect(self.kept[0], plan.k.nbytes + plan.v.nbytes)
        self._copy("k", self.keys.address(), column, (*batch, zero), self.kept[0])
        self._copy("v", self.values.address(), column, (*batch, zero), self.kept[0])
        position = BlockPosition(kb, blocks)
        with position.each():
            full, heads = self.ring.acquire(at), (*batch, position.head)
            self._copy("q", queries + at.stage * plan.q.nbytes, position.row, heads, full)
            self._copy("grad", grads + at.stage * plan.grad.nbytes, position.row, heads, full)
            at.advance()

    def _copy(self, name: str, target: Value, row: Value, batch: tuple[Value, ...],
              full: MemoryOperand) -> None:
        """The columns of a tile."""
        tile, rows = self.sources[name]
        outer = [batch[i].to("s32") for i in map_dimensions(rows, self.plan.spec.forward.batch)]
        for column in range(tile.columns):
            self.kb.tma_load(target.at(column * tile.column_bytes), self.tensor_maps[name],
                            [column * tile.inner, row, *outer], full)

    def produce_rows(self, l: Value, delta: Value, scale: float, extents: Extents, head: Value,
                     blocks: RowBlocks) -> None:
        """l and delta of all blocks: a warp. `head` (u32) is the number of the first query head in the whole
        batch, `scale` the number that delta is multiplied by."""
        kb, plan, at = self.kb, self.plan, self.ring.cursor(producer=True)
        lane, m, s_q = kb.special("laneid"), plan.schedule.block_m, plan.spec.forward.s_q
        base = self.row_values.address()
        position = BlockPosition(kb, blocks)
        with position.each():
            own = position.row.to("u32") + lane
            matrix = head + position.head
            sources = [advance(kb, advance(kb, each, matrix, 4 * s_q), own, 4) for each in (l, delta)]
            values = []
            for i in range(0, m, LANES):
                inside = own + i < extents.s_q
                for source, outside in zip(sources, (-math.inf, 0.0), strict=True):
                    values.append(kb.reg("f32", outside))
                    kb.emit("ld.global.f32", values[-1], source.at(4 * i), guard=inside)
            self.ring.wait_empty(at)
            place = base + at.stage * plan.row_values_bytes + self._place(lane)
            for i, (log, change) in enumerate(zip(values[::2], values[1::2], strict=True)):
                kb.st("shared", "f32", place.at(4 * LANES * i), exponent(kb, log))
                kb.st("shared", "f32", place.at(4 * LANES * i + 4 * m), change * -scale)
            kb.emit("mbarrier.arrive.shared::cta.b64", SINK, self.ring.full(at))
            at.advance()

    def _place(self, lane: Value) -> Value:
        """Bytes before row `lane` of 32: of 16c + 8h + 2q + e, those of 16c + 4q + 2h + e."""
        return ((lane & 17) | (lane & 6) << 1 | (lane >> 3 & 1) << 1) << 2
