"""The values of a region that a backward pass reads, their bytes and what it costs to compute them again.

Protocol: a value is a node of the graph whose elements are in memory once it is computed: what is made
contiguous, results of named functions, and those of matmuls, with what is added to them on the way to memory.
`values(nodes, gradients)` are those of a region; of them a backward pass reads those that the nodes of its
gradients reach first. What lies between, tinygrad computes again in the kernels that need it. A matmul is a
sum of products of which both factors are repeated, as in every contraction; sums of squares are none.

Cost is 2 operations for each product of a matmul, 4 for each query, key and dimension in attention, and 1 for
each element of others.
"""
from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv.errors import ConfigError
from tinygrad_nv.patterns.attention.named import FlashAttention
from tinygrad_nv.patterns.grouped_gemm.named import GroupedMatmul
from tinygrad_nv.patterns.quant_gemm.named import QuantMatmul
from tinygrad_nv.patterns.quant_grouped import QuantGroupedMatmul
from tinygrad_nv.patterns.scaled_gemm.fp8 import Fp8Matmul
from tinygrad_nv.patterns.scaled_gemm.named import ScaledMatmul
from tinygrad_nv.patterns.sparse_gemm import SparseMatmul

MATMULS = (Fp8Matmul, GroupedMatmul, QuantMatmul, QuantGroupedMatmul, ScaledMatmul, SparseMatmul)
STORED = frozenset({Ops.CONTIGUOUS, Ops.GETTUPLE, Ops.COPY})
# what the result of a matmul passes through on the way to memory: their gradients need none of their inputs
ON_THE_WAY = frozenset({Ops.RESHAPE, Ops.PERMUTE, Ops.CAST, Ops.CONTIGUOUS, Ops.CONTIGUOUS_BACKWARD, Ops.ADD})
POLICIES = ("full", "selective", "dots", "offload", "none")
BUDGET = "budget"


@dataclass(frozen=True)
class Policy:
    """The rule of what a region keeps for its backward pass, beside its inputs. Raises `ConfigError` for
    others.

        none       everything: there is no region
        full       nothing
        dots       results of matmuls and of attention
        selective  results of attention, and of matmuls the first, third, fifth … of a region in the order in
                   which they are computed: the rule of torchtitan's selective checkpoints
        offload    nothing, and inputs are on the host in between, but those of the last region
        budget     from 0 (as full) to 1 (as none): of all values those that cost most to compute again for
                   their bytes, with the inputs up to a share of what none keeps
    """
    name: str = "full"
    budget: float | None = None

    def __post_init__(self) -> None:
        if self.budget is not None:
            if not 0 <= self.budget <= 1:
                raise ConfigError(f"budget {self.budget}", "a share from 0 to 1 of what is kept without "
                                  "regions", "0.5 keeps at most half")
        elif self.name not in POLICIES:
            raise ConfigError(f"policy {self.name!r}", f"{', '.join(POLICIES)}, or a budget from 0 to 1",
                              "choose one")

    @staticmethod
    def read(text: str) -> Policy:
        """Returns the policy of an option: a policy's name, or a budget as a number. Raises `ConfigError`."""
        try: return Policy(BUDGET, float(text))
        except ValueError: return Policy(text)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is computed again."""
        return self.budget == 1 or (self.budget is None and self.name == "none")


@dataclass(frozen=True)
class Value:
    """A value, its kind (matmul, attention, other), its bytes, the operations that it takes, whether the
    backward pass reads it, and the values that it is computed from."""
    node: UOp
    kind: str
    nbytes: int
    cost: int
    read: bool
    above: frozenset[UOp]


def nbytes(node: UOp) -> int:
    """Returns the bytes of a node's elements."""
    return prod(int(n) for n in node.shape) * node.dtype.itemsize


def inside(result: UOp, inputs: Collection[UOp]) -> dict[UOp, None]:
    """The nodes of a region that depend on its inputs, in the order of computation."""
    found = dict[UOp, None]()
    for node in result.toposort(gate=lambda node: node not in inputs, enter_calls=False):
        if any(each in found or each in inputs for each in node.src): found[node] = None
    return found


def outside(own: dict[UOp, None], inputs: Collection[UOp]) -> list[UOp]:
    """Lists what the nodes of a region read beside its inputs and may have a gradient: weights, and whatever
    else of floats."""
    found = dict[UOp, None]()
    for node in own:
        given = node.src[1:] if node.op is Ops.FUNCTION else node.src
        found.update((one, None) for one in given if one not in own and one not in inputs and _derive(one))
    return list(found)


