"""The values of a region that a backward pass reads, their bytes and what it costs to compute them again.

Protocol: a value is a node of the graph whose elements are in memory once it is computed: what is made
contiguous, results of named functions, sums. `read(body, gradients)` are those of the nodes of a region that
the nodes of its gradients reach first; what lies between, tinygrad computes again in the kernels that need it.
`matmul(node)` tells sums of products of which both factors are repeated, as in every contraction; sums of
squares and norms are none.

Bytes are those of an element of the value; cost is 2 operations for each product of a matmul, 4 for each pair
of query and key and dimension in attention, and 1 for each element of others.
"""
from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv.patterns.attention.named import FlashAttention
from tinygrad_nv.patterns.grouped_gemm.named import GroupedMatmul
from tinygrad_nv.patterns.quant_gemm.named import QuantMatmul
from tinygrad_nv.patterns.quant_grouped.named import QuantGroupedMatmul
from tinygrad_nv.patterns.scaled_gemm.named import ScaledMatmul
from tinygrad_nv.patterns.sparse_gemm.named import SparseMatmul
from tinygrad_nv.train.regions.policy import Policy

MATMULS = (GroupedMatmul, QuantMatmul, QuantGroupedMatmul, ScaledMatmul, SparseMatmul)
STORED = frozenset({Ops.CONTIGUOUS, Ops.REDUCE, Ops.GETTUPLE, Ops.COPY})
# what a value may pass through on the way to its place in memory
ON_THE_WAY = frozenset({Ops.RESHAPE, Ops.PERMUTE, Ops.CAST, Ops.CONTIGUOUS, Ops.CONTIGUOUS_BACKWARD, Ops.ADD})


@dataclass(frozen=True)
class Value:
    """A value, its kind (matmul, attention, other), its bytes, and the operations that it takes."""
    node: UOp
    kind: str
    nbytes: int
    cost: int


def nbytes(node: UOp) -> int:
    """Of its elements."""
    return prod(int(n) for n in node.shape) * node.dtype.itemsize


def inside(result: UOp, inputs: Collection[UOp]) -> dict[UOp, None]:
    """The nodes of a region that depend on its inputs, in the order of computation."""
    found = dict[UOp, None]()
    for node in result.toposort(gate=lambda node: node not in inputs, enter_calls=False):
        if any(each in found or each in inputs for each in node.src): found[node] = None
    return found


def outside(nodes: Iterable[UOp], inputs: Collection[UOp]) -> list[UOp]:
    """What a region reads beside its inputs and may have a gradient: weights, and whatever else of floats."""
    own = nodes if isinstance(nodes, dict) else dict.fromkeys(nodes)
    found = dict[UOp, None]()
    for node in own:
        given = node.src[1:] if node.op is Ops.FUNCTION else node.src
        found.update((each, None) for each in given if each not in own and each not in inputs and _derived(each))
    return list(found)


def _derived(node: UOp) -> bool:
    return node.op is not Ops.DETACH and node._shape is not None and node.device is not None and \
        node.dtype in dtypes.floats


def read(nodes: Collection[UOp], gradients: UOp) -> list[Value]:
    """The values among `nodes`, in the order of computation, that the nodes of gradients reach first."""
    found, seen, stack = set[UOp](), set[UOp](), [gradients]
    while stack:
        node = stack.pop()
        if node in seen: continue
        seen.add(node)
        if node in nodes and node.op in STORED: found.add(node)
        else: stack.extend(node.src[1:] if node.op is Ops.FUNCTION else node.src)
    return [_value(node) for node in nodes if node in found]


def _value(node: UOp) -> Value:
    kind, cost = _made(node)
    size = prod(int(n) for n in node.shape)
    return Value(node, kind, size * node.dtype.itemsize, cost or size)


def _made(node: UOp) -> tuple[str, int]:
    """What a value is, and what it takes."""
    while node.op in ON_THE_WAY:
        # of a sum, e.g. with a bias, what is repeated in it does not count
        node = max(node.src, key=_own)
    if node.op is Ops.GETTUPLE:
        what, given = node.src[0].arg.aux, node.src[0].src[1:]
        if isinstance(what, FlashAttention):
            q, k = given[0].shape, given[1].shape
            return "attention", 4 * prod(int(n) for n in q) * int(k[2])
        if isinstance(what, MATMULS): return "matmul", 2 * prod(int(n) for n in node.shape) * int(given[0].shape[-1])
    return ("matmul", 2 * found) if (found := products(node)) else ("other", 0)


def products(node: UOp) -> int:
    """Products of a matmul; 0 of another node."""
    if node.op is not Ops.REDUCE or node.arg[0] is not Ops.ADD: return 0
    product = node.src[0]
    while product.op in GroupOp.Movement or product.op is Ops.CAST: product = product.src[0]
    if product.op is not Ops.MUL: return 0
    whole = prod(int(n) for n in product.shape)
    return whole if all(_own(each) < whole for each in product.src) else 0


def _own(node: UOp) -> int:
    """Elements of what is repeated in a node."""
    while node.op in GroupOp.Movement or node.op is Ops.CAST: node = node.src[0]
    return prod(int(n) for n in node.shape)


def kept(policy: Policy, values: list[Value], inputs: int) -> list[Value]:
    """Of all values that a backward pass reads those that a policy keeps; `inputs` are the bytes of the
    region's inputs."""
    if policy.budget is not None: return _within(policy.budget, values, inputs)
    if policy.name == "none": return values
    if policy.name not in ("dots", "selective"): return []
    found, number = list[Value](), 0
    for value in values:
        number += value.kind == "matmul"
        if value.kind == "attention" or (value.kind == "matmul" and (policy.name == "dots" or number % 2)):
            found.append(value)
    return found


def _within(budget: float, values: list[Value], inputs: int) -> list[Value]:
    """The costliest for their bytes that fit."""
    left = int(budget * (inputs + sum(value.nbytes for value in values))) - inputs
    found = set[UOp]()
    for value in sorted(values, key=lambda value: value.cost / value.nbytes, reverse=True):
        if value.nbytes <= left:
            left -= value.nbytes
            found.add(value.node)
    return [value for value in values if value.node in found]
