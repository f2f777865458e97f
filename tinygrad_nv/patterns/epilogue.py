"""Operations that follow a sum in the graph, as an expression of tile/expression.py.

Protocol. `ends` gives the nodes, first to last, at which a region that begins at the sum may end: everything
that uses a node of the region lies in it, except what uses its end. A region has elementwise ops and movement
that keeps or cuts the sum's elements; what is broadcast, padded or reduced after the sum is beyond it.

`Epilogue` translates a region from its end, whose elements are counted by ranges of a `Space`: paths to the
sum (two for `silu(g) * u` of one sum) and loads are affine indices over these. Each op becomes one node of
the graph's dtype, and constants are rounded to theirs. Elementwise ops beside the region are translated too
where they read memory and have as many elements, and where they are conditions or made of constants; other
values beside it are loaded from storage that tinygrad makes for them, if that is at most half as large as the
result. `Unfused` says why a region cannot be so.
"""
from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from tinygrad.dtype import DType, dtypes, truncate
from tinygrad.helpers import prod
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv.patterns.index import Affine, Indices, NotAffine, Space
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Sum
from tinygrad_nv.tile.gemm.spec import FLOAT16S
from tinygrad_nv.tile.operations import OPERATIONS, fold

NODES = (dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int32, dtypes.bool)
STORED = NODES[:-1]
NAMES = {Ops[operation.graph]: operation.name for operation in OPERATIONS.values() if operation.graph}
ELEMENTWISE = {*NAMES, Ops.POW, Ops.CMPEQ}
SERIES = tuple(op for op, name in NAMES.items() if OPERATIONS[name].series)    # the costly ones
MOVED = {Ops.PERMUTE, Ops.RESHAPE, Ops.SHRINK, Ops.PAD}  # of a pad, no element may be read
LOGIC = {Ops.ADD: Ops.OR, Ops.MUL: Ops.AND, Ops.MAX: Ops.OR}    # what arithmetic of booleans is
MOST_BESIDE = 32  # nodes beside a region that are translated with it
MOST_INSIDE = 128
MOST_POWER = 8

Consumers = Mapping[UOp, list[UOp]]


class Unfused(Exception):
    """A region has no expression; the text says why."""


# **** regions ****

def ends(root: UOp, consumers: Consumers, place: Mapping[UOp, int],
         taken: Callable[[UOp], bool]) -> list[tuple[UOp, frozenset[UOp]]]:
    """The ends of regions that begin at `root`, each with the region's nodes. `place` is a node's number in
    topological order; nodes that are `taken` belong to others."""
    found, region = [(root, frozenset((root,)))], {root}
    waiting: list[tuple[int, UOp]] = []
    known = {root}

    def wait_for_users(node: UOp) -> None:
        for user in consumers[node]:
            if user not in known:
                known.add(user)
                heapq.heappush(waiting, (place[user], user))

    wait_for_users(root)
    while waiting and len(region) < MOST_INSIDE:
        _, node = heapq.heappop(waiting)
        if taken(node) or not _fusable(node, region): break
        region.add(node)
        if not waiting: found.append((node, frozenset(region)))
        wait_for_users(node)
    return found


def _fusable(node: UOp, region: set[UOp]) -> bool:
    if node.op in MOVED: return node.src[0] in region
    if node.op not in ELEMENTWISE or node.dtype not in NODES: return False
    return all(_numel(s) == _numel(node) for s in node.src if s in region)


def _numel(node: UOp) -> int: return prod(node.max_shape)


def usable(found: list[tuple[UOp, frozenset[UOp]]],
           consumers: Consumers) -> list[tuple[UOp, frozenset[UOp]]]:
    """The ends worth trying, best first. Movement and casts that lose nothing, which a reader of the result
    has for nothing, are taken in only where it is stored."""
    best = []
    for end, region in reversed(found):
        if end.dtype not in STORED: continue
        stored = all(user.op in (Ops.STORE, Ops.CONTIGUOUS) for user in consumers[end])
        widened = end.op is Ops.CAST and end.dtype == dtypes.float32 and end.src[0].dtype in FLOAT16S
        if stored or not (end.op in MOVED or (widened and len(region) > 1)): best.append((end, region))
    return best


