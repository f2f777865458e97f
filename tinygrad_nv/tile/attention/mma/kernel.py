"""Flash attention with mma.sync: keys and values in a ring of cp.async stages, sums and probabilities in
registers (FlashAttention-2). For sm_80 and later.

    q of the CTA's rows, and the last `depth - 1` blocks of columns that they see, are on their way
    for each block of columns, from the last to the first:
        wait until the block is in and everybody has read the one after
        start the copies of the block `depth - 1` before, into the place of the one after
        sums = q kᵀ
        the score; where some row does not see all of the block, −inf
        a row's max, 2^(score − max), its sum so far; the sums of v so far are rescaled
        dropout, where there is one
        out += p v, with p from registers: the fragment of two products' sums is that of a left operand
    out / sum, by way of the ring, and l

A warp has 16 rows, or a multiple of it, of all columns: rows never meet across warps. From the last block to
the first, since the partial one is then the first, and no other asks how many keys there are; keys that come
too late for all of the CTA's rows are never read. Fragments of q stay in registers where there is room
(`holds_queries`), else q stays in shared memory. Blocks of rows that see most come first, so that the last
CTAs to start are short.

On Hopper it is launched early, as gemm_mma is.
"""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance, row_start
from tinygrad_nv.tile.attention.blocks import KeyBlocks
from tinygrad_nv.tile.attention.document_blocks import Documents, clear, store_logs
from tinygrad_nv.tile.attention.dropout import Dropout
from tinygrad_nv.tile.attention.mma.copy import ColumnPipeline, RowCopy
from tinygrad_nv.tile.attention.mma.plan import FlashMmaPlan, pad_head
from tinygrad_nv.tile.attention.schedules import FlashMma
from tinygrad_nv.tile.attention.score import (
    AccFragment,
    Extents,
    OnlineSoftmax,
    Scores,
    is_whole,
    sink_of,
    to_signed,
)
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec
from tinygrad_nv.tile.expression import loads
from tinygrad_nv.tile.fragments import STEP_BYTES, Fragments, instruction
from tinygrad_nv.tile.kernel import AttentionKernel
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.result_store import Store
from tinygrad_nv.tile.store_plan import Cell
from tinygrad_nv.tile.template import GPU


