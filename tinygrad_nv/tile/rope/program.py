"""Rotary positions (spec.py) as programs of the tile language: from q|k|v to heads, and from gradients back.

    a program has a block of tokens of a sequence, of one head of q, k or v:
        of q and k    load both halves and the angles, rotate, store both halves
        and then      copy what is not rotated; of v all

Angles are read again for each head, from a cache.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.order import BY_ELEMENT
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram
from tinygrad_nv.tile.rope.spec import RopeGradientSpec, RopeSpec

DETERMINISM_CLASS = BY_ELEMENT
ELEMENTS, WARP_ELEMENTS = 1024, 128     # of a half: of a program at most, of a warp: 16 bytes a thread


def rope(q: Any, k: Any, v: Any, qkv: Any, cos: Any, sin: Any, spec: RopeSpec, blocks: Blocks) -> None:
    """From q|k|v (B, T, (H + 2 H_kv) D) to q (B, H, T, D), k and v (B, H_kv, T, D)."""
    rows, head, b = place(blocks)
    angles = load_angles(cos, sin, b, rows, spec)
    columns = head * spec.d
    if head < spec.heads: rotate((qkv, b, rows), columns, (q, b, head, rows), 0, angles, spec, 1.0)
    elif head < spec.heads + spec.kv_heads:
        rotate((qkv, b, rows), columns, (k, b, head - spec.heads, rows), 0, angles, spec, 1.0)
    else: copy((qkv, b, rows), columns, (v, b, head - (spec.heads + spec.kv_heads), rows), 0, spec.d)


def rope_gradient(qkv: Any, q: Any, k: Any, v: Any, cos: Any, sin: Any, spec: RopeGradientSpec,
                  blocks: Blocks) -> None:
    """From the gradients of heads to that of q|k|v."""
    rows, head, b = place(blocks)
    angles = load_angles(cos, sin, b, rows, spec)
    columns = head * spec.d
    if head < spec.heads: rotate((q, b, head, rows), 0, (qkv, b, rows), columns, angles, spec, -1.0)
    elif head < spec.heads + spec.kv_heads:
        rotate((k, b, head - spec.heads, rows), 0, (qkv, b, rows), columns, angles, spec, -1.0)
    else: copy((v, b, head - (spec.heads + spec.kv_heads), rows), 0, (qkv, b, rows), columns, spec.d)


def place(blocks: Blocks) -> tuple[Any, Any, Any]:
    """The tokens, the head and the sequence of this program."""
    return tile.block(tile.program_id(0) * blocks.rows, blocks.rows), tile.program_id(1), tile.program_id(2)


def load_angles(cos: Any, sin: Any, b: Any, rows: Any, spec: RopeSpec) -> tuple[Any, Any]:
    """Cosines and sines of tokens, in float32."""
    half = tile.block(0, spec.half)
    return tile.cast(cos[b, rows, half], dtypes.float32), tile.cast(sin[b, rows, half], dtypes.float32)


def rotate(source: tuple[Any, ...], first: Any, target: tuple[Any, ...], to: Any, angles: tuple[Any, Any],
           spec: RopeSpec, sign: float) -> None:
    """Rotates a head whose columns begin at `first`, and stores it where they begin at `to`."""
    half, (x, *at), (out, *there), (cos, sin) = spec.half, source, target, angles
    low, high = (tile.cast(tile.cast(x[*at, tile.block(first + i * half, half)], spec.dtype), dtypes.float32)
                 for i in range(2))
    out[*there, tile.block(to, half)] = tile.cast(tile.fma(high, sin * -sign, low * cos), spec.dtype)
    out[*there, tile.block(to + half, half)] = tile.cast(tile.fma(low, sin * sign, high * cos), spec.dtype)
    if 2 * half < spec.d: copy(source, first + 2 * half, target, to + 2 * half, spec.d - 2 * half)


def copy(source: tuple[Any, ...], first: Any, target: tuple[Any, ...], to: Any, count: int) -> None:
    """Copies columns of a block of tokens."""
    (x, *at), (out, *there) = source, target
    out[*there, tile.block(to, count)] = tile.cast(x[*at, tile.block(first, count)], out.dtype)


def grid(spec: RopeSpec, blocks: Blocks) -> Grid:
    """A program for each block of tokens of each head of each sequence, of which there are 65535 at most: as
    one axis with the tokens they take 7 % longer on an H100, by the timing model."""
    return -(-spec.tokens // blocks.rows), spec.heads + 2 * spec.kv_heads, spec.batch


def cut(spec: RopeSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Blocks of as many tokens as make `ELEMENTS`, on a CPU of up to 8, or of which at most an eighth is
    beyond the last."""
    rows = 8 if target.kind == "cpu" else 1 << max(ELEMENTS // spec.half, 1).bit_length() - 1
    while rows > 1 and -spec.tokens % rows > spec.tokens // 8: rows //= 2
    return [(Blocks(rows), 1 << max(rows * spec.half // WARP_ELEMENTS, 1).bit_length() - 1)]


def elements(spec: RopeSpec) -> int:
    """Elements of q|k|v."""
    return spec.batch * spec.tokens * spec.width


PROGRAMS = (TileProgram("rope", RopeSpec, rope, grid, cut, elements),
            TileProgram("rope_gradient", RopeGradientSpec, rope_gradient, grid, cut, elements))
