"""Selective scans (spec.py) as a program of the tile language.

    a program has a block of channels of a sequence, and all states of each:
        load the states, or zeros
        for each chunk of its tokens, which ends at the border or the last token at the latest:
            load the tokens of the chunk that follows; beyond its end its last one, with a step of 0
            token by token: the states after it, and its results
            at the border store the states
        store the states

Each state is a sum in the order of tokens, whatever the chunks are.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.order import PROGRAM
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram
from tinygrad_nv.tile.selective_scan.spec import SelectiveScanSpec

DETERMINISM_CLASS = PROGRAM
F32 = dtypes.float32
LANES = 4           # threads that have a channel's states together
# of a multiprocessor: fewer wait for their loads. Modelled on H100, 8192 channels of 16 states: 64 tokens of
# one sequence in 23.2 µs by a thread a channel, in 14.7 µs by four; 32 tokens each of 32 in 78 and 151 µs.
FEW_WARPS = 8
MOST_STATES = 64    # of a channel: a thread has them, and as many decays, in its registers


def selective_scan(out: Any, states: Any, x: Any, step: Any, a: Any, b: Any, c: Any, sequences: Any,
                   spec: SelectiveScanSpec, blocks: Blocks) -> None:
    """From tokens to results (tokens, channels), and to states (pages, states, channels)."""
    columns, s = tile.block(tile.program_id(0) * blocks.columns, blocks.columns), tile.program_id(1)
    first, count, source, border, kept, target = [sequences[s, i] for i in range(6)]
    state = tile.zeros((spec.states, blocks.columns), F32)
    if source >= 0: state = states[source, :, columns]
    rate = a[:, columns] * (1 / math.log(2))
    tokens = (x, step, b, c)
    if spec.single:
        if count > 0:
            state, made = advance(state, rate, read(tokens, s, columns), True)
            out[s, columns] = made
            if target >= 0: states[target, :, columns] = state
    else:
        done, end = 0, tile.where(border > 0, border, count)
        chunk = read_chunk(tokens, first, 0, end, columns, blocks.rows)
        while done < count:
            at, last = done, end
            done = tile.minimum(done + blocks.rows, end)
            end = tile.where(done < border, border, count)
            ahead = read_chunk(tokens, first, done, end, columns, blocks.rows)
            for i in range(blocks.rows):
                there = at + i < last
                state, made = advance(state, rate, chunk[i], there)
                tile.store(out, made, first + at + i, columns, mask=there)
            chunk = ahead
            if (done == border) & (kept >= 0): states[kept, :, columns] = state
        if (count > 0) & (target >= 0): states[target, :, columns] = state


def read_chunk(tokens: tuple[Any, ...], first: Any, done: Any, end: Any, columns: Any,
               size: int) -> list[tuple[Any, ...]]:
    """`size` tokens of a sequence from `done` on, the one before `end` in the place of those after it."""
    return [read(tokens, first + tile.minimum(done + i, end - 1), columns) for i in range(size)]


def read(tokens: tuple[Any, ...], t: Any, columns: Any) -> tuple[Any, ...]:
    """A token's x, step, B and C, as they are loaded."""
    x, step, b, c = tokens
    return x[t, columns], step[t, columns], b[t, :], c[t, :]


def advance(state: Any, rate: Any, token: tuple[Any, ...], there: Any) -> tuple[Any, Any]:
    """The states after a token, if it is `there`, and its results."""
    x, step, b, c = token
    step = tile.where(there, step, 0.0)
    given = (step * x.to(F32))[None, :] * b.to(F32)[:, None]
    state = tile.fma(state, tile.exp2(step[None, :] * rate), given)
    return state, add_up(state * c.to(F32)[:, None])


def add_up(x: Any) -> Any:
    """The sum along the first axis: of halves, by elements, as long as there are two."""
    while x.shape[0] % 2 == 0: x = tile.sum(tile.reshape(x, 2, x.shape[0] // 2, x.shape[1]), 0)
    return tile.sum(x, 0)


def grid(spec: SelectiveScanSpec, blocks: Blocks) -> Grid:
    """A program for each block of channels of each sequence."""
    return -(-spec.channels // blocks.columns), spec.sequences, 1


def cut(spec: SelectiveScanSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Blocks of tokens that are loaded at once, and of channels: one for each thread of a warp, or for four
    of them where warps are few and each would wait for its loads. Sums are the same: `add_up` fixes the
    order of states that two threads have."""
    columns = 32
    if target.kind == "gpu" and not spec.single and spec.states % LANES == 0:
        warps = spec.sequences * spec.channels // columns
        if warps < FEW_WARPS * gpu_model_for(target.arch, target.sm_count).sm_count: columns //= LANES
    return [(Blocks(1 if spec.single else 4, columns), 1)]


def elements(spec: SelectiveScanSpec) -> int:
    """States that tokens change."""
    return spec.tokens * spec.channels * spec.states


def problems(spec: SelectiveScanSpec, kind: str) -> list[str]:
    """Why no kernel can be."""
    return [f"{spec.states} states of a channel, more than {MOST_STATES}"] * (spec.states > MOST_STATES)


PROGRAMS = (TileProgram("selective_scan", SelectiveScanSpec, selective_scan, grid, cut, elements, problems,
                        vector=lambda spec: 1),)