def flash_mma(spec: AttentionSpec, schedule: FlashMma, gpu: GPU) -> AttentionKernel:
    """The kernel of an attention, by a legal schedule."""
    # min_ctas: else ptxas may spill for one CTA more on a multiprocessor
    kb = Kernel("flash_mma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    _FlashMmaKernel(kb, FlashMmaPlan.of(spec, schedule)).write()
    batch, heads, group = spec.batch
    grid = (-(-spec.s_q // schedule.block_m), heads * group, batch + spec.is_ragged)
    return AttentionKernel("flash_mma", kb.ptx(), grid, schedule.threads, kb.dynamic_smem,
                           rows_of_cta=schedule.block_m if "s_q" in spec.symbolic else 0, pdl=kb.hopper)


class _FlashMmaKernel:
    """The kernel as it is written: the parameters, then the stages of the protocol above."""

    def __init__(self, kb: Kernel, plan: FlashMmaPlan) -> None:
        self.kb, self.plan, self.spec, self.schedule = kb, plan, plan.spec, plan.schedule
        spec, s = plan.spec, plan.schedule
        self.d, self.d_v, self.warp_m = plan.d, plan.d_v, plan.warp_m
        self.out = kb.pointer("out")
        self.log = kb.pointer("l") if spec.lse else None
        self.q, self.keys, self.values = (kb.pointer(name) for name in "qkv")
        cu = (kb.pointer("cu_q"), kb.pointer("cu_k")) if spec.is_ragged else None
        self.sinks = kb.pointer("sinks") if spec.sinks is not None else None
        self.seed = kb.pointer("seed") if spec.kept < KEEP_ALL else None
        self.extras = [kb.pointer(f"x{i}") for i in range(len(spec.parameters))]
        self._own_place()
        self.extents = Extents.declare_params(kb, spec) if cu is None else self._sequence(*cu)
        if spec.documents and kb.hopper: kb.wait_for_previous_grid()
        documents = Documents.of(kb, spec, self.extras, self.batch, self.first, s.block_m)
        self.blocks = KeyBlocks(kb, spec, self.extents, self.first.to("s32"), s.block_m, s.block_n, documents)
        self.scores = Scores(kb, spec, self.extents, self.extras, self.batch, self.first + self.row,
                             s.block_m, s.block_n)

    def _own_place(self) -> None:
        """The CTA's rows and head, the warp's rows."""
        kb, s, group = self.kb, self.schedule, self.spec.batch[2]
        block, head = kb.ctaid.x, kb.ctaid.y
        if self.spec.band.last is not None: block = kb.nctaid.x - 1 - block
        self.first = block * s.block_m
        self.batch = [kb.ctaid.z, head // group, head % group] if group > 1 else \
            [kb.ctaid.z, head, kb.reg("u32", 0)]
        self.row = (kb.tid.x >> 5) * self.warp_m

    def _sequence(self, cu_q: Value, cu_k: Value) -> Extents:
        """Extents of the CTA's sequence, whose rows the pointers point to from now on. Blocks that it lacks
        end here."""
        kb, spec = self.kb, self.spec
        if kb.hopper: kb.wait_for_previous_grid()
        clear(kb, spec, self.out, cu_q, self.batch, kb.ctaid.x, self.schedule.block_m)
        made = Extents.read(kb, spec, (cu_q, cu_k), self.batch[0])
        kb.emit("exit", guard=self.first >= made.s_q)
        assert made.first is not None
        q, keys = made.first
        self.out, self.q, self.keys, self.values = (
            advance(kb, pointer, first, rows.row * rows.dtype.itemsize) for pointer, first, rows in
            ((self.out, q, spec.out), (self.q, q, spec.q), (self.keys, keys, spec.k),
             (self.values, keys, spec.v)))
        return made

    def write(self) -> None:
        """The whole kernel."""
        kb, spec, plan = self.kb, self.spec, self.plan
        self.holds_queries, self.stage_bytes = plan.holds_queries, plan.stage_bytes
        self.start = kb.shared("ring", plan.ring_bytes, align=1024).address()
        if plan.q_in_ring:  # fragments are read before the last stage is needed
            self.q_start = self.start + (self.schedule.depth - 1) * self.stage_bytes
        else: self.q_start = kb.shared("q_rows", plan.q_bytes, align=1024).address()
        if kb.hopper and not (spec.is_ragged or spec.documents): kb.wait_for_previous_grid()
        self._copies()
        self._fragments()
        self.scores.prepare(loads(spec.score))
        self.dropout = None if self.seed is None else self._dropout(self.seed)
        self.softmax = OnlineSoftmax(kb, self.warp_m // 16, self.scores.factor)
        self.sums: AccFragment = self._cells(self.d_v)
        self._loop()
        if kb.hopper: kb.launch_dependents()
        self._store()

    def _dropout(self, seed: Value) -> Dropout:
        made = Dropout(self.kb, self.spec.kept, self.schedule.block_n, self.spec.batch)
        made.read(seed)
        made.move(self.batch, self.scores.row)
        return made

    def _cells(self, columns: int) -> AccFragment:
        return [[self.kb.regs("f32", 4, 0.0) for _ in range(columns // 8)] for _ in range(self.warp_m // 16)]

    # **** copies ****

    def _copies(self) -> None:
        """Starts those of q and of the first blocks."""
        kb, spec, s = self.kb, self.spec, self.schedule
        self.base = kb.reg("s32", (self.blocks.end - 1) * s.block_n)
        last = self.base.to("u32")
        copies: list[RowCopy] = []
        q_tile = SharedTile(s.block_m, self.d * 2)
        q = RowCopy(kb, spec.q, row_start(kb, self.q, spec.q, self.batch, self.first), spec.d, q_tile)
        q.to(self.q_start, None, None if is_whole(self.extents.s_q, s.block_m) else
             q.rows_left(to_signed(kb, self.extents.s_q) - self.first.to("s32")))
        kb.cp_async_commit()
        start = 0
        for pointer, rows, d in ((self.keys, spec.k, spec.d), (self.values, spec.v, spec.d_v)):
            tile = SharedTile(s.block_n, pad_head(d) * 2)
            copies.append(RowCopy(kb, rows, row_start(kb, pointer, rows, self.batch, last), d, tile, start))
            start += tile.nbytes
        self.ring = ColumnPipeline(kb, copies, self.start, self.stage_bytes, s.depth)
        self.count = self.blocks.count()
        self.ring.fill(self.blocks, self.count, self.base)

    def _fragments(self) -> None:
        """Loads the fragments of q, and declares how those of keys and values are read."""
        kb, spec, s = self.kb, self.spec, self.schedule
        keys, values = (copy.tile for copy in self.ring.copies)
        zero = kb.reg("u32", 0)
        self.left = Fragments(kb, spec.q.dtype, SharedTile(s.block_m, self.d * 2), False, False, self.row,
                              self.warp_m, self.d * 2 // STEP_BYTES, 0)
        self.right = Fragments(kb, spec.k.dtype, keys, False, True, zero, s.block_n, self.d * 2 // STEP_BYTES,
                               0)
        self.third = Fragments(kb, spec.v.dtype, values, True, True, zero, self.d_v, s.block_n // 16,
                               keys.nbytes)
        self.left.move(self.q_start)
        self.rows: list[list[list[Value]]] = []
        if not self.holds_queries: return
        kb.cp_async_wait(s.depth - 1)
        kb.sync()
        for step in range(self.left.steps):
            self.rows.append(self.left.registers())
            self.left.load(step, self.rows[-1])

    # **** the loop ****

    def _loop(self) -> None:
        kb, s, count, ring, full = self.kb, self.schedule, self.count, self.ring, self.blocks.range.full()
        ring.begin()
        with kb.loop(0, count, name="block") as block:
            kb.cp_async_wait(ring.ahead - 1)
            kb.sync()
            ring.start_copies(block < count - ring.ahead)
            for fragments in (self.right, self.third): fragments.move(ring.reading)
            cells = self.scores.of(self._scores(), self.base)
            if self.blocks.needs_mask:
                with kb.if_(full.misses(self.base, s.block_n)): self.scores.mask(cells, self.base)
            self._rescale(self.softmax.step(cells))
            if self.dropout is not None: self.dropout.drop(cells, self.base)
            self._sum(cells)
            self.base -= s.block_n
            ring.turn()
        kb.cp_async_wait(0)

    def _scores(self) -> AccFragment:
        """Products of q and the block's keys."""
        kb, made = self.kb, self._cells(self.schedule.block_n)
        shape, types = instruction(self.spec.q.dtype, self.spec.k.dtype)
        for step in range(self.left.steps):
            if self.holds_queries: rows = self.rows[step]
            else: self.left.load(step, rows := self.left.registers())
            for j in range(self.schedule.block_n // 16):
                self.right.load_one(j, step, keys := kb.regs("b32", 4))
                self._products(shape, types, made, j, rows, keys)
        return made

    def _products(self, shape: str, types: str, cells: AccFragment, j: int, left: list[list[Value]],
                  right: list[Value]) -> None:
        """Multiplies 16 columns."""
        for row, four in zip(cells, left, strict=True):
            for half in range(2):
                cell = row[2 * j + half]
                self.kb.mma(shape, types, cell, four, right[2 * half:2 * half + 2], cell)

    def _rescale(self, factors: list[Value]) -> None:
        """Rescales what has been summed to the new maxima."""
        for i, row in enumerate(self.sums):
            for cell in row:
                for r, register in enumerate(cell): register *= factors[2 * i + r // 2]

    def _sum(self, cells: AccFragment) -> None:
        """Products of probabilities and the block's values."""
        kb, dtype = self.kb, self.spec.v.dtype
        shape, types = instruction(dtype, dtype)
        name = "bf16" if dtype == dtypes.bfloat16 else "f16"
        for step in range(self.third.steps):
            rows = []
            for row in cells:
                rows.append(kb.regs("b32", 4))
                for r, register in enumerate(rows[-1]):
                    low, high = row[2 * step + r // 2][2 * (r % 2):2 * (r % 2) + 2]
                    kb.emit(f"cvt.rn.{name}x2.f32", register, high, low)
            for j in range(self.d_v // 16):
                self.third.load_one(j, step, values := kb.regs("b32", 4))
                self._products(shape, types, self.sums, j, rows, values)

    # **** the result ****

    def _store(self) -> None:
        """Divides by the row sums and stores, by way of the ring, which is no longer needed."""
        kb, extents = self.kb, self.extents
        inverses, logs = self.softmax.finish(sink_of(kb, self.spec, self.sinks, self.batch))
        if self.dropout is not None: inverses = [inverse * self.dropout.scale for inverse in inverses]
        self._rescale(inverses)
        rows = extents.s_q if isinstance(extents.s_q, Value) else kb.reg("u32", extents.s_q)
        if self.log is not None:
            store_logs(kb, self.spec, self.log, logs, self.batch, self.first + self.row, rows)
        if self.plan.store.smem_bytes: kb.sync()
        store = Store(kb, self.plan.store_target, self.plan.store, self.out, [], rows, self.start)
        cells = [Cell(16 * i, 8 * j, [cell]) for i, row in enumerate(self.sums) for j, cell in enumerate(row)]
        store.tile(self.first + self.row, kb.reg("u32", 0), self.batch, cells)
        store.finish()
