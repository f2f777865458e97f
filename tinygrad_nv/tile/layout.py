"""Layout of a tile in shared memory: rows of 32, 64 or 128 bytes with the swizzle of that width, or of 16
bytes without one.

Protocol: a tile of `rows` × `row_bytes` is stored as columns of `span` bytes (the widest of 128, 64, 32 and
16 that divides a row), each a block of `rows` rows one under the other; then some bits of the offset within a
row are XORed with some of the row's number. Which ones depends on how the tile is `read`:

    matrices  ldmatrix, TMA, wgmma: bits 4 to 6 with 7 to 9. Eight rows at the same 16 bytes of a column then
              lie in different banks
    words     4 bytes of each of four rows, from eight columns: bits 5 and 6 with the row's lowest two
    bytes     one byte of every fourth row, from eight columns: bits 4 to 6 with the row's number / 4, in rows
              below 128 bytes bits 5 and 6, which are of the row's own number

The tile begins at a multiple of 1024. The swizzle is linear over XOR: for `x` and `y` without common bits
`swizzled(x + y) = swizzled(x) ^ swizzled(y)`, so that of many places of a thread all but a few are
constants away from others.

Operands of wgmma, and the tensor maps that bring them: a tile is `columns` boxes side by side, each of `rows`
rows of `span` bytes under the swizzle of that width. A K-major operand has its rows along MN and its columns
along K; an MN-major one the other way round. Descriptors are those of the PTX manual, "Matrix descriptor":
for K-major tiles eight rows lie 8 · span bytes after the eight before; for MN-major ones columns are a box
apart, and eight rows of K 8 · span bytes.

`choose_major` says in which major TMA can bring an operand, or why it cannot.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder.hopper import descriptor_bits
from tinygrad_nv.tile.gemm.spec import FLOAT16S, Operand
from tinygrad_nv.tile.launch import MapArgument

MASKS = {128: 7, 64: 3, 32: 1, 16: 0}
Read = Literal["matrices", "words", "bytes"]
MAP_DTYPES = {dtypes.bfloat16: "bf16", dtypes.float16: "f16", dtypes.float32: "f32", dtypes.fp8e4m3: "u8",
              dtypes.fp8e5m2: "u8", dtypes.int8: "u8", dtypes.uint8: "u8", dtypes.int32: "s32",
              dtypes.uint32: "u32"}
SPANS = (128, 64, 32)
K_BYTES = 32  # of K that one wgmma takes
MOST_RANK = 5
MOST_BOX = 256


@dataclass(frozen=True)
class SharedTile:
    """A tile's extents; offsets are bytes from its beginning."""
    rows: int
    row_bytes: int
    read: Read = "matrices"

    @property
    def span(self) -> int: return next(span for span in MASKS if self.row_bytes % span == 0)

    @property
    def nbytes(self) -> int: return self.rows * self.row_bytes

    @property
    def bits(self) -> tuple[int, int, int]:
        """(from, mask, to): bits `from` and on under the mask are XORed into bits `to` and on."""
        if self.read == "words": return 7, MASKS[self.span] >> 1, 5
        if self.read == "bytes":
            start = self.span.bit_length() + 1
            return (start, 7, 4) if self.span == 128 else (start, 3, 5)
        return 7, MASKS[self.span], 4

    @property
    def window(self) -> int:
        """Bytes within which the swizzle moves."""
        return 128 if self.read == "bytes" else self.span

    def plain(self, row: int, byte: int) -> int:
        """The place of a byte of a row before the swizzle."""
        return byte // self.span * self.rows * self.span + row * self.span + byte % self.span

    def swizzle(self, plain: int) -> int:
        """The swizzle of an offset."""
        start, mask, to = self.bits
        return plain ^ (plain >> start & mask) << to

    def offset(self, row: int, byte: int) -> int:
        """The place of a byte of a row."""
        return self.swizzle(self.plain(row, byte))


