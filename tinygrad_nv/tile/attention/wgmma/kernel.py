"""Attention with wgmma and TMA (FlashAttention-3, Shah et al. 2024): one warpgroup loads, the others
multiply. For sm_90a.

    producer, one thread:                      consumers, 64 rows each:
        for each tile of this CTA:                 for each tile of this CTA:
            for each block of columns, downwards:      wait for the queries
                copy of its keys                       for each block of columns, downwards:
                copy of the values of the one before       scores of this block, sums of the one before
            copy of the last values                        softmax under those sums
    another:                                           sums of the last block
        for each tile of this CTA:                     divide by the total, store
            copy of the queries

A tile is `block_m` rows of one head. Blocks of columns that none of its rows see are skipped, only those at
the edges of the band, or of the keys, are masked (blocks.py). A CTA has one tile, or, where there
are more tiles than multiprocessors, many, in an order by length and for L2 (tile_scheduler.py): copies for
the next one are made under the end of this one. Query heads of one key head read the same keys. Operands of 8
bits have scales, and values that two more warps turn (fp8.py).

It is launched with PDL: threads that access global memory, the loading ones and the consumers, wait for the
kernel before once the barriers are made. The kernel after may begin once all CTAs' last copies are on their
way.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advance, write
from tinygrad_nv.tile.attention.blocks import KeyBlocks
from tinygrad_nv.tile.attention.document_blocks import Documents, clear
from tinygrad_nv.tile.attention.schedules import FlashWgmma
from tinygrad_nv.tile.attention.score import Extents, Scores, sink_of
from tinygrad_nv.tile.attention.spec import KEEP_ALL, AttentionSpec
from tinygrad_nv.tile.attention.wgmma.fp8 import Fp8MainLoop, TransposedValues
from tinygrad_nv.tile.attention.wgmma.load import AttentionLoads
from tinygrad_nv.tile.attention.wgmma.main_loop import AttentionMainLoop
from tinygrad_nv.tile.attention.wgmma.plan import (
    ROWS,
    WARPGROUP,
    FlashWgmmaPlan,
    map_argument,
    map_dimensions,
)
from tinygrad_nv.tile.attention.wgmma.tile_scheduler import AttentionTile, AttentionTileScheduler
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.kernel import AttentionKernel
from tinygrad_nv.tile.lanes import Lanes, pack
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import OperandTile
from tinygrad_nv.tile.template import GPU

WARP_ROWS = 16


def flash_wgmma(spec: AttentionSpec, schedule: FlashWgmma, gpu: GPU) -> AttentionKernel:
    """The kernel of an attention, by a legal schedule; its CTAs are at most as many as multiprocessors."""
    plan = FlashWgmmaPlan.of(spec, schedule, gpu_model_for(gpu.arch, gpu.sm_count).sm_count)
    kb = Kernel("flash_wgmma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    writer = _FlashWgmmaKernel(kb, plan)
    writer.write()
    return AttentionKernel("flash_wgmma", kb.ptx(), plan.grid, schedule.threads, kb.dynamic_smem,
                           maps=(*writer.loads.maps, *writer.finish.maps),
                           rows_of_cta=schedule.block_m if "s_q" in spec.symbolic and not plan.ctas else 0,
                           pdl=True)


class _FlashWgmmaKernel:
    """The kernel as it is written: parameters and shared memory, then the two roles."""

    def __init__(self, kb: Kernel, plan: FlashWgmmaPlan) -> None:
        self.kb, self.plan, spec = kb, plan, plan.spec
        out = kb.pointer("out")
        lse = kb.pointer("l") if spec.lse else None
        for name in "qkv": kb.pointer(name)  # the tensor maps'
        self.scales = [kb.pointer(f"scale_{name}") for name in "qkv"] if spec.scales is not None else []
        self.cu = (kb.pointer("cu_q"), kb.pointer("cu_k")) if spec.is_ragged else None
        self.sinks = kb.pointer("sinks") if spec.sinks is not None else None
        self.seed = kb.pointer("seed") if spec.kept < KEEP_ALL else None
        self.extras = [kb.pointer(f"x{i}") for i in range(len(spec.parameters))]
        self.extents = Extents.declare_params(kb, spec)
        self.loads = AttentionLoads(kb, plan, 1 + spec.lse)
        self.v_transposer = TransposedValues(kb, plan, self.loads) if plan.transposed_v is not None else None
        self.finish = AttentionEpilogue(kb, plan, out, lse, self.loads.q)
        self.tile_scheduler = AttentionTileScheduler(kb, plan, self.extents.s_q)

    def write(self) -> None:
        """The whole kernel."""
        kb, plan = self.kb, self.plan
        if self.cu is not None: self._sequence(*self.cu)
        with kb.comment("one thread makes the barriers, and has the tensor maps fetched"):
            with kb.if_(kb.tid.x == 0):
                for each in (*self.loads.tensor_maps, *self.finish.tensor_maps):
                    kb.emit("prefetch.tensormap", each.at())
                self.loads.init()
                if self.v_transposer is not None: self.v_transposer.ring.init()
                kb.fence_mbarrier_init()
            kb.sync()
        producer = kb.tid.x >= WARPGROUP * plan.consumers
        fewer, more = plan.registers
        with kb.if_(producer), kb.comment("producer: a thread of each of two warps of the last warpgroup"):
            if fewer: kb.setmaxnreg(fewer, more=False)
            with kb.if_(kb.tid.x < WARPGROUP * plan.consumers + 64), kb.if_(kb.elect()): self.produce()
            if self.v_transposer is not None:
                with kb.if_(kb.tid.x >= WARPGROUP * plan.consumers + 64):
                    self.v_transposer.produce(self.tile_scheduler, self.blocks)
        with kb.else_(), kb.comment("consumers"):
            if more: kb.setmaxnreg(more, more=True)
            self.consume()

    def _sequence(self, cu_q: Value, cu_k: Value) -> None:
        """Extents of the CTA's sequence, of a ragged batch. CTAs for whose block it has no rows end here."""
        kb, plan = self.kb, self.plan
        m, spec, number = plan.schedule.block_m, plan.spec, kb.ctaid.x
        kb.wait_for_previous_grid()
        clear(kb, spec, self.finish.out, cu_q, (kb.ctaid.z, *self._head()), number, m)
        self.extents = Extents.read(kb, spec, (cu_q, cu_k), kb.ctaid.z)
        if self.tile_scheduler.downwards: number = plan.blocks_of_rows - 1 - number
        kb.emit("exit", guard=number * m >= self.extents.s_q)
        assert self.extents.first is not None
        self.loads.sequence = self.extents.first
        self.finish.out = advance(kb, self.finish.out, self.extents.first[0],
                                   spec.out.row * spec.out.dtype.itemsize)

    def _head(self) -> tuple[Value, Value]:
        head, group = self.kb.ctaid.y, self.plan.spec.batch[2]
        return head // group, head % group

    def blocks(self, tile: AttentionTile) -> KeyBlocks:
        """The blocks of columns of a tile."""
        documents = Documents.of(self.kb, self.plan.spec, self.extras, tile.batch, tile.row,
                                 self.plan.schedule.block_m)
        s = self.plan.schedule
        return KeyBlocks(self.kb, self.plan.spec, self.extents, tile.row.to("s32"), s.block_m, s.block_n,
                         documents)

    def produce(self) -> None:
        """Fills the rings."""
        kb = self.kb
        kb.wait_for_previous_grid()
        with kb.if_(kb.tid.x < WARPGROUP * self.plan.consumers + 32):
            self.loads.keys_and_values(self.tile_scheduler, self.blocks)
        with kb.else_(): self.loads.queries(self.tile_scheduler)
        kb.launch_dependents()

    def consume(self) -> None:
        """Multiplies and stores."""
        kb, plan = self.kb, self.plan
        # the same in all lanes; ptxas keeps what comes from redux, and all made of it, in uniform registers
        warp = kb.reg("u32")
        kb.emit("redux.sync.min.u32", warp, kb.tid.x // 32, -1)
        kb.wait_for_previous_grid()
        first = warp * (ROWS // 4)  # of a consumer's rows, a warp's
        products = AttentionMainLoop(kb, plan, self.loads, warp >> 2) if self.v_transposer is None else \
            Fp8MainLoop(kb, plan, self.loads, self.v_transposer, self.scales, warp >> 2)
        products.begin()
        if self.seed is not None: products.read_seed(self.seed)
        with self.tile_scheduler.tiles() as tile:
            row = tile.row + first
            products.tile(self.blocks(tile), Scores(kb, plan.spec, self.extents, self.extras, tile.batch, row,
                                                    plan.schedule.block_m, plan.schedule.block_n))
            inverse, logs = products.finish(sink_of(kb, plan.spec, self.sinks, tile.batch))
            if products.dropout is not None: inverse = [each * products.dropout.scale for each in inverse]
            self.finish.store(products.out, inverse, logs, row, first, self.extents.s_q, tile.batch)
            if plan.overlaid: products.release_q()
        products.end()
        self.finish.finish()


class AttentionEpilogue:
    """Destination of the results, and of l. Registers 4j … 4j + 3 of the fragment are columns 8j … 8j + 7 of
    a warp's 16 rows. A result of 16 bits with aligned rows goes by stmatrix into shared memory, where the
    queries were (all of the warpgroup's products are done with these rows), and from there by TMA, each warp
    its own 16 rows; what lies outside the result is cut off by the map. What has room of its own is read
    there while the next tile is on its way, until the next store. Another result goes by itself, two elements
    at a time."""

    def __init__(self, kb: Kernel, plan: FlashWgmmaPlan, out: Value, lse: Value | None,
                 queries: Shared) -> None:
        self.kb, self.plan, self.out, self.lse = kb, plan, out, lse
        self.maps: list[MapArgument] = []
        self.tensor_maps: list[Value] = []
        if plan.out is None: return
        spec = plan.spec
        self.maps = [map_argument(plan, spec.out, 0, spec.s_q, spec.d_v, plan.out, WARP_ROWS, "s_q")]
        self.tensor_maps = [kb.tensor_map("map_out")]
        self.staging = queries if plan.overlaid else kb.shared("staging", plan.staging_bytes, align=1024)

    def store(self, sums: Sequence[Value], inverse: Sequence[Value], logs: Sequence[Value], row: Value,
              tile_row: Value, rows: Value | int, batch: Sequence[Value]) -> None:
        """Stores a warp's rows, which begin at `row` of the matrix and `tile_row` of the CTA (u32);
        `batch` are the indices of the head."""
        for i, each in enumerate(sums): each *= inverse[i >> 1 & 1]
        if self.plan.out is not None: self._by_tma(self.plan.out, sums, row, tile_row, batch)
        else: self._plain(sums, row, rows, batch)
        if self.lse is not None: self._logs(self.lse, logs, row, rows, batch)

    def _by_tma(self, tile: OperandTile, sums: Sequence[Value], row: Value, tile_row: Value,
                batch: Sequence[Value]) -> None:
        kb, lane, dtype = self.kb, self.kb.special("laneid"), self.plan.spec.out.dtype
        if not self.plan.overlaid: self._drain()
        base = self.staging.address() + tile_row * tile.span
        plain = (lane & 15) * tile.span + (lane >> 4) * 16
        mask = tile.span // 16 - 1
        own = plain ^ ((plain >> 7) & mask) << 4
        places = [base + (own ^ at if at else own) for at in range(0, tile.span, 32)]
        for pair in range(len(sums) // 8):
            words = [pack(kb, sums[at:at + 2], dtype) for at in range(8 * pair, 8 * pair + 8, 2)]
            column, inside = divmod(32 * pair, tile.span)
            kb.stmatrix(places[inside // 32].at(column * tile.column_bytes), words)
        kb.fence_proxy_async()
        kb.emit("bar.warp.sync", -1)
        with kb.if_(kb.elect()):
            outer = [batch[i].to("s32") for i in map_dimensions(self.plan.spec.out, self.plan.spec.batch)]
            for column in range(tile.columns):
                kb.tma_store(self.tensor_maps[0], [column * tile.inner, row.to("s32"), *outer],
                            base.at(column * tile.column_bytes))
            kb.tma_commit()
        if self.plan.overlaid: self._drain()

    def _drain(self) -> None:
        """Until the last result has been read from shared memory."""
        with self.kb.if_(self.kb.elect()): self.kb.tma_wait(0, read=True)
        self.kb.emit("bar.warp.sync", -1)

    def finish(self) -> None:
        """After all tiles."""
        if self.plan.out is not None and not self.plan.overlaid: self._drain()

    def _plain(self, sums: Sequence[Value], row: Value, rows: Value | int, batch: Sequence[Value]) -> None:
        kb, lane, out, d = self.kb, self.kb.special("laneid"), self.plan.spec.out, self.plan.spec.d_v
        size, own, column = out.dtype.itemsize, row + (lane >> 2), (lane & 3) << 1
        base = self.out + out.offset * size if out.offset else self.out
        for index, stride in zip((*batch, own), (*out.batch, out.row), strict=True):
            base = advance(kb, base, index, stride * size)
        base = advance(kb, base, column, size)
        pairs = d % 2 == 0 and out.alignment_bytes >= 2 * size
        for half in range(2):
            inside = own + 8 * half < rows
            for j in range(len(sums) // 4):
                value = Lanes(kb, out.dtype, list(sums[4 * j + 2 * half:4 * j + 2 * half + 2]))
                for i in range(0, 2, 2 if pairs else 1):
                    guard = inside & (column + (8 * j + i) < d) if 8 * j + 8 > d else inside
                    at = (8 * half * out.row + 8 * j + i) * size
                    write(kb, base, at, value, 2 if pairs else 1, guard, first=i)

    def _logs(self, to: Value, logs: Sequence[Value], row: Value, rows: Value | int,
              batch: Sequence[Value]) -> None:
        """One lane of the four that share a row."""
        kb, spec, lane = self.kb, self.plan.spec, self.kb.special("laneid")
        own = row + (lane >> 2)
        head = kb.reg("u32", 0)
        for index, extent in zip(batch, spec.batch, strict=True): head = head * extent + index
        at = advance(kb, advance(kb, to, head, spec.s_q * 4), own, 4)
        first = (lane & 3) == 0
        for half in range(2):
            value = Lanes(kb, dtypes.float32, [logs[half]])
            write(kb, at, 32 * half, value, 1, first & (own + 8 * half < rows))
