"""The two warpgroups that multiply, each 64 rows with half of the columns of values.

Protocol: with S the scores of a tile, P their weights in 16 bits and O a warpgroup's half of the result,

    the first                                       the second
        S = Q K₀ᵀ                                       for each tile j:
        for each tile j:                                    P is no longer read
            P = softmax of S, to shared memory              wait for P of tile j
            O = O · rescale + P Vⱼ                          O = O · rescale + P Vⱼ
            S = Q Kⱼ₊₁ᵀ                                     give the tile back
            give tile j back

so that the second multiplies while the first computes a softmax. Weights and rescales go through shared
memory, between two named barriers: `FREE` (they were read) and `READY` (they are there).
"""
from __future__ import annotations

from collections.abc import Callable

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.attention.score import rescale
from tinygrad_nv.tile.decode.latent.plan import CONSUMERS, ROWS, SPAN, STEP, WARPGROUP, LatentPlan
from tinygrad_nv.tile.decode.latent.tile_scheduler import LatentTile
from tinygrad_nv.tile.decode.rows import AccFragment, DecodeSoftmax
from tinygrad_nv.tile.gemm.wgmma.main_loop import Descriptors
from tinygrad_nv.tile.lanes import pack
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.ops import Places, swizzle_offset
from tinygrad_nv.tile.pipeline import Pipeline

FREE, READY = 1, 2


