"""The router of a mixture of experts (spec.py) as a program of the tile language.

    a program has some tokens, and goes through them in blocks of rows:
        scores, choices
        keys: choices as integers in the order of numbers, NONE for NaN
        keys of groups that are not among the best become those of −inf
        k times: the largest key, the lowest number that has it; its key is NONE then
        weights of these
        ranks: how many slots before have the slot's expert
    one program: offsets; order[offset + rank] = slot
    several: counts and ranks to the workspace, and a second launch, whose programs have the same tokens:
        counts of all programs, and of those before; offsets; order[offset + count before + rank] = slot

On a CPU one program has all tokens, one after the other, and puts one slot after the other in order.

Where fewer than k choices are numbers, the last expert takes the place of those that are not, and its weight
is what its score makes it: NaN goes no further than the token that has it.

Counts are integers, added in the order of tokens, so that the order of slots does not depend on the order in
which programs run. Nothing waits for another program, and no memory has to be zero before.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
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
LOG2_E = math.log2(math.e)
LOG2_E_REST = 1.9259629911e-8       # of LOG2_E, beyond float32
ONE = 1                 # column of blocks that one thread goes through
WARPS = 16              # of a program where there are several
MOST_ROWS = 32          # tokens that these go through at a time
ALONE = 32              # tokens that one program routes and orders: with 64 two launches take less time
ORDER_WARPS = 8         # of the second launch
MANY = 256              # experts of which a thread of 32 warps has the registers for keys and scores
TOGETHER = 64           # programs whose counts are added up at a time
MOST = {"experts": 512, "experts of a token": 32, "groups": 32}     # 16 experts of a lane, of which each may be a choice
MOST_ON_CPU = 1 << 15       # experts, whose scores and keys lie on a stack
NONE = -1 << 31                     # the key of no number
LEAST = -0x7F800001                 # the key of −inf


def route(experts: Any, weights: Any, order: Any, offsets: Any, logits: Any, spec: RouterSpec, blocks: Blocks,
          bias: Any = None, counts: Any = None, ranks: Any = None) -> None:
    """From logits [T, E] to experts and weights, and to order and offsets, or to counts [programs, E] and ranks
    [T, k]."""
    if blocks.columns == ONE: return route_in_turn(experts, weights, order, offsets, logits, spec, bias)
    group, size = tile.program_id(0), group_tokens(spec, blocks)
    if group == 0: offsets[spec.experts] = spec.slots
    seen = tile.zeros((spec.experts,), dtypes.int32)
    if size == blocks.rows:
        ranked = store_choices((experts, weights, logits, bias), group * size, seen, spec, blocks)
        seen = ranked.count
        if blocks.groups == 1: return arrange_alone(order, offsets, ranked, spec, blocks)
        ranks[ranked.rows, Block(0, blocks.columns)] = tile.gather(ranked.until, ranked.chosen, 1) - ranked.behind
    else:
        for first in tile.range(group * size, tile.minimum((group + 1) * size, spec.tokens), blocks.rows):
            ranked = store_choices((experts, weights, logits, bias), first, seen, spec, blocks)
            ranks[ranked.rows, Block(0, blocks.columns)] = tile.gather(ranked.until, ranked.chosen, 1) - ranked.behind
            seen = ranked.count
    counts[group, Block(0, spec.experts)] = seen


class Ranked(NamedTuple):
    """Choices of a block of tokens (rows, columns); slots of each expert until each token (rows, experts), and in all
    (experts); how many slots of its expert, itself among them, are behind a slot's place among these."""
    rows: Block
    chosen: Tile
    until: Tile
    count: Tile
    behind: Tile


def store_choices(given: tuple[Any, ...], first: Operand, seen: Tile, spec: RouterSpec, blocks: Blocks) -> Ranked:
    """Stores experts and weights of a block of tokens."""
    experts, weights, logits, bias = given
    rows, columns = tile.block(first, blocks.rows), Block(0, blocks.columns)
    chosen, weight, taken = choose_experts(logits, bias, rows, spec, blocks.columns)
    experts[rows, columns], weights[rows, columns] = chosen, weight
    until = (taken if blocks.rows == 1 else tile.cumsum(taken, 0)) + seen[None, :]
    return Ranked(rows, chosen, until, tile.max(until, 0), repeated(chosen, spec) + 1)


