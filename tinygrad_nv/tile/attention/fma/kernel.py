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
from tinygrad_nv.tile.attention.document_blocks import Documents, store_logs
from tinygrad_nv.tile.attention.fma.matmuls import ExactSoftmax, Outputs, ScoreMatmul
from tinygrad_nv.tile.attention.fma.plan import SIZE, FlashFmaPlan
from tinygrad_nv.tile.attention.fma.store import WarpReduction, store
from tinygrad_nv.tile.attention.mma.copy import ColumnPipeline, RowCopy
from tinygrad_nv.tile.attention.schedules import FlashFma
from tinygrad_nv.tile.attention.score import Columns, Extents, Scores, sink_of, to_signed
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.expression import loads
from tinygrad_nv.tile.kernel import AttentionKernel
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.template import GPU


def flash_fma(spec: AttentionSpec, schedule: FlashFma, gpu: GPU) -> AttentionKernel:
    """The kernel of an attention, by a legal schedule."""
    # min_ctas: else ptxas may spill for one CTA more on a multiprocessor
    kb = Kernel("flash_fma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    _FlashFmaKernel(kb, FlashFmaPlan.of(spec, schedule)).write()
    batch, heads, group = spec.batch
    grid = (-(-spec.s_q // schedule.block_m), heads * group, batch)
    return AttentionKernel("flash_fma", kb.ptx(), grid, schedule.threads, kb.dynamic_smem,
                           rows_of_cta=schedule.block_m if "s_q" in spec.symbolic else 0, pdl=kb.hopper)


class _FlashFmaKernel:
    """The kernel as it is written: the parameters, then the stages of the protocol above."""

    def __init__(self, kb: Kernel, plan: FlashFmaPlan) -> None:
        self.kb, self.plan, self.spec, self.schedule = kb, plan, plan.spec, plan.schedule
        spec, s = plan.spec, plan.schedule
        self.warp_m = plan.warp_m
        self.out = kb.pointer("out")
        self.log = kb.pointer("l") if spec.lse else None
        self.q, self.keys, self.values = (kb.pointer(name) for name in "qkv")
        self.sinks = kb.pointer("sinks") if spec.sinks is not None else None
        extras = [kb.pointer(f"x{i}") for i in range(len(spec.parameters))]
        self.extents = Extents.declare_params(kb, spec)
        self._own_place()
        if spec.documents and kb.hopper: kb.wait_for_previous_grid()
        documents = Documents.of(kb, spec, extras, self.batch, self.first, s.block_m)
        self.columns = Columns(kb, spec, self.extents, self.first, s.block_m, s.block_n, documents)
        self.scores = Scores(kb, spec, self.extents, extras, self.batch, self.first + self.row, s.block_m,
                             s.block_n)
        self.softmax = ExactSoftmax(kb, self.warp_m // 16, self.scores.factor)

    def _own_place(self) -> None:
        """The CTA's rows and head; the warp's rows, and its columns of a block."""
        kb, s, group = self.kb, self.schedule, self.spec.batch[2]
        block, head, warp = kb.ctaid.x, kb.ctaid.y, kb.tid.x >> 5
        if self.spec.band.last is not None: block = kb.nctaid.x - 1 - block
        self.first = block * s.block_m
        self.batch = [kb.ctaid.z, head // group, head % group] if group > 1 else \
            [kb.ctaid.z, head, kb.reg("u32", 0)]
        self.warp_n, self.row = warp % s.warps_n, warp // s.warps_n * self.warp_m
        self.column = self.warp_n * self.plan.warp_columns

    def write(self) -> None:
        """The whole kernel."""
        kb, s, plan = self.kb, self.schedule, self.plan
        self.queries = SharedTile(s.block_m, plan.d * SIZE)
        self.start = kb.shared("ring", plan.ring_bytes, align=1024).address()
        self.q_start = kb.shared("q_rows", self.queries.nbytes, align=1024).address()
        weights = kb.shared("weights", s.threads // 32 * plan.weight_bytes).address() \
            + (kb.tid.x >> 5) * plan.weight_bytes
        if kb.hopper and not self.spec.documents: kb.wait_for_previous_grid()
        self._copies()
        keys, values = (copy.tile for copy in self.ring.copies)
        self.products = ScoreMatmul(kb, self.queries, keys, self.row, self.column, self.warp_m,
                                    plan.warp_columns,
                                 plan.chains, self.q_start)
        self.outputs = Outputs(kb, values, self.column, self.warp_m, plan.warp_columns, weights, plan.pitch,
                               keys.nbytes)
        self.scores.prepare(loads(self.spec.score))
        self._loop()
        if kb.hopper: kb.launch_dependents()
        self._finish()

    # **** copies ****

    def _copies(self) -> None:
        """Starts those of q and of the first blocks."""
        kb, spec, s = self.kb, self.spec, self.schedule
        last = (self.columns.high.to("u32") - 1) * s.block_n
        self.base = last.to("s32")
        q = RowCopy(kb, spec.q, row_start(kb, self.q, spec.q, self.batch, self.first), spec.d, self.queries)
        whole = isinstance(self.extents.s_q, int) and self.extents.s_q % s.block_m == 0
        q.to(self.q_start, None, None if whole else
             q.rows_left(to_signed(kb, self.extents.s_q) - self.first.to("s32")))
        kb.cp_async_commit()
        keys = SharedTile(s.block_n, self.plan.d * SIZE)
        values = SharedTile(s.block_n, self.plan.d_v * SIZE)
        copies = [RowCopy(kb, spec.k, row_start(kb, self.keys, spec.k, self.batch, last), spec.d, keys),
                  RowCopy(kb, spec.v, row_start(kb, self.values, spec.v, self.batch, last), spec.d_v, values,
                          keys.nbytes)]
        self.ring = ColumnPipeline(kb, copies, self.start, self.plan.stage_bytes, s.depth)
        self.ring.fill(self.columns, self.base)

    # **** the loop ****

    def _loop(self) -> None:
        kb, s, count, ring = self.kb, self.schedule, self.columns.count, self.ring
        own = self.column.to("s32")
        ring.begin()
        with kb.loop(0, count, name="block") as block:
            kb.cp_async_wait(ring.ahead - 1)
            kb.sync()
            ring.start_copies(block < count - ring.ahead)
            first = self.base + own
            cells = self.scores.of(self.products.of(ring.reading), first)
            if not self.columns.always_full:
                with kb.if_(self.columns.partly(self.base)): self.scores.mask(cells, first)
            rescales = self.outputs.of_rows(self.softmax.step(cells))
            self.outputs.hand_over(cells)
            self.outputs.add(ring.reading, rescales)
            self.base -= s.block_n
            ring.turn()
        kb.cp_async_wait(0)

    # **** the result ****

    def _finish(self) -> None:
        """Divides by the row sums and stores."""
        kb, s, extents = self.kb, self.schedule, self.extents
        rows = extents.s_q if isinstance(extents.s_q, Value) else kb.reg("u32", extents.s_q)
        row = self.first + self.row
        if s.warps_n == 1: return self._store(row, rows)
        reduction = WarpReduction(kb, self.start, kb.tid.x >> 5, s.warps_n)
        reduction.row_sums(self.softmax, self.outputs)
        reduction.sums(self.outputs.sums)
        with kb.if_(self.warp_n == 0): self._store(row, rows)
        return None

    def _store(self, row: Value, rows: Value) -> None:
        inverses, logs = self.softmax.finish(sink_of(self.kb, self.spec, self.sinks, self.batch))
        self.outputs.scale_rows(inverses)
        if self.log is not None: store_logs(self.kb, self.spec, self.log, logs, self.batch, row, rows)
        out = row_start(self.kb, self.out, self.spec.out, self.batch, row + self.outputs.lane_row)
        s_q = self.extents.s_q
        edges = not (isinstance(s_q, int) and s_q % self.schedule.block_m == 0)
        store(self.kb, self.spec, out, self.outputs, row, rows, edges)
