"""The backward pass of attention with wgmma and TMA (FlashAttention-3, Shah et al. 2024): one warpgroup
loads, the others multiply. For sm_90a.

    producers:                                     consumers, 64 keys each:
        copies of the keys and values                  wait for keys and values
        for each query head, each block of rows:       for each query head, each block of rows:
            copies of its queries and gradients            p, dp, ds; sums of dk and dv; dq, added to memory
            l and delta of its rows                    store dk and dv

A CTA has `block_n` keys of one key head, and goes through all query heads of it. Blocks of rows of which none
sees any of the keys are skipped, only those at the edges of the band, or of the keys, are masked
(blocks.py). Scores are computed transposed, so that p and ds are left operands in
registers of the products that sum dv and dk (main_loop.py); ds goes through shared memory
to dq alone. dq is summed in memory, by TMA (dq.py). Of heads above 128 consumers
share 64 keys, and each has half of the columns (halves.py).

It is launched with PDL: threads that access global memory wait for the previous kernel once the barriers
are made.
The kernel after may begin once all CTAs' last copies are on their way.
"""
from __future__ import annotations

from collections.abc import Sequence

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.access import advance, write
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.backward_wgmma.dq import BoxedSums, DirectSums, QueryMap, QuerySums
from tinygrad_nv.tile.attention.backward_wgmma.halves import HalvedMainLoop
from tinygrad_nv.tile.attention.backward_wgmma.load import BackwardLoads
from tinygrad_nv.tile.attention.backward_wgmma.main_loop import FINISHED, BackwardMainLoop
from tinygrad_nv.tile.attention.backward_wgmma.plan import (
    WARP_ROWS,
    WARPGROUP,
    BackwardWgmmaPlan,
    map_argument,
    map_dimensions,
)
from tinygrad_nv.tile.attention.backward_wgmma.weights import Weights, scale_of
from tinygrad_nv.tile.attention.blocks import RowBlocks
from tinygrad_nv.tile.attention.document_blocks import Documents
from tinygrad_nv.tile.attention.schedules import BackwardWgmma
from tinygrad_nv.tile.attention.score import Extents
from tinygrad_nv.tile.attention.spec import KEEP_ALL, Rows
from tinygrad_nv.tile.kernel import BackwardKernel
from tinygrad_nv.tile.lanes import Lanes, pack
from tinygrad_nv.tile.launch import MapArgument
from tinygrad_nv.tile.layout import OperandTile
from tinygrad_nv.tile.template import GPU


