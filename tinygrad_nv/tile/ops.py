"""How a CTA of mma.sync kernels brings tiles to shared memory.

Protocol: a `TileCopy` belongs to one operand and moves one tile of it a call, the next along K each time. A
thread copies 16 bytes a pass, in the order of shared memory, so that its places of all passes are constants
away from the first (`Places`), in global memory too: a tile costs one pointer and no arithmetic a pass.
Copies are cp.async of 4 to 16 bytes, or loads where rows have odd bytes or gaps between elements.

The width of a copy divides what there is of K in the first tile and, for MN-major operands, the extent:
every copy is inside the matrix or outside it as a whole. Outside ones are filled with zeros. Only the first
tile along K is ever partial, so that the others ask nothing about K.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from tinygrad_nv.ptx.builder import Kernel, MemoryOperand, Value
from tinygrad_nv.tile.gemm.spec import Operand
from tinygrad_nv.tile.layout import SharedTile

CHUNK = 16                   # bytes a thread copies in a pass
MOST_OFFSET = (1 << 31) - 1  # bytes that an instruction of PTX takes


@dataclass
class Places:
    """Places of a tile whose plain offsets are `own` + constants without bits in common with it. `own` (u32)
    is swizzled already. Call with a plain offset; `at_stage` says where the tile is from now on."""
    kb: Kernel
    tile: SharedTile
    own: Value
    variants: dict[int, Value] = field(default_factory=dict)
    sums: dict[int, Value] = field(default_factory=dict)
    stage: Value | None = None

    def prepare(self, plains: list[int]) -> None:
        """Makes the registers that these offsets need, ahead of a loop."""
        for plain in plains: self._variant(self._bits(plain))

    def at_stage(self, stage: Value) -> None:
        """The tile lies at the shared address `stage` (u32)."""
        self.stage, self.sums = stage, {}

    def __call__(self, plain: int, more: int = 0) -> MemoryOperand:
        """The place of a plain offset, `more` bytes on."""
        assert self.stage is not None
        bits = self._bits(plain)
        if bits not in self.sums: self.sums[bits] = self.stage + self._variant(bits)
        return self.sums[bits].at(plain - plain % self.tile.window + more)

    def _bits(self, plain: int) -> int: return self.tile.swizzle(plain) % self.tile.window

    def _variant(self, bits: int) -> Value:
        if bits not in self.variants: self.variants[bits] = self.own ^ bits if bits else self.own
        return self.variants[bits]


def swizzle_offset(tile: SharedTile, row: Value, byte: Value) -> Value:
    """`SharedTile.offset` of values: u32."""
    plain = row * tile.span + (byte & tile.span - 1)
    if tile.row_bytes > tile.span: plain = plain + (byte // tile.span) * (tile.rows * tile.span)
    return swizzle_plain(plain, tile)


def swizzle_plain(plain: Value, tile: SharedTile) -> Value:
    """`SharedTile.swizzle_offset` of a value."""
    start, mask, to = tile.bits
    return plain ^ ((plain >> start) & mask) << to if mask else plain


def width_of(operand: Operand, extent: int, residue: int) -> int:
    """Bytes of one copy: what rows are aligned to and what divides the extent and the first tile's part of
    K; an element where elements do not lie side by side."""
    size = operand.dtype.itemsize
    if not operand.major: return size
    inner = (residue if operand.major == "K" else extent) * size
    return min(operand.alignment_bytes, inner & -inner)


def tile_of(operand: Operand, block_mn: int, block_k: int) -> SharedTile:
    """The tile of an operand. Operands without a major dimension are stored as K-major ones."""
    size = operand.dtype.itemsize
    if operand.major != "MN": return SharedTile(block_mn, block_k * size)
    return SharedTile(block_k, block_mn * size, {1: "bytes", 2: "matrices", 4: "words"}[size])  # type: ignore[arg-type]


class Passes:
    """Chunks of a tile that a CTA's `threads` copy, one each and pass after pass."""
    tile: SharedTile
    threads: int

    @property
    def passes(self) -> int:
        """How many copies a thread makes of a tile."""
        return -(-self.tile.nbytes // (self.threads * CHUNK))

    def where(self, i: int) -> tuple[int, int]:
        """Rows and bytes of a row between a thread's first copy and its copy of pass `i`."""
        rows = i * self.threads * CHUNK // self.tile.span
        return rows % self.tile.rows, rows // self.tile.rows * self.tile.span


@dataclass
class TileCopy(Passes):
    """Copies tiles of `block_mn` × `block_k` elements of `operand`, at `pointer` (u64). Rows along MN begin
    at `first` of `extent`; the first tile has `residue` of K. `start` is where the tile lies in a stage."""
    kb: Kernel
    operand: Operand
    pointer: Value
    first: Value
    extent: Value | int
    residue: Value | int
    width: int
    block_mn: int
    block_k: int
    start: int

    def __post_init__(self) -> None:
        kb, operand, self.size = self.kb, self.operand, self.operand.dtype.itemsize
        self.mn_major = operand.major == "MN"
        self.tile = tile = tile_of(operand, self.block_mn, self.block_k)
        self.threads, a_row = kb.threads[0], tile.span // CHUNK
        lane = kb.tid.x
        self.places = Places(kb, tile, swizzle_plain(lane * CHUNK, tile))
        byte, row = lane % a_row * CHUNK, lane // a_row
        if self.threads > a_row * tile.rows:
            byte, row = byte + row // tile.rows * tile.span, row % tile.rows
        self.row, self.byte = row, byte
        element = byte // self.size if self.size > 1 else byte
        mn, along_k = (element, row) if self.mn_major else (row, element)
        self.source = self.pointer + (self.first + mn).to("u64") * (operand.mn * self.size)
        self.source += along_k.to("u64") * (operand.k * self.size)
        whole = isinstance(self.extent, int) and self.extent % self.block_mn == 0
        self.edge = None if whole else self._edge()

    def _edge(self) -> Value:
        """How many rows, or bytes of rows, there are from this thread's own on: s32."""
        kb, left = self.kb, self.kb.reg("s32")
        kb.emit("sub.s32", left, self.extent, self.first)
        if not self.mn_major: return left - self.row.to("s32")
        return left * self.size - self.byte.to("s32")

    @property
    def partial(self) -> bool:
        """Whether the first tile may have less than `block_k` of K."""
        return not (isinstance(self.residue, int) and self.residue == self.block_k)

    def ask(self) -> None:
        """Has L2 fetch the line of the thread's first chunk."""
        kb, outside, chunks = self.kb, self._outside(0, 0, self.partial), self.tile.nbytes // CHUNK
        guard = None if outside is None else ~outside
        if chunks < self.threads:
            mine = kb.tid.x < chunks
            guard = mine if guard is None else _both(kb, mine, guard)
        kb.emit("prefetch.global.L2", self.source.at(), guard=guard)

    def next(self, stage: Value, when: Value | None = None, first: bool = False) -> None:
        """Copies the next tile along K to the stage at a shared address (u32), where the predicate holds."""
        kb = self.kb
        self.places.at_stage(stage)
        masked = first and self.partial
        for i in range(self.passes):
            left = self.tile.nbytes // CHUNK - i * self.threads
            guard = when
            if left < self.threads:
                guard = kb.tid.x < left
                if when is not None: guard = guard & when
            plain = i * self.threads * CHUNK
            if self.width < 4:
                self._elements(i, plain, guard, masked)
            else: self._asynchronous(i, plain, guard, masked)
        self._advance(self.residue if first else self.block_k)

    def _advance(self, elements: Value | int) -> None:
        step = self.operand.k * self.size
        if isinstance(elements, int): self.source += elements * step
        else: self.source += elements.to("u64") * step

    def _asynchronous(self, i: int, plain: int, guard: Value | None, masked: bool) -> None:
        kb, (row, column) = self.kb, self.where(i)
        cache = "cg" if self.width == CHUNK else "ca"
        for at in range(0, CHUNK, self.width):
            outside = self._outside(row, column + at, masked)
            kb.emit(f"cp.async.{cache}.shared.global.L2::128B", self.places(plain, self.start + at),
                   self._at(row, column + at), self.width, *([] if outside is None else [outside]),
                   guard=guard)

    def _outside(self, row: int, column: int, masked: bool) -> Value | None:
        """Whether a copy lies outside the matrix; None where it cannot."""
        found = None
        if self.edge is not None: found = self.edge <= (column if self.mn_major else row)
        if not masked: return found
        if self.mn_major: beyond = self.row + row >= self.residue
        else:
            limit = self.residue * self.size
            beyond = self.byte + column >= limit
        return beyond if found is None else found | beyond

    def _at(self, row: int, column: int) -> MemoryOperand:
        """The place in memory `row` rows and `column` bytes of a row after the thread's first."""
        o, elements = self.operand, column // self.size
        mn, along_k = (elements, row) if self.mn_major else (row, elements)
        nbytes = (mn * o.mn + along_k * o.k) * self.size
        return self.source.at(nbytes) if nbytes <= MOST_OFFSET else (self.source + nbytes).at()

    def _elements(self, i: int, plain: int, guard: Value | None, masked: bool) -> None:
        """16 bytes, each element alone."""
        kb, (row, column) = self.kb, self.where(i)
        words = []
        for word in range(0, CHUNK, 4):
            parts = [self._element(row, column + at, guard, masked)
                     for at in range(word, word + 4, self.size)]
            words.append(join_elements(kb, parts))
        kb.emit("st.shared.v4.b32", self.places(plain, self.start), words, guard=guard)

    def _element(self, row: int, column: int, guard: Value | None, masked: bool) -> Value:
        kb, outside = self.kb, self._outside(row, column, masked)
        made = kb.reg("b16" if self.size == 2 else "b32", 0)
        inside = None if outside is None else ~outside
        if guard is not None: inside = guard if inside is None else _both(kb, guard, inside)
        kb.emit(f"ld.global.{'u8' if self.size == 1 else f'b{8 * self.size}'}", made, self._at(row, column),
               guard=inside)
        return made


@dataclass
class TailFirst(TileCopy):
    """Copies the last `residue` columns of `k`, where these are no whole stage, and then those from 0 on, so
    that every stage begins where units of the matrix, or groups of its scales, do."""
    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partial: self._advance(self.k - self.residue)

    def next(self, stage: Value, when: Value | None = None, first: bool = False) -> None:
        super().next(stage, when, first)
        if first and self.partial: self._advance(-self.k)


def _both(kb: Kernel, guard: Value, inside: Value) -> Value:
    """guard and inside, which may be negated."""
    made = kb.reg("pred")
    if inside.negated:
        kb.emit("not.pred", made, ~inside)
        return guard & made
    return guard & inside


def join_elements(kb: Kernel, parts: list[Value]) -> Value:
    """A b32 of one element, two of 16 bits, or four of 8 bits in b32 registers."""
    if len(parts) == 1: return parts[0]
    made = kb.reg("b32")
    if len(parts) == 2:
        kb.emit("mov.b32", made, parts)
        return made
    low, high = kb.regs("b32", 2)
    kb.emit("prmt.b32", low, parts[0], parts[1], 0x0040)
    kb.emit("prmt.b32", high, parts[2], parts[3], 0x0040)
    kb.emit("prmt.b32", made, low, high, 0x5410)
    return made
