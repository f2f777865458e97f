"""The first kernel of a decode attention: one split of a request's keys, as kernel.py says.

Protocol: `SplitKernel(k, plan, parameters).write()`. A warp's sums `out` are by 8 columns of the result, four
registers each: two of row g, two of row g + 8.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.decode.combine import Merge, Workspace, inverse, largest, store_out
from tinygrad_nv.tile.decode.copy import Bounds, PagedTileCopy, evict_first
from tinygrad_nv.tile.decode.operands import Keys, Values
from tinygrad_nv.tile.decode.plan import DecodePlan, Parameters, Span
from tinygrad_nv.tile.decode.rows import Cells, DecodeSoftmax, LaneRows
from tinygrad_nv.tile.decode.spec import Pages, Scales
from tinygrad_nv.tile.fragments import instruction
from tinygrad_nv.tile.lanes import packed


class SplitKernel:
    """The kernel as it is written."""

    def __init__(self, k: Kernel, plan: DecodePlan, given: Parameters) -> None:
        self.k, self.plan, self.spec, self.given, s = k, plan, plan.spec, given, plan.schedule
        self.request, self.split = k.ctaid.z, k.ctaid.x
        self.head, self.block = k.ctaid.y // plan.row_blocks, k.ctaid.y % plan.row_blocks
        warp = k.tid.x >> 5
        self.warp_m, self.warp_n = warp % s.warps_m, warp // s.warps_m
        self.ring = k.shared("ring", plan.ring_bytes, align=1024).address()
        if plan.q_bytes: self.stash = k.shared("queries", plan.q_bytes).address()
        if plan.table_bytes: self.table = k.shared("split_pages", plan.table_bytes)

    def write(self) -> None:
        """The whole kernel."""
        k, plan = self.k, self.plan
        if k.hopper: k.wait_for_previous_grid()
        self.span = span = Span(k, plan, self.given.length(self.request))
        begin = span.low + self.split.to("s32") * span.keys
        with k.if_((begin < span.high) | (self.split == 0)):
            self.bounds = bounds = Bounds(begin, k.reg("s32"), k.reg("s32"))
            k.emit("max.s32", bounds.low, begin, span.first)
            k.emit("min.s32", bounds.high, begin + span.keys, span.high)
            if self.spec.table: self._tables()
            first = self.block * plan.block_rows + self.warp_m * 16 + k.special("laneid") // 4
            self.rows = LaneRows(k, self.spec, first, span.high, [self.request, self.head])
            self._queries()
            k.sync()
            self._multiply()
            if k.hopper: k.launch_dependents()
            self._finish()

    # **** what is there before the first key ****

    def _tables(self) -> None:
        """The split's pages and their scales to shared memory; 0 for pages that no row sees."""
        k, spec, bounds, size, unit = self.k, self.spec, self.bounds, self.spec.page_size, self.plan.unit
        first, low, high = bounds.begin // size, bounds.low // size, (bounds.high + (size - 1)) // size
        self.entries = (bounds.high - bounds.begin + (unit - 1)) // unit * (unit // size)
        line = self.given.table + self.request.to("u64") * (4 * spec.pages)
        with k.loop(k.tid.x.to("s32"), self.entries, self.plan.schedule.threads, name="entry") as entry:
            at, page = first + entry, k.reg("u32", 0)
            there = (at >= low) & (at < high)
            k.emit("ld.global.u32", page, (line + at.to("u64") * 4).at(), guard=there)
            place = self.table.address(entry.to("u32") * 4)
            k.st("shared", "u32", place.at(), page)
            for i, scales in enumerate((spec.k_scale, spec.v_scale)):
                if scales is None: continue
                value = k.reg("f32", 0.0)
                k.emit("ld.global.f32", value, self._scale(scales, self.given.scales[i], page).at(),
                       guard=there)
                k.st("shared", "f32", place.at(4 * self.plan.most_pages * (i + 1)), value)

    def _scale(self, scales: Scales, pointer: Value, page: Value) -> Value:
        """Where a page's scale lies."""
        at = page.to("u64") * scales.page + self.head.to("u64") * scales.head
        return pointer + (at + scales.offset) * 4

    def _queries(self) -> None:
        """Fragments of q: in registers, or in shared memory as they are read, by warp and 16 elements."""
        k = self.k
        if not self.plan.q_bytes:
            self.queries = self.rows.queries(self.given.q)
            return
        self.stash = self.stash + self.warp_m * (2 * 16 * self.spec.d) + k.special("laneid") * 16
        with k.if_(self.warp_n == 0):
            for step, four in enumerate(self.rows.queries(self.given.q)):
                k.st("shared", "b32", self.stash.at(512 * step), four)

    def _query(self, step: int) -> list[Value]:
        """The fragment of 16 elements."""
        if not self.plan.q_bytes: return self.queries[step]
        return self.k.ld("shared", "b32", self.stash.at(512 * step), 4)

    # **** the loop ****

    def _multiply(self) -> None:
        k, plan, s = self.k, self.plan, self.plan.schedule
        step = plan.stage_bytes // s.warps_n
        ring = self.ring + self.warp_n * (step * s.depth)
        first = self.bounds.begin
        if self.spec.window is not None:  # blocks of keys that no row sees are not gone through
            first = k.reg("s32")
            k.emit("max.s32", first, self.bounds.begin, self.bounds.low & -s.block_n)
        tiles = (self.bounds.high - first + (s.block_n - 1)) // s.block_n
        key = k.reg("s32", first + (self.warp_n * plan.keys).to("s32"), name="key")
        self._begin()
        with k.comment(f"the first {s.depth - 1} tiles"):
            for stage in range(s.depth - 1):
                with k.if_(tiles > stage): self._copy(ring + stage * step, key + stage * s.block_n)
                k.cp_async_commit()
        reading = k.reg("u32", ring, name="reading")
        writing = k.reg("u32", ring + (s.depth - 1) * step, name="writing")
        with k.loop(0, tiles, name="tile") as tile:
            k.cp_async_wait(s.depth - 2)
            self._meet()
            with k.if_(tile < tiles - (s.depth - 1)): self._copy(writing, key + (s.depth - 1) * s.block_n)
            k.cp_async_commit()
            self._tile(reading, key)
            key += s.block_n
            writing.set(reading)
            reading += step
            reading.set(k.select(reading == ring + s.depth * step, ring, reading))
        k.cp_async_wait(0)

    def _begin(self) -> None:
        """Copies, fragments and sums, as they are ahead of the loop."""
        k, plan, spec = self.k, self.plan, self.spec
        thread, policy = k.tid.x - self.warp_n * plan.group_threads, evict_first(k)

        def copy(pages: Pages, pointer: Value, width: int, start: int) -> PagedTileCopy:
            size = pages.dtype.itemsize
            at = pointer + (self.head.to("u64") * pages.head + pages.offset) * size
            if not spec.table: at = at + self.request.to("u64") * (pages.page * size)
            table = self.table.address() if spec.table else None
            return PagedTileCopy(k, pages, spec.page_size, at, plan.tile(width), width * size, thread,
                            plan.group_threads, table, start, policy)

        values = plan.k_tile.nbytes
        self.copies = [copy(spec.k, self.given.keys, spec.d, 0),
                       copy(spec.v, self.given.values, spec.d_v, values)]
        self.keys = Keys(k, spec.k.dtype, spec.q.dtype, plan.k_tile, spec.d, 0)
        self.values = Values(k, spec.v.dtype, spec.q.dtype, plan.v_tile, spec.d_v, values)
        self.softmax = DecodeSoftmax(k, spec, self.rows, self.given.extras)
        self.out: Cells = [k.regs("f32", 4, 0.0) for _ in range(0, spec.d_v, 8)]
        if spec.quantised: self._largest_scale()

    def _largest_scale(self) -> None:
        """Scales of values are taken relative to the split's largest: weights of float16 stay in its range.
        """
        k, lane = self.k, self.k.special("laneid")
        self.most = k.reg("f32", 0.0)
        with k.loop(lane.to("s32"), self.entries, 32) as entry:
            made = k.ld("shared", "f32", self.table.address(entry.to("u32") * 4)
                        .at(8 * self.plan.most_pages))[0]
            k.emit("abs.f32", made, made)
            self.most.set(largest(k, [self.most, made]))
        for distance in (16, 8, 4, 2, 1):
            other = k.reg("f32")
            k.emit("shfl.sync.bfly.b32", other, self.most, distance, 31, -1)
            self.most.set(largest(k, [self.most, other]))
        self.relative = inverse(k, self.most)

    def _copy(self, stage: Value, key: Value) -> None:
        for copy in self.copies: copy.copy(stage, key, self.bounds)

    def _meet(self) -> None:
        """The warps that share tiles."""
        if self.plan.schedule.warps_m == 1: self.k.emit("bar.warp.sync", -1)
        else: self.k.sync(self.warp_n + 1, self.plan.group_threads)

    def _tile(self, stage: Value, key: Value) -> None:
        """The products of a tile."""
        k, spec = self.k, self.spec
        shape, types = instruction(spec.q.dtype, spec.q.dtype)
        self.keys.fragments.move(stage)
        self.values.fragments.move(stage)
        sums: Cells = [k.regs("f32", 4, 0.0) for _ in range(0, self.plan.keys, 8)]
        with k.comment("q kT"):
            for step in range(spec.d // 16):
                for cell, pair in zip(sums, self.keys.of(step), strict=True):
                    k.mma(shape, types, cell, self._query(step), pair, cell)
        with k.comment("softmax"):
            if spec.quantised: self._scaled(sums, key, 1)
            rescales = self.softmax.step(sums, key)
            if spec.quantised: self._scaled(sums, key, 2, self.relative)
            for cell in self.out:
                for i, value in enumerate(cell): value *= rescales[i // 2]
        with k.comment("weights v"):
            for step in range(self.plan.keys // 16):
                weights = [packed(k, cell[at:at + 2], spec.q.dtype) for cell in sums[2 * step:2 * step + 2]
                           for at in (0, 2)]
                for cell, pair in zip(self.out, self.values.of(step), strict=True):
                    k.mma(shape, types, cell, weights, pair, cell)

    def _scaled(self, cells: Cells, key: Value, which: int, factor: Value | None = None) -> None:
        """Columns times the scales of their pages."""
        k, size = self.k, self.spec.page_size
        for j, cell in enumerate(cells):
            if 8 * j % size == 0:
                slot = (key + 8 * j - self.bounds.begin).to("u32") // size
                scale = k.ld("shared", "f32", self.table.address(slot * 4)
                             .at(4 * which * self.plan.most_pages))[0]
                if factor is not None: scale = scale * factor
            for value in cell: value *= scale

    # **** the result ****

    def _finish(self) -> None:
        """Merges the warps; stores the result, or leaves the split's part in the workspace."""
        k, plan, spec = self.k, self.plan, self.spec
        merge, quads = Merge(k, plan, self.ring), spec.d_v // 4
        row_sum = self.softmax.row_sums()
        if spec.quantised:
            for cell in self.out:
                for value in cell: value *= self.most
        k.sync()
        row = self.warp_m * 16 + k.special("laneid") // 4
        merge.leave(row, self.warp_n, self.out, self.softmax.row_max, row_sum)
        k.sync()
        with k.loop(k.tid.x, plan.block_rows * quads, plan.schedule.threads, name="element") as element:
            row, column = element // quads, element % quads * 4
            number = self.block * plan.block_rows + row
            with k.if_(number < spec.rows): self._store(number, column, *merge.merged(row, column))

    def _store(self, row: Value, column: Value, sums: list[Value], row_max: Value, row_sum: Value) -> None:
        """Four elements of a row, from `column` on."""
        k, indices = self.k, [self.request, self.head]

        def finish() -> None:
            scale = inverse(k, row_sum)
            store_out(k, self.spec, self.given.out, indices, row, column, [value * scale for value in sums])

        if not self.plan.workspace_bytes: return finish()
        with k.if_(self.span.several):
            workspace = Workspace(k, self.plan, self.given.workspace)
            number = workspace.number(indices, row)
            k.st("global", "f32", (workspace.sums(number, self.split) + column.to("u64") * 4).at(), sums)
            with k.if_(column == 0):
                k.st("global", "f32", workspace.stats(number, self.split).at(), [row_max, row_sum])
        with k.if_(~self.span.several): finish()
