"""How templates look at a matmul: as it is or transposed, and what its elements are packed as.

Protocol: vectors of results lie along n. Operands of blocked products are packed in units of 32 bits along k:
one float32 ("fma"), a pair of bfloat16 ("pair"), four bytes ("quad"). An AMX tile has 16 rows of `UNITS`
units; a step of products takes `STRIP` rows and two panels of `PANEL` columns.
"""
from __future__ import annotations

from tinygrad.dtype import dtypes

from tinygrad_nv.cpu.isa import ISA
from tinygrad_nv.tile.gemm.spec import INT8S, GemmSpec

PER = {"fma": 1, "pair": 2, "quad": 4}  # elements of a unit
MOST_ROWS = 16                          # of a, by gemv (of pairs: gemv/pairs.py)
STRIP, PANEL, UNITS = 32, 16, 16


def kind_of(spec: GemmSpec, isa: ISA) -> str:
    """Returns the kind of units that operands are packed as."""
    if spec.a.dtype in INT8S: return "quad" if isa.vnni else "fma"
    return "pair" if spec.a.dtype == dtypes.bfloat16 and isa.bf16 else "fma"


def orient(spec: GemmSpec, isa: ISA) -> GemmSpec:
    """Returns a blocked product as it is or transposed, whichever has vectors along n."""
    if spec.symbolic or spec.parts > 1: return spec
    narrow = 2 * spec.n <= isa.lanes and spec.m > spec.n
    return spec.swap_operands() if narrow or (spec.out.n != 1 and spec.out.m == 1 and spec.m > 1) else spec


def few_rows(spec: GemmSpec) -> GemmSpec:
    """Returns a product of gemv: transposed if there are fewer columns than rows that way, and too many rows
    as it is."""
    turned = spec.m > MOST_ROWS >= spec.n and spec.parts == 1 and not spec.symbolic
    return spec.swap_operands() if turned else spec


def for_tiles(spec: GemmSpec) -> GemmSpec:
    """Returns a product of AMX as it is or transposed, whichever has vectors of the result along n."""
    turned = spec.out.n != 1 and spec.out.m == 1 and spec.parts == 1 and not spec.symbolic
    return spec.swap_operands() if turned else spec


def tile_kind(spec: GemmSpec) -> str:
    """Returns the kind of units that operands of AMX tiles are packed as."""
    return "quad" if spec.a.dtype in INT8S else "pair"


def tile_multiples(spec: GemmSpec) -> tuple[int, int, int]:
    """Returns the multiples of block_m, block_n and block_k of AMX: a strip, the columns of the result that a
    pair of panels makes, a tile."""
    return STRIP, max(1, PANEL * 2 // spec.parts), UNITS * PER[tile_kind(spec)]
