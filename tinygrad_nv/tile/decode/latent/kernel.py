"""Decode attention over latents (MLA, absorbed): all query heads of a token against one copy of its latents
in shared memory, by wgmma (FlashMLA, FlashInfer). For sm_90a.

    wait for the kernel before; the kernel after may begin
    one warp counts splits of all requests (tile_scheduler.py)
    for each work tile of this CTA: request, key head, block of 64 rows (query heads of each of the request's
    rows) and split of the keys:
        one warpgroup loads (load.py)         two multiply (main_loop.py)
            for each tile of keys:                scores = q kᵀ, by the first
                wait until there is room          weights, rescale = online softmax of the scores
                its latents, page by page         out = out · rescale + weights v, each half of the columns
            rows of q, after the first tile       a request of one split: store the result; else leave sums,
                                                  maxima and totals in the workspace (`LatentStore`)
    `combine` merges splits, as of any decode attention (combine.py)

Values are columns of the tile that are keys, too: of 512 + 64 elements 1152 bytes of a token are read, and
where there are more than 64 rows, again, from L2.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.decode.combine import Workspace, inverse_sum, out_place
from tinygrad_nv.tile.decode.kernel import combine_kernel
from tinygrad_nv.tile.decode.latent.load import LatentLoads
from tinygrad_nv.tile.decode.latent.main_loop import ScoringLoop, Values, second
from tinygrad_nv.tile.decode.latent.plan import CONSUMERS, LANES, REGISTERS, ROWS, WARPGROUP, LatentPlan
from tinygrad_nv.tile.decode.latent.tile_scheduler import LatentTile, LatentTileScheduler
from tinygrad_nv.tile.decode.plan import Parameters
from tinygrad_nv.tile.decode.rows import DecodeSoftmax, LaneRows
from tinygrad_nv.tile.decode.schedules import LatentWgmma
from tinygrad_nv.tile.decode.spec import DecodeSpec
from tinygrad_nv.tile.gemm.wgmma.main_loop import Descriptors
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.kernel import AttentionKernel, DecodeKernel
from tinygrad_nv.tile.lanes import pack
from tinygrad_nv.tile.pipeline import Pipeline
from tinygrad_nv.tile.template import GPU

TAKEN, TOTALS = 3, 4    # named barriers, after those of weights


def latent_attention(spec: DecodeSpec, schedule: LatentWgmma, gpu: GPU) -> DecodeKernel:
    """The kernels, by a legal schedule; CTAs are at most as many as multiprocessors."""
    plan = LatentPlan.of(spec, schedule)
    kb = Kernel("latent_split", arch=gpu.arch, threads=schedule.threads, min_ctas=1)
    _LatentKernel(kb, plan, Parameters(kb, plan)).write()
    grid = min(plan.work_tiles, gpu_model_for(gpu.arch, gpu.sm_count).sm_count), 1, 1
    kernels = [AttentionKernel("latent_split", kb.ptx(), grid, schedule.threads, kb.dynamic_smem, pdl=True)]
    if plan.workspace_bytes: kernels.append(combine_kernel(plan, gpu.arch))
    return DecodeKernel(tuple(kernels), plan.workspace_bytes)


class _LatentKernel:
    """The kernel as it is written."""

    def __init__(self, kb: Kernel, plan: LatentPlan, given: Parameters) -> None:
        self.kb, self.plan, self.spec, self.given = kb, plan, plan.spec, given
        depth, warps = plan.schedule.depth, WARPGROUP // 32
        self.queries = kb.shared("queries", plan.queries.nbytes, align=1024)
        self.latents = kb.shared("latents", plan.keys.nbytes * depth, align=1024)
        self.weights = kb.shared("weights", plan.weights.nbytes, align=1024)
        self.factors, self.totals = kb.shared("factors", 4 * ROWS), kb.shared("totals", 8 * ROWS)
        self.ring = Pipeline(kb, depth, 0, CONSUMERS * warps, loaders=WARPGROUP - 1)
        self.q_ring = Pipeline(kb, 1, 0, warps, name="full_and_empty_queries", loaders=WARPGROUP - 1)
        self.work = LatentTileScheduler(kb, plan, given)

    def write(self) -> None:
        """The whole kernel."""
        kb, plan = self.kb, self.plan
        kb.wait_for_previous_grid()
        kb.launch_dependents()
        with kb.if_(kb.tid.x < LANES): self.work.count()
        with kb.if_(kb.tid.x == WARPGROUP):
            for ring in (self.ring, self.q_ring): ring.init()
            kb.fence_mbarrier_init()
        kb.sync()
        fewer, more = REGISTERS
        warp = kb.reg("u32")
        kb.emit("redux.sync.min.u32", warp, kb.tid.x // 32, -1)
        with kb.if_(warp >= CONSUMERS * WARPGROUP // 32), kb.comment("copies"):
            kb.setmaxnreg(fewer, more=False)
            loads = LatentLoads(kb, plan, self.given, kb.tid.x - CONSUMERS * WARPGROUP)
            loads.run(self.work, self.ring, self.latents, self.q_ring, self.queries)
        with kb.else_():
            kb.setmaxnreg(more, more=True)
            with kb.if_(warp < WARPGROUP // 32), kb.comment("scores, and the first half"): self._first(warp)
            with kb.else_(), kb.comment("the second half"): self._second(warp - WARPGROUP // 32)

    def _first(self, warp: Value) -> None:
        """The warpgroup with the scores."""
        kb = self.kb
        row, values, store = self._half(warp, 0)
        loop = ScoringLoop(kb, self.plan, values, self.q_ring, self.queries, self.latents, self.weights)
        with self.work.work_tiles() as tile:
            rows = LaneRows(kb, self.spec, tile.block * ROWS + row, tile.length, [tile.request, tile.head])
            softmax = DecodeSoftmax(kb, self.spec, rows, self.given.extras)
            loop.run(tile, softmax)
            store.leave(softmax.row_max, softmax.row_sums())
            store.store(values.out, 0, tile)

    def _second(self, warp: Value) -> None:
        """The other one."""
        kb, (_, values, store) = self.kb, self._half(warp, 1)
        left = Descriptors.of(kb, self.plan.weights, self.weights.address())
        with self.work.work_tiles() as tile:
            store.release_panel()
            second(kb, self.plan, values, left, tile.tiles)
            store.store(values.out, 1, tile)

    def _half(self, warp: Value, half: int) -> tuple[Value, Values, LatentStore]:
        """The first of a lane's rows among 64, and a warpgroup's half of the result."""
        kb, plan = self.kb, self.plan
        row = warp * (ROWS // 4) + kb.special("laneid") // 4
        values = Values(kb, plan, self.ring, self.latents, self.factors, half, row)
        return row, values, LatentStore(kb, plan, self.given, self.totals, row)


class LatentStore:
    """Store of one warpgroup: the result, or the split's part in the workspace. Both warpgroups that multiply
    have half of the columns of each row; a lane has two rows, and pairs of elements of every 8 columns. The
    first one's maxima and sums of the rows go through shared memory. `row` (u32) is the first of the lane's
    two rows among 64."""

    def __init__(self, kb: Kernel, plan: LatentPlan, given: Parameters, totals: Shared,
                 row: Value) -> None:
        self.kb, self.plan, self.given, self.row = kb, plan, given, row
        self.totals = totals.address() + row * 4

    def leave(self, row_max: list[Value], row_sum: list[Value]) -> None:
        """The first warpgroup's, for both, once the other one has those of the work tile before."""
        kb = self.kb
        kb.sync(TAKEN, CONSUMERS * WARPGROUP)
        with kb.if_(kb.special("laneid") % 4 == 0):
            for h in range(2):
                kb.st("shared", "f32", self.totals.at(32 * h), row_max[h])
                kb.st("shared", "f32", self.totals.at(32 * h + 4 * ROWS), row_sum[h])

    def release_panel(self) -> None:
        """The second warpgroup has read what the first left."""
        self.kb.arrive(TAKEN, CONSUMERS * WARPGROUP)

    def store(self, out: list[Value], half: int, tile: LatentTile) -> None:
        """A warpgroup's half."""
        kb, plan = self.kb, self.plan
        kb.sync(TOTALS, CONSUMERS * WARPGROUP)
        column = kb.special("laneid") % 4 * 2 + half * plan.half
        for h in range(2):
            totals = [kb.ld("shared", "f32", self.totals.at(32 * h + 4 * ROWS * i))[0] for i in range(2)]
            number = tile.block * ROWS + (self.row + 8 * h)
            pairs = [out[i + 2 * h:i + 2 * h + 2] for i in range(0, len(out), 4)]
            with kb.if_(number < plan.spec.rows):
                if not plan.workspace_bytes: self._finish(pairs, tile, number, column, *totals)
                else:
                    with kb.if_(tile.span.several): self._leave(pairs, tile, number, column, half, totals)
                    with kb.if_(~tile.span.several): self._finish(pairs, tile, number, column, *totals)

    def _leave(self, pairs: list[list[Value]], tile: LatentTile, number: Value, column: Value, half: int,
               totals: list[Value]) -> None:
        """A row's part."""
        kb, work = self.kb, Workspace(self.kb, self.plan, self.given.workspace)
        index = work.number([tile.request, tile.head], number)
        at = work.sums(index, tile.split) + column.to("u64") * 4
        for j, pair in enumerate(pairs): kb.st("global", "f32", at.at(32 * j), pair)
        if half: return
        with kb.if_(kb.special("laneid") % 4 == 0):
            kb.st("global", "f32", work.stats(index, tile.split).at(), totals)

    def _finish(self, pairs: list[list[Value]], tile: LatentTile, number: Value, column: Value,
                row_max: Value, row_sum: Value) -> None:
        """A row of the result."""
        kb, spec = self.kb, self.plan.spec
        scale = inverse_sum(kb, spec, self.given.sinks, tile.head, number, row_max, row_sum)
        at = out_place(kb, spec, self.given.out, [tile.request, tile.head], number, column)
        for j, pair in enumerate(pairs):
            scaled = pack(kb, [value * scale for value in pair], spec.out.dtype)
            kb.st("global", "b32", at.at(16 * j), scaled)