def flash_backward_wgmma(spec: BackwardSpec, schedule: BackwardWgmma, gpu: GPU) -> BackwardKernel:
    """The kernel of a backward pass, by a legal schedule."""
    plan = BackwardWgmmaPlan.of(spec, schedule)
    kb = Kernel("flash_backward_wgmma", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    writer = _BackwardWgmmaKernel(kb, plan)
    writer.write()
    return BackwardKernel("flash_backward_wgmma", kb.ptx(), plan.grid, schedule.threads, kb.dynamic_smem,
                          maps=tuple(writer.maps), pdl=True, dq_bytes=spec.dq_bytes, flags=plan.flags,
                          rows_of_cta=schedule.block_n if "s_kv" in spec.forward.symbolic else 0)


class _BackwardWgmmaKernel:
    """The kernel as it is written: parameters and shared memory, then the roles."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan) -> None:
        self.kb, self.plan, one = kb, plan, plan.spec.forward
        self.dq = kb.pointer("dq")
        self.turns = kb.pointer("turns") if plan.flags else None
        first = 1 + bool(plan.flags)  # the number of dk's pointer
        results = [kb.pointer(name) for name in ("dk", "dv")]
        for name in ("q", "k", "v", "grad"): kb.pointer(name)  # the tensor maps'
        self.l, self.delta = kb.pointer("l"), kb.pointer("delta")
        self.seed = kb.pointer("seed") if one.kept < KEEP_ALL else None
        self.extras = [kb.pointer(f"x{i}") for i in range(len(one.parameters))]
        self.extents = Extents.declare_params(kb, one)
        self.loads = BackwardLoads(kb, plan, first + 2)
        self.to = None if plan.splits_columns else QueryMap(kb, plan)
        self.dk = GradientEpilogue(kb, plan, plan.spec.dk, one.d, results[0], first, plan.dk, self.loads.keys,
                                   "map_dk")
        self.dv = GradientEpilogue(kb, plan, plan.spec.dv, one.d_v, results[1], first + 1, plan.dv,
                                   self.loads.values,
                         "map_dv")
        self.maps = [*self.loads.maps, *([self.to.map] if self.to else []), *self.dk.maps, *self.dv.maps]
        self.tensor_maps = [*self.loads.tensor_maps.values(), *([self.to.tensor_map] if self.to else []),
                            *self.dk.tensor_maps, *self.dv.tensor_maps]

    def write(self) -> None:
        """The whole kernel."""
        kb, plan = self.kb, self.plan
        with kb.comment("one thread makes the barriers, and has the tensor maps fetched"):
            with kb.if_(kb.tid.x == 0):
                for each in self.tensor_maps: kb.emit("prefetch.tensormap", each.at())
                self.loads.init()
                kb.fence_mbarrier_init()
            kb.sync()
        block, head = self._deal_tiles()
        self.column = block * plan.schedule.block_n
        self.batch = kb.ctaid.z, head
        _, heads, group = plan.spec.forward.batch
        self.head = (kb.ctaid.z * heads + head) * group
        self.blocks = RowBlocks(kb, plan.spec.forward, self.extents, self.column.to("s32"),
                                plan.schedule.block_n, plan.schedule.block_m, self._documents())
        fewer, more = plan.registers
        threads = WARPGROUP * plan.consumers
        with kb.if_(kb.tid.x >= threads), kb.comment("producers: a thread of the last warpgroup, and a warp"):
            if fewer: kb.setmaxnreg(fewer, more=False)
            with kb.if_(kb.tid.x < threads + 32), kb.if_(kb.elect()): self.produce()
            with kb.if_((kb.tid.x >= threads + 32) & (kb.tid.x < threads + 64)): self.produce_rows()
        with kb.else_(), kb.comment("consumers"):
            if more: kb.setmaxnreg(more, more=True)
            self.consume()

    def _documents(self) -> Documents | None:
        """Returns the documents of the keys, whose rows alone are walked; turns count all the band's
        blocks."""
        one = self.plan.spec.forward
        if self.turns is not None or not one.documents: return None
        self.kb.wait_for_previous_grid()
        return Documents.of(self.kb, one, self.extras, self.batch, self.column, self.plan.schedule.block_n)

    def _deal_tiles(self) -> tuple[Value, Value]:
        """Returns the CTA's block of keys, and its key head. Of some heads together the first blocks, which
        under a causal mask most rows see, come first, so that CTAs that end last are short."""
        kb, together = self.kb, self.plan.heads_together
        if together == 1: return kb.ctaid.x, kb.ctaid.y
        number = kb.ctaid.y % together * kb.nctaid.x + kb.ctaid.x
        return number // together, kb.ctaid.y - kb.ctaid.y % together + number % together

    def produce(self) -> None:
        """Fills the ring with what comes by TMA."""
        self.kb.wait_for_previous_grid()
        self.loads.produce(self.column.to("s32"), self.batch, self.blocks)
        self.kb.launch_dependents()

    def produce_rows(self) -> None:
        """And with l and delta."""
        self.kb.wait_for_previous_grid()
        self.loads.produce_rows(self.l, self.delta, scale_of(self.plan), self.extents, self.head, self.blocks)

    def consume(self) -> None:
        """Multiplies and stores."""
        kb, plan = self.kb, self.plan
        # the same in all lanes; ptxas keeps what comes from redux, and all made of it, in uniform registers
        warp = kb.reg("u32")
        kb.emit("redux.sync.min.u32", warp, kb.tid.x // 32, -1)
        consumer = warp >> 2
        kb.wait_for_previous_grid()
        first = (warp & 3 if plan.splits_columns else warp) * WARP_ROWS
        key = self.column + first
        weights = Weights(kb, plan, self.blocks, self.extents, self.extras, self.seed, self.batch, key)
        queries = self._queries(warp)
        kind = HalvedMainLoop if plan.splits_columns else BackwardMainLoop
        products = kind(kb, plan, self.loads, weights, queries, self.blocks, consumer)
        products.sum()
        with kb.if_(kb.elect()): queries.drain()
        if weights.dropout is not None:
            for each in products.dv: each *= weights.dropout.scale
        heads = (*self.batch, kb.reg("u32", 0))
        self.dv.store(products.dv, key, first, self.extents.s_kv, heads, consumer)
        # dk comes where keys were that the other consumer's dq is made of, unless each has its own columns
        if plan.dk is not None and not plan.splits_columns: kb.sync(FINISHED, WARPGROUP * plan.consumers)
        self.dk.store(products.dk, key, first, self.extents.s_kv, heads, consumer)
        kb.tma_wait(0)

    def _queries(self, warp: Value) -> QuerySums:
        """How a warp adds its share of dq."""
        rest = self.turns, self.blocks, warp, self.head
        if self.to is None: return DirectSums(self.kb, self.plan, self.dq, *rest)
        return BoxedSums(self.kb, self.plan, self.to, *rest)


class GradientEpilogue:
    """Destination of one of the two gradients: `rows` at `pointer`, the parameter's number, through `tile`
    and the shared memory `staging` if it goes by TMA. A result of 16 bits with aligned rows goes by stmatrix
    into shared memory, where the keys or values were, and from there by TMA, each warp its own 16 rows; what
    lies outside is cut off by the map. All products of all consumers are done with the keys by then. Another
    result goes by itself, two elements at a time."""

    def __init__(self, kb: Kernel, plan: BackwardWgmmaPlan, rows: Rows, width: int, out: Value, pointer: int,
                 tile: OperandTile | None, staging: Shared, name: str) -> None:
        self.kb, self.plan, self.rows, self.width, self.out = kb, plan, rows, width, out
        self.tile, self.staging = tile, staging
        self.maps: list[MapArgument] = []
        self.tensor_maps: list[Value] = []
        if tile is None: return
        self.maps = [map_argument(plan, rows, pointer, plan.spec.forward.s_kv, width, tile.inner, tile.span,
                                  WARP_ROWS, "s_kv")]
        self.tensor_maps = [kb.tensor_map(name)]

    def store(self, sums: Sequence[Value], key: Value, tile_row: Value, keys: Value | int,
              batch: Sequence[Value], half: Value) -> None:
        """Stores a warp's keys, which begin at `key` of all and `tile_row` of the CTA (u32), of all columns
        or of the half with the number `half` (u32)."""
        if self.tile is not None: self._by_tma(self.tile, sums, key, tile_row, batch, half)
        else: self._plain(sums, key, keys, batch, half)

    def _by_tma(self, tile: OperandTile, sums: Sequence[Value], key: Value, tile_row: Value,
                batch: Sequence[Value], half: Value) -> None:
        kb, lane = self.kb, self.kb.special("laneid")
        columns = tile.columns // (2 if self.plan.splits_columns else 1)
        base, first = self.staging.address() + tile_row * tile.span, kb.reg("s32", 0)
        if self.plan.splits_columns:
            base = base + half * (columns * tile.column_bytes)
            first = (half * (columns * tile.inner)).to("s32")
        plain = (lane & 15) * tile.span + (lane >> 4) * 16
        mask = tile.span // 16 - 1
        own = plain ^ ((plain >> 7) & mask) << 4
        places = [base + (own ^ at if at else own) for at in range(0, tile.span, 32)]
        for pair in range(len(sums) // 8):
            words = [pack(kb, sums[at:at + 2], self.rows.dtype) for at in range(8 * pair, 8 * pair + 8, 2)]
            column, inside = divmod(32 * pair, tile.span)
            kb.stmatrix(places[inside // 32].at(column * tile.column_bytes), words)
        kb.fence_proxy_async()
        kb.emit("bar.warp.sync", -1)
        with kb.if_(kb.elect()):
            outer = [batch[i].to("s32") for i in map_dimensions(self.rows, self.plan.spec.forward.batch)]
            for column in range(columns):
                kb.tma_store(self.tensor_maps[0], [first + column * tile.inner, key.to("s32"), *outer],
                            base.at(column * tile.column_bytes))
            kb.tma_commit()

    def _plain(self, sums: Sequence[Value], key: Value, keys: Value | int, batch: Sequence[Value],
               half: Value) -> None:
        kb, lane, rows, d = self.kb, self.kb.special("laneid"), self.rows, self.width
        size, own, column = rows.dtype.itemsize, key + (lane >> 2), (lane & 3) << 1
        width = 2 * len(sums) if self.plan.splits_columns else 0
        if width: column = column + half * width
        base = self.out + rows.offset * size if rows.offset else self.out
        for index, stride in zip((*batch, own), (*rows.batch, rows.row), strict=True):
            base = advance(kb, base, index, stride * size)
        base = advance(kb, base, column, size)
        pairs = d % 2 == 0 and rows.alignment_bytes >= 2 * size
        for h in range(2):
            inside = own + 8 * h < keys
            for j in range(len(sums) // 4):
                value = Lanes(kb, rows.dtype, list(sums[4 * j + 2 * h:4 * j + 2 * h + 2]))
                for i in range(0, 2, 2 if pairs else 1):
                    guard = inside & (column + (8 * j + i) < d) if width + 8 * j + 8 > d else inside
                    at = (8 * h * rows.row + 8 * j + i) * size
                    write(kb, base, at, value, 2 if pairs else 1, guard, first=i)
