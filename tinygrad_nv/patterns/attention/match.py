"""Attention: softmax(score(q kᵀ)) v in a graph, however it is written, to one kernel of ours.

Protocol. `rewrite` is a rewrite of hooks/, before that of matmuls. It looks at every product one
side of which is, through movement, casts and CONTIGUOUS, an exponential, normalised before the product
(e · 1/Σe @ v) or after it ((e @ v) · 1/Σe):

    end ← … ← REDUCE(ADD) of weights · v           the second product
    weights = EXP2(exponent) · RECIPROCAL(Σ)       weights.py
    exponent → … → REDUCE(ADD) of q · k            the first product, through the score: score.py

All indices are taken in one `Space` (patterns/index.py), from the end's to those of q, k and v; dims.py
reads strides off them, mask.py finds bands. A softmax does not change by what is added to a row, so
the maximum may be any, or none. Nothing between the products may be used elsewhere: who asks for the weights
gets them from tinygrad's kernels.

Numerics: sums, scores and softmax are float32, and weights are rounded to v's dtype, whatever 16-bit casts
the graph has between them; rows that see nothing are 0 (in tinygrad's they are NaN). Operands of float32 are
multiplied as they are, without tensor cores, whatever ALLOW_TF32 says.

Extents that are not numbers are arguments of the launch: s_q, s_kv and start, each a constant and whole
multiples of variables (tile/launch.py: `Integer`). What no template takes is left as it is, for
products and tinygrad, and `program.miss` says why. NV_ATTENTION=0 leaves all. On a CPU kernels are
cpu/attention/flash.py's.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv import config
from tinygrad_nv.patterns import building, program
from tinygrad_nv.patterns.attention.attempt import Attempt, call_kernel, make_first
from tinygrad_nv.patterns.attention.dims import Ranges
from tinygrad_nv.patterns.attention.score import FLOATS, Score
from tinygrad_nv.patterns.attention.spec import Found, Reading, make_spec
from tinygrad_nv.patterns.attention.weights import (
    NAME,
    first_product,
    strip_views,
    tail,
    weights,
    weights_operand,
)
from tinygrad_nv.patterns.contraction import (
    MatmulReduce,
    Side,
    Unsupported,
    arithmetic,
    is_storage,
    product,
    side,
)
from tinygrad_nv.patterns.decode.match import choose_decode
from tinygrad_nv.patterns.epilogue import Unfused
from tinygrad_nv.patterns.index import Indices, Space
from tinygrad_nv.patterns.positions import is_variable
from tinygrad_nv.patterns.rewriting import rebuilt, write_through
from tinygrad_nv.patterns.target import Chosen, Target, choose, target_of
from tinygrad_nv.runtime.observe import ranges


def rewrite(sink: UOp) -> UOp:
    """The graph with calls for its attentions."""
    if not config.get("NV_ATTENTION"): return sink
    matcher = _AttentionMatcher(sink)
    matches = matcher.matches()
    if not matches: return sink

    def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
        if (match := matches.get(node)) is None: return None
        inputs = [new(x) for x in match.found.inputs]
        result = building.attempt(
            NAME, node, lambda: call_kernel(match.attempt, match.found, match.how, inputs)[0])
        if result is None: return None
        ranges.carry_region(match.region, result)
        return result
    return write_through(rebuilt(matcher.nodes, change))


@dataclass(frozen=True)
class AttentionMatch:
    """An attention, ready to be called: what lies inside, what it is, and how it is made: by one kernel, or
    as a decode attention, divided along its keys."""
    attempt: Attempt
    region: frozenset[UOp]
    found: Found
    how: Chosen


# **** matching ****

class _AttentionMatcher:
    """One graph: who uses what, and which nodes end attentions."""

    def __init__(self, sink: UOp) -> None:
        self.nodes = tuple(sink.toposort(enter_calls=False))
        self.ends: dict[UOp, AttentionMatch] = {}

    def matches(self) -> dict[UOp, AttentionMatch]:
        """The matches, by their ends."""
        if not any(node.op is Ops.EXP2 for node in self.nodes): return {}
        products = [(one, operand) for node in self.nodes if node.op is Ops.REDUCE
                    and (one := product(node)) is not None and (operand := weights_operand(one)) is not None
                    and target_of(node.device) is not None]
        if not products: return {}
        self.variables = {node.expr: node for node in self.nodes if is_variable(node)}
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.consumers: dict[UOp, list[UOp]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for one in dict.fromkeys(node.src):
                if one in self.consumers: self.consumers[one].append(node)
        for one, operand in products: self.match(one, operand)
        return self.ends

    def is_memory(self, node: UOp) -> bool: return node in self.ends or is_storage(node)

    def match(self, second: MatmulReduce, operand: int) -> None:
        """Takes in an attention that ends in a product, or says why not."""
        target = target_of(second.total.device)
        assert target is not None

        def take(attempt: Attempt) -> None:
            self.ends[attempt.end] = self.make_match(second, operand, attempt, target)
        attempts = [Attempt(end, rows) for end in self.candidates(second.total) for rows in (True, False)]
        if reason := make_first(attempts, take): program.miss(NAME, second.total, reason)

    def candidates(self, total: UOp) -> list[UOp]:
        """Returns the places where an attention may end, best first: where its result is stored or read,
        since a product reads it best as it lies then; else after the last arithmetic."""
        found, node = [total], total
        while len(users := self.consumers[node]) == 1 and _is_tail(users[0], node):
            node = users[0]
            found.append(node)
        worked = [one for one in found if one.op not in GroupOp.Movement and one.dtype in FLOATS]
        if not worked: return [total]  # float64: why not is said where operands are read
        narrow = next((one for one in worked if one.dtype != dtypes.float32), worked[-1])
        return list(dict.fromkeys([node, worked[-1], narrow, total]))

    def inside(self, root: UOp, end: UOp) -> frozenset[UOp]:
        """Returns the nodes between a product and the end. Raises `Unsupported` where something outside uses
        it."""
        after = {root}
        for node in self.nodes[self.place[root] + 1:self.place[end] + 1]:
            if any(s in after for s in node.src): after.add(node)
        kept, waiting = {end}, [end]
        while waiting:
            for s in waiting.pop().src:
                if s in after and s not in kept:
                    kept.add(s)
                    waiting.append(s)
        for node in kept - {end}:
            if any(user not in kept for user in self.consumers[node]):
                what = "q kᵀ is" if node is root else f"a {node.op.name} between q kᵀ and the result is"
                raise Unsupported(f"{what} used elsewhere too", final=False)
        return frozenset(kept)

    def make_match(self, second: MatmulReduce, operand: int, attempt: Attempt,
                   target: Target) -> AttentionMatch:
        """The match of an attempt. Raises `Unsupported`, `Unfused` or `NotAffine` where there is none."""
        space, end = Space(), attempt.end
        kept = space.ranges(end.shape)
        out = space.lies([end.shape[i] for i in attempt.order], tuple(kept[i] for i in attempt.order))
        columns = space.ranges(second.total.src[0].shape[:second.total.arg[1]])
        at, divisor = tail(space, second.total, end, kept)
        at = second.indices(space, columns + at)
        w, v = second.mul.src[operand], second.mul.src[1 - operand]
        exponential, inside = weights(space, w, space.over(second.mul.shape, w.shape, at), columns, divisor)
        numbers = frozenset(r for index in columns for r in index.strides)
        first = first_product(exponential)
        region = self.inside(first.total, end)
        score = Score(space, first.total, exponential.src[0], region, inside, self.is_memory, numbers)
        if len(score.paths) != 1: raise Unfused(f"scores of {len(score.paths)} elements of q kᵀ")
        sides = _sides(space, first, score.paths[0], numbers, self.is_memory)
        value = side(space, v, space.over(second.mul.shape, v.shape, at), second.strip, self.is_memory)
        _check(first, second, (*sides[:2], value))
        counted = Ranges(tuple(numbers), sides[2], frozenset(), order_ranges(space, inside, numbers))
        made = make_spec(Reading(space, end, score, (*sides[:2], value), out, counted, self.variables),
                     attempt.rows)
        how = choose_decode(made, target) or choose(made.spec, target, made.integers)
        return AttentionMatch(attempt, region, made, how)


def _is_tail(user: UOp, node: UOp) -> bool:
    """Whether a kernel can do what follows a result: a cast, movement that keeps its elements, a division by
    the sum of its weights."""
    if user.op in (Ops.PERMUTE, Ops.RESHAPE): return True
    if user.op is Ops.CAST: return user.dtype in FLOATS
    return user.op is Ops.MUL and any(strip_views(s).op is Ops.RECIPROCAL for s in user.src if s is not node)


# **** operands ****

def _sides(space: Space, first: MatmulReduce, at: Indices, columns: frozenset[int],
           memory: Callable[[UOp], bool]) -> tuple[Side, Side, tuple[int, ...]]:
    """q, k, and the ranges that are summed."""
    summed = space.ranges(first.total.src[0].shape[:first.total.arg[1]])
    at = first.indices(space, summed + at)
    both = [side(space, s, space.over(first.mul.shape, s.shape, at), first.strip, memory)
            for s in first.mul.src]
    keys = {leaf for r in columns for leaf in space.leaves(r)}
    has = [bool(keys & one.resolve(space).lies.strides.keys()) for one in both]
    if has[0] == has[1]: raise Unsupported("keys in both operands of q kᵀ, or in neither")
    k, q = both if has[0] else both[::-1]
    return q, k, tuple(r for index in summed for r in index.strides)


def order_ranges(space: Space, at: Indices, columns: frozenset[int]) -> tuple[int, ...]:
    """Ranges as the scores have them, without those of keys."""
    return tuple(r for index in map(space.resolve, at)
                 for r in sorted(index.strides, key=index.strides.__getitem__, reverse=True)
                 if r not in columns)


def _check(first: MatmulReduce, second: MatmulReduce, sides: tuple[Side, Side, Side]) -> None:
    kinds = [one.dtype for one in sides]
    if dtypes.float32 in kinds and len(set(kinds)) > 1:
        names = [name for name, kind in zip("qkv", kinds, strict=True) if kind == dtypes.float32]
        raise Unsupported(f"{' and '.join(names)} alone in float32: realize all three in it, or none",
                          final=True)
    for words in (arithmetic(first, *kinds[:2]), arithmetic(second, kinds[2], kinds[2])):
        if words: raise Unsupported(words, final=True)
