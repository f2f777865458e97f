"""The router of a mixture of experts (spec.py) as a program of the tile language.

    a program has some tokens, and goes through them in blocks of rows:
        scores, choices; keys: choices as integers in the order of numbers, NONE for NaN
        keys of groups that are not among the best become those of −inf
        k times: the largest key, the lowest number that has it; its key is NONE then
        weights of these
        ranks: how many slots before have the slot's expert
    one program: offsets; order[offset + rank] = slot
    several: counts and ranks to memory, and a second launch, whose programs have the same tokens:
        counts of all programs, and of those before; offsets; order[offset + count before + rank] = slot

On a CPU one program has all tokens, one after the other, and puts one slot after the other in order; so it
does with slots whose experts are given.

Where fewer than k choices are numbers, the last expert takes the place of those that are not, and its weight
is what its score makes it: NaN goes no further than the token that has it.

Counts are integers, added in the order of tokens, so that the order of slots does not depend on the order in
which programs run. Nothing waits for another program, and no memory has to be zero before.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tinygrad.dtype import dtypes

from tinygrad_nv import tile
from tinygrad_nv.tile.gpu import gpu_model_for
from tinygrad_nv.tile.language.memory import Block
from tinygrad_nv.tile.language.values import Operand, Tile
from tinygrad_nv.tile.order import BY_ROW
from tinygrad_nv.tile.programs import Blocks, Grid, TileProgram
from tinygrad_nv.tile.router.spec import EPSILON, GroupRowsSpec, Policy, RouterSpec

DETERMINISM_CLASS = BY_ROW
ONE = 1                 # column of blocks that one thread goes through
WARPS = 16              # of a program where there are several
MOST_KEYS, LOOP_KEYS = 24, 16   # that a thread of these has at a time, of some tokens of a warp; in a loop
ALONE = 32              # tokens that one program routes and orders: with 64 two launches take less time
MOST_SLOTS = 4096       # that the second launch puts in order at a time
MANY = 256              # experts of which a thread of 32 warps has the registers for keys and scores
# 16 experts of a lane, of which each may have a choice
MOST = {"experts": 512, "experts of a token": 32, "groups": 32}
MOST_ON_CPU = 1 << 15       # experts, whose scores and keys lie on a stack
LOG2_E = math.log2(math.e)
LOG2_E_REST = 1.9259629911e-8       # of LOG2_E, beyond float32
NONE = -1 << 31                     # the key of no number
LEAST = -0x7F800001                 # the key of −inf


def route(experts: Any, weights: Any, order: Any, offsets: Any, logits: Any, spec: RouterSpec, blocks: Blocks,
          bias: Any = None, counts: Any = None, ranks: Any = None) -> None:
    """From logits [T, E] to experts and weights, and to order and offsets, or to counts [programs, E] and
    ranks [T, k]."""
    if blocks.columns == ONE: return route_in_turn((experts, weights, logits, bias), order, offsets, spec)
    group, seen = tile.program_id(0), tile.zeros((spec.experts,), dtypes.int32)
    every, begin = Block(0, spec.experts), group * group_tokens(spec, blocks)
    if group == 0: offsets[spec.experts] = spec.slots
    ahead = logits[tile.block(begin, blocks.rows), every]
    if blocks.groups == 1:
        ranked = store_choices((experts, weights, ahead, bias), 0, seen, spec, blocks)
        return arrange_alone(order, offsets, ranked, spec, blocks)
    end = begin + group_tokens(spec, blocks)
    for first in first_tokens(group, spec, blocks):
        x = ahead
        if blocks.rows < group_tokens(spec, blocks):    # the next block's are on their way
            then = tile.minimum(first + blocks.rows, end - blocks.rows)
            ahead = logits[tile.block(then, blocks.rows), every]
        ranked = store_choices((experts, weights, x, bias), first, seen, spec, blocks)
        rank = tile.gather(ranked.until, ranked.chosen, 1) - ranked.behind
        ranks[ranked.rows, Block(0, blocks.columns)] = rank
        seen = ranked.total
    counts[group, Block(0, spec.experts)] = seen


def first_tokens(group: Tile, spec: RouterSpec, blocks: Blocks) -> Any:
    """The first token of each block of a program."""
    size = group_tokens(spec, blocks)
    if size == blocks.rows: return [group * size]
    return tile.range(group * size, tile.minimum((group + 1) * size, spec.tokens), blocks.rows)


class Ranked(NamedTuple):
    """Choices of a block of tokens (rows, columns); slots of each expert until each token (rows, experts) and
    in all (experts); how far a slot's place among these is below the number of those until its token."""
    rows: Block
    chosen: Tile
    until: Tile
    total: Tile
    behind: Tile


