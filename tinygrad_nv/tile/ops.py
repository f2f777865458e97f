"""What a CTA does with tiles: copy them from global memory, read fragments, multiply, finish and store.

Protocol: a `TileCopy` belongs to one operand and moves one tile of it a call, the next along K each time,
with cp.async where rows are aligned to 4 bytes and through registers where not; what lies outside the
matrix becomes zero, so that nothing after it has edges to mind but the store. `Fragments` reads the tile as
operands of mma.m16n8k16. Formulas of lanes are those of the PTX manual, "Matrix Fragments for
mma.m16n8k16".
"""
from __future__ import annotations

from dataclasses import dataclass, field

from tinygrad.dtype import dtypes

from tinygrad_nv.ptx.builder import Kernel, Shared, Value
from tinygrad_nv.tile.layout import MASKS, SharedTile
from tinygrad_nv.tile.spec import Operand

CHUNK = 16  # bytes a thread copies at a time
NAMES = {dtypes.bfloat16: "bf16", dtypes.float16: "f16"}


def swizzled(k: Kernel, tile: SharedTile, row: Value, byte: Value) -> Value:
    """`SharedTile.offset` of values: u32."""
    plain = row * tile.span + (byte & tile.span - 1)
    if tile.row_bytes > tile.span: plain = plain + byte // tile.span * (tile.rows * tile.span)
    return plain ^ ((plain >> 7) & MASKS[tile.span]) << 4


@dataclass
class Chunk:
    """16 bytes of a tile that one thread copies: their place in a stage, their place in memory, and in bytes
    (or, for MN-major operands, rows of K) how much of the matrix is left there."""
    place: Value
    source: Value
    left: Value
    width: Value | None
    guard: Value | None


