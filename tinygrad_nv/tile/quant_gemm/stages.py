"""Stages of a matrix in fragments, and its operands in registers: for kernels that bring codes and factors to
shared memory.

Protocol: `boxes(spec, rows, block_k)` say how a stage of `rows` rows and `block_k` columns lies in shared
memory: of each buffer, tile after tile of 16 rows, what the columns need. `StageOperands` are a warp's tiles
of it. `read(at, column)` at the first of the columns, with the addresses of the warp's lane in the stage,
then `operand(number, column)` for 16 columns of one of its tiles.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinygrad.dtype import DType

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.quant.types import TILE, QType
from tinygrad_nv.tile.quant_gemm.factors import VECTORS, Factors, factor_names
from tinygrad_nv.tile.quant_gemm.fragments import NAMES, Decoder
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec

ALIGNED = 128                               # bytes of a box's place in shared memory


@dataclass(frozen=True)
class Box:
    """A buffer's part in a stage: `inner` elements of `size` bytes of each of `tiles` tiles of 16 rows, at
    byte `start` of the stage. A block has `columns` columns; 0: a whole row. Of codes that is 1."""
    name: str
    size: int
    inner: int
    tiles: int
    start: int
    columns: int

    @property
    def codes(self) -> bool:
        """Whether it has codes, as u32."""
        return self.name in ("codes", "high")

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile."""
        return self.inner * self.size

    @property
    def nbytes(self) -> int: return self.tiles * self.tile_bytes

    @property
    def end(self) -> int:
        """Offset at which the next one may begin."""
        return self.start + -(-self.nbytes // ALIGNED) * ALIGNED


def boxes(spec: QuantGemmSpec, rows: int, block_k: int) -> tuple[Box, ...]:
    """Returns the boxes of a stage."""
    made: list[Box] = []
    type, tiles = spec.type, rows // TILE
    for name, buffer in spec.buffers.items():
        start = made[-1].end if made else 0
        if name in ("codes", "high"):
            bits = type.low_bits if name == "codes" else type.bits - type.low_bits
            made.append(Box(name, 4, block_k * bits // 2, tiles, start, 1))
            continue
        scale = type.outer if name.startswith("outer") else type.scale
        assert scale is not None
        blocks = max(1, block_k // scale.columns) if scale.columns else 1
        made.append(Box(name, buffer.dtype.itemsize, TILE * blocks, tiles, start, scale.columns))
    return tuple(made)


def problems(spec: QuantGemmSpec, of: tuple[Box, ...], block_k: int) -> list[str]:
    """Why a stage cannot have so many columns."""
    out, unit = [], spec.type.unit
    if block_k % unit: out.append(f"block_k={block_k} is not a multiple of the unit's {unit} columns")
    for box in of:
        if box.columns > 1 and max(box.columns, block_k) % min(box.columns, block_k):
            out.append(f"{box.name}: blocks of {box.columns} columns, stages of {block_k}")
    return out


class StageOperands:
    """A warp's tiles, of numbers `tiles` after its first; with `scaled`, elements are multiplied with their
    scales, else with none. Codes and factors stay in registers until they are read again."""

    def __init__(self, kb: Kernel, type: QType, dtype: DType, of: tuple[Box, ...], tiles: Sequence[int],
                 scaled: bool) -> None:
        self.kb, self.type, self.dtype, self.tiles, self.scaled = kb, type, dtype, tiles, scaled
        self.boxes = {box.name: box for box in of}
        self.decoder = Decoder(kb, type, dtype)
        self.decoder.prepare()
        self.factors = Factors(kb, type, factor_names(self.boxes), "ld.shared")
        self.words = [{name: kb.regs("b32", self.decoder.words(name)) for name in self.decoder.planes}
                      for _ in tiles]
        every = range(len(tiles))
        many = self.decoder.offset_count if type.zeros else 0
        self.zeros = [[kb.regs("b32", many) for _ in range(2)] for _ in every]
        self.pairs = [[kb.regs("b32", 1 + type.mins) for _ in range(2)] for _ in every] if scaled else []

    def places(self, stage: Value, tile: Value) -> dict[str, Value]:
        """Addresses of this lane in a stage at a shared address (u32), for the warp's first tile."""
        lane, made = self.kb.special("laneid"), {}
        for name, box in self.boxes.items():
            own = lane * (4 * self.decoder.words(name)) if box.codes else (lane >> 2) * (2 * box.size)
            made[name] = stage + (tile * box.tile_bytes + own) + box.start
        return made

    # **** shared memory to registers ****

    def read(self, at: Mapping[str, Value], column: int, tiles: range | None = None) -> None:
        """Reads what begins at a column of the stage: codes of a unit, blocks of factors."""
        columns = self.type.scale.columns
        for number in tiles or range(len(self.words)):
            if column % self.type.unit == 0: self._read_codes(at, number, column // self.type.unit)
            # a row's own are read with every stage, and blocks that are longer than a stage
            if column == 0 or (columns and column % columns == 0): self._read_factors(at, number, column)

    def _read_codes(self, at: Mapping[str, Value], number: int, unit: int) -> None:
        for name, words in self.words[number].items():
            nbytes = 4 * len(words)
            place = at[name].at(self.tiles[number] * self.boxes[name].tile_bytes + 32 * nbytes * unit)
            self.kb.emit(f"ld.shared{VECTORS[nbytes]}", words if len(words) > 1 else words[0], place)

    def load_blocks(self, at: Mapping[str, Value], number: int, column: int) -> dict[str, list[Value]]:
        """Blocks of a column, as they are."""
        made = self.factors.registers()
        for name, into in made.items():
            box = self.boxes[name]
            self.factors.load(name, into, at[name] + self.tiles[number] * box.tile_bytes,
                              column // box.columns if box.columns else 0, None)
        return made

    def _read_factors(self, at: Mapping[str, Value], number: int, column: int) -> None:
        if not (self.type.zeros or self.scaled): return
        loaded = self.load_blocks(at, number, column)
        for into, zero in zip(self.zeros[number], self.factors.zeros(loaded), strict=True):
            if zero is None: continue
            for register, value in zip(into, self.decoder.offsets(zero), strict=True): register.set(value)
        if not self.scaled: return
        both, minima = self.factors.broadcast(loaded, self.dtype), self.factors.minima(loaded)
        scales = self.factors.scales(loaded) if both is None else both
        for row, (factor, *addend) in enumerate(self.pairs[number]):
            if both is None: self._pair(factor, scales[row])
            else: factor.set(scales[row])
            if minima is not None: self._pair(addend[0], -minima[row])

    def _pair(self, into: Value, value: Value) -> None:
        """float32 as two 16-bit floats."""
        self.kb.emit(f"cvt.rn.{NAMES[self.dtype]}x2.f32", into, value, value)

    # **** operands ****

    def operand(self, number: int, column: int) -> list[Value]:
        """The registers of 16 columns of a tile, as operand A."""
        zeros = self.zeros[number] if self.type.zeros else [self.decoder.offsets(None)] * 2
        made = self.decoder.operand(self.words[number], column % self.type.unit // 16, zeros)
        return [self._scale_value(each, number, r % 2) for r, each in enumerate(made)]

    def _scale_value(self, value: Value, number: int, row: int) -> Value:
        if not self.scaled: return value
        made, (factor, *addend) = self.kb.reg("b32"), self.pairs[number][row]
        if addend: last = addend[0]
        elif self.kb.arch >= "sm_90" or NAMES[self.dtype] == "f16":
            self.kb.emit(f"mul.rn.{NAMES[self.dtype]}x2", made, value, factor)
            return made
        else: last = self.decoder.constant(0x80008000)
        self.kb.emit(f"fma.rn.{NAMES[self.dtype]}x2", made, value, factor, last)
        return made
