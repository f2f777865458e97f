"""Tile scheduler of a plain grid: the tile of the result that a CTA makes, and of which matrix.

Protocol: x of the grid counts (tile, split), the split fastest; y and z count matrices. Tiles are walked in
groups of `group` rows of tiles, down each column of a group: the CTAs that run together then share `group`
tiles of A and few of B. A symbolic spec has its number of rows of tiles from the launch.
"""
from __future__ import annotations

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.gemm.spec import GemmSpec

MOST_GRID_Y = 32768


def tiles_of(spec: GemmSpec, schedule: Mma) -> int:
    """Tiles of one matrix of the result."""
    rows, columns = schedule.block_m, schedule.block_n // spec.parts
    return -(-spec.m // rows) * -(-spec.n // columns)


class TileScheduler:
    """`m`, `n` (u32): the tile; `batch`: the index along each dimension of the batch; `split` (u32);
    `number`: of the tile among all tiles of all matrices."""

    def __init__(self, kb: Kernel, spec: GemmSpec, schedule: Mma, rows: Value | int) -> None:
        s = schedule
        self.tiles_m = -(-spec.m // s.block_m)
        self.tiles_n = tiles_of(spec, s) // self.tiles_m
        self.ctas_of_rows = self.tiles_n * s.splits
        matrices = spec.matrices
        self.deep = -(-matrices // MOST_GRID_Y)
        self.high = -(-matrices // self.deep)
        self.grid = (self.tiles_m * self.ctas_of_rows, self.high, self.deep)
        tile = kb.ctaid.x
        self.split = tile % s.splits if s.splits > 1 else kb.reg("u32", 0)
        if s.splits > 1: tile = tile // s.splits
        tiles_m = self.tiles_m if isinstance(rows, int) else (rows + (s.block_m - 1)) // s.block_m
        self.m, self.n = _group_order(kb, tile, tiles_m, self.tiles_n, s.group)
        matrix = kb.ctaid.y if self.deep == 1 else kb.ctaid.y + kb.ctaid.z * self.high
        if matrices == 1: matrix = kb.reg("u32", 0)
        if self.high * self.deep > matrices: kb.emit("exit", guard=matrix >= matrices)
        self.matrix = matrix
        self.number = matrix * (self.tiles_m * self.tiles_n) + tile
        self.batch = _indices(matrix, spec.batch)


def _group_order(kb: Kernel, tile: Value, tiles_m: Value | int, tiles_n: int, group: int) -> tuple[Value,
                                                                                                   Value]:
    """Row and column of a tile's number."""
    if tiles_n == 1: return tile, kb.reg("u32", 0)
    if isinstance(tiles_m, int):
        if tiles_m == 1: return kb.reg("u32", 0), tile
        if tiles_m <= group: return tile % tiles_m, tile // tiles_m
    first, inside = tile // (group * tiles_n) * group, tile % (group * tiles_n)
    if isinstance(tiles_m, int) and tiles_m % group == 0: return first + inside % group, inside // group
    height = kb.reg("u32")
    if isinstance(tiles_m, int): tiles_m = kb.reg("u32", tiles_m)
    kb.emit("min.u32", height, tiles_m - first, group)
    return first + inside % height, inside // height


def _indices(matrix: Value, batch: tuple[int, ...]) -> list[Value]:
    """The index along each dimension of the batch."""
    made, rest = [], matrix
    for extent in reversed(batch):
        made.append(rest % extent)
        rest = rest // extent
    return made[::-1]
