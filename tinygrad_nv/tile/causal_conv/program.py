"""Short causal convolutions (spec.py) as a program of the tile language.

    several programs have a block of channels of a sequence, and its chunks of tokens in turns:
        for each chunk:
            for each tap: the tokens that many places before, or columns of the window
        the first: at the border and at the end the K − 1 newest columns, of tokens and of the window before

The first program alone reads the window, which its own writes may replace: a chunk has K − 1 tokens at least.
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
CHUNK = 16          # tokens that are computed at once
# programs of a block of channels, of all sequences. Modelled on H100: 512 tokens of one sequence with 8192
# channels take 264 µs by one program a block, 15 by 32
PROGRAMS_OF_BLOCK = 32


def causal_conv(out: Any, windows: Any, x: Any, weight: Any, sequences: Any, spec: CausalConvSpec,
                blocks: Blocks, bias: Any = None) -> None:
    """From tokens to results (tokens, channels), and to windows (pages, taps − 1, channels)."""
    columns, s = tile.block(tile.program_id(0) * blocks.columns, blocks.columns), tile.program_id(1)
    first, count, source, border, kept, target = [sequences[s, i] for i in range(6)]
    window, part = (windows, source), tile.program_id(2)
    size = 1 << (spec.taps - 1).bit_length()
    every = weight[columns, tile.block(0, size)].to(F32)
    taps = [tile.sum(tile.where((tile.arange(size) == j)[None, :], every, 0.0), 1) for j in range(spec.taps)]
    for done in tile.range(part * blocks.rows, count, blocks.rows * count_parts(spec)):
        made = tile.zeros((blocks.rows, blocks.columns), F32)
        if spec.bias: made = made + bias[columns].to(F32)[None, :]
        for j in range(spec.taps):
            column = read(x, window, first, done - (spec.taps - 1) + j, blocks.rows, columns, spec)
            made = tile.fma(column, taps[j][None, :], made)
        if spec.silu: made = tile.silu(made)
        some = tile.arange(blocks.rows) + done < count
        tile.store(out, tile.cast(made, out.dtype), tile.block(first + done, blocks.rows), columns,
                   mask=some[:, None])
    if (part == 0) & (count > 0):
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
    """Programs for each block of channels of each sequence."""
    return -(-spec.channels // blocks.columns), spec.sequences, count_parts(spec)


def count_parts(spec: CausalConvSpec) -> int:
    """Returns how many programs have a sequence's chunks in turns."""
    if spec.single or spec.taps > CHUNK: return 1
    return max(1, min(-(-spec.tokens // CHUNK), PROGRAMS_OF_BLOCK // spec.sequences))


def cut(spec: CausalConvSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Blocks of channels, and of tokens that are computed at once."""
    channels = min(CHANNELS, 1 << (spec.channels - 1).bit_length())
    return [(Blocks(1 if spec.single else CHUNK, channels), 1 if spec.single else 4)]


def elements(spec: CausalConvSpec) -> int:
    """Products."""
    return spec.tokens * spec.channels * spec.taps


PROGRAMS = (TileProgram("causal_conv", CausalConvSpec, causal_conv, grid, cut, elements),)