@dataclass(frozen=True)
class OperandTile:
    """`mn` × `k` elements of `dtype`, in `parts` pieces along MN that lie elsewhere in memory."""
    dtype: DType
    major: str
    mn: int
    k: int
    span: int
    parts: int = 1

    @property
    def size(self) -> int: return self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Rows of a column of boxes."""
        return self.mn if self.major == "K" else self.k

    @property
    def inner(self) -> int:
        """Elements of a row of a box."""
        return self.span // self.size

    @property
    def columns(self) -> int:
        """Boxes side by side; the last of an MN-major tile may reach beyond it."""
        return -(-(self.k if self.major == "K" else self.mn) // self.inner)

    @property
    def column_bytes(self) -> int: return self.rows * self.span

    @property
    def nbytes(self) -> int: return self.columns * self.column_bytes

    @property
    def descriptor(self) -> int:
        """The descriptor without its address."""
        leading = 0 if self.major == "K" else self.column_bytes
        return descriptor_bits(leading, 8 * self.span, f"{self.span}B")

    def at_mn(self, mn: int) -> int:
        """Bytes before row or column `mn`, a multiple of 8 rows or of a box's row."""
        return mn * self.span if self.major == "K" else mn // self.inner * self.column_bytes

    def at_step(self, step: int) -> int:
        """Bytes before the K of wgmma number `step` of a stage."""
        if self.major == "MN": return step * (K_BYTES // self.size) * self.span
        return step * K_BYTES // self.span * self.column_bytes + step * K_BYTES % self.span


def natural_span(row_bytes: int) -> int:
    """The widest swizzle whose rows a tile's rows are made of, 32 bytes where none is."""
    return next((span for span in SPANS if row_bytes % span == 0), 32)


def choose_major(operand: Operand, mn: int, k: int) -> tuple[str, str]:
    """The major in which TMA can bring an operand of `mn` × `k` elements, and "" ; or "" and why not."""
    size, why = operand.dtype.itemsize, []
    choices = (("K", operand.k, k, operand.mn, mn), ("MN", operand.mn, mn, operand.k, k))
    for major, step, extent, pitch, others in choices:
        if step != 1 and extent > 1: continue
        other = {"K": "MN", "MN": "K"}[major]
        if major == "MN" and operand.dtype not in FLOAT16S:
            why.append(f"MN-major operands of {operand.dtype.name}: wgmma takes them K-major only")
        elif others > 1 and pitch * size % 16:
            why.append(f"{other} stride {pitch * size} B is not a multiple of 16 B: no TMA")
        else: return major, ""
    return "", "; ".join(why) or (f"strides of {operand.mn} along MN and {operand.k} along K: elements lie "
                                  "side by side along neither, no TMA")


def unreachable(operand: Operand, batch: tuple[int, ...], rank: int) -> list[str]:
    """Returns what TMA refuses of an operand: strides of the batch, the beginning, `rank` dimensions at
    most."""
    size, out = operand.dtype.itemsize, []
    for i, (stride, extent) in enumerate(zip(operand.batch, batch, strict=True)):
        if extent > 1 and stride * size % 16:
            out.append(f"batch[{i}] stride {stride * size} B is not a multiple of 16 B: no TMA")
    if operand.offset * size % 16:
        out.append(f"offset {operand.offset * size} B is not a multiple of 16 B: no TMA")
    if rank > MOST_RANK: out.append(f"{rank} dimensions, a tensor map has at most {MOST_RANK}")
    return out


def map_dimensions(operand: Operand, batch: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of the batch that a map of the operand has: those it differs along."""
    return tuple(i for i, (stride, extent) in enumerate(zip(operand.batch, batch, strict=True))
                 if stride and extent > 1)


def map_argument(operand: Operand, tile: OperandTile, pointer: int, mn: int, k: int, batch: tuple[int, ...],
                 rows: int, part_offset: int = 0, symbolic: bool = False) -> MapArgument:
    """The tensor map of an operand: boxes of `rows` rows of the tile."""
    size, extents = tile.size, (k, mn) if tile.major == "K" else (mn, k)
    pitch = (operand.mn if tile.major == "K" else operand.k) * size
    if extents[1] == 1: pitch = -(-extents[0] * size // 16) * 16  # never used, but must be one
    axes = map_dimensions(operand, batch)
    return MapArgument(pointer, MAP_DTYPES[operand.dtype], (*extents, *(batch[i] for i in axes)),
                       (pitch, *(operand.batch[i] * size for i in axes)),
                       (tile.inner, rows, *(1 for _ in axes)), f"{tile.span}B",
                       (operand.offset + part_offset) * size,
                       (1 if tile.major == "K" else 0) if symbolic else -1)