def store_choices(given: tuple[Any, ...], first: Operand, seen: Tile, spec: RouterSpec,
                  blocks: Blocks) -> Ranked:
    """Stores experts and weights of a block of tokens."""
    experts, weights, x, bias = given
    rows, columns = tile.block(first, blocks.rows), Block(0, blocks.columns)
    choice = choose_experts(x, bias, rows, spec, blocks.columns)
    experts[rows, columns], weights[rows, columns] = choice.experts, choice.weights
    taken = count_choices(choice, rows, spec)
    until = (taken if blocks.rows == 1 else tile.cumsum(taken, 0)) + seen[None, :]
    return Ranked(rows, choice.experts, until, tile.max(until, 0), count_behind(choice.experts, spec) + 1)


def arrange_alone(order: Any, offsets: Any, ranked: Ranked, spec: RouterSpec, blocks: Blocks) -> None:
    """Offsets and order of tokens that one program has."""
    offset = tile.cumsum(ranked.total, 0) - ranked.total
    offsets[Block(0, spec.experts)] = offset
    place = tile.gather(ranked.until + offset[None, :], ranked.chosen, 1) - ranked.behind
    store_order(order, ranked.rows, place, spec, blocks)


def store_order(order: Any, rows: Block, place: Tile, spec: RouterSpec, blocks: Blocks) -> None:
    """Stores slots of a block of tokens at their places."""
    token, slot = rows.indices[:, None], tile.arange(blocks.columns)[None, :]
    tile.store(order, token * spec.policy.k + slot, place,
               mask=(slot < spec.policy.k) & (token < spec.tokens))


def arrange(experts: Any, weights: Any, order: Any, offsets: Any, counts: Any, ranks: Any, spec: RouterSpec,
            blocks: Blocks, **_: Any) -> None:
    """Offsets and order, from counts and ranks."""
    group, every = tile.program_id(0), Block(0, spec.experts)
    total = before = tile.zeros((spec.experts,), dtypes.int32)
    together = order_cut(spec)[0]
    for first in tile.range(0, blocks.groups, together):
        some = tile.block(first, together)
        its = counts[some, every]
        total += tile.sum(its, 0)
        before += tile.sum(tile.where((some.indices < group)[:, None], its, 0), 0)
    offset = tile.cumsum(total, 0) - total
    if group == 0: offsets[every] = offset
    place = (offset + before)[None, :]
    size = group_tokens(spec, blocks)
    if size * blocks.columns <= MOST_SLOTS: blocks = replace(blocks, rows=size)
    for first in first_tokens(group, spec, blocks):
        order_slots(experts, ranks, order, place, first, spec, blocks)


def order_slots(experts: Any, ranks: Any, order: Any, place: Tile, first: Operand, spec: RouterSpec,
                blocks: Blocks) -> None:
    """Stores a block of tokens' slots where their experts' begin, and ranks behind."""
    rows, columns = tile.block(first, blocks.rows), Block(0, blocks.columns)
    chosen = experts[rows, columns].reshape(1, blocks.rows * blocks.columns)
    begins = tile.gather(place, chosen, 1).reshape(blocks.rows, blocks.columns)
    store_order(order, rows, begins + ranks[rows, columns], spec, blocks)


