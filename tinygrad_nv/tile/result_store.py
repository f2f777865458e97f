"""From sums in registers to the result in memory.

Protocol: a warp holds cells, each 16 rows by 8 columns of every part's sums, in the fragment that mma.m16n8
and wgmma share: of a cell, registers 2h and 2h + 1 are row g + 8h, columns 2q and 2q + 1, g = lane / 4,
q = lane % 4. A wgmma of m64nN gives N / 8 cells to each warp: cell j has registers 4j … 4j + 3, and warp p of
the warpgroup begins 16 p rows further down.

    plan = store_plan(stored, tile)                             # a `StoreTarget`: GemmSpec.store_target
    staging = k.shared("staging", plan.smem_bytes, align=1024) if plan.smem_bytes else None
    out_map = k.tensor_map("out_map") if plan.map else None     # with plan.map among the kernel's maps
    store = Store(k, stored, plan, out, extras, rows, staging, out_map)
    ...                                                         # once, or for every tile of a persistent CTA:
    cells = [Cell(16 * i, 8 * j, [sums[i][j]]) for i in … for j in …]
    store.tile(first_m, first_n, batch, cells)                  # the warp's first row and column, u32
    ...
    store.finish()                                              # before the kernel ends

`out` and `extras` are the kernel's pointers, without offsets; `rows` is how many rows there are (u32);
`batch` the indices of the matrix (u32). What lies outside the result is computed, never stored.

The plan chooses one of three ways: a tensor map (warpgroups, rows aligned to 16 bytes), 16 bytes a thread
from staged lines (warps, the same), or each pair of elements by itself. `staging` is the
shared memory of the first two, at a multiple of 1024; it may be an address (u32) in memory that all CTAs have
ceased to use. Without it, or without the map the plan asks for, elements are stored by themselves. In `tile`
all warps of a warpgroup take part together (wgmma), or each warp for itself (mma); staging by warpgroups uses
the named barriers from `barrier` on, one for each.

The result by way of shared memory: full rows of a panel at a time, by TMA or 16 bytes a thread.

Protocol: the warps of a group (one, or the four of a warpgroup with 16 rows each) share panels: `lines` lines
of `line_bytes` contiguous bytes of the result, which run along its columns where they lie side by side
("N"), along its rows where those do ("M"). A panel of lines longer than 128 bytes is columns of 128 bytes,
one after the other; each is swizzled as TMA does it with boxes of that width (of 32 and 64 bytes: with those
swizzles). For each panel of the group's tile, in turn, into two panels' worth of memory:

    wait until what was in this half of the memory has been read
    a residual goes the other way first: 16 bytes a thread (loaded a panel ahead) to the panel, ldmatrix
    finish the sums, write them (stmatrix, of 16-bit elements on sm_90)
    all warps of the group have written
    one thread starts a TMA store of each column of 128 bytes; or all read 16 bytes at a time and store them

Eight lanes' 16 bytes (or all lanes' 4) lie in different banks in every access; stores to global memory are of
whole lines.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.access import place, store_form
from tinygrad_nv.tile.expression import Load, loads
from tinygrad_nv.tile.gemm.spec import Result, StoreTarget
from tinygrad_nv.tile.lanes import FLOAT16S, Lanes
from tinygrad_nv.tile.store_plan import Cell, Destination, Panel, Share, StorePlan

Values = dict[tuple[int, int], Lanes]  # by row and column
MASKS = {128: 7, 64: 3, 32: 1}


class Store(Destination):
    """Finishes sums and stores them; see the module."""

    def tile(self, first_m: Value, first_n: Value, batch: Sequence[Value], cells: Sequence[Cell]) -> None:
        """Stores what a warp holds, whose first element is at (`first_m`, `first_n`) of the matrix."""
        share = Share(self, first_m, first_n, batch, cells)
        if self.is_staged: return Staged(share).run()
        # columns outside: what belongs to a row is needed throughout, and there are fewer rows
        for row, column in sorted(share.halves, key=lambda at: (at[1], at[0])):
            share.put(row, column, share.finish.at(row, column))
        return None

    @property
    def is_staged(self) -> bool:
        """Whether the result goes by way of shared memory."""
        mapped = (self.plan.map is None) == (self.out_map is None)
        return self.plan.panel is not None and self.staging is not None and mapped

    def finish(self) -> None:
        """Waits until shared memory may go."""
        if self.is_staged and self.out_map is not None: self.kb.tma_wait(0, read=True)


@dataclass
class Lines:
    """Places in a panel: `line` and `byte` (u32) are this lane's, others are constants away from them."""
    kb: Kernel
    panel: Panel
    base: Value
    line: Value
    byte: Value
    known: dict[tuple[int, int], Value] = field(default_factory=dict)

    def at(self, line: int, byte: int, start: int) -> MemoryOperand:
        """`line` lines and `byte` bytes on, in the panel that begins `start` bytes after the first. `byte`
        has no bit in common with the lane's."""
        panel, span = self.panel, self.panel.span
        shift, flip = line % 8, byte % span
        if (shift, flip) not in self.known:
            if flip: self.known[shift, flip] = self._own(shift) ^ flip
            else: self._own(shift)
        plain = byte // span * panel.lines * span + (line - shift) * span
        return self.known[shift, flip].at(start + plain)

    def _own(self, shift: int) -> Value:
        if (shift, 0) not in self.known:
            panel, span = self.panel, self.panel.span
            line = self.line + shift if shift else self.line
            plain = line * span + (self.byte & span - 1)
            if panel.line_bytes > span: plain = plain + (self.byte // span) * (panel.lines * span)
            self.known[shift, 0] = self.base + (plain ^ ((plain >> 7) & MASKS[span]) << 4)
        return self.known[shift, 0]


class Staged:
    """Writes a group's tile, panel by panel. Rows and columns are counted from the group's first."""

    def __init__(self, share: Share) -> None:
        self.share, self.kb, self.stored = share, share.kb, share.stored
        store, kb = share.store, share.kb
        panel = store.plan.panel
        assert panel is not None
        assert store.staging is not None
        self.panel, self.size = panel, self.stored.out.dtype.itemsize
        self.start = store.staging if isinstance(store.staging, Value) else store.staging.address()
        self.warp = kb.tid.x >> 5
        self.number = self.warp // panel.group
        self.inner = self.warp % panel.group * 16 if panel.group > 1 else kb.reg("u32", 0)
        self.base = self.start + self.number * (2 * panel.nbytes)
        self.first_m = share.m0 - self.inner if panel.group > 1 else share.m0
        self.first_n = share.n0
        self.tma = store.out_map is not None
        self.load = find_staged_load(self.stored, store.plan)
        self.kinds: dict[str, Lines] = {}
        self.made: dict[tuple[str, ...], Value] = {}
        self.chunk: tuple[Value, Value] | tuple[()] = ()
        self.present: Value | None = None   # whether the panel has this thread's line, where some have none

    def run(self) -> None:
        """All panels of the tile."""
        rows, columns = self.panel.extents(self.size)
        held: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for row, column in sorted(self.share.halves, key=lambda at: (at[1], at[0])):
            held.setdefault((column // columns, row // rows), []).append((row, column))
        panels = [(down * rows, across * columns, held[across, down]) for across, down in sorted(held)]
        fetched = self._fetch(*panels[0][:2])
        for turn, (row, column, halves) in enumerate(panels):
            start = turn % 2 * self.panel.nbytes
            with self.kb.comment(f"rows {row} and on, columns {column} and on of the group's tile"):
                if not self.load: values = {at: self.share.finish.at(*at) for at in halves}
                self._free(turn, len(panels))
                if self.load:
                    self._hand_out(start, row, column, halves, fetched)
                    if turn + 1 < len(panels): fetched = self._fetch(*panels[turn + 1][:2])
                    values = {at: self.share.finish.at(*at) for at in halves}
                    self.kb.emit("bar.warp.sync", -1)  # a warp writes where it has read
                self._write(start, row, column, values)
                if self.tma: self.kb.fence_proxy_async()
                self._together()
                if self.tma: self._store_boxes(start, row, column)
                else: self._store_chunks(start, row, column)

    def _free(self, turn: int, turns: int) -> None:
        """Waits until the memory of this turn may be written."""
        if self.tma:
            # what is pending may be in the other half; the first panel of a tile cannot tell
            self.kb.tma_wait(1 if turn or turns % 2 == 0 else 0, read=True)
            self._together()
        elif turn == 0: self._together()

    def _together(self) -> None:
        """A barrier of the group."""
        if self.panel.group == 1: return self.kb.emit("bar.warp.sync", -1)
        barrier = self.number + self.share.store.barrier
        return self.kb.sync(barrier, 32 * self.panel.group)

    # **** sums to shared memory ****

    def _write(self, start: int, row: int, column: int, values: Values) -> None:
        if self.stored.out.dtype in FLOAT16S: return self._write_halves(start, row, column, values)
        if self.panel.major == "M": return self._write_elements(start, row, column, values)
        if self.size == 4: return self._write_words(start, row, column, values)
        lines = self._lines("rows", lambda lane: (self.inner + (lane >> 2), (lane & 3) * (2 * self.size)))
        for (r, c), value in values.items():
            kind, words = store_form(self.kb, value, 2)
            self.kb.st("shared", kind, lines.at(r - row, (c - column) * self.size, start), words[0])
        return None

    def _lines(self, name: str, at: Callable[[Value], tuple[Value, Value]]) -> Lines:
        """Places of a kind; `at` gives the line and the byte of a lane."""
        if name not in self.kinds:
            line, byte = at(self.kb.special("laneid"))
            self.kinds[name] = Lines(self.kb, self.panel, self.base, line, byte)
        return self.kinds[name]

    def _write_halves(self, start: int, row: int, column: int, values: Values) -> None:
        """16-bit elements, as matrices of 8 × 8: four at a time where there is stmatrix."""
        kb, along_m = self.kb, self.panel.major == "M"
        if kb.arch >= "sm_90":
            for at, matrices in self._matrices(start, row, column, list(values)):
                kb.stmatrix(at, [values[each].pair() for each in matrices], trans=along_m)
            return
        def own(lane: Value) -> tuple[Value, Value]:
            g, q = lane >> 2, (lane & 3) * 4
            return (g, self.inner * 2 + q) if along_m else (self.inner + g, q)
        lines = self._lines("pairs", own)
        for (r, c), value in values.items():
            pair = value.pair()
            if along_m:
                turned = kb.reg("b32")
                kb.emit("movmatrix.sync.aligned.m8n8.trans.b16", turned, pair)
                kb.st("shared", "b32", lines.at(c - column, (r - row) * 2, start), turned)
            else: kb.st("shared", "b32", lines.at(r - row, (c - column) * 2, start), pair)

    def _matrices(self, start: int, row: int, column: int,
                  halves: Sequence[tuple[int, int]]) -> Iterator[tuple[MemoryOperand, list[tuple[int, int]]]]:
        """Matrices of 8 × 8 in fours (or twos), for ldmatrix and stmatrix: where, and which."""
        along_m = self.panel.major == "M"
        def spread(lane: Value) -> tuple[Value, Value]:
            # matrices 0 and 1 differ in rows, 2 and 3 in columns
            low, h, j = lane & 7, (lane >> 3) & 1, lane >> 4
            if along_m: return low + j * 8, self.inner * 2 + h * 16
            return self.inner + low + h * 8, j * 16
        lines = self._lines("matrices", spread)
        by_row: dict[int, list[int]] = {}
        for r, c in halves:
            if (r - row) % 16 == 0: by_row.setdefault(r, []).append(c)
        for r, columns in by_row.items():
            for i in range(0, len(columns), 2):
                along, across = r - row, columns[i] - column
                at = lines.at(across, along * 2, start) if along_m else lines.at(along, across * 2, start)
                yield at, [(r + 8 * h, c) for c in columns[i:i + 2] for h in range(2)]

    def _write_words(self, start: int, row: int, column: int, values: Values) -> None:
        """Pairs of 32-bit elements along rows. Half a warp's eight bytes a lane would meet in the banks of
        two rows at a time; so lanes of some rows write another cell first."""
        kb, span = self.kb, self.panel.span
        lines = self._lines("rows", lambda lane: (self.inner + (lane >> 2), (lane & 3) << 3))
        apart, bit = {128: (64, 4), 64: (32, 8), 32: (0, 0)}[span]  # bytes between the two cells; of the lane
        if not apart:
            for (r, c), value in values.items():
                kb.st("shared", "b32", lines.at(r - row, (c - column) * 4, start),
                      store_form(kb, value, 2)[1])
            return
        if ("other",) not in self.made: self.made["other",] = (kb.special("laneid") & bit) != 0
        other = self.made["other",]
        for (r, c), value in values.items():
            byte = (c - column) * 4
            if byte & apart: continue
            first = store_form(kb, value, 2)[1]
            second = store_form(kb, values[r, c + apart // 4], 2)[1]
            for one, two, swap in ((first, second, False), (second, first, True)):
                words = [kb.select(other, b, a, "b32") for a, b in zip(one, two, strict=True)]
                own = lines.at(r - row, byte + (apart if swap else 0), start)
                theirs = lines.at(r - row, byte + (0 if swap else apart), start)
                kb.st("shared", "b32", self._either(other, theirs, own), words)

    def _either(self, condition: Value, yes: MemoryOperand, no: MemoryOperand) -> MemoryOperand:
        assert isinstance(yes.base, Value)
        assert isinstance(no.base, Value)
        assert yes.offset == no.offset
        key = (yes.base.name, no.base.name)
        if key not in self.made: self.made[key] = self.kb.select(condition, yes.base, no.base)
        return self.made[key].at(yes.offset)

    def _write_elements(self, start: int, row: int, column: int, values: Values) -> None:
        """Elements one by one, where those of a column lie side by side."""
        kb, size = self.kb, self.size
        lines = self._lines("columns", lambda lane: ((lane & 3) << 1, (self.inner + (lane >> 2)) * size))
        for (r, c), value in values.items():
            for i in range(2):
                kind, words = store_form(kb, value, 1, i)
                kb.st("shared", kind, lines.at(c - column + i, (r - row) * size, start), words[0])

    # **** shared memory to the result ****

    def _store_boxes(self, start: int, row: int, column: int) -> None:
        """One thread stores the panel, a column of 128 bytes at a time."""
        kb, panel, store = self.kb, self.panel, self.share.store
        assert store.out_map is not None
        first = kb.if_(self.warp % panel.group == 0) if panel.group > 1 else nullcontext()
        with first, kb.if_(kb.elect()):
            for part in range(panel.line_bytes // panel.span):
                on = part * panel.span // self.size
                down, across = (row, column + on) if panel.major == "N" else (row + on, column)
                m, n = (self.first_m + down).to("s32"), (self.first_n + across).to("s32")
                at = [n, m] if panel.major == "N" else [m, n]
                batch = [self.share.batch[i].to("s32") for i in store.plan.batch_dimensions]
                kb.tma_store(store.out_map, [*at, *batch],
                            place(self.base, start + part * panel.lines * panel.span))
            kb.tma_commit()

    def _chunks(self, start: int, row: int,
                column: int) -> Iterator[tuple[int, int, MemoryOperand, Value | None]]:
        """A panel by 16 bytes a thread: their row and column, from this thread's first; where in shared
        memory; whether they are inside."""
        kb, panel, size, share = self.kb, self.panel, self.size, self.share
        a_line, threads, along_m = panel.span // 16, 32 * panel.group, panel.major == "M"
        thread = kb.tid.x % threads
        lines = self._lines("chunks", lambda _: (thread // a_line, thread % a_line * 16))
        if not self.chunk:
            inner = lines.byte // size
            m, n = (inner, lines.line) if along_m else (lines.line, inner)
            self.chunk = (self.first_m + m, self.first_n + n)
        self.present = fewer = lines.line < panel.lines if panel.lines % (threads // a_line) else None
        for byte in range(0, panel.line_bytes, panel.span):
            for down in range(0, panel.lines, threads // a_line):
                on = byte // size
                r, c = (row + on, column + down) if along_m else (row + down, column + on)
                guard = share.guard_at(self.chunk[0], r, self.chunk[1], c)
                if fewer is not None: guard = fewer if guard is None else guard & fewer
                yield r, c, lines.at(down, byte, start), guard

    def _address(self, pointer: Value, tensor: Load | Result) -> Value:
        """Returns the address at which this thread's first chunk of a tensor lies."""
        key = (pointer.name, str(tensor))
        if key not in self.made: self.made[key] = self.share.base_at(pointer, tensor, *self.chunk)
        return self.made[key]

    def _store_chunks(self, start: int, row: int, column: int) -> None:
        """All threads store 16 bytes of lines at a time."""
        kb, out = self.kb, self.stored.out
        for r, c, at, guard in self._chunks(start, row, column):
            words = kb.regs("b32", 4) if guard is None else kb.regs("b32", 4, 0)
            kb.emit("ld.shared.v4.b32", words, at, guard=guard)
            to = place(self._address(self.share.store.out, out), (r * out.m + c * out.n) * self.size)
            kb.emit("st.global.v4.b32", to, words, guard=guard)

    # **** a further parameter by way of shared memory ****

    def _fetch(self, row: int, column: int) -> list[list[Value]]:
        """The load's elements of a panel, 16 bytes at a time."""
        kb, load, made = self.kb, self.load, []
        if load is None: return []
        for r, c, _, guard in self._chunks(0, row, column):
            words = kb.regs("b32", 4) if guard is None else kb.regs("b32", 4, 0)
            base = self._address(self.share.store.extras[load.parameter], load)
            kb.emit("ld.global.v4.b32", words, place(base, (r * load.m + c * load.n) * self.size),
                    guard=guard)
            made.append(words)
        return made

    def _hand_out(self, start: int, row: int, column: int, halves: Sequence[tuple[int, int]],
                  fetched: list[list[Value]]) -> None:
        """Hands what has been fetched to the lanes that have the elements."""
        kb, load = self.kb, self.load
        assert load is not None
        for words, (_, _, at, _) in zip(fetched, self._chunks(start, row, column), strict=True):
            kb.emit("st.shared.v4.b32", at, words, guard=self.present)  # zeros beyond the result, too
        self._together()
        for at, matrices in self._matrices(start, row, column, halves):
            for each, word in zip(matrices, kb.ldmatrix(at, len(matrices), trans=self.panel.major == "M"),
                                  strict=True):
                self.share.handed[load, *each] = Lanes(kb, load.dtype, [], word)


def find_staged_load(stored: StoreTarget, plan: StorePlan) -> Load | None:
    """A load that a panel can hold before the result does: 16-bit elements of every row and column, side by
    side as the result's, their lines aligned to 16 bytes."""
    out, along_n = stored.out, stored.out.major == "N"
    extent, edges = (stored.n, plan.edges_n) if along_n else (stored.m, plan.edges_m)
    if out.dtype not in FLOAT16S or (edges and (extent % 8 or (stored.symbolic and not along_n))): return None
    for load in loads(stored.epilogue):
        inner, pitch = (load.n, load.m) if along_n else (load.m, load.n)
        if load.dtype in FLOAT16S and inner == 1 and pitch > 0 and \
                not any(stride % 8 for stride in (pitch, load.offset, *load.batch)): return load
    return None
