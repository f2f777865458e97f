"""The result by way of shared memory: full rows of a panel at a time, by TMA or 16 bytes a thread.

Protocol: the warps of a group (one, or the four of a warpgroup with 16 rows each) share panels: `lines` lines
of `line_bytes` contiguous bytes of the result, which run along its columns where they lie side by side
("N"), along its rows where those do ("M"). A panel of lines longer than 128 bytes is columns of 128 bytes,
one after the other; each is swizzled as TMA does it with boxes of that width (of 32 and 64 bytes: with those
swizzles). For each panel of the group's tile, in turn, into two panels' worth of memory:

    wait until what was in this half of the memory has been read
    finish the sums, write them (stmatrix, of 16-bit elements on sm_90)
    everybody of the group has written
    one thread starts a TMA store of each column of 128 bytes; or all read 16 bytes at a time and store them

Eight lanes' 16 bytes (or all lanes' 4) lie in different banks in every access; stores to global memory are of
whole lines.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinygrad_nv.ptx.builder import Kernel, Place, Value
from tinygrad_nv.tile.access import place, stored_form
from tinygrad_nv.tile.lanes import HALVES, Lanes

if TYPE_CHECKING:
    from tinygrad_nv.tile.store import Share

SPANS = (128, 64, 32)
Values = dict[tuple[int, int], Lanes]  # by row and column
MASKS = {128: 7, 64: 3, 32: 1}


@dataclass(frozen=True)
class Panel:
    """`lines` lines of `line_bytes` bytes along `major`; `group` warps share one."""
    major: str
    lines: int
    line_bytes: int
    group: int

    @property
    def span(self) -> int:
        """The width of a column."""
        return span_of(self.line_bytes)

    @property
    def nbytes(self) -> int: return self.lines * self.line_bytes

    def extents(self, size: int) -> tuple[int, int]:
        """Its rows and columns of the result."""
        inner = self.line_bytes // size
        return (self.lines, inner) if self.major == "N" else (inner, self.lines)


def span_of(line_bytes: int) -> int:
    """The widest swizzle that lines can have; 0 for none."""
    return next((span for span in SPANS if line_bytes % span == 0), 0)


def panel_of(major: str, rows: int, columns: int, group: int, size: int) -> Panel | None:
    """The panel for a group whose tile has `rows` × `columns` elements of `size` bytes; None where its lines
    are no multiples of 32 bytes. Of M-major ones a line has all rows of the group."""
    if major == "N":
        span = span_of(columns * size)
        return Panel("N", 16 * group, span, group) if span else None
    line = rows * size
    lines = next((lines for lines in (64, 32, 16, 8) if columns % lines == 0
                  and (lines * line <= 2048 * group or lines == 8)), 0)
    return Panel("M", lines, line, group) if span_of(line) and lines else None


@dataclass
class Lines:
    """Places in a panel: `line` and `byte` (u32) are this lane's, others are constants away from them."""
    k: Kernel
    panel: Panel
    base: Value
    line: Value
    byte: Value
    known: dict[tuple[int, int], Value] = field(default_factory=dict)

    def at(self, line: int, byte: int, start: int) -> Place:
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
        self.share, self.k, self.spec = share, share.k, share.spec
        store, k = share.store, share.k
        panel = store.plan.panel
        assert panel is not None
        assert store.staging is not None
        self.panel, self.size = panel, self.spec.out.dtype.itemsize
        self.start = store.staging if isinstance(store.staging, Value) else store.staging.address()
        self.warp = k.tid.x >> 5
        self.number = self.warp // panel.group
        self.inner = self.warp % panel.group * 16 if panel.group > 1 else k.reg("u32", 0)
        self.base = self.start + self.number * (2 * panel.nbytes)
        self.first_m = share.m0 - self.inner if panel.group > 1 else share.m0
        self.first_n = share.n0
        self.kinds: dict[str, Lines] = {}
        self.made: dict[tuple[str, ...], Value] = {}

    def run(self) -> None:
        """All panels of the tile."""
        rows, columns = self.panel.extents(self.size)
        held: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for row, column in sorted(self.share.halves, key=lambda at: (at[1], at[0])):
            held.setdefault((column // columns, row // rows), []).append((row, column))
        for turn, (across, down) in enumerate(sorted(held)):
            self._panel(turn, len(held), down * rows, across * columns, held[across, down])

    def _panel(self, turn: int, turns: int, row: int, column: int, halves: Sequence[tuple[int, int]]) -> None:
        k, start = self.k, turn % 2 * self.panel.nbytes
        tma = self.share.store.out_map is not None
        with k.comment(f"rows {row} and on, columns {column} and on of the group's tile"):
            values = {at: self.share.finish.at(*at) for at in halves}
            if tma:
                # what is pending may be in the other half; the first panel of a tile cannot tell
                k.tma_wait(1 if turn or turns % 2 == 0 else 0, read=True)
                self._together()
            elif turn == 0: self._together()
            self._write(start, row, column, values)
            if tma: k.fence_proxy_async()
            self._together()
            if tma: self._store_boxes(start, row, column)
            else: self._store_chunks(start, row, column)

    def _together(self) -> None:
        """Everybody of the group is here."""
        if self.panel.group == 1: return self.k.emit("bar.warp.sync", -1)
        barrier = self.number + self.share.store.barrier
        return self.k.sync(barrier, 32 * self.panel.group)

    # **** sums to shared memory ****

    def _write(self, start: int, row: int, column: int, values: Values) -> None:
        if self.spec.out.dtype in HALVES: return self._write_halves(start, row, column, values)
        if self.panel.major == "M": return self._write_elements(start, row, column, values)
        if self.size == 4: return self._write_words(start, row, column, values)
        lines = self._lines("rows", lambda lane: (self.inner + (lane >> 2), (lane & 3) << 1))
        for (r, c), value in values.items():
            kind, words = stored_form(self.k, value, 2)
            self.k.st("shared", kind, lines.at(r - row, c - column, start), words[0])
        return None

    def _lines(self, name: str, at: Callable[[Value], tuple[Value, Value]]) -> Lines:
        """Places of a kind; `at` gives the line and the byte of a lane."""
        if name not in self.kinds:
            line, byte = at(self.k.special("laneid"))
            self.kinds[name] = Lines(self.k, self.panel, self.base, line, byte)
        return self.kinds[name]

    def _write_halves(self, start: int, row: int, column: int, values: Values) -> None:
        """16-bit elements, as matrices of 8 × 8: four at a time where there is stmatrix."""
        k, along_m = self.k, self.panel.major == "M"
        if k.arch < "sm_90":
            def own(lane: Value) -> tuple[Value, Value]:
                g, q = lane >> 2, (lane & 3) * 4
                return (g, self.inner * 2 + q) if along_m else (self.inner + g, q)
            lines = self._lines("matrix", own)
            for (r, c), value in values.items():
                pair = value.pair()
                if along_m:
                    turned = k.reg("b32")
                    k.emit("movmatrix.sync.aligned.m8n8.trans.b16", turned, pair)
                    k.st("shared", "b32", lines.at(c - column, (r - row) * 2, start), turned)
                else: k.st("shared", "b32", lines.at(r - row, (c - column) * 2, start), pair)
            return
        def spread(lane: Value) -> tuple[Value, Value]:
            # matrices 0 and 1 differ in rows, 2 and 3 in columns
            low, h, j = lane & 7, (lane >> 3) & 1, lane >> 4
            if along_m: return low + j * 8, self.inner * 2 + h * 16
            return self.inner + low + h * 8, j * 16
        lines = self._lines("matrix", spread)
        cells = sorted({(c, r // 16 * 16) for r, c in values})
        by_row: dict[int, list[int]] = {}
        for c, r in cells: by_row.setdefault(r, []).append(c)
        for r, columns in by_row.items():
            for i in range(0, len(columns), 2):
                some = columns[i:i + 2]
                matrices = [values[r + 8 * h, c].pair() for c in some for h in range(2)]
                along, across = r - row, columns[i] - column
                at = lines.at(across, along * 2, start) if along_m else lines.at(along, across * 2, start)
                k.stmatrix(at, matrices, trans=along_m)

    def _write_words(self, start: int, row: int, column: int, values: Values) -> None:
        """Pairs of 32-bit elements along rows. Half a warp's eight bytes a lane would meet in the banks of
        two rows at a time; so lanes of some rows write another cell first."""
        k, span = self.k, self.panel.span
        lines = self._lines("rows", lambda lane: (self.inner + (lane >> 2), (lane & 3) << 3))
        apart, bit = {128: (64, 4), 64: (32, 8), 32: (0, 0)}[span]  # bytes between the two cells; of the lane
        if not apart:
            for (r, c), value in values.items():
                k.st("shared", "b32", lines.at(r - row, (c - column) * 4, start), stored_form(k, value, 2)[1])
            return
        if ("other",) not in self.made: self.made["other",] = (k.special("laneid") & bit) != 0
        other = self.made["other",]
        for (r, c), value in values.items():
            byte = (c - column) * 4
            if byte & apart: continue
            first = stored_form(k, value, 2)[1]
            second = stored_form(k, values[r, c + apart // 4], 2)[1]
            for one, two, swap in ((first, second, False), (second, first, True)):
                words = [k.select(other, b, a, "b32") for a, b in zip(one, two, strict=True)]
                own = lines.at(r - row, byte + (apart if swap else 0), start)
                theirs = lines.at(r - row, byte + (0 if swap else apart), start)
                k.st("shared", "b32", self._either(other, theirs, own), words)

    def _either(self, condition: Value, yes: Place, no: Place) -> Place:
        assert isinstance(yes.base, Value)
        assert isinstance(no.base, Value)
        assert yes.offset == no.offset
        key = (yes.base.name, no.base.name)
        if key not in self.made: self.made[key] = self.k.select(condition, yes.base, no.base)
        return self.made[key].at(yes.offset)

    def _write_elements(self, start: int, row: int, column: int, values: Values) -> None:
        """Elements one by one, where those of a column lie side by side."""
        k, size = self.k, self.size
        lines = self._lines("columns", lambda lane: ((lane & 3) << 1, (self.inner + (lane >> 2)) * size))
        for (r, c), value in values.items():
            for i in range(2):
                kind, words = stored_form(k, value, 1, i)
                k.st("shared", kind, lines.at(c - column + i, (r - row) * size, start), words[0])

    # **** shared memory to the result ****

    def _store_boxes(self, start: int, row: int, column: int) -> None:
        """One thread stores the panel, a column of 128 bytes at a time."""
        k, panel, store = self.k, self.panel, self.share.store
        assert store.out_map is not None
        first = k.if_(self.warp % panel.group == 0) if panel.group > 1 else nullcontext()
        with first, k.if_(k.elect()):
            for part in range(panel.line_bytes // panel.span):
                on = part * panel.span // self.size
                down, across = (row, column + on) if panel.major == "N" else (row + on, column)
                m, n = (self.first_m + down).to("s32"), (self.first_n + across).to("s32")
                at = [n, m] if panel.major == "N" else [m, n]
                batch = [self.share.batch[i].to("s32") for i in store.plan.batch_dimensions]
                k.tma_store(store.out_map, [*at, *batch],
                            place(self.base, start + part * panel.lines * panel.span))
            k.tma_commit()

    def _store_chunks(self, start: int, row: int, column: int) -> None:
        """All threads store 16 bytes of lines at a time."""
        k, panel, out, size = self.k, self.panel, self.spec.out, self.size
        share, a_line, threads = self.share, panel.span // 16, 32 * panel.group
        thread = k.tid.x % threads
        lines = self._lines("chunks", lambda _: (thread // a_line, thread % a_line * 16))
        along_m = panel.major == "M"
        if ("address",) not in self.made:
            line, inner = lines.line, lines.byte // size
            m, n = (inner, line) if along_m else (line, inner)
            self.chunk_m, self.chunk_n = self.first_m + m, self.first_n + n
            self.made["address",] = share.base_at(share.store.out, out, self.chunk_m, self.chunk_n)
        base, step = self.made["address",], threads // a_line
        for byte in range(0, panel.line_bytes, panel.span):
            for down in range(0, panel.lines, step):
                r, c = (row + byte // size, column + down) if along_m else (row + down, column + byte // size)
                guard = share.guard_at(self.chunk_m, r, self.chunk_n, c)
                if panel.lines % step: # a panel of fewer lines than threads
                    assert panel.lines < step
                    fewer = lines.line < panel.lines
                    guard = fewer if guard is None else guard & fewer
                words = k.regs("b32", 4)
                if guard is not None and panel.lines % step:
                    for word in words: word.set(0)
                    k.emit("ld.shared.v4.b32", words, lines.at(down, byte, start), guard=guard)
                else: k.emit("ld.shared.v4.b32", words, lines.at(down, byte, start))
                at = (r * out.m + c * out.n) * size
                k.emit("st.global.v4.b32", place(base, at), words, guard=guard)
