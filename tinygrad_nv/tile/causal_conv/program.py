"""Short causal convolutions (spec.py) as a program of the tile language.

    a program has a block of channels of a sequence:
        for each chunk of its tokens, which ends at the border or the last token at the latest:
            for each tap: the tokens that many places before, or columns of the window
        at the border and at the end the K − 1 newest columns, of tokens and of the window before

Row i + j of a window is what tap j of token i needs, for as long as it has such a row: what lies beyond the
window is read as 0, as are tokens of other sequences, and one of both is added to the other.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.causal_conv.spec import CausalConvSpec
from tinygrad_nv.tile.order import BY_ELEMENT
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram

DETERMINISM_CLASS = BY_ELEMENT
F32 = dtypes.float32
CHANNELS = 256      # of a program: 8 for each thread of a warp


def causal_conv(out: Any, windows: Any, x: Any, weight: Any, sequences: Any, spec: CausalConvSpec,
                blocks: Blocks, bias: Any = None) -> None:
    """From tokens to results (tokens, channels), and to windows (pages, taps − 1, channels)."""
    columns, s = tile.block(tile.program_id(0) * blocks.columns, blocks.columns), tile.program_id(1)
    first, count, source, border, kept, target = [sequences[s, i] for i in range(6)]
    window = (windows, source)
    for done in tile.range(0, count, blocks.rows):
        made = tile.zeros((blocks.rows, blocks.columns), F32)
        if spec.bias: made = made + bias[columns].to(F32)[None, :]
        for j in range(spec.taps):
            column = read(x, window, first, done - (spec.taps - 1) + j, blocks.rows, columns, spec)
            made = tile.fma(column, weight[columns, j].to(F32)[None, :], made)
        if spec.silu: made = tile.silu(made)
        some = tile.arange(blocks.rows) + done < count
        tile.store(out, tile.cast(made, out.dtype), tile.block(first + done, blocks.rows), columns,
                   mask=some[:, None])
    if count > 0:
        size = spec.taps - 1
        at_border = read(x, window, first, border - size, size, columns, spec)
        at_end = read(x, window, first, count - size, size, columns, spec)
        if kept >= 0: windows[kept, :, columns] = tile.cast(at_border, windows.dtype)
        if target >= 0: windows[target, :, columns] = tile.cast(at_end, windows.dtype)


def read(x: Any, window: tuple[Any, Any], first: Any, place: Any, size: int, columns: Any,
         spec: CausalConvSpec) -> Any:
    """Tokens at `size` places of a sequence from `place` on, float32; before its first those of the
    window."""
    windows, source = window
    own = (tile.arange(size) + place >= 0)[:, None]
    token = tile.where(own, x[tile.block(first + place, size), columns].to(F32), 0.0)
    # there is no page -1: zeros
    return token + windows[source, tile.block(place + (spec.taps - 1), size), columns].to(F32)


def grid(spec: CausalConvSpec, blocks: Blocks) -> Grid:
    """A program for each block of channels of each sequence."""
    return -(-spec.channels // blocks.columns), spec.sequences, 1


def cut(spec: CausalConvSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Blocks of channels, and of tokens that are computed at once."""
    channels = min(CHANNELS, 1 << (spec.channels - 1).bit_length())
    return [(Blocks(1 if spec.single else 8, channels), 1 if spec.single else 4)]


def elements(spec: CausalConvSpec) -> int:
    """Products."""
    return spec.tokens * spec.channels * spec.taps


PROGRAMS = (TileProgram("causal_conv", CausalConvSpec, causal_conv, grid, cut, elements),)
