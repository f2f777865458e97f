"""The first kernel of a decode attention: one split of a request's keys, as kernel.py says.

Protocol: `SplitKernel(k, plan, parameters).write()`. A warp's sums `out` are by 8 columns of the result, four
registers each: two of row g, two of row g + 8.
"""
from __future__ import annotations

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.decode.combine import Merge, Workspace, inverse, inverse_sum, largest, store_out
from tinygrad_nv.tile.decode.copy import Bounds, PagedTileCopy
from tinygrad_nv.tile.decode.plan import DecodePlan, Parameters, Span
from tinygrad_nv.tile.decode.rows import AccFragment, DecodeSoftmax, LaneRows
from tinygrad_nv.tile.decode.spec import Pages, Scales
from tinygrad_nv.tile.fragments import STEP_BYTES, Fragments, instruction
from tinygrad_nv.tile.lanes import pack
from tinygrad_nv.tile.layout import SharedTile

Pairs = list[list[Value]]  # by 8 keys or columns: two registers
# how bytes in the upper halves of 16 bits become 16-bit floats: shifted right by, these bits kept beside the
# sign, times this power of two, by which the exponents' offsets differ; None where they are such already
WIDENED = {(dtypes.fp8e4m3, dtypes.float16): (1, 0x3F803F80, 0x5C005C00),
           (dtypes.fp8e4m3, dtypes.bfloat16): (4, 0x07F007F0, 0x7B807B80),
           (dtypes.fp8e5m2, dtypes.float16): None,
           (dtypes.fp8e5m2, dtypes.bfloat16): (3, 0x0FE00FE0, 0x77807780)}


