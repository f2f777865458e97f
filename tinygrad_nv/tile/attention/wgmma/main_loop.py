"""A consumer warpgroup: 64 rows against block after block of columns.

Protocol: with S the scores, P their weights in 16 bits, O the result so far,

    S = Q K₀ᵀ;  P = softmax of S
    for each further block j:
        issue S = Q Kⱼᵀ
        issue O += P Vⱼ₋₁
        wait for S, give Kⱼ back
        softmax of S, while the tensor core is at O (`_pin_exp_before_pv_wait`)
        wait for O, give Vⱼ₋₁ back
        O ×= the factor of what came before;  P = S in 16 bits
    give Q back, for the next tile's
    O += P V of the last block

The fragment of S in 16 bits is the fragment of a left operand in registers: registers 8c … 8c + 7 are the
four of wgmma c. In ping-pong (FlashAttention-3) a consumer issues a block's wgmmas when the one before it has
issued its own, so that the softmax of each falls under the products of the others (`IssueOrder`).
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.blocks import KeyBlocks
from tinygrad_nv.tile.attention.dropout import Dropout
from tinygrad_nv.tile.attention.score import AccFragment, OnlineSoftmax, Scores, rescale
from tinygrad_nv.tile.attention.wgmma.load import AttentionLoads
from tinygrad_nv.tile.attention.wgmma.plan import ROWS, WARPGROUP, FlashWgmmaPlan
from tinygrad_nv.tile.gemm.wgmma.main_loop import Descriptors
from tinygrad_nv.tile.lanes import FLOAT16S
from tinygrad_nv.tile.pipeline import Pipeline

CLEARED = 4  # a named barrier, after those of turns


class IssueOrder:
    """Consumers that issue in turn: consumer i waits at named barrier 1 + i for the one before it, the first
    one for the last one's turn before. All have as many turns; the last one's start gives the first turn, and
    the first one takes what the last one's last turn gives."""

    def __init__(self, kb: Kernel, plan: FlashWgmmaPlan, consumer: Value) -> None:
        self.kb, self.first = kb, consumer == 0
        self.own = consumer + 1
        self.next = kb.select(consumer == plan.consumers - 1, 1, consumer + 2, "u32")

    def begin(self) -> None:
        """Before all turns."""
        with self.kb.if_(self.next == 1): self.arrive()

    def wait(self) -> None:
        """Waits for the turn."""
        self.kb.sync(self.own, 2 * WARPGROUP)

    def arrive(self) -> None:
        """Gives it to the next consumer."""
        self.kb.arrive(self.next, 2 * WARPGROUP)

    def end(self) -> None:
        """After all turns."""
        with self.kb.if_(self.first): self.wait()


