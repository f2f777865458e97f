"""Types of quantised matrices. Frozen and hashable: a type is part of a kernel's spec.

A matrix W of N rows (outputs) and K columns (inputs) has a code q for each element, and a scale s for each
block of `Scale.rows` x `Scale.columns` of them:

    W[n, k] = (value(q) − shift − z) · s − m          s = scale · outer        m = min · outer_min
    with `divided` scales (compressed-tensors' NVFP4)  s = scale / outer
    with `outer_last` (bitsandbytes' int8)  W[n, k] = ((value(q) − shift − z) · scale) · outer, without minima

`value` is the number a code stands for: itself, a float, or an entry of a codebook. `shift` is the same for
the whole matrix (8 for signed 4-bit integers that are stored unsigned); zero points z (`zeros`) and minima m
(`mins`) lie in the same blocks as scales. `outer` scales are those of larger blocks: of the scales, and of
the minima. All is computed in float32, in the order written here, and rounded once to what is asked for.

With `permuted` (GPTQ's act order) columns lie in another order than inputs: column k has input order[k].

    int8 = INT8 @ per_channel_scale(axis=0)       AWQ, g 128 = QType(UINT4, per_group_scale(128), zeros=True)

Buffers, each dense, `buffers(type, N, K)` has their shapes; fp8 lies in uint8 Tensors (tensor.py):

    codes       8 bits: [N, K] of the element's dtype. Fewer: uint8 [N, K · b / 8] of the b = 4, 2 or 1 lower
                bits, column k in bits b · (k mod 8/b) of byte k // (8/b). Of 3, 5 and 6 bits that is the
                lowest 2, 4, 4 of them; the rest in the same way in
    high        uint8 [N, K · rest / 8]
    scales, zeros, mins     one for each block; zeros are uint8, up to 2^bits, mins of the scales' dtype
    outer, outer_mins       one for each of outer's blocks
    order       int32 [K]

That is the `layout` "rows". In the others `TILE` rows lie together, N is padded with zeros to whole tiles T,
and scales are of single rows.

"tiles", as vectors of a CPU read it: rows are interleaved, four columns at a time. Of a plane of b bits, with
e = 8 / b, byte [t, q, r, j] has columns 4 e q + 4 i + j of row 16 t + r, for i < e from the lowest bits on.

    codes, high                     [T, K · b / 32, 16, 4]
    scales, zeros, mins, outer, …   [T, blocks of a row, 16]

"fragments", as mma.sync and wgmma take it: K is padded with zeros to whole units U of 64 columns, of 32 where
codes have a plane of 8 bits. A lane has `bytes` = unit · b / 16 of a tile's unit. In them, as u32, field f of
b bits, from bit b · (f mod 16/b) of the lower half of word f // (16/b) on, is row 16 t + g + 8 (f mod 2) and
column 16 (f // 4) + 8 (f // 2 mod 2) + 2 q of the unit, g = lane / 4, q = lane mod 4; the same field of the
upper half is the column after it. That is operand A of mma.m16n8k16, 16 columns at a time; and two operands
B of it, whose columns are the rows. Blocks cover the padded columns.

    codes, high                     [T, U, 32, bytes]
    scales, zeros, mins, outer, …   [T, blocks of a row, 16], of rows 0, 8, 1, 9, … 7, 15

Sources of formats: readers/, each with its own.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.errors import SpecError

Layout = Literal["rows", "tiles", "fragments"]
TILE = 16           # rows of a tile


@dataclass(frozen=True)
class Element:
    """Codes of `bits`, stored as `dtype`: integers or floats of it, or, with a codebook, numbers of `values`
    in the order of codes. `element @ scale` is a type."""
    name: str
    bits: int
    dtype: DType = dtypes.uint8
    values: tuple[float, ...] = ()

    def __matmul__(self, scale: Scale) -> QType: return QType(self, scale)

    def __str__(self) -> str: return self.name

    @property
    def lsb(self) -> float:
        """The power of two that all numbers are multiples of, where those multiples have 8 bits; else 0."""
        if not self.values: return 0.0 if dtypes.is_float(self.dtype) else 1.0
        for lsb in (1, 1 / 2, 1 / 4, 1 / 8):
            whole = [value / lsb for value in self.values]
            if all(value == int(value) for value in whole): return lsb * (max(whole) - min(whole) < 256)
        return 0.0


@dataclass(frozen=True)
class Scale:
    """Scales of blocks of `rows` x `columns` elements, 0 for all of them, stored as `dtype`: float32,
    float16, bfloat16, fp8e4m3, integers (of K-quants), or with `e8m0` uint8, 2^(byte − 127)."""
    rows: int
    columns: int
    dtype: DType = dtypes.float32
    e8m0: bool = False

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 0:
            raise SpecError(f"scales of blocks of {self.rows} x {self.columns}", "extents ≥ 1, or 0 for all")

    def blocks(self, n: int, k: int) -> tuple[int, int]:
        """Blocks of a matrix of n rows and k columns, in each dimension; the last may be cut off."""
        return -(-n // (self.rows or n)), -(-k // (self.columns or k))

    def __str__(self) -> str:
        if (self.rows, self.columns) == (0, 0): return "tensor"
        if (self.rows, self.columns) == (1, 0): return "channel"
        return f"g{self.columns}" if self.rows == 1 else f"{self.rows}x{self.columns}"


def per_tensor_scale(dtype: DType = dtypes.float32) -> Scale:
    """One scale."""
    return Scale(0, 0, dtype)


def per_channel_scale(axis: int = 0, dtype: DType = dtypes.float32) -> Scale:
    """A scale of each row (axis 0, outputs), or of each column."""
    if axis not in (0, 1): raise SpecError(f"axis {axis}", "0, outputs, or 1, inputs")
    return Scale(1, 0, dtype) if axis == 0 else Scale(0, 1, dtype)


def per_group_scale(size: int, dtype: DType = dtypes.float32) -> Scale:
    """A scale of each `size` inputs of an output."""
    return Scale(1, size, dtype)


def per_block_scale(rows: int, columns: int, dtype: DType = dtypes.float32) -> Scale:
    """A scale of each block."""
    return Scale(rows, columns, dtype)


@dataclass(frozen=True)
class QType:
    """A quantised matrix's type (see the top of the file). Raises `SpecError` for what cannot be."""
    element: Element
    scale: Scale
    shift: int = 0
    zeros: bool = False
    mins: bool = False
    outer: Scale | None = None
    permuted: bool = False
    divided: bool = False
    outer_last: bool = False
    layout: Layout = "rows"

    def __post_init__(self) -> None:
        if self.layout != "rows" and any(scale is not None and scale.rows != 1
                                         for scale in (self.scale, self.outer)):
            raise SpecError(f"{self.layout} of {self.element} {self.scale}", "scales of single rows")
        if self.mins and self.outer is None and self.scale.e8m0:
            raise SpecError("minima of E8M0", "scales that have a sign")
        if (self.divided or self.outer_last) and (self.outer is None or self.mins):
            raise SpecError(f"{self} without outer scales, or with minima", "outer scales, no minima")

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.element.bits

    @property
    def low_bits(self) -> int:
        """Bits of a code that are in `codes`."""
        return {3: 2, 5: 4, 6: 4}.get(self.bits, self.bits)

    @property
    def unit(self) -> int:
        """Columns of a unit of fragments."""
        return 32 if self.bits == 8 else 64

    def pad_columns(self, k: int) -> int:
        """Columns that a matrix of k columns has in memory."""
        return -(-k // self.unit) * self.unit if self.layout == "fragments" else k

    def with_multipliers(self) -> QType:
        """The type with outer scales that multiply scales (`QTensor.with_multipliers`)."""
        kept = self.outer
        if kept is not None and self.divided: kept = replace(kept, dtype=dtypes.float32)
        return replace(self, divided=False, outer_last=False, outer=kept)

    def of_rows(self) -> QType:
        """The type with scales of single rows."""
        outer = None if self.outer is None else replace(self.outer, rows=1)
        return replace(self, scale=replace(self.scale, rows=1), outer=outer)

    def __str__(self) -> str:
        flags = ("zeros", "mins", "permuted", "divided", "outer_last")
        more = [name for name in flags if getattr(self, name)]
        if self.layout != "rows": more.append(f"in {self.layout}")
        return " ".join([f"{self.element} {self.scale}", *more])


class Buffer(NamedTuple):
    """A buffer of a quantised matrix."""
    shape: tuple[int, ...]
    dtype: DType


def buffers(type: QType, n: int, k: int) -> dict[str, Buffer]:
    """Returns the buffers of a matrix of n rows and k columns, in the order of kernels' parameters. Raises
    `SpecError` where a row is no whole number of bytes."""
    made: dict[str, Buffer] = {}
    tiles, padded = -(-n // TILE), type.pad_columns(k)
    for name, bits in (("codes", type.low_bits), ("high", type.bits - type.low_bits)):
        if k * bits % 8:
            raise SpecError(f"{k} columns of {bits} bits", "whole bytes in each row", "pad the columns")
        if not bits: continue
        shape: tuple[int, ...] = n, k * bits // 8
        if type.layout == "fragments": shape = tiles, padded // type.unit, 32, type.unit * bits // 16
        if type.layout == "tiles":
            if k * bits % 32: raise SpecError(f"{k} columns of {bits} bits in tiles", "a multiple of 32 bits")
            shape = tiles, k * bits // 32, TILE, 4
        made[name] = Buffer(shape, type.element.dtype if bits == 8 else dtypes.uint8)

    def blocks(scale: Scale) -> tuple[int, ...]:
        rows, columns = scale.blocks(n, padded)
        return (rows, columns) if type.layout == "rows" else (tiles, columns, TILE)
    made["scales"] = Buffer(blocks(type.scale), type.scale.dtype)
    if type.zeros: made["zeros"] = Buffer(blocks(type.scale), dtypes.uint8)
    if type.mins: made["mins"] = Buffer(blocks(type.scale), type.scale.dtype)
    if type.outer is not None:
        made["outer"] = Buffer(blocks(type.outer), type.outer.dtype)
        if type.mins: made["outer_mins"] = Buffer(blocks(type.outer), type.outer.dtype)
    if type.permuted: made["order"] = Buffer((k,), dtypes.int32)
    return made


def stack_buffers(type: QType, shape: tuple[int, int, int]) -> dict[str, Buffer]:
    """Returns the buffers of a stack (stack.py) of `count` matrices of n rows and k columns."""
    count, n, k = shape
    made = {name: Buffer((count * one.shape[0], *one.shape[1:]), one.dtype)
            for name, one in buffers(type, n, k).items()}
    if "order" in made: made["order"] = Buffer((count, k), dtypes.int32)
    return made


def nbytes(type: QType, n: int, k: int) -> int:
    """Bytes of a matrix of n rows and k columns."""
    total = 0
    for shape, dtype in buffers(type, n, k).values():
        count = dtype.itemsize
        for extent in shape: count *= extent
        total += count
    return total


# **** elements ****

INT8, UINT8 = Element("int8", 8, dtypes.int8), Element("uint8", 8)
UINT6, UINT5, UINT4, UINT3, UINT2 = (Element(f"uint{bits}", bits) for bits in (6, 5, 4, 3, 2))
E4M3, E5M2 = Element("e4m3", 8, dtypes.fp8e4m3), Element("e5m2", 8, dtypes.fp8e5m2)
# OCP Microscaling Formats 1.0, table 5
E2M1 = Element("e2m1", 4, values=(0., .5, 1., 1.5, 2., 3., 4., 6., -0., -.5, -1., -1.5, -2., -3., -4., -6.))
# table 4
_E2M3 = (*(m / 8 for m in range(8)), *((1 + m / 8) * 2. ** e for e in range(3) for m in range(8)))
E2M3 = Element("e2m3", 6, values=(*_E2M3, *(-x for x in _E2M3)))
# Dettmers et al. 2023 (arXiv 2305.14314), appendix E
NF4 = Element("nf4", 4, values=(
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0))
# bitsandbytes' own, functional.py
FP4 = Element("fp4", 4, values=(
    0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25,
    0.0, -0.0052083334885537624, -0.6666666865348816, -1.0, -0.3333333432674408, -0.5, -0.1666666716337204,
    -0.25))

# **** types that have names ****

MXFP4 = QType(E2M1, Scale(1, 32, dtypes.uint8, e8m0=True))
NVFP4 = QType(E2M1, Scale(1, 16, dtypes.fp8e4m3), outer=per_tensor_scale())
Q4_0 = QType(UINT4, per_group_scale(32, dtypes.float16), shift=8)
Q4_1 = QType(UINT4, per_group_scale(32, dtypes.float16), mins=True)     # mins are negated: w = q·d + m
Q5_0 = QType(UINT5, per_group_scale(32, dtypes.float16), shift=16)
Q5_1 = QType(UINT5, per_group_scale(32, dtypes.float16), mins=True)
Q8_0 = QType(INT8, per_group_scale(32, dtypes.float16))
Q2_K = QType(UINT2, Scale(1, 16, dtypes.uint8), mins=True, outer=Scale(1, 256, dtypes.float16))
Q3_K = QType(UINT3, Scale(1, 16, dtypes.int8), shift=4, outer=Scale(1, 256, dtypes.float16))
Q4_K = QType(UINT4, Scale(1, 32, dtypes.uint8), mins=True, outer=Scale(1, 256, dtypes.float16))
Q5_K = QType(UINT5, Scale(1, 32, dtypes.uint8), mins=True, outer=Scale(1, 256, dtypes.float16))
Q6_K = QType(UINT6, Scale(1, 16, dtypes.int8), shift=32, outer=Scale(1, 256, dtypes.float16))