class SplitKernel:
    """The kernel as it is written."""

    def __init__(self, kb: Kernel, plan: DecodePlan, given: Parameters) -> None:
        self.kb, self.plan, self.spec, self.given, s = kb, plan, plan.spec, given, plan.schedule
        self.request, self.split = kb.ctaid.z, kb.ctaid.x
        self.head, self.block = kb.ctaid.y // plan.row_blocks, kb.ctaid.y % plan.row_blocks
        warp = kb.tid.x >> 5
        self.warp_m, self.warp_n = warp % s.warps_m, warp // s.warps_m
        self.ring = kb.shared("ring", plan.ring_bytes, align=1024).address()
        if plan.q_bytes: self.stash = kb.shared("queries", plan.q_bytes).address()
        if plan.table_bytes: self.table = kb.shared("split_pages", plan.table_bytes)

    def write(self) -> None:
        """The whole kernel."""
        kb, plan = self.kb, self.plan
        if kb.hopper:
            kb.wait_for_previous_grid()
            kb.launch_dependents()
        length = self.given.length(self.request)
        with kb.comment("while the length is on its way: queries"):
            first = self.block * plan.block_rows + self.warp_m * 16 + kb.special("laneid") // 4
            self.rows = LaneRows(kb, self.spec, first, length, [self.request, self.head])
            self._queries()
        self.span = span = Span(kb, plan, length)
        begin = span.low + self.split.to("s32") * span.keys
        with kb.if_((begin < span.high) | (self.split == 0)):
            self.bounds = bounds = Bounds(begin, kb.reg("s32"), kb.reg("s32"))
            kb.emit("max.s32", bounds.low, begin, span.first)
            kb.emit("min.s32", bounds.high, begin + span.keys, span.high)
            if self.spec.table: self._tables()
            else: self._begin()
            kb.sync()
            if self.spec.is_quantised: self._largest_scale()
            self._multiply()
            self._finish()

    # **** what is there before the first key ****

    def _tables(self) -> None:
        """The split's pages and their scales to shared memory; 0 for pages that no row sees. What else comes
        ahead of the loop is written behind the loads of pages."""
        kb, spec, bounds, size, unit = self.kb, self.spec, self.bounds, self.spec.page_size, self.plan.unit
        first, low, high = bounds.begin // size, bounds.low // size, (bounds.high + (size - 1)) // size
        self.entries = (bounds.high - bounds.begin + (unit - 1)) // unit * (unit // size)
        line = self.given.table + self.request.to("u64") * (4 * spec.pages)

        def page_of(entry: Value) -> tuple[Value, Value]:
            """The page of an entry, and whether a row sees it."""
            at, page = first + entry, kb.reg("u32", 0)
            there = (at >= low) & (at < high)
            kb.emit("ld.global.u32", page, (line + at.to("u64") * 4).at(), guard=there)
            return page, there

        mine, threads = kb.tid.x.to("s32"), self.plan.schedule.threads
        if self.plan.most_pages <= threads:
            page, there = page_of(mine)
            self._begin()
            with kb.if_(mine < self.entries): self._keep(mine, page, there)
            return
        self._begin()
        with kb.loop(mine, self.entries, threads, name="entry") as entry: self._keep(entry, *page_of(entry))

    def _keep(self, entry: Value, page: Value, there: Value) -> None:
        """A page and its scales, in shared memory."""
        kb, spec, place = self.kb, self.spec, self.table.address(entry.to("u32") * 4)
        kb.st("shared", "u32", place.at(), page)
        for i, scales in enumerate((spec.k_scale, spec.v_scale)):
            if scales is None: continue
            value = kb.reg("f32", 0.0)
            kb.emit("ld.global.f32", value, self._scale(scales, self.given.scales[i], page).at(), guard=there)
            kb.st("shared", "f32", place.at(4 * self.plan.most_pages * (i + 1)), value)

    def _scale(self, scales: Scales, pointer: Value, page: Value) -> Value:
        """Returns the address at which a page's scale lies."""
        at = page.to("u64") * scales.page + self.head.to("u64") * scales.head
        return pointer + (at + scales.offset) * 4

    def _queries(self) -> None:
        """Fragments of q: in registers, or in shared memory as they are read, by warp and 16 elements."""
        kb = self.kb
        if not self.plan.q_bytes:
            self.queries = self.rows.queries(self.given.q)
            return
        self.stash = self.stash + self.warp_m * (2 * 16 * self.spec.d) + kb.special("laneid") * 16
        with kb.if_(self.warp_n == 0):
            for step, four in enumerate(self.rows.queries(self.given.q)):
                kb.st("shared", "b32", self.stash.at(512 * step), four)

    def _query(self, step: int) -> list[Value]:
        """The fragment of 16 elements."""
        if not self.plan.q_bytes: return self.queries[step]
        return self.kb.ld("shared", "b32", self.stash.at(512 * step), 4)

    # **** the loop ****

    def _multiply(self) -> None:
        kb, plan, s = self.kb, self.plan, self.plan.schedule
        step = plan.stage_bytes // s.warps_n
        ring = self.ring + self.warp_n * (step * s.depth)
        first = self.bounds.begin
        if self.spec.window is not None:  # blocks of keys that no row sees are not gone through
            first = kb.reg("s32")
            kb.emit("max.s32", first, self.bounds.begin, self.bounds.low & -s.block_n)
        tiles = (self.bounds.high - first + (s.block_n - 1)) // s.block_n
        key = kb.reg("s32", first + (self.warp_n * plan.keys).to("s32"), name="key")
        with kb.comment(f"the first {s.depth - 1} tiles"):
            for stage in range(s.depth - 1):
                with kb.if_(tiles > stage): self._copy(ring + stage * step, key + stage * s.block_n)
                kb.cp_async_commit()
        reading = kb.reg("u32", ring, name="reading")
        writing = kb.reg("u32", ring + (s.depth - 1) * step, name="writing")
        with kb.loop(0, tiles, name="tile") as tile:
            kb.cp_async_wait(s.depth - 2)
            self._meet()
            with kb.if_(tile < tiles - (s.depth - 1)): self._copy(writing, key + (s.depth - 1) * s.block_n)
            kb.cp_async_commit()
            self._tile(reading, key)
            key += s.block_n
            writing.set(reading)
            reading += step
            reading.set(kb.select(reading == ring + s.depth * step, ring, reading))
        kb.cp_async_wait(0)

    def _begin(self) -> None:
        """Copies, fragments and sums, as they are ahead of the loop: nothing of them asks for the length."""
        kb, plan, spec = self.kb, self.plan, self.spec
        thread = kb.tid.x - self.warp_n * plan.group_threads

        def copy(pages: Pages, pointer: Value, width: int, start: int) -> PagedTileCopy:
            size = pages.dtype.itemsize
            at = pointer + (self.head.to("u64") * pages.head + pages.offset) * size
            if not spec.table: at = at + self.request.to("u64") * (pages.page * size)
            table = self.table.address() if spec.table else None
            return PagedTileCopy(kb, pages, spec.page_size, at, plan.tile(width), width * size, thread,
                            plan.group_threads, table, start)

        values = plan.k_tile.nbytes
        self.copies = [copy(spec.k, self.given.keys, spec.d, 0),
                       copy(spec.v, self.given.values, spec.d_v, values)]
        self.keys = Keys(kb, spec.k.dtype, spec.q.dtype, plan.k_tile, spec.d, 0)
        self.values = Values(kb, spec.v.dtype, spec.q.dtype, plan.v_tile, spec.d_v, values)
        self.softmax = DecodeSoftmax(kb, spec, self.rows, self.given.extras)
        self.out: AccFragment = [kb.regs("f32", 4, 0.0) for _ in range(0, spec.d_v, 8)]

    def _largest_scale(self) -> None:
        """Scales of values are taken relative to the split's largest: weights of float16 stay in its range.
        """
        kb, lane = self.kb, self.kb.special("laneid")
        self.most = kb.reg("f32", 0.0)
        with kb.loop(lane.to("s32"), self.entries, 32) as entry:
            made = kb.ld("shared", "f32", self.table.address(entry.to("u32") * 4)
                        .at(8 * self.plan.most_pages))[0]
            kb.emit("abs.f32", made, made)
            self.most.set(largest(kb, [self.most, made]))
        for distance in (16, 8, 4, 2, 1):
            other = kb.reg("f32")
            kb.emit("shfl.sync.bfly.b32", other, self.most, distance, 31, -1)
            self.most.set(largest(kb, [self.most, other]))
        self.relative = inverse(kb, self.most)

    def _copy(self, stage: Value, key: Value) -> None:
        for copy in self.copies: copy.copy(stage, key, self.bounds)

    def _meet(self) -> None:
        """The warps that share tiles."""
        if self.plan.schedule.warps_m == 1: self.kb.emit("bar.warp.sync", -1)
        else: self.kb.sync(self.warp_n + 1, self.plan.group_threads)

    def _tile(self, stage: Value, key: Value) -> None:
        """The products of a tile."""
        kb, spec = self.kb, self.spec
        shape, types = instruction(spec.q.dtype, spec.q.dtype)
        self.keys.fragments.move(stage)
        self.values.fragments.move(stage)
        sums: AccFragment = [kb.regs("f32", 4, 0.0) for _ in range(0, self.plan.keys, 8)]
        with kb.comment("q kT"):
            for step in range(spec.d // 16):
                for cell, pair in zip(sums, self.keys.of(step), strict=True):
                    kb.mma(shape, types, cell, self._query(step), pair, cell)
        with kb.comment("softmax"):
            if spec.is_quantised: self._scale_columns(sums, key, 1)
            rescales = self.softmax.step(sums, key)
            if spec.is_quantised: self._scale_columns(sums, key, 2, self.relative)
            for cell in self.out:
                for i, value in enumerate(cell): value *= rescales[i // 2]
        with kb.comment("weights v"):
            for step in range(self.plan.keys // 16):
                weights = [pack(kb, cell[at:at + 2], spec.q.dtype) for cell in sums[2 * step:2 * step + 2]
                           for at in (0, 2)]
                for cell, pair in zip(self.out, self.values.of(step), strict=True):
                    kb.mma(shape, types, cell, weights, pair, cell)

    def _scale_columns(self, cells: AccFragment, key: Value, which: int, factor: Value | None = None) -> None:
        """Columns times the scales of their pages."""
        kb, size = self.kb, self.spec.page_size
        for j, cell in enumerate(cells):
            if 8 * j % size == 0:
                slot = (key + 8 * j - self.bounds.begin).to("u32") // size
                scale = kb.ld("shared", "f32", self.table.address(slot * 4)
                             .at(4 * which * self.plan.most_pages))[0]
                if factor is not None: scale = scale * factor
            for value in cell: value *= scale

    # **** the result ****

    def _finish(self) -> None:
        """Merges the warps; stores the result, or leaves the split's part in the workspace."""
        kb, plan, spec = self.kb, self.plan, self.spec
        merge, quads = Merge(kb, plan, self.ring), spec.d_v // 4
        row_sum = self.softmax.row_sums()
        if spec.is_quantised:
            for cell in self.out:
                for value in cell: value *= self.most
        kb.sync()
        row = self.warp_m * 16 + kb.special("laneid") // 4
        merge.leave(row, self.warp_n, self.out, self.softmax.row_max, row_sum)
        kb.sync()
        with kb.loop(kb.tid.x, plan.block_rows * quads, plan.schedule.threads, name="element") as element:
            row, column = element // quads, element % quads * 4
            number = self.block * plan.block_rows + row
            with kb.if_(number < spec.rows): self._store(number, column, *merge.merge_sums(row, column))

    def _store(self, row: Value, column: Value, sums: list[Value], row_max: Value, row_sum: Value) -> None:
        """Four elements of a row, from `column` on."""
        kb, indices = self.kb, [self.request, self.head]

        def finish() -> None:
            scale = inverse_sum(kb, self.spec, self.given.sinks, self.head, row, row_max, row_sum)
            store_out(kb, self.spec, self.given.out, indices, row, column, [value * scale for value in sums])

        if not self.plan.workspace_bytes: return finish()
        with kb.if_(self.span.several):
            workspace = Workspace(kb, self.plan, self.given.workspace)
            number = workspace.number(indices, row)
            kb.st("global", "f32", (workspace.sums(number, self.split) + column.to("u64") * 4).at(), sums)
            with kb.if_(column == 0):
                kb.st("global", "f32", workspace.stats(number, self.split).at(), [row_max, row_sum])
        with kb.if_(~self.span.several): finish()


# **** operands: queries, keys and values as fragments of mma.m16n8k16 (fragments.py) ****

# `Keys.of(step)` gives two registers for each 8 keys, for 16 elements of the head; `Values.of(step)` two for
# each 8 columns of the result, for 16 keys.
#
# Keys and values of 8 bits become q's dtype on their way. A register of four bytes has two registers' worth
# of operands, which permutes the elements, equally for both sides of a matmul (g = lane / 4, q = lane % 4):
#
#     keys    bytes 4q … 4q + 3 of 16 elements are k = 2q, 2q + 1, 2q + 8, 2q + 9: a lane takes elements
#             4q … 4q + 3 of q's rows as well
#     values  ldmatrix.trans moves pairs of columns: of 16 columns, the even ones are one tile of the result,
#             the odd ones another, and a lane's four sums of a row are columns 4q … 4q + 3


class Keys:
    """Fragments of a warp's tile of keys, `start` bytes after a stage's beginning."""

    def __init__(self, kb: Kernel, dtype: DType, wide: DType, tile: SharedTile, d: int, start: int) -> None:
        self.kb, self.dtype, self.wide = kb, dtype, wide
        self.per_load = STEP_BYTES // dtype.itemsize // 16  # steps of 16 elements that one load has
        self.fragments = Fragments(kb, dtype, tile, False, True, kb.reg("u32", 0), tile.rows,
                                   d // 16 // self.per_load, start)
        self.loaded: list[list[Value]] = []

    def of(self, step: int) -> Pairs:
        """Returns the pairs of 16 elements of the head; steps in order."""
        load, half = divmod(step, self.per_load)
        if half == 0:
            self.loaded = self.fragments.registers()
            self.fragments.load(load, self.loaded)
        eights = [four[at:at + 2] for four in self.loaded for at in (0, 2)]
        if self.per_load == 1: return eights
        return [[widen_bytes(self.kb, two[half], at, at + 1, self.dtype, self.wide) for at in (0, 2)]
                for two in eights]


class Values:
    """Operands of values."""

    def __init__(self, kb: Kernel, dtype: DType, wide: DType, tile: SharedTile, d_v: int, start: int) -> None:
        self.kb, self.dtype, self.wide = kb, dtype, wide
        # pairs of bytes are moved as elements of 16 bits
        self.fragments = Fragments(kb, wide, tile, True, True, kb.reg("u32", 0), d_v * dtype.itemsize // 2,
                                   tile.rows // 16, start)

    def of(self, step: int) -> Pairs:
        """Returns the pairs of 16 keys."""
        loaded = self.fragments.registers()
        self.fragments.load(step, loaded)
        eights = [four[at:at + 2] for four in loaded for at in (0, 2)]
        if self.dtype.itemsize == 2: return eights
        return [[widen_bytes(self.kb, word, at, at + 2, self.dtype, self.wide) for word in two]
                for two in eights for at in (0, 1)]


def widen_bytes(kb: Kernel, word: Value, first: int, second: int, dtype: DType, wide: DType) -> Value:
    """Two bytes of a b32 as two numbers of a 16-bit float, exactly."""
    made = kb.reg("b32")
    if dtype == dtypes.int8: return _integers(kb, word, first, second, wide, made)
    kb.emit("prmt.b32", made, word, 0, second << 12 | 4 << 8 | first << 4 | 4)
    if (places := WIDENED[dtype, wide]) is None: return made
    (shift, keep, power), moved = places, kb.reg("b32")
    kb.emit("shr.u32", moved, made, shift)
    kept = (moved & keep) | (made & 0x80008000)
    return _fma(kb, wide, kept, kb.reg("b32", power), kb.reg("b32", 0x80008000))


def _integers(kb: Kernel, word: Value, first: int, second: int, wide: DType, made: Value) -> Value:
    """A byte x with its sign s is (128 + x mod 128) − (128 + 128 s): both are bytes with a constant above
    them, which is 128 in bfloat16, and 1024 in float16."""
    high = 0x43434343 if wide == dtypes.bfloat16 else 0x64646464
    kb.emit("prmt.b32", made, word, high, 4 << 12 | second << 8 | 4 << 4 | first)
    minus_one = kb.reg("b32", 0xBF80BF80 if wide == dtypes.bfloat16 else 0xBC00BC00)
    return _fma(kb, wide, made & 0xFF80FF80, minus_one, made & 0xFF7FFF7F)


def _fma(kb: Kernel, wide: DType, a: Value, b: Value, c: Value) -> Value:
    """a · b + c, of two numbers each."""
    made = kb.reg("b32")
    kb.emit(f"fma.rn.{'bf16x2' if wide == dtypes.bfloat16 else 'f16x2'}", made, a, b, c)
    return made