def _derive(node: UOp) -> bool:
    return node.op is not Ops.DETACH and node._shape is not None and node.device is not None and \
        node.dtype in dtypes.floats


def values(nodes: dict[UOp, UOp], gradients: UOp) -> list[Value]:
    """Lists the values of a region's nodes, in the order of computation; `nodes` with those of the forward
    pass."""
    made = _in_memory(nodes, gradients)
    seen, found, stack = set[UOp](), set[UOp](), [gradients]
    while stack:
        node = stack.pop()
        if node in seen: continue
        seen.add(node)
        if node in made: found.add(node)
        else: stack.extend(node.src[1:] if node.op is Ops.FUNCTION else node.src)
    above = dict[UOp, frozenset[UOp]]()
    for node in nodes:
        given = [each for each in node.src if each in above]
        above[node] = frozenset[UOp]().union(*({each} if each in made else above[each] for each in given))
    return [Value(node, *made[node], node in found, above[node]) for node in nodes if node in made]


def _in_memory(nodes: dict[UOp, UOp], gradients: UOp) -> dict[UOp, tuple[str, int, int]]:
    """Kind, bytes and cost of the nodes whose elements are in memory."""
    users: dict[UOp, set[UOp]] = {}
    for node in (*nodes, *gradients.toposort(enter_calls=False)):
        given = node.src[1:] if node.op is Ops.FUNCTION else node.src
        for each in given: users.setdefault(each, set()).add(node)
    made, costs = dict[UOp, tuple[str, int, int]](), dict[UOp, int]()
    for node, forward in nodes.items():
        if found := products(forward):
            top = _store(node, users, nodes)
            costs[top] = costs.get(top, 0) + 2 * found
    for node in nodes:
        size = prod(int(n) for n in node.shape) if node.op in STORED or node in costs else 0
        if node in costs: made[node] = "matmul", size * node.dtype.itemsize, costs[node]
        elif node.op is Ops.GETTUPLE:
            kind, cost = _call(node, size)
            made[node] = kind, size * node.dtype.itemsize, cost
        elif node.op in STORED: made[node] = "other", size * node.dtype.itemsize, size
    return made


def _store(node: UOp, users: dict[UOp, set[UOp]], nodes: Collection[UOp]) -> UOp:
    """The node as which the result of a matmul is in memory."""
    while node.op is not Ops.CONTIGUOUS and len(after := users.get(node, set())) == 1:
        user = next(iter(after))
        if user not in nodes or user.op not in ON_THE_WAY: break
        node = user
    return node


def _call(node: UOp, size: int) -> tuple[str, int]:
    """Kind and cost of the result of a function."""
    what, given = node.src[0].arg.aux, node.src[0].src[1:]
    if isinstance(what, FlashAttention):
        return "attention", 4 * prod(int(n) for n in given[0].shape) * int(given[1].shape[2])
    if isinstance(what, MATMULS): return "matmul", 2 * size * int(given[0].shape[-1])
    return "other", size


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


def keep(policy: Policy, found: list[Value], inputs: int) -> list[Value]:
    """Selects, of all values that a backward pass reads, those that a policy keeps; `inputs` are the bytes of
    the region's inputs."""
    own = [value for value in found if value.read]
    if policy.budget is not None: return _within(policy.budget, own, inputs)
    if policy.name == "none": return own
    matmuls = [value for value in found if value.kind == "matmul"]
    if policy.name == "selective": matmuls = matmuls[::2]
    elif policy.name != "dots": return []
    return [value for value in own if value.kind == "attention" or value in matmuls]


def _within(budget: float, own: list[Value], inputs: int) -> list[Value]:
    """The costliest for their bytes that fit. Those that are computed from the same, as queries, keys and
    values are, stay together: a matmul of which a part is computed again is another kernel."""
    left = int(budget * (inputs + sum(value.nbytes for value in own))) - inputs
    groups: dict[frozenset[UOp], list[Value]] = {}
    for value in own: groups.setdefault(value.above, []).append(value)
    def worth(group: list[Value]) -> float:
        return sum(value.cost for value in group) / sum(value.nbytes for value in group)
    chosen = list[Value]()
    for group in sorted(groups.values(), key=worth, reverse=True):
        if (size := sum(value.nbytes for value in group)) <= left:
            left -= size
            chosen += group
    return [value for value in own if value in chosen]
