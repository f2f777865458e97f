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

from collections.abc import Sequence
from dataclasses import dataclass

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import place, row_start
from tinygrad_nv.tile.attention.blocks import KeyBlocks
from tinygrad_nv.tile.attention.document_blocks import Documents, store_logs
from tinygrad_nv.tile.attention.fma.matmuls import ExactSoftmax, Outputs, ScoreMatmul
from tinygrad_nv.tile.attention.fma.plan import SIZE, FlashFmaPlan
from tinygrad_nv.tile.attention.mma.copy import ColumnPipeline, RowCopy
from tinygrad_nv.tile.attention.schedules import FlashFma
from tinygrad_nv.tile.attention.score import Extents, Scores, is_whole, sink_of, to_signed
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.expression import loads
from tinygrad_nv.tile.kernel import AttentionKernel
from tinygrad_nv.tile.lanes import FLOAT16S, pack
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
        self.blocks = KeyBlocks(kb, spec, self.extents, self.first.to("s32"), s.block_m, s.block_n, documents)
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
        self.base = kb.reg("s32", (self.blocks.end - 1) * s.block_n)
        last = self.base.to("u32")
        q = RowCopy(kb, spec.q, row_start(kb, self.q, spec.q, self.batch, self.first), spec.d, self.queries)
        q.to(self.q_start, None, None if is_whole(self.extents.s_q, s.block_m) else
             q.rows_left(to_signed(kb, self.extents.s_q) - self.first.to("s32")))
        kb.cp_async_commit()
        keys = SharedTile(s.block_n, self.plan.d * SIZE)
        values = SharedTile(s.block_n, self.plan.d_v * SIZE)
        copies = [RowCopy(kb, spec.k, row_start(kb, self.keys, spec.k, self.batch, last), spec.d, keys),
                  RowCopy(kb, spec.v, row_start(kb, self.values, spec.v, self.batch, last), spec.d_v, values,
                          keys.nbytes)]
        self.ring = ColumnPipeline(kb, copies, self.start, self.plan.stage_bytes, s.depth)
        self.count = self.blocks.count()
        self.ring.fill(self.blocks, self.count, self.base)

    # **** the loop ****

    def _loop(self) -> None:
        kb, s, count, ring, full = self.kb, self.schedule, self.count, self.ring, self.blocks.range.full()
        own = self.column.to("s32")
        ring.begin()
        with kb.loop(0, count, name="block") as block:
            kb.cp_async_wait(ring.ahead - 1)
            kb.sync()
            ring.start_copies(block < count - ring.ahead)
            first = self.base + own
            cells = self.scores.of(self.products.of(ring.reading), first)
            if self.blocks.needs_mask:
                with kb.if_(full.misses(self.base, s.block_n)): self.scores.mask(cells, first)
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
        edges = not is_whole(self.extents.s_q, self.schedule.block_m)
        store(self.kb, self.spec, out, self.outputs, row, rows, edges)