def group_tokens(spec: RouterSpec, blocks: Blocks) -> int:
    """Tokens of a program: whole blocks."""
    return -(-spec.tokens // (blocks.groups * blocks.rows)) * blocks.rows


def route_in_turn(given: tuple[Any, ...], order: Any, offsets: Any, spec: RouterSpec) -> None:
    """All of it by one program of one thread."""
    experts, weights, logits, bias = given
    for t in tile.range(spec.tokens):
        row, slots = tile.block(t, 1), Block(0, spec.policy.k)
        choice = choose_experts(logits[row, Block(0, spec.experts)], bias, row, spec, spec.policy.k)
        experts[row, slots], weights[row, slots] = choice.experts, choice.weights
    sort_in_turn(order, offsets, experts, spec)


def group_rows(order: Any, offsets: Any, experts: Any, spec: GroupRowsSpec, blocks: Blocks) -> None:
    """From experts of slots to order and offsets."""
    sort_in_turn(order, offsets, experts, spec)


def sort_in_turn(order: Any, offsets: Any, experts: Any, spec: RouterSpec | GroupRowsSpec) -> None:
    """A counting sort, one slot after the other. While slots find their places, an expert's end is the place
    of its next slot."""
    k, every, last = spec.slots // spec.tokens, isinstance(spec, RouterSpec), 0
    offsets[Block(0, spec.experts + 1)] = tile.zeros((spec.experts + 1,), dtypes.int32)
    for t in tile.range(spec.tokens):
        for j in tile.range(k):
            end = tile.load(experts, t, j, other=-1) + 1
            if every or (end > 0) & (end <= spec.experts): offsets[end] = offsets[end] + 1
    for end in tile.range(1, spec.experts + 1):
        count = offsets[end]
        offsets[end] = last
        last += count
    for t in tile.range(spec.tokens):
        for j in tile.range(k):
            end = tile.load(experts, t, j, other=-1) + 1
            if every or (end > 0) & (end <= spec.experts):
                place = offsets[end]
                order[place] = t * k + j
                offsets[end] = place + 1
            else:
                order[last] = t * k + j
                last += 1


def count_behind(chosen: Tile, spec: RouterSpec) -> Tile:
    """Slots behind each of its token that have its expert: the last one alone has several."""
    k, last = spec.policy.k, spec.experts - 1
    slots = tile.arange(chosen.shape[1])[None, :]
    same = (chosen == last) & (slots < k)
    many = tile.sum(tile.cast(same, dtypes.int32), 1)[:, None]
    return tile.where(same, tile.minimum(many - 1, k - 1 - slots), 0)


# **** a token's experts ****

class Choice(NamedTuple):
    """Experts and weights (rows, columns), and which experts are among them (rows, experts): 1, else 0."""
    experts: Tile
    weights: Tile
    taken: Tile


def choose_experts(x: Tile, bias: Any, rows: Block, spec: RouterSpec, columns: int) -> Choice:
    """The choices of a block of tokens, of their logits."""
    count, policy, every = spec.experts, spec.policy, Block(0, spec.experts)
    score = scores(tile.cast(x, dtypes.float32), spec)
    choice = score if bias is None else score + bias[every][None, :]
    start = keys_of(choice, positive=bias is None and policy.score in ("softmax", "sigmoid"))
    if policy.groups > 1: start = keep_best_groups(start, policy)
    if spec.tokens % rows.size: start = tile.where((rows.indices < spec.tokens)[:, None], start, NONE)
    chosen, keys = pick(start, spec, columns)
    taken, slots = tile.cast(keys != start, dtypes.int32), tile.arange(columns)[None, :]
    chosen = tile.where(slots < tile.sum(taken, 1)[:, None], chosen, count - 1)
    return Choice(chosen, weigh(tile.gather(score, chosen, 1), spec, slots), taken)


def count_choices(choice: Choice, rows: Block, spec: RouterSpec) -> Tile:
    """How often each expert was taken (rows, experts): the last one for what is not a number, too."""
    slots, number = tile.arange(choice.experts.shape[1])[None, :], tile.arange(spec.experts)[None, :]
    last = (choice.experts == spec.experts - 1) & (slots < spec.policy.k)
    if spec.tokens % rows.size: last = last & (rows.indices < spec.tokens)[:, None]
    many = tile.sum(tile.cast(last, dtypes.int32), 1)[:, None]
    return tile.where(number == spec.experts - 1, many, choice.taken)


def scores(x: Tile, spec: RouterSpec) -> Tile:
    """Scores of logits, float32."""
    kind = spec.policy.score
    if kind == "sigmoid": return sigmoid(x)
    if kind != "softmax": return x
    made = exp(x - tile.max(x, 1)[:, None])
    return made / tile.sum(made, 1)[:, None]


def exp(x: Tile) -> Tile:
    """e^x: of x log2(e) what float32 leaves out is a factor next to 1."""
    power = x * LOG2_E
    rest = tile.fma(x, LOG2_E_REST, tile.fma(x, LOG2_E, -power)) * math.log(2)
    made = tile.exp2(power)
    return tile.where((made > 0.0) & (made < math.inf), tile.fma(made, rest, made), made)


def sigmoid(x: Tile) -> Tile:
    """1 / (1 + e^-x)."""
    return 1.0 / (exp(-x) + 1.0)


def keys_of(x: Tile, positive: bool) -> Tile:
    """Larger for a larger number; −0 is as large as 0. Bits of what is `positive` are keys already."""
    bits = tile.bitcast(x if positive else x + 0.0, dtypes.int32)
    return tile.where(x != x, NONE, bits if positive else bits ^ (bits >> 31 & 0x7FFFFFFF))


def keep_best_groups(keys: Tile, policy: Policy) -> Tile:
    """Keys of groups that are not among the best become those of −inf."""
    (rows, count), groups = keys.shape, policy.groups
    within = count // groups
    if within & within - 1:     # a group's experts are no lanes side by side
        own, group = (tile.arange(count) // within)[None, :], tile.arange(groups)[None, :]
        score = tile.zeros((rows, groups))
        for g in range(groups):
            its = group_score(tile.where(own == g, keys, NONE), policy)
            score = tile.where(group == g, its[:, None], score)
        kept = tile.cast(group_ranks(score) < policy.top_groups, dtypes.int32)
        return tile.where(tile.gather(kept, own.broadcast_to(rows, count), 1) != 0, keys, LEAST)
    keys = keys.reshape(rows, groups, within)
    kept = group_ranks(group_score(keys, policy)) < policy.top_groups
    return tile.where(kept[:, :, None], keys, LEAST).reshape(rows, count)


def group_score(keys: Tile, policy: Policy) -> Tile:
    """The score of the choices along the last axis: the largest, or the sum of the two largest."""
    axis, within = keys.ndim - 1, keys.shape[-1]
    top = tile.max(keys, axis, keepdims=True)
    score = number_of(top).reshape(*keys.shape[:-1])
    if policy.group_score == "max": return score
    number = tile.arange(within).reshape(*[1] * axis, within)
    first = tile.min(tile.where(keys == top, number, within), axis, keepdims=True)
    return score + number_of(tile.max(tile.where(number == first, NONE, keys), axis))


def group_ranks(score: Tile) -> Tile:
    """The rank of each group (rows, groups), 0 the best; of equal ones the first is better."""
    rows, groups = score.shape
    group, rank = tile.arange(groups)[None, :], tile.zeros((rows, groups), dtypes.int32)
    for other in range(groups):
        its = tile.gather(score, tile.full((rows, 1), other, dtypes.int32), 1)
        rank += tile.cast((its > score) | ((its == score) & (group > other)), dtypes.int32)
    return rank


def number_of(key: Tile) -> Tile:
    """The number of a key; −inf of none."""
    bits = tile.maximum(key, LEAST)
    return tile.bitcast(bits ^ (bits >> 31 & 0x7FFFFFFF), dtypes.float32)


def pick(start: Tile, spec: RouterSpec, columns: int) -> tuple[Tile, Tile]:
    """The k choices (rows, columns), and keys that are NONE where experts were chosen."""
    rows, count = start.shape
    number, slots = tile.arange(count)[None, :], tile.arange(columns)[None, :]
    chosen, keys = tile.full((rows, columns), count - 1, dtypes.int32), start
    for j in tile.range(spec.policy.k, unroll=False):
        found = tile.min(tile.where(keys == tile.max(keys, 1)[:, None], number, count), 1)[:, None]
        chosen = tile.where(slots == j, found, chosen)
        keys = tile.where(number == found, NONE, keys)
    return chosen, keys


def weigh(score: Tile, spec: RouterSpec, slots: Tile) -> Tile:
    """Weights of the chosen experts' scores."""
    policy = spec.policy
    there = slots < policy.k
    if policy.score == "chosen":
        score = exp(score - tile.max(tile.where(there, score, -math.inf), 1)[:, None])
        score = score / tile.sum(tile.where(there, score, 0.0), 1)[:, None]
    if policy.score == "chosen_sigmoid": score = sigmoid(score)
    if policy.renormalize: score = score / (tile.sum(tile.where(there, score, 0.0), 1)[:, None] + EPSILON)
    return score if policy.scale == 1 else score * policy.scale


# **** schedules ****

def grid(spec: RouterSpec, blocks: Blocks) -> Grid:
    """A program for each group of tokens."""
    return blocks.groups, 1, 1


def scratch(spec: RouterSpec, blocks: Blocks) -> dict[str, tuple[int, int]]:
    """Counts and ranks, where there are several programs."""
    if blocks.groups == 1: return {}
    return {"counts": (blocks.groups, spec.experts), "ranks": (spec.tokens, spec.policy.k)}


def cut(spec: RouterSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    """All tokens on a CPU, or few on a GPU; of many some of each warp, at once where registers have room for
    their keys, else in blocks by which programs have the fewest tokens."""
    if target.kind == "cpu": return [(Blocks(spec.tokens, ONE), 1)]
    columns, keys = max(2, power(spec.policy.k)), -(-spec.experts // 32)
    if spec.tokens <= ALONE:
        rows, most = power(spec.tokens), ALONE if spec.experts <= MANY else ALONE // 2
        return [(Blocks(rows, columns), max(1, min(rows * min(32, power(spec.experts)) // 32, most)))]
    sms = target.sm_count or gpu_model_for(target.arch).sm_count
    size = each = -(-spec.tokens // (WARPS * sms))
    if each * keys > MOST_KEYS:
        some = range(max(1, LOOP_KEYS // keys), 0, -1)
        each = min(some, key=lambda count: -(-size // count) * count)
        size = -(-size // each) * each
    return [(Blocks(WARPS * each, columns, -(-spec.tokens // (WARPS * size))), WARPS)]


def order_cut(spec: RouterSpec) -> tuple[int, int]:
    """Programs whose counts the second launch adds up at a time, and its warps."""
    experts = power(spec.experts)
    if experts <= 128: return 64, 8
    return (8192 // experts, 8) if spec.tokens <= 1024 else (64 if experts <= 256 else 32, 16)


def problems(spec: RouterSpec | GroupRowsSpec, kind: str) -> list[str]:
    """Why a router has no kernel; empty when it has one."""
    if isinstance(spec, GroupRowsSpec) or kind == "cpu":
        return [f"{spec.experts} experts, at most {MOST_ON_CPU}"] * (spec.experts > MOST_ON_CPU)
    found = {"experts": spec.experts, "experts of a token": spec.policy.k, "groups": spec.policy.groups}
    return [f"{count} {name}, at most {MOST[name]}" for name, count in found.items() if count > MOST[name]]


def power(count: int) -> int:
    """The least power of two not below a number."""
    return 1 << (count - 1).bit_length()


def vector_of(spec: RouterSpec) -> int:
    """Experts that a thread has side by side."""
    vector = 1
    while vector * spec.dtype.itemsize < 16 and spec.experts % (64 * vector) == 0: vector *= 2
    return vector


ARRANGE = TileProgram("order", RouterSpec, arrange, grid,
                      lambda spec, target: [(Blocks(), order_cut(spec)[1])], lambda spec: spec.slots,
                      scratch=scratch)
PROGRAMS = (TileProgram("router", RouterSpec, route, grid, cut, lambda spec: spec.tokens * spec.experts,
                        problems, fixed=True, vector=vector_of, scratch=scratch,
                        following=ARRANGE),
            TileProgram("group_rows", GroupRowsSpec, group_rows, lambda spec, blocks: (1, 1, 1),
                        lambda spec, target: [(Blocks(spec.tokens), 1)], lambda spec: spec.slots,
                        problems, kinds=("cpu",), by_rows=("experts",)))