def arrange_alone(order: Any, offsets: Any, ranked: Ranked, spec: RouterSpec, blocks: Blocks) -> None:
    """Offsets and order of tokens that one program has."""
    offset = tile.cumsum(ranked.count, 0) - ranked.count
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
    group, size, every = tile.program_id(0), group_tokens(spec, blocks), Block(0, spec.experts)
    total = before = tile.zeros((spec.experts,), dtypes.int32)
    for first in tile.range(0, blocks.groups, TOGETHER):
        some = tile.block(first, TOGETHER)
        count = counts[some, every]
        total += tile.sum(count, 0)
        before += tile.sum(tile.where((some.indices < group)[:, None], count, 0), 0)
    offset = tile.cumsum(total, 0) - total
    if group == 0: offsets[every] = offset
    place = (offset + before)[None, :]
    if size == blocks.rows: return order_slots(experts, ranks, order, place, group * size, spec, blocks)
    for first in tile.range(group * size, tile.minimum((group + 1) * size, spec.tokens), blocks.rows):
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


def route_in_turn(experts: Any, weights: Any, order: Any, offsets: Any, logits: Any, spec: RouterSpec,
                  bias: Any) -> None:
    """All of it by one program of one thread."""
    for t in tile.range(spec.tokens):
        chosen, weight, _ = choose_experts(logits, bias, tile.block(t, 1), spec, spec.policy.k)
        experts[t, Block(0, spec.policy.k)] = chosen.reshape(spec.policy.k)
        weights[t, Block(0, spec.policy.k)] = weight.reshape(spec.policy.k)
    sort_in_turn(order, offsets, experts, spec)


def group_rows(order: Any, offsets: Any, experts: Any, spec: GroupRowsSpec, blocks: Blocks) -> None:
    """From experts of slots to order and offsets."""
    sort_in_turn(order, offsets, experts, spec)


def sort_in_turn(order: Any, offsets: Any, experts: Any, spec: RouterSpec | GroupRowsSpec) -> None:
    """A counting sort, one slot after the other. While slots find their places, an expert's end is the place of its
    next slot."""
    k, ends = spec.slots // spec.tokens, tile.block(1, spec.experts)
    every = isinstance(spec, RouterSpec)
    offsets[Block(0, spec.experts + 1)] = tile.zeros((spec.experts + 1,), dtypes.int32)
    for t in tile.range(spec.tokens):
        for j in tile.range(k):
            end = tile.load(experts, t, j, other=-1) + 1
            if every or (end > 0) & (end <= spec.experts): offsets[end] = offsets[end] + 1
    count = offsets[ends]
    until = tile.cumsum(count, 0)
    offsets[ends] = until - count
    last = tile.max(until, 0)
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


