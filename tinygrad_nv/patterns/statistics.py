"""Variances of float16 and bfloat16 rows in float32, as torch has them.

Protocol. `rewrite` is a rewrite of hooks/, before those of kernels. tinygrad adds in float32, but what it
adds was rounded: of float16 values with a deviation of 256 the squares are infinite, and a norm is 0. The
mean, which is rounded too, is wrong by half a unit in the last place of the values. In a graph with Σ y², y
of such a dtype:

    Σ float(y · y)                              →   Σ float(y) · float(y)
    y = x - half(mean), in that sum             →   float(x) - mean
    1 / √(half(variance) + ε), y times that     →   the same of float32, rounded once

where y² may be y ** 2, and a root of a sum a power of 0.5 or -0.5.

What is computed with the normalised value is as it was. Other sums, of products too, stay. A count of equal
maxima, which the gradient of a maximum is divided by, is one of float32 as well: float16 ends at 65504.
"""
from __future__ import annotations

from collections.abc import Callable

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv.patterns.epilogue import number
from tinygrad_nv.patterns.rewriting import rebuilt

NARROW = (dtypes.half, dtypes.bfloat16)
MOST_DEEP = 8   # nodes between a statistic and its sum, or its use
ELEMENTS = (Ops.ADD, Ops.SUB, Ops.MUL, Ops.NEG, Ops.SQRT, Ops.RECIPROCAL, Ops.MAX)


def rewrite(sink: UOp) -> UOp:
    """The graph with variances of float32."""
    nodes = tuple(sink.toposort(enter_calls=False))
    if any(_is_summed_power(node) for node in nodes):
        nodes = tuple(rebuilt(nodes, _without_power).toposort(enter_calls=False))
    squares = {node.src[0] for node in nodes if node.op is Ops.REDUCE and _square(node.src[0]) is not None}
    counts = {node for node in nodes if node.op is Ops.RECIPROCAL
              and _is_count(_before_movements(node.src[0]))}
    return _Widening(squares, counts).rewritten(nodes) if squares or counts else sink


def _is_summed_power(node: UOp) -> bool:
    """Whether a node is a sum of narrow squares that are powers."""
    if node.op is not Ops.REDUCE or node.arg[0] is not Ops.ADD: return False
    cast = _before_movements(node.src[0])
    power = _before_movements(cast.src[0]) if cast.op is Ops.CAST else cast
    return power.op is Ops.POW and power.dtype in NARROW and number(power.src[1]) == 2


