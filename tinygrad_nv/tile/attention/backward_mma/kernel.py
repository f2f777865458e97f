"""The backward pass of flash attention with mma.sync: a CTA has a block of keys, and dk and dv of it in
registers (FlashAttention-2, arXiv 2307.08691, algorithm 2). For sm_80 and later.

    the CTA's keys and values, and the first `depth - 1` blocks of rows that see them, are on their way
    for each query head of the key head, for each block of rows:
        wait until the block is in and everybody has read the one before
        start the copies of the block `depth - 1` after, into the place of the one before
        sums = k qᵀ, transposed: a warp has 16 keys, or a multiple of it, of all rows
        p = 2^(score − l), where some row does not see all keys, 0
        ds = p (v gradᵀ − delta), the sums of which begin with −delta
        ds, in 16 bits, to shared memory; of dropout, see dropout.py
        dv += p grad, dk += ds q, with p and ds from registers: as in the forward pass
        wait until everybody's ds is there (with several warps for the same keys: p too; then dv and dk)
        dq block = dsᵀ k, each warp with its share of rows and d, added to memory
    dv and dk, by way of shared memory

Products of the score with a constant are made of exponents, and of dk and dq at their ends. The query heads
of a key head follow one another in the CTA: dk and dv need no reduction. dq is summed by red.global.add.f32;
`deterministic`, by turns (ordered.py). Key blocks from the first to the last: with a causal
band the first are seen by the most rows.

Of wide heads dk and dv of 16 keys are more than a warp's registers: `warps_n` warps have the same keys, of
sums each its part of the block's rows, of dk and dv its part of d; p and ds go through shared memory.

On Hopper it is launched early, as gemm_mma is.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import row_start
from tinygrad_nv.tile.attention.backward_mma.dq import QueryGradient
from tinygrad_nv.tile.attention.backward_mma.ordered import OrderedBlocks, count_started, flags_of
from tinygrad_nv.tile.attention.backward_mma.plan import BackwardMmaPlan
from tinygrad_nv.tile.attention.backward_mma.rows import RowBlockPosition, RowPipeline
from tinygrad_nv.tile.attention.backward_score import TransposedScores, values_of
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.blocks import RowBlocks
from tinygrad_nv.tile.attention.document_blocks import Documents
from tinygrad_nv.tile.attention.dropout import TransposedDropout
from tinygrad_nv.tile.attention.mma.copy import RowCopy
from tinygrad_nv.tile.attention.schedules import BackwardMma
from tinygrad_nv.tile.attention.score import AccFragment, Extents
from tinygrad_nv.tile.attention.spec import KEEP_ALL
from tinygrad_nv.tile.fragments import STEP_BYTES, Fragments, instruction
from tinygrad_nv.tile.kernel import BackwardKernel
from tinygrad_nv.tile.lanes import FLOAT16S
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.result_store import Store
from tinygrad_nv.tile.store_plan import Cell
from tinygrad_nv.tile.template import GPU

Four = list[Value]  # registers of a fragment


def flash_backward_mma(spec: BackwardSpec, schedule: BackwardMma, gpu: GPU) -> BackwardKernel:
    """The kernel of a backward pass, by a legal schedule."""
    # min_ctas: else ptxas may spill for one CTA more on a multiprocessor
    kb = Kernel("flash_backward_mma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    _BackwardMmaKernel(kb, BackwardMmaPlan.of(spec, schedule)).write()
    one = spec.forward
    grid = (-(-one.s_kv // schedule.block_n), one.batch[1], one.batch[0])
    return BackwardKernel("flash_backward_mma", kb.ptx(), grid, schedule.threads, kb.dynamic_smem,
                          rows_of_cta=schedule.block_n if "s_kv" in one.symbolic else 0, pdl=kb.hopper,
                          dq_bytes=spec.dq_bytes,
                          flags=flags_of(one, schedule.block_m) if spec.deterministic else 0)


class _BackwardMmaKernel:
    """The kernel as it is written: the parameters, then the stages of the protocol above."""

    def __init__(self, kb: Kernel, plan: BackwardMmaPlan) -> None:
        self.kb, self.plan, self.spec, self.schedule = kb, plan, plan.spec, plan.schedule
        spec, s = plan.spec, plan.schedule
        self.one = one = spec.forward
        self.d, self.d_v = plan.d, plan.d_v
        self.warp_keys, self.warp_rows = s.block_n // s.warps_m, s.block_m // s.warps_n
        self.dq = kb.pointer("dq")
        self.turns = kb.pointer("turns") if spec.deterministic else None
        self.dk, self.dv = kb.pointer("dk"), kb.pointer("dv")
        self.q, self.keys, self.values, self.grad = (kb.pointer(name) for name in ("q", "k", "v", "grad"))
        self.log, self.delta = kb.pointer("l"), kb.pointer("delta")
        self.seed = kb.pointer("seed") if one.kept < KEEP_ALL else None
        self.extras = [kb.pointer(f"x{i}") for i in range(len(one.parameters))]
        self.extents = Extents.declare_params(kb, one)

    def _own_place(self) -> None:
        """The CTA's keys and head, the warp's keys and rows."""
        kb, one, s = self.kb, self.one, self.schedule
        block, head, batch = (kb.ctaid.x, kb.ctaid.y, kb.ctaid.z) if self.turns is None else \
            count_started(kb, self.turns, one.batch[1])
        self.block, self.first = block, block * s.block_n
        self.batch = [batch, head, kb.reg("u32", 0)]
        warp, self.across = kb.tid.x >> 5, kb.reg("u32", 0)
        if s.warps_n > 1: warp, self.across = warp % s.warps_m, warp // s.warps_m
        self.key, self.row = warp * self.warp_keys, self.across * self.warp_rows
        # turns count the blocks of the band
        documents = None if self.turns is not None else \
            Documents.of(kb, one, self.extras, self.batch, self.first, s.block_n)
        self.blocks = RowBlocks(kb, one, self.extents, self.first.to("s32"), s.block_n, s.block_m, documents)
        self.scores = TransposedScores.of_spec(kb, one, self.extents, self.extras, self.batch,
                                           self.first + self.key, s.block_n, s.block_m)

    def write(self) -> None:
        """The whole kernel."""
        kb, s = self.kb, self.schedule
        self.memory = kb.shared("memory", self.plan.memory_bytes, align=1024).address()
        if kb.hopper: kb.wait_for_previous_grid()
        self._own_place()
        self._copies()
        self._fragments()
        self.scores.prepare_for(self.adding.position)
        self.dropout = None
        if self.seed is not None:
            self.dropout = TransposedDropout(kb, self.one.kept, self.first + self.key)
            self.dropout.read(self.seed)
        self.sums_k, self.sums_v = (self._cells(d // s.warps_n) for d in (self.d, self.d_v))
        self._loop()
        if kb.hopper: kb.launch_dependents()
        self._store()

    def _cells(self, columns: int) -> AccFragment:
        return [[self.kb.regs("f32", 4, 0.0) for _ in range(columns // 8)]
                for _ in range(self.warp_keys // 16)]

    def _per_row(self, pointer: Value, row: Value, width: int = 1) -> Value:
        """Returns the address at which row `row` (u32) begins of float32 [*batch, s_q, width], of the first
        query head."""
        _, heads, group = self.one.batch
        matrix = (self.batch[0] * heads + self.batch[1]) * group
        return pointer + (matrix.to("u64") * self.one.s_q + row.to("u64")) * (4 * width)

    # **** copies ****

    def _copies(self) -> None:
        """Starts those of the keys and of the first blocks of rows."""
        kb, one, s = self.kb, self.one, self.schedule
        self.key_copies, start = [], 0
        for pointer, rows, d in ((self.keys, one.k, one.d), (self.values, one.v, one.d_v)):
            tile = SharedTile(s.block_n, self.plan.width(d) * 2)
            copy = RowCopy(kb, rows, row_start(kb, pointer, rows, self.batch[:2], self.first), d, tile, start)
            end = self.blocks.key_end()
            copy.to(self.memory, None, None if end is None else copy.rows_left(end - self.blocks.key))
            start += tile.nbytes
            self.key_copies.append(copy)
        kb.cp_async_commit()
        self.start = self.memory + start
        self.stage_bytes = self.plan.stage_bytes
        self.slopes = self.start + s.depth * self.stage_bytes
        self.weights = self.slopes + s.block_n * s.block_m * 2  # where p goes, if it goes anywhere
        position, tiles = RowBlockPosition(self.blocks), [SharedTile(s.block_m, d * 2)
                                                          for d in (self.d, self.d_v)]
        low = position.low.to("u32")
        q = RowCopy(kb, one.q, row_start(kb, self.q, one.q, self.batch[:2], low), one.d, tiles[0])
        grad = RowCopy(kb, self.spec.grad, row_start(kb, self.grad, self.spec.grad, self.batch[:2], low),
                       one.d_v, tiles[1], tiles[0].nbytes)
        self.values_of_rows = tiles[0].nbytes + tiles[1].nbytes
        self.ring = RowPipeline(position, q, grad, self.log, self.delta,
                            self._per_row(kb.reg("u64", 0), low), self.values_of_rows)
        for stage in range(s.depth - 1):
            at = self.start + stage * self.stage_bytes
            self.ring.start_copies(at, self.blocks.total > stage)
            self.ring.ask(self.blocks.total > stage)
            self.ring.finish(at)

    def _fragments(self) -> None:
        """How operands are read: of the sums, of dk and dv."""
        kb, one, s = self.kb, self.one, self.schedule
        dtype, apart = one.q.dtype, 16 * (s.warps_n - 1)
        def steps(d: int) -> int: return -(-d * 2 // STEP_BYTES)
        self.left, self.right, self.third = [], [], []
        for key, row, d in zip(self.key_copies, (self.ring.q, self.ring.grad), (one.d, one.d_v), strict=True):
            left = Fragments(kb, dtype, key.tile, False, False, self.key, self.warp_keys, steps(d), key.start)
            left.move(self.memory)
            self.left.append(left)
            self.right.append(Fragments(kb, dtype, row.tile, False, True, self.row, self.warp_rows, steps(d),
                                        row.start))
            self.third.append(Fragments(kb, dtype, row.tile, True, True, self.across * 16,
                                        self.plan.width(d) - apart, s.block_m // 16, row.start))
        self.fourth = Fragments(kb, dtype, SharedTile(s.block_n, s.block_m * 2), False, False, self.key,
                                self.warp_keys, s.block_m // 16, 0)
        low = self.ring.position.low.to("u32")
        self.turn = None if self.turns is None else \
            OrderedBlocks(kb, self.one, self.blocks, self.turns, self.block, self.batch)
        self.adding = QueryGradient(kb, self.plan, self.key_copies[0].tile, self.memory, self.slopes,
                                    self._per_row(self.dq, low, one.d), self.blocks, self.scores.slope)

    # **** the loop ****

    def _loop(self) -> None:
        kb, s, count = self.kb, self.schedule, self.blocks.total
        self.full = self.blocks.full()
        ahead = s.depth - 1
        self.reading = kb.reg("u32", name="reading").set(self.start)
        self.writing = kb.reg("u32", name="writing").set(self.start + ahead * self.stage_bytes)
        end = self.start + s.depth * self.stage_bytes
        with kb.loop(0, count, name="block") as block:
            kb.cp_async_wait(ahead - 1)
            kb.sync()
            if self.turn is not None: self.turn.pass_turn(block > 0)
            self.ring.start_copies(self.writing, block < count - ahead)
            for fragments in (*self.right, *self.third): fragments.move(self.reading)
            weights, slopes = self._weights()
            products = self._products_of(weights, slopes)
            packed, packed_weights = self._pack_weights(products), self._pack_weights(weights)
            self.adding.keep(packed, self.key, self.row, self.slopes)
            if s.warps_n > 1: self.adding.keep(packed_weights, self.key, self.row, self.weights)
            self.ring.ask(block < count - ahead)
            if s.warps_n == 1: self._sum_own(packed_weights, packed)
            if self.turn is not None: self.turn.wait(self.adding.position)
            kb.sync()
            if s.warps_n > 1: self._sum_all()
            self.adding.add()
            self.ring.finish(self.writing)
            self.writing.set(self.reading)
            self.reading += self.stage_bytes
            self.reading.set(kb.select(self.reading == end, self.start, self.reading))
        kb.cp_async_wait(0)

    def _multiply_keys(self, which: int, cells: AccFragment) -> AccFragment:
        """Cells of keys by rows, and the products of keys (0) or values (1) and the block's rows."""
        kb, left, right = self.kb, self.left[which], self.right[which]
        for step in range(left.steps):
            left.load(step, keys := left.registers())
            for j in range(self.warp_rows // 16):
                right.load_one(j, step, rows := kb.regs("b32", 4))
                self._products(cells, j, keys, rows)
        return cells

    def _products(self, cells: AccFragment, j: int, left: list[Four], right: Four) -> None:
        """Multiplies 16 columns."""
        shape, types = instruction(self.one.q.dtype, self.one.q.dtype)
        for row, four in zip(cells, left, strict=True):
            for half in range(2):
                cell = row[2 * j + half]
                self.kb.mma(shape, types, cell, four, right[2 * half:2 * half + 2], cell)

    def _of_rows(self, start: int) -> list[list[Value]]:
        """Returns a stage's values of the lane's two rows of each cell."""
        kb, lane = self.kb, self.kb.special("laneid")
        at = self.reading + self.row * 4 + (lane & 3) * 8
        return [kb.ld("shared", "f32", at.at(self.values_of_rows + start + 32 * j), 2)
                for j in range(self.warp_rows // 8)]

    @property
    def base(self) -> Value:
        """The first row (s32) of the warp's in the block."""
        position = self.adding.position
        return position.row if self.schedule.warps_n == 1 else position.row + self.row.to("s32")

    def _weights(self) -> tuple[AccFragment, AccFragment | None]:
        """p of the block, float32, and the derivatives of its scores where they differ."""
        kb, sums = self.kb, self._multiply_keys(0, self._cells(self.warp_rows))
        cells, slopes = self.scores.score_and_slope(sums, self.base)
        logs = self._of_rows(0)
        for row in cells:
            for cell, two in zip(row, logs, strict=True):
                for r, value in enumerate(cell):
                    kb.emit("fma.rn.f32", value, value, self.scores.factor, two[r % 2])
                    kb.emit("ex2.approx.ftz.f32", value, value)
        partly = self.blocks.partly(self.full, self.adding.position.row, self.schedule.block_m)
        if partly is not None:
            with kb.if_(partly): self.scores.mask(cells, self.base, 0.0)
        if self.dropout is not None:
            _, heads, group = self.one.batch
            matrix = (self.batch[0] * heads + self.batch[1]) * group + self.adding.position.query
            self.dropout.mark(cells, self.base, matrix)
        return cells, slopes

    def _products_of(self, weights: AccFragment, slopes: AccFragment | None) -> AccFragment:
        """ds of the block, without a constant slope, float32."""
        minus = 4 * self.schedule.block_m
        if self.dropout is None:
            cells = [[[*first, *second] for first, second in zip(self._of_rows(minus), self._of_rows(minus),
                                                                 strict=True)] for _ in weights]
            for value, weight in zip(values_of(self._multiply_keys(1, cells)), values_of(weights),
                                     strict=True):
                value *= weight
        else:
            cells, deltas = self._multiply_keys(1, self._cells(self.warp_rows)), self._of_rows(minus)
            for row, own in zip(cells, weights, strict=True):
                for cell, marked, two in zip(row, own, deltas, strict=True):
                    for r in range(4): self.dropout.change(cell[r], marked[r], two[r % 2])
        if slopes is not None:
            for value, weight, slope in zip(*map(values_of, (cells, weights, slopes)), strict=True):
                # where p is 0 the slope may be infinite, or v what was never meant to be read
                value.set(self.kb.select(weight == 0.0, 0.0, value * slope))
        if self.dropout is not None:
            for weight in values_of(weights): weight.set(self.dropout.of_values(weight))
        return cells

    def _pack_weights(self, cells: AccFragment) -> list[list[Four]]:
        """Weights in 16 bits, as fragments of left operands: by 16 keys, by 16 rows."""
        made = [[self.kb.regs("b32", 4) for _ in range(len(row) // 2)] for row in cells]
        for row, fours in zip(cells, made, strict=True):
            for step, four in enumerate(fours):
                for r, register in enumerate(four):
                    low, high = row[2 * step + r // 2][2 * (r % 2):2 * (r % 2) + 2]
                    self.kb.emit(f"cvt.rn.{FLOAT16S[self.one.q.dtype]}x2.f32", register, high, low)
        return made

    def _sum_own(self, weights: list[list[Four]], slopes: list[list[Four]]) -> None:
        """Adds products of the warp's own p and ds, in 16 bits, and the block's rows."""
        for sums, own, third in ((self.sums_v, weights, self.third[1]), (self.sums_k, slopes, self.third[0])):
            for step in range(third.steps): self._sum(sums, [row[step] for row in own], third, step)

    def _sum_all(self) -> None:
        """Multiplies all rows' p and ds, from shared memory."""
        for sums, start, third in ((self.sums_v, self.weights, self.third[1]),
                                   (self.sums_k, self.slopes, self.third[0])):
            self.fourth.move(start)
            for step in range(third.steps):
                self.fourth.load(step, left := self.fourth.registers())
                self._sum(sums, left, third, step)

    def _sum(self, sums: AccFragment, left: list[Four], third: Fragments, step: int) -> None:
        """Adds products of 16 rows, each warp those of every so many 16 elements of d."""
        for j in range(len(sums[0]) // 2):
            third.load_one(j * self.schedule.warps_n, step, rows := self.kb.regs("b32", 4))
            self._products(sums, j, left, rows)

    def _store(self) -> None:
        """dk and dv."""
        kb, one, s = self.kb, self.one, self.schedule
        rows = self.extents.s_kv if isinstance(self.extents.s_kv, Value) else kb.reg("u32", self.extents.s_kv)
        kb.sync()
        if self.turn is not None: self.turn.pass_turn(self.blocks.total > 0)
        for row in self.sums_k:
            for cell in row:
                for value in cell: value *= self.scores.slope
        if self.dropout is not None:
            for value in values_of(self.sums_v): value *= self.dropout.scale
        start = self.memory
        for pointer, where, d, sums in ((self.dv, self.spec.dv, one.d_v, self.sums_v),
                                        (self.dk, self.spec.dk, one.d, self.sums_k)):
            plan = self.plan.store(where, d)
            store = Store(kb, self.plan.store_target(where, d), plan, pointer, [], rows, start)
            cells = [Cell(16 * i, j // 2 * 16 * s.warps_n + j % 2 * 8, [cell])
                     for i, row in enumerate(sums) for j, cell in enumerate(row)]
            store.tile(self.first + self.key, self.across * 16, self.batch, cells)
            store.finish()
            start = start + plan.smem_bytes