class Values:
    """A warpgroup's half of the result. `row` (u32) is the first of the lane's two rows among 64; `half` the
    warpgroup's number."""

    def __init__(self, kb: Kernel, plan: LatentPlan, ring: Pipeline, latents: Shared, factors: Shared,
                 half: int, row: Value) -> None:
        self.kb, self.plan, self.ring, self.row = kb, plan, ring, row
        start = (plan.values_at * 2 // SPAN + half * (plan.half * 2 // SPAN)) * plan.keys.column_bytes
        self.values = Descriptors.of(kb, plan.values, latents.address(start))
        self.factors = factors.address() + row * 4
        self.at, self.empty = ring.cursor(), ring.empty_barriers()
        self.mine = kb.special("laneid") == 0
        self.out = kb.regs("f32", plan.half // 2)

    def clear(self) -> None:
        """Nothing is added yet."""
        for each in self.out: each.set(0.0)

    def wait(self) -> None:
        """Waits for the tile; copies are of another proxy than wgmma's reads."""
        self.ring.wait(self.at)
        self.kb.fence_proxy_async()

    def add(self, weights: Callable[[int], Value | list[Value]]) -> None:
        """Issues O += P V; `weights` gives the left operand of each 16 keys."""
        kb, plan, tile = self.kb, self.plan, self.plan.values
        low = self.values.base + self.at.stage * (plan.keys.nbytes >> 4)
        kb.wgmma_fence()
        for step in range(plan.schedule.block_n // STEP):
            kb.wgmma(f"m64n{plan.half}k{STEP}", f"f32.{plan.kind}.{plan.kind}", self.out, weights(step),
                    self.values.at(low, tile.at_step(step)), trans=(False, True))
        kb.wgmma_commit()

    def give_back(self) -> None:
        """No lane of this warp reads the tile any more."""
        self.ring.release(self.empty, self.at.stage, self.mine)
        self.at.advance()


class ScoringLoop:
    """The first warpgroup."""

    def __init__(self, kb: Kernel, plan: LatentPlan, values: Values, q_ring: Pipeline, queries: Shared,
                 latents: Shared, weights: Shared) -> None:
        self.kb, self.plan, self.values, self.q_ring = kb, plan, values, q_ring
        self.at_q, self.empty_q = q_ring.cursor(), q_ring.empty_barriers()
        self.q = Descriptors.of(kb, plan.queries, queries.address())
        self.keys = Descriptors.of(kb, plan.keys, latents.address())
        self.ahead = values.ring.cursor()
        self.s = kb.regs("f32", plan.schedule.block_n // 2)
        self.p = kb.regs("b32", plan.schedule.block_n // 4)
        lane, tile = kb.special("laneid"), SharedTile(ROWS, plan.weights.span)
        # the four matrices of a store: 16 rows of 8 keys, then of the next 8
        row = values.row - lane // 4 + lane % 16
        places = Places(kb, tile, swizzle_offset(tile, row, lane // 16 * 16))
        places.at_stage(weights.address())
        self.places = [places(plan.weights.at_step(step)) for step in range(plan.schedule.block_n // STEP)]

    def run(self, tile: LatentTile, softmax: DecodeSoftmax) -> None:
        """A work tile."""
        kb = self.kb
        self.softmax = softmax
        self.values.clear()
        self.q_ring.wait(self.at_q)
        with kb.if_(tile.tiles > 0): self._attend(tile)
        with kb.else_(): self._release_q()
        self.at_q.advance()

    def _attend(self, tile: LatentTile) -> None:
        """All tiles of keys, of which there is at least one."""
        kb, values = self.kb, self.values
        key = kb.reg("s32", tile.first)
        self._scores()
        with kb.loop(1, tile.tiles, name="tile"):
            self._softmax_step(key)
            self._scores()
            kb.wgmma_wait(1)
            values.give_back()
            key += self.plan.schedule.block_n
        self._softmax_step(key, self._release_q)
        kb.wgmma_wait(0)
        values.give_back()

    def _release_q(self) -> None:
        self.q_ring.release(self.empty_q, self.at_q.stage, self.values.mine)

    def _scores(self) -> None:
        """Issues S = Q Kᵀ of the next tile."""
        kb, plan = self.kb, self.plan
        self.values.ring.wait(self.ahead)
        kb.fence_proxy_async()
        low = self.keys.stage(self.ahead.stage)
        kb.wgmma_fence()
        for step in range(plan.spec.d // STEP):
            kb.wgmma(f"m64n{plan.schedule.block_n}k{STEP}", f"f32.{plan.kind}.{plan.kind}", self.s,
                    self.q.at(self.q.base, plan.queries.at_step(step)),
                    self.keys.at(low, plan.keys.at_step(step)), step > 0)
        kb.wgmma_commit()
        self.ahead.advance()

    def _softmax_step(self, key: Value, read: Callable[[], None] = lambda: None) -> None:
        """Scores become weights; issues O += P V. `read` is called when the scores are there."""
        kb, values = self.kb, self.values
        kb.wgmma_wait(0)
        read()
        cells: AccFragment = [self.s[i:i + 4] for i in range(0, len(self.s), 4)]
        factors = self.softmax.step(cells, key)
        for i, cell in enumerate(cells):
            for h in range(2):
                self.p[2 * i + h].set(pack(kb, cell[2 * h:2 * h + 2], self.plan.spec.q.dtype))
        kb.sync(FREE, CONSUMERS * WARPGROUP)
        for step, place in enumerate(self.places): kb.stmatrix(place, self.p[4 * step:4 * step + 4])
        with kb.if_(kb.special("laneid") % 4 == 0):
            for h, factor in enumerate(factors): kb.st("shared", "f32", values.factors.at(32 * h), factor)
        kb.fence_proxy_async()
        kb.arrive(READY, CONSUMERS * WARPGROUP)
        rescale(values.kb, values.out, factors)
        values.add(lambda step: self.p[4 * step:4 * step + 4])


def second(kb: Kernel, plan: LatentPlan, values: Values, left: Descriptors, tiles: Value) -> None:
    """The second warpgroup: a work tile of `tiles` (s32) tiles of keys; `left` are the weights."""
    values.clear()
    with kb.loop(0, tiles, name="tile"):
        kb.arrive(FREE, CONSUMERS * WARPGROUP)
        values.wait()
        kb.sync(READY, CONSUMERS * WARPGROUP)
        rescale(kb, values.out, [kb.ld("shared", "f32", values.factors.at(32 * h))[0] for h in range(2)])
        values.add(lambda step: left.at(left.base, plan.weights.at_step(step)))
        kb.wgmma_wait(0)
        values.give_back()
