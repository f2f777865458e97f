"""Linear attention (spec.py) as programs of the tile language.

    a program has a head of a sequence, and a block of the columns of its state:
        load the state, or zeros
        for each chunk of its tokens, which ends at the border or the last token at the latest:
            solve v' of all tokens of the chunk
            results: what the state gives, and the tokens of the chunk among each other
            the state after the chunk; at the border store it
        store the state

A chunk of C tokens whose decays sum up to G_i has, with the delta rule, a system

    (I + A) v' = β (v − exp(G) K S)     A_ij = β_i k_iᵀ k_j exp(G_i − G_j) for j < i

(arXiv 2412.06464, 3.3). I + A is inverted by blocks of 1, 2, 4 … rows, which is exact and needs matmuls
alone. Decays between two tokens are at most 1, so that nothing overflows. Those of channels stand within the
sum of k_iᵀ k_j, which is no matmul: exp(G_i) · exp(−G_j) would overflow.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.linear_attention.spec import LinearAttentionSpec
from tinygrad_nv.tile.order import PROGRAM
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram

DETERMINISM_CLASS = PROGRAM
F32, INF = dtypes.float32, float("inf")


def linear_attention(out: Any, states: Any, q: Any, k: Any, v: Any, decay: Any, sequences: Any,
                     spec: LinearAttentionSpec, blocks: Blocks, beta: Any = None) -> None:
    """From tokens to results (tokens, heads, d_v), and to states (pages, heads, d_k, d_v)."""
    columns = tile.block(tile.program_id(0) * blocks.columns, blocks.columns)
    h, s = tile.program_id(1), tile.program_id(2)
    first, count, source, border, kept, target = [sequences[s, i] for i in range(6)]
    state = states[source, h, :, columns]   # there is no page -1: zeros
    operands = (q, k, v, decay, beta)
    if spec.single:
        if count > 0:
            state, made = advance(state, operands, s, h, columns, spec)
            out[s, h, columns] = tile.cast(made, out.dtype)
            if target >= 0: states[target, h, :, columns] = state
    else:
        done = 0
        while done < count:
            end = tile.where(done < border, border, count)
            rows, some = tile.block(first + done, blocks.rows), tile.arange(blocks.rows) + done < end
            if spec.channels:
                state, made = advance_channels(state, operands, rows, some, (first + done, end - done), h,
                                               columns, spec, blocks.rows)
            else: state, made = advance_chunk(state, operands, rows, some, h, columns, spec, blocks.rows)
            tile.store(out, tile.cast(made, out.dtype), rows, h, columns, mask=some[:, None])
            done = tile.minimum(done + blocks.rows, end)
            if (done == border) & (kept >= 0): states[kept, h, :, columns] = state
        if (count > 0) & (target >= 0): states[target, h, :, columns] = state


def advance(state: Any, operands: tuple[Any, ...], t: Any, h: Any, columns: Any,
            spec: LinearAttentionSpec) -> tuple[Any, Any]:
    """The state after a token, and its result."""
    (q, k, v, decay, beta), g = operands, h // (spec.heads // spec.key_heads)
    left = tile.exp(decay[t, h, :])[:, None] if spec.channels else tile.exp(decay[t, h])
    key, query, value = k[t, g, :].to(F32), q[t, g, :].to(F32) * spec.scale, v[t, h, columns].to(F32)
    state = state * left
    if spec.delta: value = beta[t, h] * (value - tile.sum(state * key[:, None], 0))
    state = state + key[:, None] * value[None, :]
    return state, tile.sum(state * query[:, None], 0)


def advance_chunk(state: Any, operands: tuple[Any, ...], rows: Any, some: Any, h: Any, columns: Any,
                  spec: LinearAttentionSpec, size: int) -> tuple[Any, Any]:
    """The state after a chunk of which there are `some` tokens, and their results."""
    (q, k, v, decay, beta), g = operands, h // (spec.heads // spec.key_heads)
    keys = tile.where(some[:, None], k[rows, g, :].to(F32), 0.0)
    queries = q[rows, g, :].to(F32) * spec.scale
    values = tile.where(some[:, None], v[rows, h, columns].to(F32), 0.0)
    each = tile.where(some, decay[rows, h], 0.0)
    summed, total = tile.cumsum(each, 0), tile.sum(each, 0)
    i, j = tile.arange(size)[:, None], tile.arange(size)[None, :]
    between = tile.exp(tile.where(i >= j, summed[:, None] - summed[None, :], -INF))
    before = tile.exp(summed)[:, None]
    if spec.delta:
        rate = tile.where(some, beta[rows, h], 0.0)[:, None]
        system = tile.where(i > j, tile.dot(keys, tile.transpose(keys)) * between * rate, 0.0)
        values = rate * (values - before * tile.dot(keys, state))
        values = tile.dot(invert(system, i, j, size), values)
    among = tile.dot(queries, tile.transpose(keys)) * between
    made = tile.dot(queries, state) * before + tile.dot(among, values)
    left = keys * tile.exp(total - summed)[:, None]
    return state * tile.exp(total) + tile.dot(tile.transpose(left), values), made


def advance_channels(state: Any, operands: tuple[Any, ...], rows: Any, some: Any, tokens: tuple[Any, Any],
                     h: Any, columns: Any, spec: LinearAttentionSpec, size: int) -> tuple[Any, Any]:
    """`advance_chunk` with decays of channels; `tokens` are the first, and how many there are from it on."""
    (q, k, v, decay, beta), g = operands, h // (spec.heads // spec.key_heads)
    keys = tile.where(some[:, None], k[rows, g, :].to(F32), 0.0)
    queries = q[rows, g, :].to(F32) * spec.scale
    values = tile.where(some[:, None], v[rows, h, columns].to(F32), 0.0)
    met, among, before, left = pair(keys, queries, k, decay, tokens, h, spec, size)
    if spec.delta:
        i, j = tile.arange(size)[:, None], tile.arange(size)[None, :]
        rate = tile.where(some, beta[rows, h], 0.0)[:, None]
        values = rate * (values - tile.dot(keys * before, state))
        values = tile.dot(invert(tile.where(i > j, met * rate, 0.0), i, j, size), values)
    made = tile.dot(queries * before, state) + tile.dot(among, values)
    total = tile.sum(tile.where(some[:, None], decay[rows, h, :], 0.0), 0)
    return state * tile.exp(total)[:, None] + tile.dot(tile.transpose(left), values), made


def pair(keys: Any, queries: Any, k: Any, decay: Any, tokens: tuple[Any, Any], h: Any,
         spec: LinearAttentionSpec, size: int) -> tuple[Any, Any, Any, Any]:
    """Products of a chunk's keys, and of its queries, with its keys, each with the decays between the two
    tokens; what the chunk leaves up to each token, and keys with what it leaves after them. Keys follow each
    other from the last on, so that sums are of what lies between, and no difference."""
    i, j, g = tile.arange(size)[:, None], tile.arange(size)[None, :], h // (spec.heads // spec.key_heads)
    met, among = tile.zeros((size, size), F32), tile.zeros((size, size), F32)
    since, rest = tile.zeros((size, spec.d_k), F32), tile.zeros((size, spec.d_k), F32)
    first, count = tokens
    at = tile.minimum(count, size) - 1
    while at >= 0:
        key, lost = k[first + at, g, :].to(F32)[None, :], decay[first + at, h, :][None, :]
        left = tile.exp(tile.where(i >= at, since, -INF)) * key
        met = tile.where(j == at, tile.sum(keys * left, 1)[:, None], met)
        among = tile.where(j == at, tile.sum(queries * left, 1)[:, None], among)
        since, rest = since + tile.where(i >= at, lost, 0.0), rest + tile.where(i < at, lost, 0.0)
        at = at - 1
    return met, among, tile.exp(since), keys * tile.exp(rest)


def invert(system: Any, i: Any, j: Any, size: int) -> Any:
    """(I + system)⁻¹ of a strictly lower triangle, by blocks of 1, 2, 4 … rows."""
    made, block = tile.where(i == j, 1.0, 0.0), 1
    for _ in range(size.bit_length() - 1):
        between = (i // (2 * block) == j // (2 * block)) & (i // block != j // block)
        made = made - tile.dot(tile.dot(made, tile.where(between, system, 0.0)), made)
        block = 2 * block
    return made


def grid(spec: LinearAttentionSpec, blocks: Blocks) -> Grid:
    """A program for each block of columns of each head of each sequence."""
    return -(-spec.d_v // blocks.columns), spec.heads, spec.sequences


def cut(spec: LinearAttentionSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """Chunks of so many tokens, and columns of a state."""
    if spec.single: return [(Blocks(1, min(spec.d_v, 32)), 4)]
    return [(Blocks(16, min(spec.d_v, 64)), 4)]


def elements(spec: LinearAttentionSpec) -> int:
    """Elements of states that tokens change."""
    return spec.tokens * spec.heads * spec.d_k * spec.d_v


PROGRAMS = (TileProgram("linear_attention", LinearAttentionSpec, linear_attention, grid, cut, elements),)
