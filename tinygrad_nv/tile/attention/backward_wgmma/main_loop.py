"""A consumer warpgroup: 64 keys against block after block of rows (FlashAttention-3's backward pass).

Protocol: with K and V the consumer's 64 keys and values in shared memory, Q and G queries and gradients of
64 rows, everything of the keys' side transposed; a block of rows has one such part, a, or two, a and b:

    for each block of rows:
        issue Sᵀ = K Qᵀ of both parts;  read l and delta of a
        wait for dK of the block before, give that block back
        issue dPᵀa = V Gᵀ
        wait for Sᵀ;  Pᵀa = 2^(Sᵀa · factor − l), to registers in 16 bits;  issue dV += Pᵀa G
        wait for dPᵀa;  dSᵀa = Pᵀa (dPᵀa − delta) scale, in 16 bits to registers, and to shared memory as dS
        read l and delta of b;  issue dPᵀb in the place of dPᵀa,  dK += dSᵀa Q
        Pᵀb;  issue dV += Pᵀb G
        wait for dPᵀb;  dSᵀb
        all consumers have written dS
        issue dQ = dS K,  dK += dSᵀb Q (of a, where it is the only part)
        wait for dQ, add it to memory

Where dk has so many columns that ptxas has no registers for it in flight from block to block, it is waited
for at a block's end (`BackwardWgmmaPlan.carries_products`).

A fragment of 16 bits is the fragment of a left operand in registers: registers 8c … 8c + 7 are the four of
wgmma c. dS has two buffers: who writes one of them has passed the barrier of the block between, and so have
all others, after their products of the block before.

Rows of dS lie in an order that frees dQ of bank conflicts: row 2i + o of each eight is the tile's row i + 4o.
Of dQ's fragment lanes 4i … 4i + 3 then have row 2i + o, and the four rows that a request writes, two apart,
meet four different swizzles.
"""
from __future__ import annotations

from functools import partial

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.backward_wgmma.dq import QuerySums
from tinygrad_nv.tile.attention.backward_wgmma.load import BackwardLoads
from tinygrad_nv.tile.attention.backward_wgmma.plan import ROWS, STEP, WARPGROUP, BackwardWgmmaPlan
from tinygrad_nv.tile.attention.backward_wgmma.weights import RowValues, Weights
from tinygrad_nv.tile.attention.blocks import BlockPosition, RowBlocks
from tinygrad_nv.tile.gemm.wgmma.main_loop import Descriptors
from tinygrad_nv.tile.layout import OperandTile

WRITTEN, CLEARED, FINISHED = 1, 2, 3  # named barriers of all consumers