@dataclass
class WarpReduction:
    """Reduction over `warps` neighbouring warps, which have the same rows, in shared memory from `start`
    (u32) on, that of the ring, when it is read no more; `warp` (u32) is this warp's number in the CTA.

        row_sums   every warp leaves its rows' maxima and sums, and takes the largest max and the sum of all
                   for its own; its sums are rescaled by 2^(factor · (its max − the largest)), and its
                   outputs too
        sums       warps but the first of those with the same rows tell their sums, which the first adds

    Each lane tells what it holds to the lanes of its number, so that nothing depends on the layout of the
    sums. The order of additions is that of the warps. A warp that saw nothing has weight 0."""
    kb: Kernel
    start: Value
    warp: Value
    warps: int

    def __post_init__(self) -> None:
        self.own = self.warp % self.warps
        self.lane = self.kb.special("laneid")

    def row_sums(self, softmax: ExactSoftmax, outputs: Outputs) -> None:
        """Maxima and sums of all rows, in each warp."""
        kb, count = self.kb, len(softmax.row_max)
        lanes = 32 * 8
        base = self.start + (self.lane << 3)
        first = base + (self.warp - self.own) * (count * lanes)
        kb.sync()
        mine = base + self.warp * (count * lanes)
        for i, pair in enumerate(zip(softmax.row_max, softmax.row_sum, strict=True)):
            kb.st("shared", "f32", mine.at(i * lanes), pair)
        kb.sync()
        factors = []
        for i, (row_max, row_sum) in enumerate(zip(softmax.row_max, softmax.row_sum, strict=True)):
            pairs = [kb.ld("shared", "f32", first.at((w * count + i) * lanes), 2) for w in range(self.warps)]
            most = kb.reg("f32", pairs[0][0])
            for other, _ in pairs[1:]: kb.emit("max.f32", most, most, other)
            whole, base = kb.reg("f32", 0.0), softmax.base(most)
            for other, share in pairs:
                kb.emit("fma.rn.f32", whole, share, softmax.weight(other, base), whole)
            factors.append(softmax.weight(row_max, base))
            row_max.set(most)
            row_sum.set(whole)
        outputs.scale_rows(factors)

    def sums(self, sums: Sequence[Sequence[Sequence[Value]]]) -> None:
        """Adds the others' sums to those of the first of the warps."""
        kb, fours = self.kb, [four for row in sums for four in row]
        lanes = 32 * 16
        nbytes = len(fours) * lanes
        others = self.warps - 1
        number = self.warp // self.warps * others
        base = self.start + (self.lane << 4) + number * nbytes
        kb.sync()
        with kb.if_(self.own > 0):
            mine = base + (self.own - 1) * nbytes
            for i, four in enumerate(fours): kb.st("shared", "f32", mine.at(i * lanes), four)
        kb.sync()
        with kb.if_(self.own == 0):
            for other in range(others):
                for i, four in enumerate(fours):
                    told = kb.ld("shared", "f32", base.at(other * nbytes + i * lanes), 4)
                    for register, value in zip(four, told, strict=True): register += value


def store(kb: Kernel, spec: AttentionSpec, out: Value, outputs: Outputs, row: Value, rows: Value,
          edges: bool) -> None:
    """Stores a warp's sums: `out` (u64) is where the lane's first row begins, `row` (u32) the warp's first of
    `rows`; with `edges` it may have more."""
    size, lane = spec.out.dtype.itemsize, kb.special("laneid")
    width = next(n for n in (4, 2, 1) if n * size <= spec.out.alignment_bytes and spec.d_v % n == 0)
    column, first = (lane & 7) << 2, row + outputs.lane_row
    base = out + (column * size).to("u64")
    for i, groups in enumerate(outputs.sums):
        inside = first + 4 * i < rows if edges else None
        for j, four in enumerate(groups):
            for e in range(0, 4, width):
                guard = inside
                if spec.d_v < 32 * (j + 1):
                    seen = column + (32 * j + e) < spec.d_v
                    guard = seen if guard is None else guard & seen
                at = place(base, (4 * i * spec.out.row + 32 * j + e) * size)
                kind, values = _as(kb, spec, four[e:e + width])
                vector = f".v{len(values)}" if len(values) > 1 else ""
                kb.emit(f"st.global{vector}.{kind}", at, values if vector else values[0], guard=guard)


def _as(kb: Kernel, spec: AttentionSpec, values: list[Value]) -> tuple[str, list[Value]]:
    """Elements of a row as the result has them, and their type in PTX."""
    dtype = spec.out.dtype
    if dtype == dtypes.float32: return "f32", values
    if len(values) > 1:
        return "b32", [pack(kb, values[i:i + 2], dtype) for i in range(0, len(values), 2)]
    half = kb.reg("b16")
    kb.emit(f"cvt.rn.{FLOAT16S[dtype]}.f32", half, values[0])
    return "b16", [half]
