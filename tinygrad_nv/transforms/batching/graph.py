"""A graph over inputs that have one dimension more, in front: no loop, a node for each node.

Protocol. `batched(nodes, inputs, n)` gives what takes the place of nodes: [n, *shape] of those that depend on
an input; None for others, which stay as they are. `inputs` maps nodes to their values with n in front. A node
of elements broadcasts: its arguments get dimensions of 1 between n and their own. A reduction, which is over
leading dimensions, gets n behind them. A node with effects (assign, a call of a program) is refused: it would
happen once.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv.errors import TransformError

PASSED = {Ops.CAST, Ops.BITCAST, Ops.CONTIGUOUS, Ops.CONTIGUOUS_BACKWARD, Ops.DETACH, Ops.COPY}
Call = Callable[["Batch", UOp], Sequence[UOp]]     # of a function node, the values of its results


class Batch:
    """A graph that is being rewritten; `made` has what takes the place of nodes, [n, *shape]."""

    def __init__(self, inputs: Mapping[UOp, UOp], n: int, call: Call) -> None:
        self.made, self.n, self.call = dict(inputs), n, call
        self.results: dict[UOp, Sequence[UOp]] = {}     # of function nodes

    def run(self, nodes: Sequence[UOp]) -> list[UOp | None]:
        """Returns the nodes that take the place of nodes."""
        for node in _toposort(nodes):
            if node not in self.made and self._depends(node): self._step(node)
        return [self.made.get(node) for node in nodes]

    def _depends(self, node: UOp) -> bool:
        return any(src in self.made or src in self.results for src in sources(node))

    def lift(self, node: UOp) -> UOp:
        """A node with n in front, repeated if it does not depend on an input."""
        return self.made[node] if node in self.made else repeat_node(node, self.n)

    def _step(self, node: UOp) -> None:
        if node.op is Ops.FUNCTION: self.results[node] = self.call(self, node)
        elif node.op is Ops.GETTUPLE: self.made[node] = self.results[node.src[0]][node.arg]
        elif node.op is not Ops.TUPLE: self.made[node] = self._value(node)

    def _value(self, node: UOp) -> UOp:
        if node.op in PASSED: return node.replace(src=(self.made[node.src[0]], *node.src[1:]))
        if node.op in GroupOp.Elementwise: return self._elements(node)
        if node.op in GroupOp.Movement: return self._move(node)
        if node.op is Ops.REDUCE:
            op, count = node.arg
            x = self.made[node.src[0]]
            order = (*range(1, 1 + count), 0, *range(1 + count, len(x.shape)))
            return UOp(Ops.REDUCE, src=(x.permute(order),), arg=(op, count))
        if node.op is Ops.STACK:
            stacked = node.replace(src=tuple(map(self.lift, node.src)))
            return stacked.permute((1, 0, *range(2, len(stacked.shape))))
        raise TransformError(f"vmap of a function with {_describe(node)}",
                             "a pure function of tinygrad's operations",
                             "give what it makes as an argument, or say how it is batched: custom_vmap")

    def _elements(self, node: UOp) -> UOp:
        rank = len(node.shape)

        def wide(src: UOp) -> UOp:
            if src not in self.made: return src
            own = self.made[src]
            return own.reshape((self.n, *(1,) * (rank - len(src.shape)), *src.shape))
        return node.replace(src=tuple(map(wide, node.src)))

    def _move(self, node: UOp) -> UOp:
        x, n = self.made[node.src[0]], self.n
        if node.op is Ops.RESHAPE: return x.reshape((n, *node.marg))
        if node.op is Ops.PERMUTE: return x.permute((0, *(axis + 1 for axis in node.marg)))
        if node.op is Ops.FLIP: return x._mop(Ops.FLIP, (False, *node.marg))
        if node.op in (Ops.PAD, Ops.SHRINK): return x._mop(node.op, ((0, n), *node.marg))
        assert node.op is Ops.EXPAND, node.op
        new = len(node.marg)    # dimensions that it puts in front
        wide = x._mop(Ops.EXPAND, tuple(node.marg))
        return wide.permute((new, *range(new), *range(new + 1, len(wide.shape))))


@dataclass(frozen=True)
class Given:
    """Mark of a function node: its results, which pass through it, are batched by a rule of their own,
    whatever they are made of. `rule(arguments, n)` has of each argument of the node but the first its batched
    value, or None."""
    rule: Callable[[UOp, Sequence[UOp | None], int], Sequence[UOp]]


def sources(node: UOp) -> tuple[UOp, ...]:
    """Returns the nodes that have to be batched before a node."""
    return node.src[2:] if node.op is Ops.FUNCTION and isinstance(node.arg.aux, Given) else \
        node.src[1:] if node.op is Ops.FUNCTION else node.src


def _toposort(nodes: Sequence[UOp]) -> list[UOp]:
    """Nodes and what they are made of, that first."""
    order, seen, stack = list[UOp](), set[UOp](), [(node, False) for node in reversed(nodes)]
    while stack:
        node, done = stack.pop()
        if done: order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(each, False) for each in reversed(sources(node)) if each not in seen]
    return order


def repeat_node(node: UOp, n: int) -> UOp:
    """n times a node, in a new first dimension."""
    return node.reshape((1, *node.shape)).expand((n, *node.shape))


def _describe(node: UOp) -> str:
    names = {Ops.STORE: "an assignment", Ops.AFTER: "an assignment", Ops.CALL: "a kernel of its own",
             Ops.UNSHARD: "a Tensor over several devices"}
    return names.get(node.op, f"the operation {node.op.name}")