class BackwardMainLoop:
    """One consumer's main loop; `consumer` is its number (u32), the same in all its lanes."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan, loads: BackwardLoads, weights: Weights,
                 queries: QuerySums,
                 blocks: RowBlocks, consumer: Value) -> None:
        self.kb, self.plan, self.loads, self.weights, self.queries = kb, plan, loads, weights, queries
        self.blocks, self.consumer, self.threads = blocks, consumer, WARPGROUP * plan.consumers
        self.mine = kb.special("laneid") == 0
        self.at, self.empty_barriers = loads.ring.cursor(), loads.ring.empty_barriers()
        self.before = kb.reg("u32", 0)  # the stage of the block before
        self.slopes = kb.shared("ds", plan.smem_parts["ds"], align=1024)
        self._operands()
        self.s = [kb.regs("f32", ROWS // 2) for _ in range(plan.parts)]
        self.dp = kb.regs("f32", ROWS // 2)
        self.p, self.ds = ([kb.regs("b32", ROWS // 4) for _ in range(plan.parts)] for _ in range(2))
        self.dk = kb.regs("f32", plan.q_right.mn // 2, 0.0)
        self.dv = kb.regs("f32", plan.grad_right.mn // 2, 0.0)
        self.buffer = kb.reg("u32", 0)

    def _operands(self) -> None:
        """Descriptors: left operands from the consumer's own rows on."""
        kb, plan, loads, consumer = self.kb, self.plan, self.loads, self.consumer

        def own(tile: OperandTile, start: Value) -> Descriptors:
            return Descriptors.of(kb, tile, start + consumer * tile.at_mn(ROWS))

        def whole(tile: OperandTile, start: Value) -> Descriptors: return Descriptors.of(kb, tile, start)

        self.keys, self.values = own(plan.k, loads.keys.address()), own(plan.v, loads.values.address())
        queries, grads, slopes = (each.address() for each in (loads.queries, loads.grads, self.slopes))
        self.q, self.q_right = whole(plan.q, queries), whole(plan.q_right, queries)
        self.grad, self.grad_right = whole(plan.grad, grads), whole(plan.grad_right, grads)
        columns = loads.keys.address()
        if plan.shares_rows: columns = columns + consumer * plan.k_right.at_mn(plan.dq_columns)
        self.keys_right = whole(plan.k_right, columns)
        self.left = whole(plan.ds, slopes) if plan.shares_rows else own(plan.ds, slopes)
        self.place = slopes + self._place()

    def _place(self) -> Value:
        """Returns the address at which a lane's row of the four matrices of a stmatrix goes, of 16 rows: keys
        0 … 7 and 8 … 15 of the warp, of rows 0 … 7, then of rows 8 … 15."""
        kb, plan, lane = self.kb, self.plan, self.kb.special("laneid")
        row = ((lane & 7) >> 1) + ((lane & 1) << 2)
        chunk = ((kb.tid.x // 32 & 3) << 1) + (lane >> 3 & 1)
        return self.consumer * plan.ds.column_bytes + ((lane >> 4) << 10) + (row << 7) + ((chunk ^ row) << 4)

    def sum(self) -> None:
        """All blocks."""
        kb, position, total = self.kb, BlockPosition(self.kb, self.blocks), self.blocks.total
        kb.mbarrier_wait(self.loads.kept[0], 0)  # without blocks too: dk and dv are stored where they come
        with kb.if_(total > 0):
            self._clear()
            with kb.loop(0, total) as number: self._block(position, number > 0)
            kb.wgmma_wait(0)

    def _block(self, position: BlockPosition, further: Value) -> None:
        kb, plan, ring = self.kb, self.plan, self.loads.ring
        ring.wait(self.at)
        self._issue_scores()
        logs, changes = self._row_values(0)
        if plan.carries_products:
            kb.wgmma_wait(1)
            ring.release(self.empty_barriers, self.before, self.mine & further)
        self._issue_changes(0)
        kb.wgmma_wait(1)
        self._weigh(position, 0, logs)
        kb.wgmma_wait(1)
        self._slope(0, changes)
        if plan.parts == 2:
            logs, changes = self._row_values(1)
            self._issue_changes(1)
            self._issue_keys(0)
            self._weigh(position, 1, logs)
            kb.wgmma_wait(2)
            self._slope(1, changes)
        kb.fence_proxy_async()
        kb.sync(WRITTEN, self.threads)
        self._issue_queries()
        self._issue_keys(plan.parts - 1)
        kb.wgmma_wait(1)
        self.queries.add(position)
        if plan.carries_products: self.before.set(self.at.stage)
        else:
            kb.wgmma_wait(0)
            ring.release(self.empty_barriers, self.at.stage, self.mine)
        self.at.advance()
        self.buffer ^= 1
        position.advance()

    def _row_values(self, part: int) -> tuple[RowValues, RowValues]:
        """A part's −log₂e · l, and −scale · delta."""
        plan = self.plan

        def start(which: int) -> Value:
            first = self.loads.row_values.address(4 * ROWS * (plan.parts * which + part))
            return first + self.at.stage * plan.row_values_bytes
        logs, changes = (self.weights.row_values(partial(start, which), ROWS // 4) for which in range(2))
        return logs, changes

    def _weigh(self, position: BlockPosition, part: int, logs: RowValues) -> None:
        """p of a part, and dv of it."""
        row = position.row + ROWS * part if part else position.row
        self.weights.of(self.s[part], self.p[part], row, position.head, logs)
        self._issue_transposed(self.dv, self.p[part], self.grad_right, part)

    def _slope(self, part: int, changes: RowValues) -> None:
        """ds of a part, to its buffer too."""
        kb, plan, ds = self.kb, self.plan, self.ds[part]
        self.weights.slopes(self.s[part], self.dp, ds, changes)
        place = self.place + self.buffer * plan.ds.nbytes
        for c in range(ROWS // STEP):
            kb.stmatrix(place.at((ROWS * part + STEP * c) * plan.ds.span), ds[4 * c:4 * c + 4], trans=True)

    def _issue_scores(self) -> None:
        """Issues the scores of all parts at once, where registers allow it: a wider wgmma reads its left
        operand less often."""
        parts = [[each for part in self.s for each in part]] if self.plan.carries_products else self.s
        for part, sums in enumerate(parts): self._issue(sums, self.keys, self.q, part)

    def _issue_changes(self, part: int) -> None: self._issue(self.dp, self.values, self.grad, part)

    def _issue_keys(self, part: int) -> None:
        self._issue_transposed(self.dk, self.ds[part], self.q_right, part)

    def _issue(self, sums: list[Value], left: Descriptors, right: Descriptors, part: int) -> None:
        """sums = left right, both K-major, of a part of the block's rows."""
        kb, kind = self.kb, self.plan.kind
        kb.wgmma_fence()
        low, start = right.stage(self.at.stage), right.tile.at_mn(ROWS * part)
        for step in range(right.tile.k // STEP):
            kb.wgmma(f"m64n{2 * len(sums)}k16", f"f32.{kind}.{kind}", sums,
                    left.at(left.base, left.tile.at_step(step)),
                    right.at(low, start + right.tile.at_step(step)), step > 0)
        kb.wgmma_commit()

    def _issue_transposed(self, sums: list[Value], left: list[Value], right: Descriptors, part: int) -> None:
        """sums += left right, the left operand in registers, over a part of the block's rows."""
        kb, kind, steps = self.kb, self.plan.kind, ROWS // STEP
        kb.wgmma_fence()
        low = right.stage(self.at.stage)
        for step in range(steps):
            kb.wgmma(f"m64n{right.tile.mn}k16", f"f32.{kind}.{kind}", sums, left[4 * step:4 * step + 4],
                    right.at(low, right.tile.at_step(steps * part + step)), trans=(False, True))
        kb.wgmma_commit()

    def _issue_queries(self) -> None:
        """dQ = dS K."""
        kb, plan, kind = self.kb, self.plan, self.plan.kind
        kb.wgmma_fence()
        low = self.left.stage(self.buffer)
        for step in range(plan.schedule.block_n // STEP):
            kb.wgmma(f"m64n{plan.dq_columns}k16", f"f32.{kind}.{kind}", self.queries.sums,
                    self.left.at(low, plan.ds.at_step(step)),
                    self.keys_right.at(self.keys_right.base, plan.k_right.at_step(step)), step > 0,
                    trans=(False, True))
        kb.wgmma_commit()

    def _clear(self) -> None:
        """Keys that exist but that no row sees may be anything, NaN too, and so may their values: zeros
        instead, which ds of 0 is multiplied by."""
        kb, plan, loads, seen = self.kb, self.plan, self.loads, self.blocks.visible_keys()
        some = seen.misses(self.blocks.key, plan.schedule.block_n)
        if some is None: return
        with kb.if_(some):
            with kb.loop(kb.tid.x + 0, plan.schedule.block_n, self.threads) as key, \
                    kb.if_(~seen.has(self.blocks.key + key.to("s32"))):
                for tile, start in ((plan.k, loads.keys.address()), (plan.v, loads.values.address())):
                    place = start + key * tile.span
                    for column in range(tile.columns):
                        for at in range(0, tile.span, 16):
                            kb.st("shared", "b32", place.at(column * tile.column_bytes + at), [0] * 4)
            kb.fence_proxy_async()
            kb.sync(CLEARED, self.threads)
