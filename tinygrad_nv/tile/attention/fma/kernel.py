"""Flash attention in float32, multiplied and added by ordinary arithmetic: keys and values in a ring of
cp.async stages, sums in registers. For sm_80 and later.

    q of the CTA's rows, and the last `depth - 1` blocks of columns that they see, are on their way
    for each block of columns, from the last to the first:
        wait until the block is in and everybody has read the one after
        start the copies of the block `depth - 1` before, into the place of the one after
        sums = q kᵀ
        the score; where some row does not see all of the block, −inf
        a row's max, 2^(score − max), its sum so far; the sums of v so far are rescaled
        p to shared memory, where the warp's other lanes read it
        out += p v
    warps with the same rows reduce; out / sum, and l

`warps_m` warps have 16 rows or a multiple of it each. `warps_n` of them share rows, and divide each block's
columns: each has maxima and sums of its own, which are reduced at the end, in the warps' order. That is for
few rows, whose keys and values one warp would be long in reading. Nothing is rounded before the result. What
lanes multiply is in matmuls.py; the rest is as in attention/mma/kernel.py.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import row_start
from tinygrad_nv.tile.attention.fma.matmuls import Outputs, ScoreMatmul
from tinygrad_nv.tile.attention.fma.plan import SIZE, FlashFmaPlan
from tinygrad_nv.tile.attention.fma.softmax import ExactSoftmax
from tinygrad_nv.tile.attention.fma.store import WarpReduction, store
from tinygrad_nv.tile.attention.mma.copy import ColumnPipeline, RowCopy
from tinygrad_nv.tile.attention.ragged_rest import store_logs
from tinygrad_nv.tile.attention.schedules import FlashFma
from tinygrad_nv.tile.attention.score import Columns, Extents, Scores, signed
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.expression import loads
from tinygrad_nv.tile.kernel import AttentionKernel
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.template import GPU


def flash_fma(spec: AttentionSpec, schedule: FlashFma, gpu: GPU) -> AttentionKernel:
    """The kernel of an attention, by a legal schedule."""
    # min_ctas: else ptxas may spill for one CTA more on a multiprocessor
    k = Kernel("flash_fma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    _FlashFmaKernel(k, FlashFmaPlan.of(spec, schedule)).write()
    batch, heads, group = spec.batch
    grid = (-(-spec.s_q // schedule.block_m), heads * group, batch)
    return AttentionKernel("flash_fma", k.ptx(), grid, schedule.threads, k.dynamic_smem,
                           rows_of_cta=schedule.block_m if "s_q" in spec.symbolic else 0, pdl=k.hopper)


class _FlashFmaKernel:
    """The kernel as it is written: the parameters, then the stages of the protocol above."""

    def __init__(self, k: Kernel, plan: FlashFmaPlan) -> None:
        self.k, self.plan, self.spec, self.schedule = k, plan, plan.spec, plan.schedule
        spec, s = plan.spec, plan.schedule
        self.warp_m = plan.warp_m
        self.out = k.pointer("out")
        self.log = k.pointer("l") if spec.lse else None
        self.q, self.keys, self.values = (k.pointer(name) for name in "qkv")
        extras = [k.pointer(f"x{i}") for i in range(len(spec.parameters))]
        self.extents = Extents.declared(k, spec)
        self._own_place()
        self.columns = Columns(k, spec, self.extents, self.first, s.block_m, s.block_n)
        self.scores = Scores(k, spec, self.extents, extras, self.batch, self.first + self.row, s.block_m,
                             s.block_n)
        self.softmax = ExactSoftmax(k, self.warp_m // 16, self.scores.factor)

    def _own_place(self) -> None:
        """The CTA's rows and head; the warp's rows, and its columns of a block."""
        k, s, group = self.k, self.schedule, self.spec.batch[2]
        block, head, warp = k.ctaid.x, k.ctaid.y, k.tid.x >> 5
        if self.spec.band.last is not None: block = k.nctaid.x - 1 - block
        self.first = block * s.block_m
        self.batch = [k.ctaid.z, head // group, head % group] if group > 1 else \
            [k.ctaid.z, head, k.reg("u32", 0)]
        self.warp_n, self.row = warp % s.warps_n, warp // s.warps_n * self.warp_m
        self.column = self.warp_n * self.plan.warp_columns

    def write(self) -> None:
        """The whole kernel."""
        k, s, plan = self.k, self.schedule, self.plan
        self.queries = SharedTile(s.block_m, plan.d * SIZE)
        self.start = k.shared("ring", plan.ring_bytes, align=1024).address()
        self.q_start = k.shared("q_rows", self.queries.nbytes, align=1024).address()
        weights = k.shared("weights", s.threads // 32 * plan.weight_bytes).address() \
            + (k.tid.x >> 5) * plan.weight_bytes
        if k.hopper: k.wait_for_previous_grid()
        self._copies()
        keys, values = (copy.tile for copy in self.ring.copies)
        self.products = ScoreMatmul(k, self.queries, keys, self.row, self.column, self.warp_m,
                                    plan.warp_columns,
                                 plan.chains, self.q_start)
        self.outputs = Outputs(k, values, self.column, self.warp_m, plan.warp_columns, weights, plan.pitch,
                               keys.nbytes)
        self.scores.prepare(loads(self.spec.score))
        self._loop()
        if k.hopper: k.launch_dependents()
        self._finish()

    # **** copies ****

    def _copies(self) -> None:
        """Starts those of q and of the first blocks."""
        k, spec, s = self.k, self.spec, self.schedule
        last = (self.columns.high.to("u32") - 1) * s.block_n
        self.base = last.to("s32")
        q = RowCopy(k, spec.q, row_start(k, self.q, spec.q, self.batch, self.first), spec.d, self.queries)
        whole = isinstance(self.extents.s_q, int) and self.extents.s_q % s.block_m == 0
        q.to(self.q_start, None, None if whole else
             q.left(signed(k, self.extents.s_q) - self.first.to("s32")))
        k.cp_async_commit()
        keys = SharedTile(s.block_n, self.plan.d * SIZE)
        values = SharedTile(s.block_n, self.plan.d_v * SIZE)
        copies = [RowCopy(k, spec.k, row_start(k, self.keys, spec.k, self.batch, last), spec.d, keys),
                  RowCopy(k, spec.v, row_start(k, self.values, spec.v, self.batch, last), spec.d_v, values,
                          keys.nbytes)]
        self.ring = ColumnPipeline(k, copies, self.start, self.plan.stage_bytes, s.depth)
        self.ring.fill(self.columns, self.base)

    # **** the loop ****

    def _loop(self) -> None:
        k, s, count, ring = self.k, self.schedule, self.columns.count, self.ring
        own = self.column.to("s32")
        ring.begin()
        with k.loop(0, count, name="block") as block:
            k.cp_async_wait(ring.ahead - 1)
            k.sync()
            ring.bring(block < count - ring.ahead)
            first = self.base + own
            cells = self.scores.of(self.products.of(ring.reading), first)
            if not self.columns.always_full:
                with k.if_(self.columns.partly(self.base)): self.scores.mask(cells, first)
            rescales = self.outputs.of_rows(self.softmax.step(cells))
            self.outputs.hand_over(cells)
            self.outputs.add(ring.reading, rescales)
            self.base -= s.block_n
            ring.turn()
        k.cp_async_wait(0)

    # **** the result ****

    def _finish(self) -> None:
        """Divides by the row sums and stores."""
        k, s, extents = self.k, self.schedule, self.extents
        rows = extents.s_q if isinstance(extents.s_q, Value) else k.reg("u32", extents.s_q)
        row = self.first + self.row
        if s.warps_n == 1: return self._store(row, rows)
        reduction = WarpReduction(k, self.start, k.tid.x >> 5, s.warps_n)
        reduction.row_sums(self.softmax, self.outputs)
        reduction.sums(self.outputs.sums)
        with k.if_(self.warp_n == 0): self._store(row, rows)
        return None

    def _store(self, row: Value, rows: Value) -> None:
        inverses, logs = self.softmax.finish()
        self.outputs.scaled(inverses)
        if self.log is not None: store_logs(self.k, self.spec, self.log, logs, self.batch, row, rows)
        out = row_start(self.k, self.out, self.spec.out, self.batch, row + self.outputs.lane_row)
        s_q = self.extents.s_q
        edges = not (isinstance(s_q, int) and s_q % self.schedule.block_m == 0)
        store(self.k, self.spec, out, self.outputs, row, rows, edges)