class AttentionMainLoop:
    """One consumer's main loop; `consumer` is its number, the same in all its lanes."""

    def __init__(self, kb: Kernel, plan: FlashWgmmaPlan, loads: AttentionLoads, consumer: Value) -> None:
        self.kb, self.plan, self.loads, self.consumer = kb, plan, loads, consumer
        self.q = Descriptors.of(kb, plan.q, loads.q.address() + consumer * plan.q.at_mn(ROWS))
        self.keys = Descriptors.of(kb, plan.k, loads.keys.address())
        self.values, self.v_ring = self._values()
        pipelines = loads.q_ring, loads.k_ring, self.v_ring
        self.at_q, self.at_k, self.at_v = (ring.cursor() for ring in pipelines)
        self.empty_q, self.empty_k, self.empty_v = (ring.empty_barriers() for ring in pipelines)
        self.mine = kb.special("laneid") == 0
        self.s = kb.regs("f32", plan.scores)
        self.p = kb.regs("b32", plan.weights)
        self.out = kb.regs("f32", plan.sums)
        self.ordered = IssueOrder(kb, plan, consumer) if plan.pingpong else None
        self.dropout: Dropout | None = None

    def begin(self) -> None:
        """Before all tiles."""
        if self.ordered is not None: self.ordered.begin()

    def end(self) -> None:
        """After all tiles."""
        if self.ordered is not None: self.ordered.end()

    def read_seed(self, seed: Value) -> None:
        """Reads the seed of dropout, once for all tiles."""
        kb, spec = self.kb, self.plan.spec
        self.dropout = Dropout(kb, spec.kept, self.plan.schedule.block_n, spec.batch)
        self.dropout.read(seed)

    def tile(self, blocks: KeyBlocks, scores: Scores) -> None:
        """A tile. Queries are given back unless the result will lie where they do."""
        self.scores, self.softmax = scores, self._softmax(scores)
        if self.dropout is not None: self.dropout.move(scores.batch, scores.row)
        for each in self.out: each.set(0.0)
        self.loads.q_ring.wait(self.at_q)
        with blocks.any(): self._attend(blocks)
        if not blocks.always and not self.plan.overlaid:
            with self.kb.else_(): self.release_q()
        self.at_q.advance()

    def _attend(self, blocks: KeyBlocks) -> None:
        """All blocks, of which there is at least one."""
        kb, n = self.kb, self.plan.schedule.block_n
        block = kb.reg("s32", blocks.end - 1)
        self._first(block * n, blocks)
        for end, masked in blocks.runs():
            with kb.loop(0, block - end):
                block -= 1
                self._mainloop_step(block * n, masked)
        if not self.plan.overlaid: self.release_q()
        self._last(block * n)

    # **** what differs between dtypes ****

    def _values(self) -> tuple[Descriptors, Pipeline]:
        """Values as wgmma takes them, and their ring."""
        return Descriptors.of(self.kb, self.plan.v, self.loads.values.address()), self.loads.v_ring

    def _softmax(self, scores: Scores) -> OnlineSoftmax: return OnlineSoftmax(self.kb, 1, scores.factor)

    def _prefetch_scales(self, column: Value) -> None:
        """Reads the scales for the scores of the block that begins at `column`."""

    def _ahead_of_sums(self, column: Value) -> None:
        """Reads the scales for its second product."""

    def _dequantize_scores(self, cells: AccFragment) -> AccFragment:
        """The sums of products as the score has them."""
        return cells

    def _add_values(self) -> None:
        """After a block's second product, while its values are there."""

    def finish(self, sink: Value | None = None) -> tuple[list[Value], list[Value]]:
        """Returns the factors of the result, of each row, and l; `sink` is the tile's."""
        return self.softmax.finish(sink)

    # **** blocks ****

    def _first(self, column: Value, blocks: KeyBlocks) -> None:
        kb, loads = self.kb, self.loads
        self._prefetch_scales(column)
        loads.k_ring.wait(self.at_k)
        self._issue_scores()
        kb.wgmma_wait(0)
        self._give_back_keys()
        if isinstance(blocks.key_end, Value): self._clear(blocks.key_end - column)
        self._softmax_step(column, blocks.needs_mask)
        self._pack()

    def _clear(self, seen: Value) -> None:
        """Values of columns that exist but that no row sees may be anything, NaN too: of the first block only
        the first `seen` (s32) are kept, and zeros have weight 0."""
        kb, plan, tile = self.kb, self.plan, self.plan.v
        threads = WARPGROUP * plan.consumers
        with kb.if_(seen < tile.rows):
            self.v_ring.wait(self.at_v)
            values = self.loads.values.address() + self.at_v.stage * tile.nbytes
            with kb.loop(values + (seen.to("u32") * tile.span + kb.tid.x * 16),
                        values + tile.rows * tile.span, threads * 16) as place:
                for column in range(tile.columns):
                    kb.st("shared", "b32", place.at(column * tile.column_bytes), [0] * 4)
            kb.fence_proxy_async()
            kb.sync(CLEARED, threads)

    def _mainloop_step(self, column: Value, masked: bool) -> None:
        kb, loads = self.kb, self.loads
        self._prefetch_scales(column)
        self._ahead_of_sums(column + self.plan.schedule.block_n)
        loads.k_ring.wait(self.at_k)
        if self.ordered is not None: self.ordered.wait()
        self._issue_scores()
        self.v_ring.wait(self.at_v)
        self._issue_sums()
        if self.ordered is not None: self.ordered.arrive()
        kb.wgmma_wait(1)
        self._give_back_keys()
        factors = self._softmax_step(column, masked)
        self._pin_exp_before_pv_wait()
        kb.wgmma_wait(0)
        self._add_values()
        self._give_back_values()
        rescale(self.kb, self.out, factors)
        self._pack()

    def _pin_exp_before_pv_wait(self) -> None:
        """Keeps the exponentials before the wait for O. ptxas moves that wait up, and exponentials down to
        where the weights are packed: of 90 none stood under the product of P and V (128 elements of d). It
        leaves a sleep where it is among waits, and this one needs the row sums, and they every exponential.
        No sum is negative, so that no warp sleeps."""
        low, high = (row_sum < 0.0 for row_sum in self.softmax.row_sum)
        self.kb.emit("nanosleep.u32", 0, guard=low | high)

    def _last(self, column: Value) -> None:
        self._ahead_of_sums(column)
        self.v_ring.wait(self.at_v)
        self._issue_sums()
        self.kb.wgmma_wait(0)
        self._add_values()
        self._give_back_values()

    def _softmax_step(self, column: Value, masked: bool) -> list[Value]:
        """Sums of the block that begins at `column` become weights; the factors of what was before."""
        cells: AccFragment = [[self.s[i:i + 4] for i in range(0, len(self.s), 4)]]
        cells = self.scores.of(self._dequantize_scores(cells), column)
        if masked: self.scores.mask(cells, column)
        factors = self.softmax.step(cells)
        if self.dropout is not None: self.dropout.drop(cells, column)
        self.weights = [each for cell in cells[0] for each in cell]
        return factors

    def _pack(self) -> None:
        kind = FLOAT16S[self.plan.spec.v.dtype]
        for i, each in enumerate(self.p):
            self.kb.emit(f"cvt.rn.{kind}x2.f32", each, self.weights[2 * i + 1], self.weights[2 * i])

    def _issue_scores(self) -> None:
        kb, plan = self.kb, self.plan
        kb.wgmma_fence()
        low = self.keys.stage(self.at_k.stage)
        for step in range(plan.q.k // plan.step):
            kb.wgmma(f"m64n{plan.schedule.block_n}k{plan.step}", f"f32.{plan.kind}.{plan.kind}", self.s,
                    self.q.at(self.q.base, plan.q.at_step(step)), self.keys.at(low, plan.k.at_step(step)),
                    step > 0)
        kb.wgmma_commit()

    def _issue_sums(self) -> None:
        kb, plan = self.kb, self.plan
        kb.wgmma_fence()
        low = self.values.stage(self.at_v.stage)
        for step in range(plan.schedule.block_n // plan.step):
            kb.wgmma(f"m64n{plan.v.mn}k{plan.step}", f"f32.{plan.kind}.{plan.kind}", self.out,
                    self.p[4 * step:4 * step + 4], self.values.at(low, plan.v.at_step(step)),
                    trans=(False, True))
        kb.wgmma_commit()

    def release_q(self) -> None:
        """No lane of this warp reads them any more, nor what lies there instead."""
        self.loads.q_ring.release(self.empty_q, self.at_q.stage, self.mine)

    def _give_back_keys(self) -> None:
        self.loads.k_ring.release(self.empty_k, self.at_k.stage, self.mine)
        self.at_k.advance()

    def _give_back_values(self) -> None:
        self.v_ring.release(self.empty_v, self.at_v.stage, self.mine)
        self.at_v.advance()
