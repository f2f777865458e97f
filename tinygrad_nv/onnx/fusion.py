"""Attention as exporters write it, made one node.

Protocol: `fuse_attentions(graph)` is the graph with each

    MatMul(q, kᵀ) → [Mul | Div by a number] → [Add(mask)] → Softmax(last) → [Where(IsNaN(p), 0, p)]
                                                                          → MatMul(p, v)

in the place of its last node as `tinygrad_nv.Attention` (ops/attention.py), if no other node reads what lies
between. Numbers by which q and kᵀ are multiplied, as torch's exporter does with √scale each, become part of
the scale. Casts around the softmax are left out: the kernel's own sums are in float32. What
remains of norms and matmuls is found in the graph of UOps, as in any Tensor program.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto

from tinygrad_nv.onnx.model import Graph, Node

DOMAIN = "tinygrad_nv"
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True)
class Found:
    """One attention: the names of its operands, and the nodes that it replaces. k is [..., size, keys], or
    with `grouped` [batch, heads, keys, size] like v, of fewer heads than q."""
    q: str
    k: str
    v: str
    mask: str
    scale: float
    grouped: bool
    nodes: tuple[Node, ...]


def fuse_attentions(graph: Graph) -> Graph:
    """The graph with its attentions as one node each, in the graphs of nodes too."""
    nodes = [replace(each, attributes={name: fuse_attentions(value) if isinstance(value, Graph) else value
                                       for name, value in each.attributes.items()}) for each in graph.nodes]
    search = _Search(replace(graph, nodes=tuple(nodes)))
    made, gone = {}, set[Node]()
    for node in nodes:
        if (found := search.attention(node)) is None: continue
        made[node] = Node("Attention", DOMAIN, 1, node.name, (found.q, found.k, found.v, found.mask),
                          node.outputs, {"scale": found.scale, "grouped": found.grouped}, node.proto)
        gone |= set(found.nodes)
    return replace(graph, nodes=tuple(made.get(each, each) for each in nodes if each not in gone))


class _Search:
    """The writer and the readers of each name of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.writers = {name: node for node in graph.nodes for name in node.outputs}
        self.readers = Counter(names_read(graph)) + Counter(graph.outputs)

    def attention(self, node: Node) -> Found | None:
        """The attention that ends with a node."""
        if node.op != "MatMul" or node.domain: return None
        between: list[Node] = []
        name = self.uncast(node.inputs[0], between)
        weights = self.inner(name, "Softmax", between) or self.guarding_softmax(name, between)
        if weights is None or not self.last(weights): return None
        scores, mask = self.split_mask(self.uncast(weights.inputs[0], between), between)
        scores, factor = self.split_scale(scores, between)
        product = self.inner(self.uncast(scores, between), "MatMul", between)
        if product is None: return None
        q, first = self.split_scale(product.inputs[0], between)
        k, second = self.split_scale(product.inputs[1], between)
        v = node.inputs[1]
        own_k, own_v = self.undo_repeat(self.undo_transpose(k)), self.undo_repeat(v)
        grouped = own_k is not None and own_v is not None
        if own_k is not None and own_v is not None: k, v = own_k, own_v
        return Found(q, k, v, mask, factor * first * second, grouped, tuple(between))

    def undo_transpose(self, name: str) -> str:
        """A value whose last two of four dimensions were exchanged."""
        node = self.writers.get(name)
        if node is None or node.op != "Transpose" or node.attributes.get("perm") != [0, 1, 3, 2]: return name
        return node.inputs[0]

    def undo_repeat(self, name: str) -> str | None:
        """Keys or values of fewer heads, which Unsqueeze, Expand and Reshape repeated for each query's."""
        for op in ("Reshape", "Expand", "Unsqueeze"):
            node = self.writers.get(name)
            if node is None or node.op != op: return None
            name = node.inputs[0]
        return name if node is not None and self.number(node.inputs[1]) == 2 else None

    def uncast(self, name: str, between: list[Node]) -> str:
        """A value before it was cast to another float."""
        node = self.writers.get(name)
        if node is None or node.op != "Cast" or self.readers[name] != 1: return name
        if node.attributes["to"] not in FLOATS: return name
        between.append(node)
        return node.inputs[0]

    def inner(self, name: str, op: str, between: list[Node], readers: int = 1) -> Node | None:
        """The node of an op that writes a name which so many read."""
        node = self.writers.get(name)
        if node is None or node.op != op or node.domain or self.readers[name] != readers: return None
        between.append(node)
        return node

    def guarding_softmax(self, name: str, between: list[Node]) -> Node | None:
        """Softmax behind Where(IsNaN(p), 0, p), which makes rows 0 that see nothing."""
        where = self.inner(name, "Where", between)
        if where is None or self.number(where.inputs[1]) != 0: return None
        test = self.inner(where.inputs[0], "IsNaN", between)
        if test is None or test.inputs[0] != where.inputs[2]: return None
        return self.inner(where.inputs[2], "Softmax", between, readers=2)

    def last(self, softmax: Node) -> bool:
        """Whether a softmax is along the last dimension."""
        return softmax.attributes.get("axis", -1 if softmax.version >= 13 else 1) in (-1, 3)

    def split_mask(self, name: str, between: list[Node]) -> tuple[str, str]:
        """Scores and the mask that is added to them."""
        node = self.writers.get(name)
        if node is None or node.op != "Add" or self.readers[name] != 1: return name, ""
        for scores, mask in (node.inputs, node.inputs[::-1]):
            writer = self.writers.get(scores)
            if writer is not None and writer.op in ("MatMul", "Mul", "Div") and self.readers[scores] == 1:
                between.append(node)
                return scores, mask
        return name, ""

    def split_scale(self, name: str, between: list[Node]) -> tuple[str, float]:
        """A value less the number that it is multiplied with."""
        node = self.writers.get(name)
        if node is None or node.op not in ("Mul", "Div") or self.readers[name] != 1: return name, 1.0
        given, by = node.inputs
        if self.number(by) is None and node.op == "Mul": given, by = by, given
        if (number := self.number(by)) is None: return name, 1.0
        between.append(node)
        return given, 1 / number if node.op == "Div" else number

    def number(self, name: str) -> float | None:
        """A constant of one element."""
        value = self.graph.constants.get(name)
        node = self.writers.get(name)
        if node is not None and node.op == "Constant":
            value = node.attributes.get("value", node.attributes.get("value_float"))
        if isinstance(value, float): return value
        return float(value.item()) if isinstance(value, np.ndarray) and value.size == 1 else None


def names_read(graph: Graph) -> Iterator[str]:
    """The names that nodes read, and those that graphs of nodes read of it."""
    for node in graph.nodes:
        yield from node.inputs
        for value in node.attributes.values():
            if isinstance(value, Graph): yield from (*names_read(value), *value.outputs)