def _without_power(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
    """A narrow square as a product, a power of a sum as a root."""
    if node.op is not Ops.POW or node.dtype not in NARROW: return None
    x, exponent = new(node.src[0]), number(node.src[1])
    if exponent == 2: return x * x
    if exponent not in (0.5, -0.5) or not _is_of_sum(node.src[0], MOST_DEEP): return None
    return x.sqrt() if exponent == 0.5 else x.sqrt().reciprocal()


def _is_of_sum(node: UOp, deep: int) -> bool:
    """Whether a value is made of a sum by elements."""
    if (node := _before_movements(node)).op is Ops.REDUCE: return node.arg[0] is Ops.ADD
    return deep > 0 and node.op in (*ELEMENTS, Ops.CAST) and any(_is_of_sum(s, deep - 1) for s in node.src)


def _before_movements(node: UOp) -> UOp:
    """Returns the node that movements are of."""
    while node.op in GroupOp.Movement: node = node.src[0]
    return node


def _square(summed: UOp) -> UOp | None:
    """The narrow square that a sum adds in float32."""
    cast = _before_movements(summed)
    if cast.op is not Ops.CAST or cast.dtype != dtypes.float32 or cast.src[0].dtype not in NARROW: return None
    product = _before_movements(cast.src[0])
    return product if product.op is Ops.MUL and product.src[0] is product.src[1] else None


def _is_count(node: UOp) -> bool:
    """Whether a value is a narrow number of what is true."""
    if node.op is not Ops.REDUCE or node.arg[0] is not Ops.ADD or node.dtype not in NARROW: return False
    return node.src[0].op is Ops.CAST and node.src[0].src[0].dtype == dtypes.bool


def _count(node: UOp, new: Callable[[UOp], UOp]) -> UOp:
    """A number of what is true in float32, under the movements that were over it."""
    if node.op is Ops.CAST: return new(node.src[0]).cast(dtypes.float32)
    return UOp(node.op, src=(_count(node.src[0], new), *node.src[1:]), arg=node.arg)


class _Widening:
    """Nodes that become float32 in a graph, given the sources of its sums of squares, and quotients by
    counts."""

    def __init__(self, squares: set[UOp], counts: set[UOp]) -> None:
        self.squares, self.counts = squares, counts
        self.known: dict[tuple[UOp, bool], bool] = {}

    def rewritten(self, nodes: tuple[UOp, ...]) -> UOp:
        """The graph of nodes."""
        def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
            if node in self.counts: return _count(node.src[0], new).reciprocal().cast(node.dtype)
            if node in self.squares: return self._widen_square(node, new)
            if node.dtype not in NARROW or not self._leans(node, True): return None
            return self._wide(node, new).cast(node.dtype)
        return rebuilt(nodes, change)

    def _widen_square(self, node: UOp, new: Callable[[UOp], UOp]) -> UOp:
        """A square in float32 under the movements that were over it."""
        if node.op in GroupOp.Movement:
            return UOp(node.op, src=(self._widen_square(node.src[0], new), *node.src[1:]), arg=node.arg)
        if node.op is Ops.CAST: return self._widen_square(node.src[0], new)
        y = self._wide(node.src[0], new)
        return y * y

    def _wide(self, node: UOp, new: Callable[[UOp], UOp]) -> UOp:
        """A narrow value in float32, without the roundings of its statistics."""
        if node.dtype in dtypes.weaks: return new(node)
        base = _before_movements(node)
        if not self._is_statistic(base, False) and not self._leans(base, False):
            return new(node).cast(dtypes.float32)
        if node is not base: sources = (self._wide(node.src[0], new), *node.src[1:])
        elif node.op is Ops.CAST: return new(node.src[0])
        else: sources = tuple(self._wide(s, new) for s in node.src)
        return UOp(node.op, src=sources, arg=node.arg)

    def _leans(self, node: UOp, variance: bool) -> bool:
        """Whether a narrow value is made of a statistic by elements: of a variance, or of any. A value times
        the root of a variance is a normalised one: what is made of that leans on none."""
        if node.op not in ELEMENTS: return False
        if (found := self.known.get((node, variance))) is None:
            found = any(self._is_statistic(s, variance)
                        or (self._leans(s, variance) and not self._is_normal(s))
                        for s in map(_before_movements, node.src))
            self.known[node, variance] = found
        return found

    def _is_normal(self, node: UOp) -> bool:
        """Whether a value is one that was multiplied with the root of a variance."""
        return node.op is Ops.MUL and self._leans(node, True) and not all(
            number(s) is not None or self._is_statistic(_before_movements(s),
                                                        True) or self._leans(_before_movements(s), True)
            for s in node.src)

    def _is_statistic(self, node: UOp, variance: bool) -> bool:
        """Whether a value is a rounded mean of float32: of squares, or of anything."""
        return node.op is Ops.CAST and node.dtype in NARROW and node.src[0].dtype == dtypes.float32 \
            and self._sums(node.src[0], variance, MOST_DEEP)

    def _sums(self, node: UOp, squares: bool, deep: int) -> bool:
        if (node := _before_movements(node)).op is Ops.REDUCE:
            return node.arg[0] is Ops.ADD and (not squares or node.src[0] in self.squares)
        return deep > 0 and node.op in ELEMENTS and any(self._sums(s, squares, deep - 1) for s in node.src)
