"""The producer's copies: queries, and blocks of keys and values by turns.

Protocol: a thread for each of the two. Queries have a ring of one stage, keys and values one each. K of a
block comes before V of the block before it, in the order in which the consumers ask for them: K₀, K₁, V₀, K₂,
V₁, … Boxes reach beyond the matrices where blocks do; TMA brings zeros for what lies outside, and counts
them.
"""
from __future__ import annotations

from collections.abc import Callable

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.attention.blocks import KeyBlocks
from tinygrad_nv.tile.attention.wgmma.plan import (
    TURNERS,
    WARPGROUP,
    FlashWgmmaPlan,
    map_argument,
    map_dimensions,
)
from tinygrad_nv.tile.attention.wgmma.tile_scheduler import AttentionTile, AttentionTileScheduler
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.pipeline import Pipeline, PipelineState


class AttentionLoads:
    """Tensor maps and shared memory of q, k and v; `first_pointer` is the number of q's pointer."""

    def __init__(self, kb: Kernel, plan: FlashWgmmaPlan, first_pointer: int) -> None:
        self.kb, self.plan = kb, plan
        spec, depth, warps = plan.spec, plan.schedule.depth, WARPGROUP // 32 * plan.consumers
        rows, keys = spec.total or (spec.s_q, spec.s_kv)
        self.maps: list[MapArgument] = [
            map_argument(plan, spec.q, first_pointer, rows, spec.d, plan.q, plan.q.rows, "s_q"),
            map_argument(plan, spec.k, first_pointer + 1, keys, spec.d, plan.k, plan.k.rows, "s_kv"),
            map_argument(plan, spec.v, first_pointer + 2, keys, spec.d_v, plan.v, plan.v.rows, "s_kv")]
        self.sequence: tuple[Value, Value] | None = None  # its first rows of q and of k, of a ragged batch
        self.tensor_maps = [kb.tensor_map(f"map_{name}") for name in "qkv"]
        self.q = kb.shared("queries", plan.q.nbytes, align=1024)
        self.keys = kb.shared("keys", plan.k.nbytes * depth, align=1024)
        self.values = kb.shared("values", plan.v.nbytes * depth, align=1024)
        self.k_ring = Pipeline(kb, depth, plan.k.nbytes, warps, name="full_and_empty_keys")
        readers = warps if plan.transposed_v is None else TURNERS
        self.v_ring = Pipeline(kb, depth, plan.v.nbytes, readers, name="full_and_empty_values")
        self.q_ring = Pipeline(kb, 1, plan.q.nbytes, warps, name="full_and_empty_queries")
        self.pipelines = self.q_ring, self.k_ring, self.v_ring

    def init(self) -> None:
        """Makes the barriers: one thread."""
        for ring in self.pipelines: ring.init()

    def queries(self, tile_scheduler: AttentionTileScheduler) -> None:
        """The queries of all tiles."""
        at = self.q_ring.cursor(producer=True)
        with tile_scheduler.tiles() as tile:
            full = self.q_ring.acquire(at)
            self._copy(0, tile, tile.row.to("s32"), self.q.address(), full)
            at.advance()

    def keys_and_values(self, tile_scheduler: AttentionTileScheduler,
                        blocks: Callable[[AttentionTile], KeyBlocks]) -> None:
        """The keys and values of all tiles that have `blocks`."""
        at = self.k_ring.cursor(producer=True), self.v_ring.cursor(producer=True)
        with tile_scheduler.tiles() as tile:
            seen = blocks(tile)
            with seen.any(): self._of_tile(tile, seen, *at)

    def _of_tile(self, tile: AttentionTile, blocks: KeyBlocks, at_k: PipelineState,
                 at_v: PipelineState) -> None:
        kb, plan, n = self.kb, self.plan, self.plan.schedule.block_n
        keys, values = self.keys.address(), self.values.address()

        def copy_keys(column: Value) -> None:
            full = self.k_ring.acquire(at_k)
            self._copy(1, tile, column, keys + at_k.stage * plan.k.nbytes, full)
            at_k.advance()

        def copy_values(column: Value) -> None:
            full = self.v_ring.acquire(at_v)
            self._copy(2, tile, column, values + at_v.stage * plan.v.nbytes, full)
            at_v.advance()

        column = kb.reg("s32", (blocks.end - 1) * n)
        first = blocks.first * n
        copy_keys(column)
        with kb.while_(lambda: column > first):
            following = column - n
            copy_keys(following)
            copy_values(column)
            column.set(following)
        copy_values(column)

    def _copy(self, which: int, tile: AttentionTile, at: Value, target: Value, full: MemoryOperand) -> None:
        """The boxes of a tile of q, k or v, from row `at` (s32) on."""
        plan, spec = self.plan, self.plan.spec
        operand, rows = ((plan.q, spec.q), (plan.k, spec.k), (plan.v, spec.v))[which]
        if self.sequence is not None: at = at + self.sequence[min(which, 1)].to("s32")
        outer = [tile.batch[i].to("s32") for i in map_dimensions(rows, spec.batch)]
        for column in range(operand.columns):
            self.kb.tma_load(target.at(column * operand.column_bytes), self.tensor_maps[which],
                            [column * operand.inner, at, *outer], full)