# **** translation ****

class Epilogue:
    """The expression of one region. Sums of `expression` are numbered as `paths`, loads as `loads`, each with
    the storage it reads; strides are not in it yet."""

    def __init__(self, space: Space, root: UOp, end: UOp, region: frozenset[UOp], indices: Indices,
                 memory: Callable[[UOp], bool]) -> None:
        self.space, self.root, self.end, self.region, self.memory = space, root, end, region, memory
        self.paths: list[Indices] = []
        self.loads: list[tuple[UOp, Affine]] = []
        self.numbers: dict[tuple[UOp, tuple[int, ...]], int] = {}
        self.made: dict[tuple[UOp, tuple[int, ...], DType], Expression] = {}
        self.beside = 0
        self.expression = self.value(end, indices, end.dtype)

    def value(self, node: UOp, indices: Indices, want: DType) -> Expression:
        """A node's expression. `want` is the dtype of one whose own is weak."""
        key = (node, _key(indices), want)
        if (known := self.made.get(key)) is None:
            known = self.made[key] = self._make(node, indices, want)
        return known

    def _make(self, node: UOp, indices: Indices, want: DType) -> Expression:
        if node is self.root: return self._sum(indices)
        if node not in self.region: return self._leaf(node, indices, want)
        if node.op in MOVED: return self.value(node.src[0], self.space.through(node, indices), want)
        return self._apply(node, indices, want)

    def _sum(self, indices: Indices) -> Expression:
        number = self.numbers.setdefault((self.root, _key(indices)), len(self.paths))
        if number == len(self.paths): self.paths.append(indices)
        return Sum(self.root.dtype, number)

    def _apply(self, node: UOp, indices: Indices, want: DType) -> Expression:
        dtype = want if node.dtype in dtypes.weaks else node.dtype
        if node.op is Ops.CAST: own = _strong(node.src[0].dtype)
        elif node.op in GroupOp.Comparison: own = _common(node.src)
        else: own = dtype
        if node.op is Ops.POW: return self._power(node, indices, dtype)
        wants = [dtypes.bool if node.op is Ops.WHERE and not i else own for i in range(len(node.src))]
        args = tuple(self.value(s, self.space.over(node.shape, s.shape, indices), each)
                     for s, each in zip(node.src, wants, strict=True))
        if node.op is Ops.CAST: return args[0].cast(dtype)
        if node.op in (Ops.CMPNE, Ops.CMPEQ): return _unequal(args, node.op is Ops.CMPEQ)
        op = LOGIC.get(node.op, node.op) if dtype == dtypes.bool else node.op
        if args[-1].dtype == dtypes.bool and op not in (Ops.AND, Ops.OR, Ops.XOR):
            raise Unfused("arithmetic of booleans")
        return Apply(NAMES[op], args, dtype)

    def _power(self, node: UOp, indices: Indices, dtype: DType) -> Expression:
        """Whole powers, multiplied in the order in which tinygrad does."""
        if (power := number(node.src[1])) is None or power != int(power) or not 1 <= power <= MOST_POWER:
            raise Unfused("a power that is not a small whole number")
        x = self.value(node.src[0], self.space.over(node.shape, node.src[0].shape, indices), dtype)

        def raise_to(exponent: int) -> Expression:
            if exponent == 1: return x
            half = raise_to(exponent // 2)
            square = half * half
            return square * x if exponent % 2 else square
        return raise_to(int(power))

    def _leaf(self, node: UOp, indices: Indices, want: DType) -> Expression:
        """A value beside the region."""
        if (value := number(node)) is not None:
            dtype = want if node.dtype in dtypes.weaks else node.dtype
            if dtype not in NODES: raise Unfused(f"a constant of {dtype.name}")
            return Constant(truncate[dtype](value), dtype)
        if self.memory(node): return self._load(node, indices)
        if node.op in GroupOp.Movement:
            try: return self.value(node.src[0], self.space.through(node, indices), want)
            except NotAffine: return self._load_small(node, indices)
        if node.op in ELEMENTWISE and self._is_computed(node) \
                and node.dtype in (*NODES, *dtypes.weaks) and self.beside < MOST_BESIDE:
            if _numel(node) == _numel(self.end) and is_normalised(node, self.memory):
                return self._load(node, indices)
            self.beside += 1
            return self._apply(node, indices, want)
        return self._load_small(node, indices)

    def _is_computed(self, node: UOp) -> bool:
        """Whether an elementwise op beside the region is translated: it is as large, or cannot be loaded.
        Constants have no device, and no storage."""
        if node.op is Ops.CAST or node.dtype not in STORED or node.device is None: return True
        return _numel(node) == _numel(self.end)

    def _load_small(self, node: UOp, indices: Indices) -> Expression:
        if 2 * _numel(node) > _numel(self.end): raise Unfused("a large value beside it that is not in memory")
        return self._load(node, indices)

    def _load(self, node: UOp, indices: Indices) -> Expression:
        if node.dtype not in NODES: raise Unfused(f"a parameter of {node.dtype.name}")
        if node.device is None: raise Unfused("a value beside it that is made of constants")
        lies = self.space.lies(node.shape, indices)
        number = self.numbers.setdefault((node, lies.key()), len(self.loads))
        if number == len(self.loads): self.loads.append((node, lies))
        return Load(number, node.dtype, 0, 0)


def is_normalised(node: UOp, memory: Callable[[UOp], bool]) -> bool:
    """Whether a value is made of reductions of rows, a norm: computed where it is used it would be computed
    again for each use, of statistics that were stored for it."""
    if node.dtype not in STORED or node.device is None: return False
    waiting, seen = [node], {node}
    for each in waiting:
        if each.op is Ops.REDUCE and _numel(each) < _numel(node): return True
        if len(seen) > MOST_BESIDE or memory(each): continue
        if each.op not in ELEMENTWISE and each.op not in GroupOp.Movement: continue
        new = [s for s in each.src if s.device is not None and s not in seen]
        seen.update(new)
        waiting += new
    return False


def _key(indices: Indices) -> tuple[int, ...]:
    return tuple(x for index in indices for x in (*index.key(), -1))


def _strong(dtype: DType) -> DType:
    return {dtypes.weakfloat: dtypes.float32, dtypes.weakint: dtypes.int32}.get(dtype, dtype)


def _common(sources: tuple[UOp, ...]) -> DType:
    """The dtype in which a comparison is made."""
    return next((s.dtype for s in sources if s.dtype not in dtypes.weaks), _strong(sources[0].dtype))


def _unequal(args: tuple[Expression, ...], negated: bool) -> Expression:
    """Booleans have no order and no equality in the expressions, but `xor`; not x is int(x) < 1."""
    if args[0].dtype != dtypes.bool: made: Expression = Apply("not_equal", args, dtypes.bool)
    else:
        fixed = [arg for arg in args if isinstance(arg, Constant)]
        if fixed:
            negated ^= bool(fixed[0].value)
            made = next((arg for arg in args if not isinstance(arg, Constant)), args[0])
        else: made = Apply("xor", args, dtypes.bool)
    return made.cast(dtypes.int32) < 1 if negated else made


def number(node: UOp) -> float | int | bool | None:
    """The value of a constant, or of arithmetic of weak constants; None of anything else."""
    if node.op is Ops.CONST: return node.val
    if node.op in (Ops.RESHAPE, Ops.EXPAND, Ops.PERMUTE): return number(node.src[0])
    if node.dtype not in dtypes.weaks: return None
    if (name := NAMES.get(node.op)) is None: return None
    values = [value for s in node.src if (value := number(s)) is not None]
    return fold(name, *values) if len(values) == len(node.src) else None