@dataclass
class TileCopy:
    """Copies tiles of `operand`, whose rows along MN begin at `first` of `extent`, K at 0 of `depth`. A tile
    has `block_mn` × `block_k` elements."""
    k: Kernel
    operand: Operand
    pointer: Value
    first: Value
    extent: Value | int
    depth: int
    block_mn: int
    block_k: int
    chunks: list[Chunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        size = self.operand.dtype.itemsize
        self.mn_major = self.operand.major == "MN"
        rows, columns = (self.block_k, self.block_mn) if self.mn_major else (self.block_mn, self.block_k)
        self.tile = SharedTile(rows, columns * size)
        threads = 1
        for extent in self.k.threads: threads *= extent
        a_row = self.tile.row_bytes // CHUNK
        total = rows * a_row
        with self.k.comment(f"where this thread copies its {-(-total // threads)} chunks of 16 bytes"):
            for start in range(0, total, threads):
                self.chunks.append(self._chunk(start, total - start, a_row))

    def _chunk(self, start: int, remaining: int, a_row: int) -> Chunk:
        k, size, operand = self.k, self.operand.dtype.itemsize, self.operand
        number = k.tid.x + start
        row, byte = number // a_row, number % a_row * CHUNK
        guard = None
        if remaining < k.threads[0]: guard = k.tid.x < remaining
        place, element = swizzled(k, self.tile, row, byte), byte // size
        along_mn, along_k = (element, row) if self.mn_major else (row, element)
        mn = self.first + along_mn
        source = self.pointer + mn.to("u64") * (operand.mn * size) + along_k.to("u64") * (operand.k * size)
        inside = k.reg("s32")
        k.emit("sub.s32", inside, self.extent, mn.to("s32"))
        if self.mn_major:  # rows of K are left; the columns' bytes are the same for every tile
            width = clamped(k, inside * size, CHUNK)
            left = k.reg("s32")
            k.emit("sub.s32", left, self.depth, along_k.to("s32"))
            return Chunk(place, source, left, width, guard)
        left = k.reg("s32")
        k.emit("sub.s32", left, self.depth * size, byte.to("s32"))
        return Chunk(place, source, k.select(inside > 0, left, 0), None, guard)

    def next(self, stage: Value) -> None:
        """Copies the next tile along K to the shared address `stage` (u32)."""
        k, size = self.k, self.operand.dtype.itemsize
        for chunk in self.chunks:
            if chunk.guard is None: self._copy(chunk, stage)
            else:
                with k.if_(chunk.guard): self._copy(chunk, stage)
            chunk.source += self.block_k * self.operand.k * size
            chunk.left -= self.block_k if self.mn_major else self.block_k * size

    def _copy(self, chunk: Chunk, stage: Value) -> None:
        k, width = self.k, self.operand.aligned_bytes if self.operand.major else 2
        inside = clamped(k, chunk.left, CHUNK) if chunk.width is None else \
            k.select(chunk.left > 0, chunk.width, 0)
        place = stage + chunk.place
        if width < 4: return self._copy_elements(chunk, place, inside)
        cache = "cg" if width == 16 else "ca"
        for at in range(0, CHUNK, width):
            some = inside if width == CHUNK else clamped(k, inside - at, width)
            # a copy of no bytes reads nothing, wherever it points
            k.emit(f"cp.async.{cache}.shared.global", place.at(at), chunk.source.at(at), width, some)
        return None

    def _copy_elements(self, chunk: Chunk, place: Value, inside: Value) -> None:
        """Eight elements of two bytes, each alone: for rows of odd alignment, or with gaps."""
        k, size = self.k, self.operand.dtype.itemsize
        step = (self.operand.mn if self.mn_major else self.operand.k) * size
        words = []
        for pair in range(0, CHUNK // size, 2):
            halves = []
            for element in (pair, pair + 1):
                half = k.reg("b16", 0)
                k.emit("ld.global.b16", half, chunk.source.at(element * step), guard=inside > element * size)
                halves.append(half)
            word = k.reg("b32")
            k.emit("mov.b32", word, halves)
            words.append(word)
        k.st("shared", "b32", place.at(), words)


def clamped(k: Kernel, value: Value, most: int) -> Value:
    """`value` (s32) within 0 … most."""
    low, high = k.reg("s32"), k.reg("s32")
    k.emit("max.s32", low, value, 0)
    k.emit("min.s32", high, low, most)
    return high


@dataclass
class Fragments:
    """Reads a warp's `extent` rows (A) or columns (B) of a tile, from `first` (u32) on, as operands of
    mma.m16n8k16. Places differ between steps of K and of MN by constants, but for bits that the swizzle XORs:
    one register for each value of those."""
    k: Kernel
    tile: SharedTile
    mn_major: bool
    is_b: bool
    first: Value
    block_k: int
    bases: dict[int, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        k, lane = self.k, self.k.special("laneid")
        low, mid, high = lane & 7, (lane >> 3) & 1, lane >> 4
        # matrices 0, 1 of an x4 differ in MN and 2, 3 in K for A; the other way round for B
        along_mn, along_k = (high, mid) if self.is_b else (mid, high)
        if self.mn_major: row, column = low + along_k * 8, self.first + along_mn * 8
        else: row, column = self.first + low + along_mn * 8, along_k * 8
        self.base = swizzled(k, self.tile, row, column * 2)

    def at_stage(self, stage: Value) -> None:
        """Reads from the tile at the shared address `stage` (u32) from now on."""
        self.bases = {0: stage + self.base}
        self.stage = stage

    def load(self, mn: int, step: int) -> list[Value]:
        """Four registers: 16 × 16 elements, `mn` rows or columns further, at K = 16 `step`."""
        byte, row = (mn * 2, step * 16) if self.mn_major else (step * 32, mn)
        span = self.tile.span
        bits, plain = byte % span, byte // span * self.tile.rows * span + row * span
        if bits not in self.bases: self.bases[bits] = self.stage + (self.base ^ bits)
        return self.k.ldmatrix(self.bases[bits].at(plain), 4, trans=self.mn_major)


def shared_ring(k: Kernel, name: str, tile: SharedTile, depth: int) -> Shared:
    """Shared memory for `depth` tiles."""
    return k.shared(name, tile.nbytes * depth, align=1024)
