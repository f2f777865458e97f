"""Decode attention over latents (MLA, absorbed): all query heads of a token against one copy of its latents in
shared memory, by wgmma (FlashMLA, FlashInfer). For sm_90a.

    for each request, key head, block of 64 rows (query heads, then the request's rows) and split of the keys,
    in one CTA of three warpgroups:
        wait for the kernel before; the kernel after may begin
        the request's length; nothing to do beyond it
        one warpgroup loads                   two multiply (main_loop.py)
            the rows of q                         scores = q kᵀ, by the first
            for each tile of keys:                weights, rescale = online softmax of the scores
                wait until it was read            out = out · rescale + weights v, each half of the columns
                its latents, page by page
        a request of one split: store the result; else leave sums, maxima and totals in the workspace
    `combine` merges splits, as of any decode attention (combine.py)

Values are columns of the tile that are keys, too: of 512 + 64 elements 1152 bytes of a token are read, and
where there are more than 64 rows, again, from L2.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.decode.copy import Bounds
from tinygrad_nv.tile.decode.kernel import combine_kernel
from tinygrad_nv.tile.decode.latent.load import LatentLoads
from tinygrad_nv.tile.decode.latent.main_loop import ScoringLoop, Values, second
from tinygrad_nv.tile.decode.latent.plan import CONSUMERS, REGISTERS, ROWS, WARPGROUP, LatentPlan
from tinygrad_nv.tile.decode.latent.store import LatentStore
from tinygrad_nv.tile.decode.plan import Parameters, Span
from tinygrad_nv.tile.decode.rows import DecodeSoftmax, LaneRows
from tinygrad_nv.tile.decode.schedules import LatentWgmma
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.kernel import AttentionKernel, DecodeKernel
from tinygrad_nv.tile.pipeline import Pipeline
from tinygrad_nv.tile.template import GPU


def latent_attention(spec: DecodeSpec, schedule: LatentWgmma, gpu: GPU) -> DecodeKernel:
    """The kernels, by a legal schedule."""
    plan = LatentPlan.of(spec, schedule)
    kb = Kernel("latent_split", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    _LatentKernel(kb, plan, Parameters(kb, plan)).write()
    grid = plan.most_splits, spec.heads * plan.row_blocks, spec.batch
    kernels = [AttentionKernel("latent_split", kb.ptx(), grid, schedule.threads, kb.dynamic_smem, pdl=True)]
    if plan.workspace_bytes: kernels.append(combine_kernel(plan, gpu.arch))
    return DecodeKernel(tuple(kernels), plan.workspace_bytes)


class _LatentKernel:
    """The kernel as it is written."""

    def __init__(self, kb: Kernel, plan: LatentPlan, given: Parameters) -> None:
        self.kb, self.plan, self.spec, self.given = kb, plan, plan.spec, given
        self.request, self.split = kb.ctaid.z, kb.ctaid.x
        self.head, self.block = kb.ctaid.y // plan.row_blocks, kb.ctaid.y % plan.row_blocks
        depth = plan.schedule.depth
        self.queries = kb.shared("queries", plan.queries.nbytes, align=1024)
        self.latents = kb.shared("latents", plan.keys.nbytes * depth, align=1024)
        self.weights = kb.shared("weights", plan.weights.nbytes, align=1024)
        self.factors, self.totals = kb.shared("factors", 4 * ROWS), kb.shared("totals", 8 * ROWS)
        self.ring = Pipeline(kb, depth, 0, CONSUMERS * WARPGROUP // 32, loaders=WARPGROUP - 1)
        self.full_q = kb.mbarriers("full_queries")

    def write(self) -> None:
        """The whole kernel."""
        kb, plan, n = self.kb, self.plan, self.plan.schedule.block_n
        kb.wait_for_previous_grid()
        kb.launch_dependents()
        self.length = self.given.length(self.request)
        with kb.if_(kb.tid.x == 0):
            self.ring.init()
            kb.mbarrier_init(self.full_q.at(), WARPGROUP)
            kb.fence_mbarrier_init()
        kb.sync()
        self.span = span = Span(kb, plan, self.length)
        begin = span.low + self.split.to("s32") * span.keys
        with kb.if_((begin < span.high) | (self.split == 0)):
            self.bounds = bounds = Bounds(begin, kb.reg("s32"), kb.reg("s32"))
            kb.emit("max.s32", bounds.low, begin, span.first)
            kb.emit("min.s32", bounds.high, begin + span.keys, span.high)
            self.first = begin
            if self.spec.window is not None:  # tiles of keys that no row sees are not gone through
                self.first = kb.reg("s32")
                kb.emit("max.s32", self.first, begin, bounds.low & -n)
            self.tiles = (bounds.high - self.first + (n - 1)) // n
            self._roles()

    def _roles(self) -> None:
        """What each warpgroup does."""
        kb, plan = self.kb, self.plan
        fewer, more = REGISTERS
        warp = kb.reg("u32")
        kb.emit("redux.sync.min.u32", warp, kb.tid.x // 32, -1)
        with kb.if_(warp >= CONSUMERS * WARPGROUP // 32), kb.comment("copies"):
            kb.setmaxnreg(fewer, more=False)
            loads = LatentLoads(kb, plan, self.given, kb.tid.x - CONSUMERS * WARPGROUP)
            loads.queries(self.queries, self.request, self.head, self.block, self.full_q.at())
            loads.latents(self.ring, self.latents, self.request, self.head, self.first, self.tiles,
                          self.bounds)
        with kb.else_():
            kb.setmaxnreg(more, more=True)
            with kb.if_(warp < WARPGROUP // 32), kb.comment("scores, and the first half"): self._first(warp)
            with kb.else_(), kb.comment("the second half"): self._second(warp - WARPGROUP // 32)

    def _first(self, warp: Value) -> None:
        """The warpgroup with the scores."""
        kb = self.kb
        row, values, store = self._half(warp, 0)
        rows = LaneRows(kb, self.spec, self.block * ROWS + row, self.length, [self.request, self.head])
        softmax = DecodeSoftmax(kb, self.spec, rows, self.given.extras)
        loop = ScoringLoop(kb, self.plan, values, softmax, self.queries, self.latents, self.weights)
        kb.mbarrier_wait(self.full_q.at(), 0)
        with kb.if_(self.tiles > 0): loop.run(self.first, self.tiles)
        store.leave(softmax.row_max, softmax.row_sums())
        store.store(values.out, 0, self.request, self.head, self.block, self.split)

    def _second(self, warp: Value) -> None:
        """The other one."""
        _, values, store = self._half(warp, 1)
        second(self.kb, self.plan, values, self.weights, self.tiles)
        store.store(values.out, 1, self.request, self.head, self.block, self.split)

    def _half(self, warp: Value, half: int) -> tuple[Value, Values, LatentStore]:
        """The first of a lane's rows among 64, and a warpgroup's half of the result."""
        kb, plan = self.kb, self.plan
        row = warp * (ROWS // 4) + kb.special("laneid") // 4
        values = Values(kb, plan, self.ring, self.latents, self.factors, half, row)
        return row, values, LatentStore(kb, plan, self.given, self.totals, self.span, row)
