"""Operands of mma.sync in registers: how a warp reads its share of a tile.

Protocol: a step of K is 32 bytes of an operand for every dtype: 16 elements of two bytes (m16n8k16), 8 of
float32 (m16n8k8), 32 of one byte (m16n8k32). Register r of a lane (g = lane / 4, q = lane % 4) holds bytes
4q … 4q + 3 of the half r / 2 of the step, from row g + 8 (r % 2) of A; B has its halves in r % 2, and
columns g + 8 (r / 2) where two instructions' columns are read together. These are the formulas of the PTX
manual, "Matrix Fragments for mma". K-major tiles of all dtypes and MN-major ones of 16 bits are read with
ldmatrix, which knows rows of 16 bytes; MN-major words and bytes with ordinary loads.
"""
from __future__ import annotations

from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.layout import SharedTile
from tinygrad_nv.tile.ops import Places, join_elements, swizzle_offset

STEP_BYTES = 32
NAMES = {dtypes.bfloat16: "bf16", dtypes.float16: "f16", dtypes.float32: "tf32", dtypes.int8: "s8",
         dtypes.uint8: "u8", dtypes.fp8e4m3: "e4m3", dtypes.fp8e5m2: "e5m2"}


def instruction(a: DType, b: DType) -> tuple[str, str]:
    """Shape and types of the mma.sync that multiplies two dtypes."""
    total = "s32" if a in (dtypes.int8, dtypes.uint8) else "f32"
    return f"m16n8k{STEP_BYTES // a.itemsize}", f"{total}.{NAMES[a]}.{NAMES[b]}.{total}"


@dataclass
class Fragments:
    """Reads a warp's `extent` rows (A) or columns (B) of a tile `start` bytes after a stage's beginning, from
    row or column `first` (u32) on."""
    kb: Kernel
    dtype: DType
    tile: SharedTile
    mn_major: bool
    is_b: bool
    first: Value
    extent: int
    steps: int
    start: int

    def __post_init__(self) -> None:
        kb, lane, size = self.kb, self.kb.special("laneid"), self.dtype.itemsize
        if self.mn_major and size != 2:  # a lane's own element: row 4 / size · q, column g
            row, byte = lane % 4 * (4 // size), (self.first + lane // 4) * size
        else:
            low, mid, high = lane & 7, (lane >> 3) & 1, lane >> 4
            # matrices 0, 1 of an x4 differ in MN and 2, 3 in K for A; the other way round for B
            along_mn, along_k = (high, mid) if self.is_b else (mid, high)
            if self.mn_major: row, byte = low + along_k * 8, (self.first + along_mn * 8) * size
            else: row, byte = self.first + low + along_mn * 8, along_k * 16
        self.places = Places(kb, self.tile, swizzle_offset(self.tile, row, byte))
        self.places.prepare([self._plain(mn, step, r) + j * self.tile.span
                             for mn in range(0, self.extent, 16) for step in range(self.steps)
                             for r in range(4) for j in range(4 if size == 1 and self.mn_major else 1)])

    def registers(self) -> list[list[Value]]:
        """Registers for a step: four for each 16 rows or columns."""
        return [self.kb.regs("b32", 4) for _ in range(0, self.extent, 16)]

    def move(self, stage: Value) -> None:
        """Reads from the stage at a shared address (u32) from now on."""
        self.places.at_stage(stage)

    def load(self, step: int, into: list[list[Value]]) -> None:
        """Reads a step of the tile."""
        for i, four in enumerate(into): self.load_one(i, step, four)

    def load_one(self, i: int, step: int, four: list[Value]) -> None:
        """Reads 16 rows or columns of a step, from 16 `i` on."""
        if self.mn_major and self.dtype.itemsize != 2: self._load_elements(16 * i, step, four)
        else:
            trans = ".trans" if self.mn_major else ""
            self.kb.emit(f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16", four,
                        self.places(self._plain(16 * i, step, 0), self.start))
        if self.dtype == dtypes.float32: self._round(four)

    def _plain(self, mn: int, step: int, r: int) -> int:
        """The plain offset from a lane's own place to that of register `r`; ldmatrix has one for all four."""
        tile, size = self.tile, self.dtype.itemsize
        if not self.mn_major: return tile.plain(mn, step * STEP_BYTES)
        rows = STEP_BYTES // size
        if size == 2: return tile.plain(step * rows, mn * size)
        far, half = (r >> 1, r & 1) if self.is_b else (r & 1, r >> 1)
        return tile.plain(step * rows + half * rows // 2, (mn + 8 * far) * size)

    def _load_elements(self, mn: int, step: int, four: list[Value]) -> None:
        kb, tile = self.kb, self.tile
        for r, register in enumerate(four):
            plain = self._plain(mn, step, r)
            if self.dtype.itemsize == 4:
                kb.emit("ld.shared.b32", register, self.places(plain, self.start))
                continue
            parts = kb.regs("b32", 4)
            for j, part in enumerate(parts):
                kb.emit("ld.shared.u8", part, self.places(plain + j * tile.span, self.start))
            register.set(join_elements(kb, parts))

    def _round(self, four: list[Value]) -> None:
        """To nearest, 10 bits of mantissa. The instruction would cut the rest off, which is twice the error
        and always towards zero. In SASS of sm_80 that is 2.5 instructions for each product of m16n8k8, which
        keeps the tensor core busy for 8 cycles."""
        for register in four: self.kb.emit("cvt.rna.tf32.f32", register, register)
