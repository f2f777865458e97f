"""Consumers that share 64 keys: each has half of a block's rows until p and ds are known, and half of the
columns of dk, dv and dq after that. For heads so wide that the sums of 64 keys do not fit in a warpgroup's
registers (FlashAttention-3 likewise has p and ds in shared memory for 192 and 256).

Protocol: with K and V the 64 keys and values in shared memory, Q and G queries and gradients of 64 rows,

    for each block of rows:
        issue Sᵀ = K Qᵀ,  dPᵀ = V Gᵀ of the consumer's 32 rows
        wait for Sᵀ;  Pᵀ to shared memory, in 16 bits
        wait for dPᵀ;  dSᵀ to shared memory, in 16 bits
        all consumers have written theirs
        issue dQ = dS K,  dV += Pᵀ G,  dK += dSᵀ Q of the consumer's columns
        wait for dQ, add it to memory
        wait for the others, give the block back

Pᵀ and dSᵀ lie as rows of keys. As left operands of dV and dK they are K-major, dS of dQ is MN-major: the
same bytes.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.attention.backward_wgmma.dq import QuerySums
from tinygrad_nv.tile.attention.backward_wgmma.load import BackwardLoads
from tinygrad_nv.tile.attention.backward_wgmma.main_loop import WRITTEN, BackwardMainLoop
from tinygrad_nv.tile.attention.backward_wgmma.plan import (
    DS_BUFFERS,
    ROWS,
    STEP,
    WARPGROUP,
    BackwardWgmmaPlan,
)
from tinygrad_nv.tile.attention.backward_wgmma.weights import RowValues, Weights
from tinygrad_nv.tile.attention.blocks import BlockPosition, RowBlocks
from tinygrad_nv.tile.gemm.wgmma.main_loop import Descriptors
from tinygrad_nv.tile.layout import OperandTile

OWN = ROWS // 2  # rows of a consumer


class HalvedMainLoop(BackwardMainLoop):
    """One consumer's main loop; `consumer` is its number (u32), the same in all its lanes."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan, loads: BackwardLoads, weights: Weights,
                 queries: QuerySums,
                 blocks: RowBlocks, consumer: Value) -> None:
        self.kb, self.plan, self.loads, self.weights, self.queries = kb, plan, loads, weights, queries
        self.blocks, self.consumer, self.threads = blocks, consumer, WARPGROUP * plan.consumers
        self.mine = kb.special("laneid") == 0
        self.at, self.empty_barriers = loads.ring.cursor(), loads.ring.empty_barriers()
        self.weighed, self.slopes = (kb.shared(name, DS_BUFFERS * plan.ds.nbytes, align=1024)
                                     for name in ("p", "ds"))
        self._operands()
        self.s, self.dp = [kb.regs("f32", OWN // 2)], kb.regs("f32", OWN // 2)
        self.p, self.ds = [kb.regs("b32", OWN // 4)], [kb.regs("b32", OWN // 4)]
        self.dk = kb.regs("f32", plan.q_right.mn // 4, 0.0)
        self.dv = kb.regs("f32", plan.grad_right.mn // 4, 0.0)
        self.buffer = kb.reg("u32", 0)

    def _operands(self) -> None:
        kb, plan, loads, consumer = self.kb, self.plan, self.loads, self.consumer

        def half(tile: OperandTile, start: Value, mn: int) -> Descriptors:
            return Descriptors.of(kb, tile, start + consumer * tile.at_mn(mn))

        keys, values, queries, grads = (each.address() for each in (loads.keys, loads.values, loads.queries,
                                                                    loads.grads))
        self.keys, self.values = Descriptors.of(kb, plan.k, keys), Descriptors.of(kb, plan.v, values)
        self.q, self.grad = half(plan.q, queries, OWN), half(plan.grad, grads, OWN)
        self.q_right = half(plan.q_right, queries, plan.q_right.mn // 2)
        self.grad_right = half(plan.grad_right, grads, plan.grad_right.mn // 2)
        self.keys_right = half(plan.k_right, keys, plan.dq_columns)
        transposed = OperandTile(plan.ds.dtype, "MN", ROWS, ROWS, plan.ds.span)
        slopes, weighed = self.slopes.address(), self.weighed.address()
        self.p_left, self.ds_left = (Descriptors.of(kb, plan.ds, start) for start in (weighed, slopes))
        self.ds_transposed = Descriptors.of(kb, transposed, slopes)
        own = self._place()
        self.p_place, self.ds_place = weighed + own, slopes + own

    def _place(self) -> Value:
        """Returns the address at which a lane's row of the four matrices of a stmatrix goes, of 16 rows: keys
        0 … 7 and 8 … 15 of the warp, of rows 0 … 7, then of rows 8 … 15."""
        kb, lane = self.kb, self.kb.special("laneid")
        key = (kb.tid.x // 32 & 3) * 16 + (lane & 15)
        chunk = (self.consumer << 2) + (lane >> 4)
        return (key << 7) + ((chunk ^ (key & 7)) << 4)

    def _block(self, position: BlockPosition, further: Value) -> None:
        kb, ring, consumer = self.kb, self.loads.ring, self.consumer
        ring.wait(self.at)
        logs, changes = (self._own_values(which) for which in range(2))
        self._issue(self.s[0], self.keys, self.q, 0)
        self._issue(self.dp, self.values, self.grad, 0)
        row = position.row + (consumer * OWN).to("s32")
        kb.wgmma_wait(1)
        self.weights.of(self.s[0], self.p[0], row, position.head, logs)
        self._write(self.p_place, self.p[0])
        kb.wgmma_wait(0)
        self.weights.slopes(self.s[0], self.dp, self.ds[0], changes)
        self._write(self.ds_place, self.ds[0])
        kb.fence_proxy_async()
        kb.sync(WRITTEN, self.threads)
        self._issue_columns(self.queries.sums, self.ds_transposed, self.keys_right, self.keys_right.base,
                            False)
        stage = self.at.stage
        self._issue_columns(self.dv, self.p_left, self.grad_right, self.grad_right.stage(stage))
        self._issue_columns(self.dk, self.ds_left, self.q_right, self.q_right.stage(stage))
        kb.wgmma_wait(2)
        self.queries.add(position)
        kb.wgmma_wait(0)
        ring.release(self.empty_barriers, stage, self.mine)
        self.at.advance()
        self.buffer ^= 1
        position.advance()

    def _own_values(self, which: int) -> RowValues:
        """−log₂e · l of the consumer's rows, or −scale · delta."""
        def start() -> Value:
            first = self.loads.row_values.address(4 * ROWS * which) + self.consumer * (4 * OWN)
            return first + self.at.stage * self.plan.row_values_bytes
        return self.weights.row_values(start, OWN // 4)

    def _write(self, start: Value, fragment: list[Value]) -> None:
        """A fragment of the consumer's rows to its buffer."""
        place = start + self.buffer * self.plan.ds.nbytes
        for c in range(len(fragment) // 4):
            self.kb.stmatrix((place ^ 32 * c if c else place).at(), fragment[4 * c:4 * c + 4])

    def _issue_columns(self, sums: list[Value], left: Descriptors, right: Descriptors, low: Value,
                       further: bool = True) -> None:
        """sums += left right, or without what they were: the consumer's columns."""
        kb, kind = self.kb, self.plan.kind
        kb.wgmma_fence()
        a = left.stage(self.buffer)
        for step in range(ROWS // STEP):
            kb.wgmma(f"m64n{2 * len(sums)}k16", f"f32.{kind}.{kind}", sums,
                    left.at(a, left.tile.at_step(step)), right.at(low, right.tile.at_step(step)),
                    further or step > 0, trans=(left.tile.major == "MN", True))
        kb.wgmma_commit()
