"""The producer's copies: the queries once, blocks of keys and values by turns.

Protocol: one thread. K of a block comes before V of the block before it, in the order in which the consumers
ask for them: K₀, K₁, V₀, K₂, V₁, … Boxes reach beyond the matrices where blocks do; TMA brings zeros for what
lies outside, and counts them.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Place, Value
from tinygrad_nv.tile.attention import Rows
from tinygrad_nv.tile.kernel import MapArgument
from tinygrad_nv.tile.pipeline import Ring
from tinygrad_nv.tile.templates.flash_wgmma_blocks import Blocks
from tinygrad_nv.tile.templates.flash_wgmma_plan import WARPGROUP, Plan, map_argument, walked
from tinygrad_nv.tile.templates.wgmma_tiles import OperandTile


class Loads:
    """Tensor maps and shared memory of q, k and v; `first_pointer` is the number of q's pointer."""

    def __init__(self, k: Kernel, plan: Plan, first_pointer: int) -> None:
        self.k, self.plan = k, plan
        spec, depth, warps = plan.spec, plan.schedule.depth, WARPGROUP // 32 * plan.consumers
        self.maps: list[MapArgument] = [
            map_argument(plan, spec.q, first_pointer, spec.s_q, spec.d, plan.q, plan.q.rows, "s_q"),
            map_argument(plan, spec.k, first_pointer + 1, spec.s_kv, spec.d, plan.k, plan.k.rows, "s_kv"),
            map_argument(plan, spec.v, first_pointer + 2, spec.s_kv, spec.d_v, plan.v, plan.v.rows, "s_kv")]
        self.tensor_maps = [k.tensor_map(f"map_{name}") for name in "qkv"]
        self.q = k.shared("queries", plan.q.nbytes, align=1024)
        self.keys = k.shared("keys", plan.k.nbytes * depth, align=1024)
        self.values = k.shared("values", plan.v.nbytes * depth, align=1024)
        self.k_ring = Ring(k, depth, plan.k.nbytes, warps, name="full_and_empty_keys")
        self.v_ring = Ring(k, depth, plan.v.nbytes, warps, name="full_and_empty_values")
        self.q_full = k.mbarriers("queries_full")

    def init(self) -> None:
        """Makes the barriers: one thread."""
        self.k_ring.init()
        self.v_ring.init()
        self.k.mbarrier_init(self.q_full[0], 1)

    def produce(self, row: Value, batch: tuple[Value, Value, Value], blocks: Blocks) -> None:
        """All copies of a CTA, whose rows begin at `row`; it has at least one block."""
        k, plan, spec, n = self.k, self.plan, self.plan.spec, self.plan.schedule.block_n
        at_k, at_v = self.k_ring.cursor(producer=True), self.v_ring.cursor(producer=True)
        keys, values = self.keys.address(), self.values.address()

        def copy(which: int, at: Value, target: Value, full: Place) -> None:
            tile, rows = ((plan.q, spec.q), (plan.k, spec.k), (plan.v, spec.v))[which]
            self._boxes(tile, rows, self.tensor_maps[which], target, at, batch, full)

        def copy_keys(column: Value) -> None:
            full = self.k_ring.acquire(at_k)
            copy(1, column, keys + at_k.stage * plan.k.nbytes, full)
            at_k.advance()

        def copy_values(column: Value) -> None:
            full = self.v_ring.acquire(at_v)
            copy(2, column, values + at_v.stage * plan.v.nbytes, full)
            at_v.advance()

        k.mbarrier_expect(self.q_full[0], plan.q.nbytes)
        copy(0, row.to("s32"), self.q.address(), self.q_full[0])
        column = k.reg("s32", (blocks.end - 1) * n)
        first = blocks.first * n
        copy_keys(column)
        with k.while_(lambda: column > first):
            following = column - n
            copy_keys(following)
            copy_values(column)
            column.set(following)
        copy_values(column)

    def _boxes(self, tile: OperandTile, rows: Rows, tensor_map: Value, target: Value, at: Value,
               batch: tuple[Value, Value, Value], full: Place) -> None:
        """The columns of a tile."""
        outer = [batch[i].to("s32") for i in walked(rows, self.plan.spec.batch)]
        for column in range(tile.columns):
            self.k.tma_load(target.at(column * tile.column_bytes), tensor_map,
                            [column * tile.inner, at, *outer], full)
