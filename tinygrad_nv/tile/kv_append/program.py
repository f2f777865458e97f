"""New keys and values into pages (spec.py) as a program of the tile language, with rotation and rounding.

    a program has one row of one request, and of its q, keys or values a block of heads:
        load the heads
        read the request's length; the place of the row, its page: -1, to which no store goes, of none
        rotate q and keys; store, keys and values into the page

Heads are loaded before the length is known, so that a row takes three latencies on a GPU: its length, then
page and angles, then the stores.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinygrad.dtype import DType, dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.decode.spec import BYTES
from tinygrad_nv.tile.kv_append.spec import AppendSpec
from tinygrad_nv.tile.language.memory import Block, TensorRef
from tinygrad_nv.tile.language.values import Tile
from tinygrad_nv.tile.order import BY_ELEMENT
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram

DETERMINISM_CLASS = BY_ELEMENT
MANY_ROWS, MOST_ROWS = 256, 1024    # from which on threads are fewer; below latency counts
NARROW = 32     # columns of a block, below which many threads would have no vectors


def kv_append(spec: AppendSpec, blocks: Blocks, **tensors: TensorRef) -> None:
    """From new rows (B, T, H, D) to pages, and to q_out."""
    part, queries, keys = tile.program_id(0), programs(spec, blocks, "q"), programs(spec, blocks, "k")
    if is_one_program(spec, blocks): append(spec, blocks, dict.fromkeys(names(spec), 0), tensors)
    elif spec.q is not None and part < queries: append(spec, blocks, {"q": part}, tensors)
    elif spec.v is None or part < queries + keys: append(spec, blocks, {"k": part - queries}, tensors)
    else: append(spec, blocks, {"v": part - (queries + keys)}, tensors)


def append(spec: AppendSpec, blocks: Blocks, numbers: Mapping[str, Any], x: Mapping[str, TensorRef]) -> None:
    """Stores blocks of heads, by their numbers, of q, keys and values."""
    row, b = tile.program_id(1), tile.program_id(2)
    heads = {name: Block(number * heads_of(spec, blocks, name), heads_of(spec, blocks, name))
             for name, number in numbers.items()}
    values = {name: [x[name][b, row, heads[name], columns] for columns in cut_columns(spec, name)]
              for name in heads}
    place = x["lengths"][b] + (row - spec.rows)
    near = tile.clamp(place, 0, spec.longest - 1)
    turned = [name for name in heads if spec.rope is not None and name != "v"]
    angles = [x[name][near, :] for name in ("cos", "sin")] if turned else []
    page: Any = -1
    token = near % spec.page_size
    if [*heads] != ["q"]: page = x["table"][b, near // spec.page_size] if spec.table else b
    for name in turned: values[name] = rotate(spec, values[name], angles)
    if [*heads] != ["q"]: page = tile.where(place == near, page, -1)
    for name in heads:
        out, at = (x["q_out"], (b, row)) if name == "q" else (x[f"{name}_pages"], (page, token))
        scaled = out.dtype in BYTES
        inverse = 1.0 / x[f"scale_{name}"][page, heads[name]][:, None] if scaled else None
        made = [narrow(each, out.dtype, inverse) for each in values[name]]
        for columns, value in zip(cut_columns(spec, name), made, strict=True):
            out[*at, heads[name], columns] = value


def cut_columns(spec: AppendSpec, name: str) -> list[Block]:
    """Columns of a head that are loaded together: both halves of a rotation, or its pairs; what is left."""
    d = spec.d_v if name == "v" else spec.d
    turned = 2 * spec.rope.half if spec.rope is not None and name != "v" else 0
    count = 1 if is_interleaved(spec) else 2
    made = [Block(i * turned // count, turned // count) for i in range(count)] if turned else []
    return [*made, *[Block(turned, d - turned)] * (d > turned)]


def is_interleaved(spec: AppendSpec) -> bool:
    """Whether pairs lie side by side."""
    return spec.rope is not None and spec.rope.interleaved


def rotate(spec: AppendSpec, x: Sequence[Tile], angles: Sequence[Tile]) -> list[Tile]:
    """Turns the pairs (a, b) of heads: a cos - b sin, b cos + a sin."""
    assert spec.rope is not None
    (cos, sin), pairs = angles, is_interleaved(spec)
    a, b = tile.deinterleave(x[0]) if pairs else x[:2]
    if spec.rope.rounded:
        first, second = product(a, cos) - product(b, sin), product(b, cos) + product(a, sin)
    else: first, second = tile.fma(a, cos, -(wide(b) * sin)), tile.fma(b, cos, wide(a) * sin)
    return [tile.interleave(first, second), *x[1:]] if pairs else [first, second, *x[2:]]


def product(x: Tile, y: Tile) -> Tile:
    """A product that is rounded before it is added to another."""
    return tile.fma(x, y, -0.0) if x.dtype == dtypes.float32 else x * y


def wide(x: Tile) -> Tile: return tile.cast(x, dtypes.float32)


def narrow(x: Tile, dtype: DType, inverse: Tile | None) -> Tile:
    """Elements in a dtype, of 8 bits times 1 / the scale of their page and head; NaN as int8 is the least."""
    if inverse is None: return tile.cast(x, dtype)
    scaled = wide(x) * inverse
    if dtype == dtypes.int8:
        whole = tile.round(tile.minimum(127.0, tile.maximum(-128.0, scaled)))
        scaled = tile.cast(whole, dtypes.int32)
    return tile.cast(scaled, dtype)


def heads_of(spec: AppendSpec, blocks: Blocks, name: str) -> int:
    """Heads of a program: all, of one that has a row; else as many as make the elements of a block, and no
    more than there are."""
    heads = spec.q_heads if name == "q" else spec.heads
    if is_one_program(spec, blocks): return heads
    width = spec.d_v if name == "v" else spec.d
    return min(heads, 1 << max(1, blocks.columns // width).bit_length() - 1)


def names(spec: AppendSpec) -> list[str]:
    """Names of the new rows that there are."""
    return [name for name, rows in (("q", spec.q), ("k", spec.k), ("v", spec.v)) if rows is not None]


def programs(spec: AppendSpec, blocks: Blocks, name: str) -> int:
    """Programs of a row's q, keys or values."""
    heads = spec.q_heads if name == "q" else spec.heads
    return -(-heads // heads_of(spec, blocks, name)) if name in names(spec) else 0


def is_one_program(spec: AppendSpec, blocks: Blocks) -> bool:
    """Whether one program has all of a row."""
    return blocks.columns >= elements(spec) // (spec.batch * spec.rows)


def grid(spec: AppendSpec, blocks: Blocks) -> Grid:
    """A program for each block of heads of q, keys and values, of each row of each request."""
    count = 1 if is_one_program(spec, blocks) else sum(programs(spec, blocks, name) for name in names(spec))
    return count, spec.rows, spec.batch


def cut(spec: AppendSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Blocks of so many elements, as the timing model likes them best; on a CPU of all of a row."""
    row, rows = elements(spec) // (spec.batch * spec.rows), spec.batch * spec.rows
    if target.kind == "cpu": return [(Blocks(1, row), 1)]
    narrow = min(block.size for name in names(spec) for block in cut_columns(spec, name)) < NARROW
    if rows >= MOST_ROWS: count, warps = 1024, 1
    elif rows < MANY_ROWS and target.arch >= "sm_90" and spec.d % 128 == 0: count, warps = 2048, 2
    else: count, warps = 1024, 2 if rows >= MANY_ROWS or narrow else 4
    return [(Blocks(1, max(1, min(count, row - 1))), warps)]


def elements(spec: AppendSpec) -> int:
    """Elements of new rows."""
    return spec.batch * spec.rows * (spec.heads * (spec.d + spec.d_v) + spec.q_heads * spec.d)


PROGRAMS = (TileProgram("kv_append", AppendSpec, kv_append, grid, cut, elements),)