def choose_experts(logits: Any, bias: Any, rows: Block, spec: RouterSpec, columns: int) -> tuple[Tile, Tile, Tile]:
    """Experts and weights of a block of tokens (rows, columns), and how often each expert was taken (rows, experts)."""
    count, policy = spec.experts, spec.policy
    every = Block(0, count)
    score = scores(tile.cast(logits[rows, every], dtypes.float32), spec)
    choice = score if bias is None else score + bias[every][None, :]
    start = keys_of(choice, positive=bias is None and policy.score in ("softmax", "sigmoid"))
    if policy.groups > 1: start = keep_best_groups(start, policy)
    if spec.tokens % rows.size: start = tile.where((rows.indices < spec.tokens)[:, None], start, NONE)
    chosen, keys = pick(start, spec, columns)
    taken = tile.cast(keys != start, dtypes.int32)
    chosen = tile.where(tile.arange(columns)[None, :] < tile.sum(taken, 1)[:, None], chosen, count - 1)
    number = tile.arange(count)[None, :]
    slots = tile.arange(columns)[None, :]
    last = tile.sum(tile.cast((chosen == count - 1) & (slots < policy.k), dtypes.int32), 1)
    if spec.tokens % rows.size: last = tile.where(rows.indices < spec.tokens, last, 0)
    taken = tile.where(number == count - 1, last[:, None], taken)
    return chosen, weigh(tile.gather(score, chosen, 1), spec, slots), taken


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
    rows, count = keys.shape
    groups, within = policy.groups, count // policy.groups
    keys = keys.reshape(rows, groups, within)
    top = tile.max(keys, 2)
    score = number_of(top)
    if policy.group_score == "sum2":
        number = tile.arange(within)[None, None, :]
        first = tile.min(tile.where(keys == top[:, :, None], number, within), 2)[:, :, None]
        score = score + number_of(tile.max(tile.where(number == first, NONE, keys), 2))
    group, rank = tile.arange(groups)[None, :], tile.zeros((rows, groups), dtypes.int32)
    for other in range(groups):
        its = tile.gather(score, tile.full((rows, 1), other, dtypes.int32), 1)
        rank += tile.cast((its > score) | ((its == score) & (group > other)), dtypes.int32)
    return tile.where((rank < policy.top_groups)[:, :, None], keys, LEAST).reshape(rows, count)


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


def repeated(chosen: Tile, spec: RouterSpec) -> Tile:
    """Slots of the token behind, with the same expert: of the last one alone."""
    k, last = spec.policy.k, spec.experts - 1
    slots = tile.arange(chosen.shape[1])[None, :]
    same = (chosen == last) & (slots < k)
    many = tile.sum(tile.cast(same, dtypes.int32), 1)[:, None]
    return tile.where(same, tile.minimum(many - 1, k - 1 - slots), 0)


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


def grid(spec: RouterSpec, blocks: Blocks) -> Grid:
    """A program for each group of tokens."""
    return blocks.groups, 1, 1


def scratch(spec: RouterSpec, blocks: Blocks) -> dict[str, tuple[int, int]]:
    """Counts and ranks, where there are several programs."""
    if blocks.groups == 1: return {}
    return {"counts": (blocks.groups, spec.experts), "ranks": (spec.tokens, spec.policy.k)}


def cut(spec: RouterSpec, target: Any) -> Sequence[tuple[Blocks, int]]:
    if target.kind == "cpu": return [(Blocks(spec.tokens, ONE), 1)]
    lanes, columns = min(32, power(spec.experts)), max(2, power(spec.policy.k))
    if spec.tokens <= ALONE:
        rows = power(spec.tokens)
        most = ALONE if spec.experts <= MANY else ALONE // 2
        return [(Blocks(rows, columns), max(1, min(rows * lanes // 32, most)))]
    sms = target.sm_count or gpu_model_for(target.arch).sm_count
    rows = WARPS
    while rows * sms < spec.tokens and rows < MOST_ROWS: rows *= 2
    size = -(-spec.tokens // (rows * sms)) * rows
    return [(Blocks(rows, columns, -(-spec.tokens // size)), WARPS)]


def problems(spec: RouterSpec, kind: str) -> list[str]:
    """Why a router has no kernel; empty when it has one."""
    if kind == "cpu": return [f"{spec.experts} experts, at most {MOST_ON_CPU}"] * (spec.experts > MOST_ON_CPU)
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


ARRANGE = TileProgram("order", RouterSpec, arrange, grid, lambda spec, target: [(Blocks(), ORDER_WARPS)],
                      lambda spec: spec.slots, scratch=scratch)
PROGRAMS = (TileProgram("router", RouterSpec, route, grid, cut, lambda spec: spec.tokens * spec.experts,
                        problems, vector=vector_of, scratch=scratch, following=ARRANGE),
            TileProgram("group_rows", GroupRowsSpec, group_rows, lambda spec, blocks: (1, 1, 1),
                        lambda spec, target: [(Blocks(spec.tokens), 1)], lambda spec: spec.slots, kinds=("cpu",)))
