"""Sums of columns: gradients of the weights of norms, and of biases, to one kernel of ours.

Protocol. `rewrite_columns` looks at each node that will be stored: a REDUCE over leading dimensions, cast or
reshaped. What is added up is translated back to memory, in index space: a range of rows, all that is reduced,
and a range of columns, all that is left. Numbers of a row that are sums themselves, as a norm's mean of
squares, are loaded from where tinygrad puts them. What else is not in memory leaves the sum to tinygrad,
which computes it as it adds. The kernel has each sum in a fixed order (tile/column_sum/). NV_NORM=0 leaves
everything to tinygrad.

`rewrite` is for reductions: sums of columns, then rows (norm/), of one walk over a graph. Columns come first,
since norm/ would find the same sums as rows whose elements lie apart. A graph with a REDUCE and nothing
computed beside it has neither, and is not walked.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import prod
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv import config
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import building, program
from tinygrad_nv.patterns.contraction import Unsupported, is_storage
from tinygrad_nv.patterns.epilogue import Unfused
from tinygrad_nv.patterns.index import Affine, Indices, NotAffine, Space, largest
from tinygrad_nv.patterns.norm import match as norm
from tinygrad_nv.patterns.norm.match import NormRows, nodes_in_memory
from tinygrad_nv.patterns.rewriting import rebuilt, write_through
from tinygrad_nv.patterns.target import Chosen, Target, choose, target_of
from tinygrad_nv.runtime.observe import ranges
from tinygrad_nv.tile.column_sum.spec import ColumnSumSpec
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, substitute, walk
from tinygrad_nv.tile.gemm.spec import FLOAT16S

NAME = "column_sum"
LEAST_ROWS, LEAST_COLUMNS = 32, 32  # below, tinygrad's own kernel is as fast


@dataclass(frozen=True)
class _Match:
    """Spec that takes the place of a node, and the tensors it loads."""
    how: Chosen
    inputs: tuple[UOp, ...]


def rewrite_columns(sink: UOp, nodes: tuple[UOp, ...]) -> UOp:
    """The graph, of these nodes, with calls for its sums of columns."""
    stored = dict.fromkeys(nodes_in_memory(nodes))
    memory = frozenset(stored)
    found = {node: match for node in stored if (match := _match_node(node, memory)) is not None}
    if not found: return sink

    def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
        if (match := found.get(node)) is None: return None
        inputs = [new(x) for x in match.inputs]
        region = node.toposort(gate=lambda each: each not in match.inputs, enter_calls=False)
        result = building.attempt(NAME, _reduction(node), lambda: _call_kernel(match, node, inputs))
        if result is None: return None
        ranges.carry_region(frozenset(region), result)
        return result
    return write_through(rebuilt(nodes, change))


def _call_kernel(match: _Match, node: UOp, inputs: list[UOp]) -> UOp:
    out = program.Output(node.shape, node.dtype)
    return match.how.call(node.device, [out], inputs, NAME, flops=match.how.spec.flops)[0]


def _reduction(end: UOp) -> UOp | None:
    """The REDUCE that a node is, but for its dtype and shape."""
    while end.op in (Ops.CAST, Ops.RESHAPE) and dtypes.is_float(end.dtype): end = end.src[0]
    if end.op is not Ops.REDUCE or end.arg[0] is not Ops.ADD or end.dtype != dtypes.float32: return None
    return end


def _match_node(end: UOp, memory: frozenset[UOp]) -> _Match | None:
    """The match of a node; None, or a miss, where there is none."""
    if end.dtype not in (dtypes.float32, *FLOAT16S): return None
    if (reduction := _reduction(end)) is None or (target := target_of(end.device)) is None: return None
    if any(isinstance(extent, UOp) for extent in reduction.src[0].shape): return None
    m, n = prod(reduction.src[0].shape[:reduction.arg[1]]), prod(end.shape)
    if m < LEAST_ROWS or n < LEAST_COLUMNS: return None
    try: return _match_reduction(reduction, end.dtype, (m, n), target, memory)
    except (Unfused, NotAffine, Unsupported, SpecError) as no:
        program.miss(NAME, reduction, no.found if isinstance(no, SpecError) else str(no))
    return None


class _Terms(NormRows):
    """The expression of what a REDUCE adds up; its own sums are none of a row."""

    def __init__(self, space: Space, reduction: UOp, source: Indices, memory: frozenset[UOp],
                 row: Affine) -> None:
        self.source = source
        super().__init__(space, reduction, (), memory, row, 0)

    def _make(self, node: UOp, indices: Indices, want: DType) -> Expression:
        if node is self.end: return self.value(node.src[0], self.source, node.dtype)
        return super()._make(node, indices, want)


def _match_reduction(reduction: UOp, dtype: DType, extents: tuple[int, int], target: Target,
           memory: frozenset[UOp]) -> _Match | None:
    """The match of a REDUCE; None of one along rows, or of what is not in memory. Raises `Unfused`,
    `NotAffine`, `Unsupported` or `SpecError`."""
    (m, n), shape, count, space = extents, reduction.src[0].shape, reduction.arg[1], Space()
    row, column = space.range(m), space.range(n)
    indices = (*space.digits(row, shape[:count]), *space.digits(column, shape[count:]))
    made = _Terms(space, reduction, indices, memory, row)
    inputs = list(dict.fromkeys(node for node, _ in made.loads))
    known: dict[Expression, Expression] = {}
    for i, (node, index) in enumerate(made.loads):
        lies = space.resolve(index)
        load = Load(inputs.index(node), node.dtype, _stride(space, row, lies), _stride(space, column, lies),
                    (), lies.offset)
        if not (is_storage(node) or node in memory or (load.n == 0 and prod(node.shape) <= m)): return None
        known[Load(i, node.dtype, 0, 0)] = load
    loads = [load for load in known.values() if isinstance(load, Load)]
    if not any(load.m and load.n == 1 for load in loads): return None
    term = substitute(made.expression, known).cast(dtypes.float32)
    if not all(isinstance(node, Apply | Load | Constant) for node in walk(term)): raise Unfused("positions")
    return _Match(choose(ColumnSumSpec(m, n, term, dtype), target, inputs=len(inputs)), tuple(inputs))


def _stride(space: Space, whole: Affine, lies: Affine) -> int:
    """The stride of a range in an index. Raises `Unfused` where its parts do not lie as one."""
    parts = [part for number in whole.strides for part in space.leaves(number)]
    stride = reach = lies.strides.get(parts[-1], 0)
    for part in reversed(parts):
        if lies.strides.get(part, 0) != reach: raise Unfused("rows or columns in several dimensions")
        reach *= largest(space.extents[part])
    if stride < 0: raise Unfused("a flipped dimension")
    return stride


def rewrite(sink: UOp) -> UOp:
    """The graph with calls for its sums of columns and its rows."""
    if not config.get("NV_NORM"): return sink
    nodes = tuple(sink.toposort(enter_calls=False))
    made = rewrite_columns(sink, nodes)
    return norm.rewrite(made, nodes if made is sink else tuple(made.toposort(enter_calls=False)))
