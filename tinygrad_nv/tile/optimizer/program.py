"""Updates of many tensors, and sums of their squares (spec.py), as programs of the tile language.

    a program has a chunk of one tensor, which it finds by its number:
        AdamW     nothing where control[0] is 0; else blocks of elements, in place
        squares   blocks of elements, added up element by element, then these

Pointers of other tensors are not loaded. A chunk's sum has one order of additions, of blocks of one size.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.language.memory import LARGEST, Block, TensorRef
from tinygrad_nv.tile.language.values import Operand, Tile
from tinygrad_nv.tile.optimizer.spec import CHUNK, HEAD, PER_GROUP, AdamWSpec, SquaresSpec, firsts
from tinygrad_nv.tile.order import OVER_ROWS
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram
from tinygrad_nv.tile.template import GPU

DETERMINISM_CLASS = OVER_ROWS
WARPS = 8
COLUMNS = 1024          # of a block: 16 bytes of float32 a thread
ROWS = {AdamWSpec: 1, SquaresSpec: 4}   # blocks that are loaded at a time: an update loads four tensors
CPU_COLUMNS = 128


def adamw(control: TensorRef, spec: AdamWSpec, blocks: Blocks, **held: TensorRef) -> None:
    """One step of a chunk."""
    lists = [[held[f"{name}{i}"] for i in range(len(spec.counts))] for name, _ in spec.kinds]
    begins = begin_chunks(spec.counts)
    *chosen, group, first = tile.select(find(begins), *lists, spec.groups, begins)
    tensors = dict(zip(dict(spec.kinds), chosen, strict=True))
    if control[0] != 0:
        place = HEAD + PER_GROUP * group
        numbers = control[1], control[2], control[place], control[place + 1]
        start, whole, stop = bounds(tensors["g"], first, blocks)
        for i in tile.range(start, whole, blocks.columns):
            update(tensors, tile.block(i, blocks.columns), numbers, spec)
        if whole < stop: update(tensors, tile.block(whole, blocks.columns), numbers, spec)


def update(tensors: dict[str, TensorRef], block: Block, numbers: Sequence[Operand], spec: AdamWSpec) -> None:
    """The step of a block."""
    scale, root, decay, step = numbers
    m, v, x = (tensors[name] for name in ("m", "v", "w" if spec.master else "x"))
    g = tile.cast(tensors["g"][block], dtypes.float32) * scale
    mean, square, before = m[block], v[block], x[block]
    mean = tile.fma(g - mean, 1 - spec.beta1, mean)
    square = tile.fma(g * g, 1 - spec.beta2, square * spec.beta2)
    change = mean / tile.fma(tile.sqrt(square), root, spec.eps)
    after = tile.fma(-step, change, before * decay)
    m[block], v[block], x[block] = mean, square, after
    if spec.master: tensors["x"][block] = after


def squares(sums: TensorRef, spec: SquaresSpec, blocks: Blocks, **held: TensorRef) -> None:
    """The sum of a chunk."""
    begins = begin_chunks(spec.counts)
    tensor, first = tile.select(find(begins), [held[f"g{i}"] for i in range(len(spec.counts))], begins)
    start, whole, stop = bounds(tensor, first, blocks)
    total = tile.zeros((blocks.columns,))
    for i in tile.range(start, whole, size_of(blocks)):
        part: Operand = 0.0
        for row in range(blocks.rows): part = add(tensor, i + row * blocks.columns, part, blocks)
        total += part
    for i in tile.range(whole, stop, blocks.columns): total = add(tensor, i, total, blocks)
    sums[tile.program_id(0)] = tile.sum(total, 0)


def add(tensor: TensorRef, i: Operand, total: Operand, blocks: Blocks) -> Tile:
    """The squares of a block more."""
    x = tile.cast(tensor[tile.block(i, blocks.columns)], dtypes.float32)
    return tile.fma(x, x, total)


def begin_chunks(counts: Sequence[int]) -> tuple[int, ...]:
    """The number of each tensor's first chunk."""
    return firsts(tuple(-(-count // CHUNK) for count in counts))[:-1]


def find(begins: Sequence[int], low: int = 0) -> Operand:
    """The number of this program's tensor among some, of which the first has number `low`."""
    if len(begins) == 1: return low
    middle = len(begins) // 2
    if tile.program_id(0) < begins[middle]: t = find(begins[:middle], low)
    else: t = find(begins[middle:], low + middle)
    return t


def bounds(tensor: TensorRef, first: Operand, blocks: Blocks) -> tuple[Operand, Operand, Operand]:
    """Returns where this program's chunk begins, where its whole blocks end, and where it ends."""
    start = tile.maximum(tile.program_id(0) - first, 0) * CHUNK
    stop = tile.minimum(start + CHUNK, tensor.shape[0])
    return start, stop // size_of(blocks) * size_of(blocks), stop


def size_of(blocks: Blocks) -> int:
    """Elements that a program loads at a time."""
    return blocks.rows * blocks.columns


def grid(spec: AdamWSpec | SquaresSpec, blocks: Blocks) -> Grid:
    """A program for each chunk."""
    return sum(-(-count // CHUNK) for count in spec.counts), 1, 1


def cut(spec: AdamWSpec | SquaresSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Blocks of one size."""
    if target.kind == "cpu": return [(Blocks(ROWS[type(spec)], CPU_COLUMNS), 1)]
    return [(Blocks(ROWS[type(spec)], COLUMNS), WARPS)]


def problems(spec: AdamWSpec | SquaresSpec, kind: str) -> list[str]:
    """Why no kernel can be; empty when one can."""
    kinds = 1 if isinstance(spec, SquaresSpec) else len(spec.kinds)
    pointers = kinds * len(spec.counts) + 1
    out = [f"{pointers} pointers, at most {GPU.pointers}"] * (kind == "gpu" and pointers > GPU.pointers)
    most = LARGEST - CHUNK      # so that the end of the last chunk is an int32
    return out + [f"{max(spec.counts)} elements of a tensor, at most {most}"] * (max(spec.counts) > most)


def elements(spec: AdamWSpec | SquaresSpec) -> int:
    """Elements of all tensors."""
    return sum(spec.counts)


PROGRAMS = (TileProgram("adamw_update", AdamWSpec, adamw, grid, cut, elements, problems, fixed=True,
                        entry=lambda spec: "adamw"),
            TileProgram("squared_sums", SquaresSpec, squares, grid, cut, elements, problems, fixed=True,
                        entry=lambda spec: "squares"))
