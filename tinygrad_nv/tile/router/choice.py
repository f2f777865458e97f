"""A token's experts and their weights, by a warp.

Protocol: lane l has experts l, l + 32, …; a `TokenRouter` is made once, `choose_expert(token)` is code for a
token.

    scores, choices                          of each expert, in registers
    keys: choices as u32 in the order of numbers, 0 for NaN and beyond the last expert
    −inf for groups that are not among the best: redux of keys for each group
    k times: the largest key of all lanes (redux), the lowest number that has it (redux), its key is 0 then
    lane j has choice j: its score by shuffles, its weight

Where fewer than k choices are numbers, the last expert takes the place of those that are not, and its weight
is what its score makes it: NaN goes no further than the token that has it.
"""
from __future__ import annotations

import math

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.ptx.builder import Kernel, Value
from tinygrad_nv.tile.access import advance
from tinygrad_nv.tile.router.spec import EPSILON
from tinygrad_nv.tile.router.templates import RouterPlan
from tinygrad_nv.tile.sampling.threshold_sift import order_bits

LOG2_E = math.log2(math.e)
LOG2_E_REST = 1.9259629911e-8       # of LOG2_E, beyond float32
LEAST_KEY = 0x007FFFFF              # of −inf


class TokenRouter:
    """Scores of the experts that a lane has, and its choice."""

    def __init__(self, kb: Kernel, plan: RouterPlan, logits: Value, bias: Value | None) -> None:
        self.kb, self.spec, self.policy, self.logits = kb, plan.spec, plan.spec.policy, logits
        self.lane, self.count = kb.special("laneid"), plan.lanes
        self.numbers = [self.lane + 32 * i if i else self.lane for i in range(self.count)]
        last = self.spec.experts % 32
        self.inside: list[Value | None] = [None] * self.count
        if last: self.inside[-1] = self.lane < last
        self.bias = [] if bias is None else self.load_numbers(bias, dtypes.float32, 0.0)

    def choose_expert(self, token: Value) -> tuple[Value, Value]:
        """The expert of lane j, which is choice j, and its weight."""
        kb, size = self.kb, self.spec.dtype.itemsize
        start = advance(kb, self.logits, token, self.spec.experts * size)
        scores = self.scores(self.load_numbers(start, self.spec.dtype, -math.inf))
        choices = [x + more for x, more in zip(scores, self.bias, strict=True)] if self.bias else scores
        keys = [self.key(x, there) for x, there in zip(choices, self.inside, strict=True)]
        if self.policy.groups > 1: self.keep_best_groups(keys)
        expert = self.pick(keys)
        return expert, self.weight(self.score_of(scores, expert))

    def load_numbers(self, start: Value, dtype: DType, outside: float) -> list[Value]:
        """Numbers of the lane's experts, float32."""
        kb, made = self.kb, []
        size = 4 if dtype == dtypes.float32 else 2
        at = advance(kb, start, self.lane, size)
        for i, there in enumerate(self.inside):
            wide = kb.reg("f32", outside)
            if size == 4: kb.emit("ld.global.f32", wide, at.at(128 * i), guard=there)
            else:
                half = kb.reg("b16")
                kb.emit("ld.global.b16", half, at.at(64 * i), guard=there)
                kb.emit(f"cvt.f32.{'bf16' if dtype == dtypes.bfloat16 else 'f16'}", wide, half, guard=there)
            made.append(wide)
        return made

    # **** scores ****

    def scores(self, x: list[Value]) -> list[Value]:
        """Returns the scores of the lane's experts, in float32."""
        if self.policy.score == "sigmoid": return [self.sigmoid(each) for each in x]
        if self.policy.score != "softmax": return x
        top = x[0]
        for each in x[1:]: top = self.larger(top, each)
        top = self.over_lanes("max.f32", top, 32)
        powers = [self.exp(each - top) for each in x]
        total = powers[0]
        for each in powers[1:]: total = total + each
        total = self.over_lanes("add.f32", total, 32)
        return [each / total for each in powers]

    def exp(self, x: Value) -> Value:
        """e^x: of x log2(e) what float32 leaves out is a factor next to 1."""
        kb = self.kb
        power, rest, made = kb.regs("f32", 3)
        kb.emit("mul.f32", power, x, LOG2_E)
        kb.emit("neg.f32", rest, power)
        kb.emit("fma.rn.f32", rest, x, LOG2_E, rest)
        kb.emit("fma.rn.f32", rest, x, LOG2_E_REST, rest)
        kb.emit("ex2.approx.f32", made, power)
        kb.emit("mul.f32", rest, rest, math.log(2))
        # where it is 0 or infinite the rest may be NaN
        kb.emit("fma.rn.f32", made, made, rest, made, guard=(made > 0.0) & (made < math.inf))
        return made

    def sigmoid(self, x: Value) -> Value:
        """1 / (1 + e^-x)."""
        made = self.kb.reg("f32")
        below = self.exp(-x)
        self.kb.emit("rcp.rn.f32", made, below + 1.0)
        return made

    def larger(self, x: Value, y: Value) -> Value:
        made = self.kb.reg("f32")
        self.kb.emit("max.f32", made, x, y)
        return made

    def over_lanes(self, opcode: str, value: Value, lanes: int) -> Value:
        """All of the first so many lanes put together, in each of them."""
        while lanes > 1:
            lanes //= 2
            other, made = self.kb.regs("f32", 2)
            self.kb.emit("shfl.sync.bfly.b32", other, value, lanes, 31, -1)
            self.kb.emit(opcode, made, value, other)
            value = made
        return value

    # **** choices ****

    def key(self, x: Value, inside: Value | None) -> Value:
        """Larger for a larger number; 0 for none."""
        kb, bits, number = self.kb, self.kb.reg("b32"), self.kb.reg("pred")
        kb.emit("mov.b32", bits, x + 0.0)   # −0 is as large as 0
        kb.emit("setp.num.f32", number, x, x)
        if inside is not None: number = number & inside
        return kb.select(number, order_bits(kb, bits), 0, "u32")

    def redux(self, opcode: str, value: Value) -> Value:
        made = self.kb.reg("u32")
        self.kb.emit(f"redux.sync.{opcode}.u32", made, value, -1)
        return made

    def largest(self, keys: list[Value]) -> tuple[Value, Value]:
        """The largest key of all lanes, and the lowest number that has it."""
        kb, best, at = self.kb, keys[0], self.numbers[0]
        for key, number in zip(keys[1:], self.numbers[1:], strict=True):
            at = kb.select(key > best, number, at)
            made = kb.reg("u32")
            kb.emit("max.u32", made, best, key)
            best = made
        top = self.redux("max", best)
        return top, self.redux("min", kb.select(best == top, at, 0xFFFFFFFF, "u32"))

    def pick(self, keys: list[Value]) -> Value:
        """Choice j, in lane j."""
        kb, last = self.kb, self.spec.experts - 1
        mine = kb.reg("u32", last)
        with kb.comment("the largest choices"), kb.loop(0, self.policy.k, kind="u32") as j:
            kb.nounroll()
            top, number = self.largest(keys)
            found = kb.select(top == 0, last, number, "u32")
            kb.emit("mov.u32", mine, found, guard=self.lane == j)
            for key, own in zip(keys, self.numbers, strict=True):
                kb.emit("mov.u32", key, 0, guard=found == own)
        return mine

    def keep_best_groups(self, keys: list[Value]) -> None:
        """Keys of groups that are not among the best become those of −inf."""
        kb, policy = self.kb, self.policy
        within = self.spec.experts // policy.groups
        own = [number // within for number in self.numbers]
        with kb.comment("scores of groups"):
            found = [self.group_score(keys, own, g, within) for g in range(policy.groups)]
        rank, mine = kb.reg("u32", 0), kb.reg("f32", found[0])
        for g, score in enumerate(found[1:], 1): kb.emit("mov.f32", mine, score, guard=self.lane == g)
        for g, score in enumerate(found):
            before = (score > mine) | ((score == mine) & (self.lane > g))
            kb.emit("add.u32", rank, rank, 1, guard=before)
        kept = kb.reg("b32")
        kb.emit("vote.sync.ballot.b32", kept, rank < policy.top_groups, -1)
        for key, group in zip(keys, own, strict=True):
            kb.emit("mov.u32", key, LEAST_KEY, guard=((kept >> group) & 1) == 0)
        if self.inside[-1] is not None: kb.emit("mov.u32", keys[-1], 0, guard=~self.inside[-1])

    def group_score(self, keys: list[Value], own: list[Value], g: int, within: int) -> Value:
        """The largest of a group's choices, or the sum of the two largest, float32 in all lanes."""
        kb, first = self.kb, g * within // 32
        last = (g * within + within - 1) // 32
        some, at = [], []
        for i in range(first, last + 1):
            whole = g * within <= 32 * i and 32 * i + 32 <= (g + 1) * within
            some.append(keys[i] if whole else kb.select(own[i] == g, keys[i], 0, "u32"))
            at.append(self.numbers[i])
        saved, self.numbers = self.numbers, at
        top, number = self.largest(some)
        if self.policy.group_score == "sum2":
            rest = [kb.select(number == each, 0, key, "u32") for each, key in zip(at, some, strict=True)]
            second = self.largest(rest)[0]
        self.numbers = saved
        return self.number_of(top) if self.policy.group_score == "max" else \
            self.number_of(top) + self.number_of(second)

    def number_of(self, key: Value) -> Value:
        """The number of a key; −inf of none."""
        kb, bits, made = self.kb, self.kb.reg("u32"), self.kb.reg("f32")
        kb.emit("max.u32", bits, key, LEAST_KEY)
        positive = bits >= 1 << 31
        kb.emit("mov.b32", made, kb.select(positive, bits ^ 1 << 31, ~bits, "u32"))
        return made

    # **** weights ****

    def score_of(self, scores: list[Value], expert: Value) -> Value:
        """The score of the lane's choice."""
        kb, made = self.kb, self.kb.reg("f32", 0.0)
        lane, number = expert & 31, expert >> 5
        for i, score in enumerate(scores):
            there = kb.reg("f32")
            kb.emit("shfl.sync.idx.b32", there, score, lane, 31, -1)
            kb.emit("mov.f32", made, there, guard=number == i)
        return made

    def weight(self, score: Value) -> Value:
        """Returns the weight of the lane's choice."""
        kb, policy = self.kb, self.policy
        lanes = 1 << (policy.k - 1).bit_length()
        there = self.lane < policy.k
        if policy.score == "chosen":
            score = self.exp(score - self.over_lanes("max.f32", kb.select(there, score, -math.inf), lanes))
            score = score / self.over_lanes("add.f32", kb.select(there, score, 0.0), lanes)
        if policy.score == "chosen_sigmoid": score = self.sigmoid(score)
        if policy.renormalize:
            score = score / (self.over_lanes("add.f32", kb.select(there, score, 0.0), lanes) + EPSILON)
        return score if policy.scale == 1 else score * policy.scale
