"""Graphs of work: nodes with edges, and what an instantiated graph does.

Protocol: `Graph.add` makes a node. `Executable` has the works as they were at instantiation, in an order that
the edges allow; streams.py runs them.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tinygrad_nv.host.errors import CudaError, Status
from tinygrad_nv.host.works import Kernel, Work
from tinygrad_nv.runtime.emulated.order import Clock, GraphOrder


@dataclass(eq=False)
class Node:
    """Work, and the nodes before it."""
    work: Work
    after: list[Node]


@dataclass(eq=False)
class Graph:
    """Nodes in the order in which they were made."""
    nodes: list[Node] = field(default_factory=list)

    def add(self, work: Work, after: Iterable[Node]) -> Node:
        self.nodes.append(Node(work, list(dict.fromkeys(after))))
        return self.nodes[-1]

    def before(self, nodes: Iterable[Node]) -> set[Node]:
        """Returns these nodes, and all that come before them."""
        found: set[Node] = set()
        left = list(nodes)
        while left:
            node = left.pop()
            if node in found: continue
            found.add(node)
            left += node.after
        return found

    def in_order(self) -> list[Node]:
        """Each node after those before it. Raises `CudaError` for a circle."""
        out: dict[Node, None] = {}
        left = list(self.nodes)
        while left:
            ready = [node for node in left if all(each in out for each in node.after)]
            if not ready: raise CudaError(Status.INVALID_VALUE, "the edges of a graph go in a circle")
            out |= dict.fromkeys(ready)
            left = [node for node in left if node not in out]
        return list(out)

    def copy_graph(self) -> tuple[Graph, dict[Node, Node]]:
        """Returns another graph with the same work, and which node became which."""
        same: dict[Node, Node] = {}
        out = Graph()
        for node in self.in_order(): same[node] = out.add(node.work, [same[each] for each in node.after])
        return out, same


@dataclass(eq=False)
class Executable:
    """An instantiated graph. `places`: where the work of each node is."""
    works: list[Work]
    after: list[list[int]]
    places: dict[Node, int]
    order: GraphOrder
    last: Clock = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> Executable:
        nodes = graph.in_order()
        places = {node: number for number, node in enumerate(nodes)}
        after = [[places[each] for each in node.after] for node in nodes]
        return cls([node.work for node in nodes], after, places, GraphOrder(after))

    def update(self, graph: Graph) -> bool:
        """Takes the work of another graph with the same edges; False where it has others."""
        other = Executable.of(graph)
        kinds, others = [[type(work) for work in each.works] for each in (self, other)]
        if other.after != self.after or kinds != others: return False
        self.works = other.works
        return True

    def early(self, number: int) -> bool:
        """Whether work may begin before the only node ahead of it has ended."""
        work, before = self.works[number], self.after[number]
        return isinstance(work, Kernel) and work.launch.pdl and len(before) == 1 and \
            isinstance(self.works[before[0]], Kernel)
