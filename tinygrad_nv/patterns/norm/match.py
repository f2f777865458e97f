"""Norms, softmax, argmax: reductions of rows and what is computed with them, to one kernel of ours.

Protocol. `rewrite` is a rewrite of hooks/, after those of products and attention, which have taken what
belongs to them. It looks at each node that will be stored: of a CONTIGUOUS, a STORE, or a call's argument.
`NormRows` translates such a node back to memory, in index space: elements of the result are counted by ranges
of rows and one range along the row, of as many elements as the first REDUCE has; every REDUCE in between must
be over that range, of a row the result belongs to. What is stored anyway, and what has no translation (a
gather, another reduction), is loaded. The result takes the node's place for all its users.

Elements of memory alone, without a statistic, are taken where they are made with functions of `SERIES`:
silu(g) · u that no product can have taken, in training. On a CPU tinygrad's code computes those one by one:
19 ms for 512 rows of 8192 float32, 2.4 ms here.

A single sum or maximum of a row, without elements made of it, stays tinygrad's, as on a GPU what its template
does not take (tile/norm/program.py: elements that lie apart, and rows for more than one CTA).
NV_NORM=0 leaves everything to tinygrad.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from tinygrad.dtype import DType, dtypes, truncate
from tinygrad.helpers import prod
from tinygrad.uop.ops import GroupOp, Ops, UOp, sint

from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import building, program
from tinygrad_nv.patterns.attention.fitted import fit_form
from tinygrad_nv.patterns.contraction import Dim, Unsupported, is_storage, merge_dims
from tinygrad_nv.patterns.epilogue import ELEMENTWISE, NODES, SERIES, STORED, Epilogue, Unfused, number
from tinygrad_nv.patterns.index import Affine, Indices, NotAffine, Space, largest
from tinygrad_nv.patterns.norm.shared import MOST_STATISTICS, find_shared
from tinygrad_nv.patterns.rewriting import rebuilt, write_through
from tinygrad_nv.patterns.target import Chosen, Target, choose, target_of
from tinygrad_nv.runtime.observe import ranges
from tinygrad_nv.tile.expression import Constant, Expression, Load, Position, Sum, substitute, walk
from tinygrad_nv.tile.gemm.spec import Result
from tinygrad_nv.tile.norm.spec import Computed, NormSpec, Statistic

NAME = "norm"
MOST_NODES = 256        # between a result and memory
VIEWS = (Ops.RESHAPE, Ops.PERMUTE, Ops.SHRINK, Ops.EXPAND)
LEAST_ROW = 64          # elements of a row without statistics
KINDS: dict[Ops, Literal["add", "max"]] = {Ops.ADD: "add", Ops.MAX: "max"}


@dataclass(frozen=True)
class NormMatch:
    """Rows, ready to be called: what takes the place of `end`. `rows` is the symbolic number of rows."""
    end: UOp
    how: Chosen
    inputs: tuple[UOp, ...]
    rows: UOp | None


def rewrite(sink: UOp, nodes: tuple[UOp, ...]) -> UOp:
    """The graph, of these nodes, with calls for its rows."""
    if not _may_have_rows(nodes): return sink
    stored = dict.fromkeys(nodes_in_memory(nodes))
    # a statistic that is stored too is computed again with its row: that costs no memory traffic
    memory = frozenset(node for node in stored if node.op not in (*GroupOp.Movement, Ops.REDUCE))
    between = find_shared([node for node in nodes if node in stored], memory)
    stored |= dict.fromkeys(between)
    memory |= frozenset(between)
    targets = {node.device: target_of(node.device) for node in stored}
    found = {node: match for node in stored if (target := targets[node.device]) is not None
             and (match := match_node(node, target, memory)) is not None}
    if not found: return sink

    def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
        if (match := found.get(node)) is None: return None
        inputs = [new(x) for x in match.inputs]
        region = node.toposort(gate=lambda each: each not in match.inputs, enter_calls=False)
        first = next((each for each in region if each.op is Ops.REDUCE), node)
        result = building.attempt(NAME, first, lambda: _call_kernel(match, inputs))
        if result is None: return None
        ranges.carry_region(frozenset(region), result)
        return result
    return write_through(rebuilt(nodes, change))


def _may_have_rows(nodes: tuple[UOp, ...]) -> bool:
    """Whether there may be a match: not where nothing spreads the numbers of the only REDUCE along rows."""
    reduces = [node for node in nodes if node.op is Ops.REDUCE]
    if len(reduces) > 1 or any(node.op in SERIES for node in nodes): return True
    after = set(reduces)
    for node in nodes:
        if after.isdisjoint(node.src): continue
        # elementwise operations spread their sources, too
        if node.op is Ops.EXPAND or (node.op in ELEMENTWISE
                                     and any(s in after and s.shape != node.shape for s in node.src)):
            return True
        after.add(node)
    return False


def nodes_in_memory(nodes: tuple[UOp, ...]) -> Iterator[UOp]:
    """Yields what will be in memory: the nodes under what is stored and passed, without reshapes."""
    for node in nodes:
        values = node.src[1:] if node.op is Ops.CALL else node.src[1:2] if node.op is Ops.STORE else \
            node.src[:1] if node.op is Ops.CONTIGUOUS else ()
        for value in values:
            while value.op in (Ops.RESHAPE, Ops.CONTIGUOUS): value = value.src[0]
            if not is_storage(value) and value._shape is not None: yield value


# **** matching ****

def match_node(end: UOp, target: Target, memory: frozenset[UOp]) -> NormMatch | None:
    """The match that ends at a node; None, or a miss, where there is none."""
    if end.op not in ELEMENTWISE or end.dtype not in STORED: return None
    if (first := _first(end, memory)) is None and not _is_costly(end, memory): return None
    try:
        spec, inputs, rows = _spec(end, first, memory)
        how = choose(spec, target, inputs=len(inputs))
        if _read_once(spec) and not all(is_storage(x) or x in memory for x in inputs):
            raise Unfused("sums of values that are not in memory: tinygrad computes them as it adds")
    except (Unfused, NotAffine, Unsupported, SpecError) as no:
        if first is not None:
            program.miss(NAME, first, no.found if isinstance(no, SpecError) else str(no))
    else:
        if len(spec.statistics) != 1 or spec.results[0].result.n:
            return NormMatch(end, how, inputs, rows)
    return None


def spec_of(end: UOp) -> tuple[NormSpec, tuple[UOp, ...], UOp | None]:
    """The spec of a value that is made of rows, what it loads, and its symbolic number of rows. Raises
    `Unfused`, `NotAffine` or `SpecError` where there is none."""
    if end.op not in ELEMENTWISE or end.dtype not in STORED: raise Unfused(f"{end.op.name} of {end.dtype}")
    return _spec(end, _first(end, frozenset()), frozenset())


def _read_once(spec: NormSpec) -> bool:
    """Whether a row is read once: one number a row, of statistics that are not made of each other."""
    terms = [node for statistic in spec.statistics for node in walk(statistic.term)]
    return not spec.results[0].result.n and not any(isinstance(node, Sum) for node in terms)


def _first(end: UOp, memory: frozenset[UOp]) -> UOp | None:
    """The REDUCE along rows that a node is made of: of as many elements as its last dimensions have, or the
    nearest. None where there is none, or too much before it."""
    waiting, seen, found = [end], {end}, list[UOp]()
    for node in waiting:
        if _is_statistic(node): found.append(node)
        if node.op is Ops.REDUCE: continue
        if len(seen) > MOST_NODES: return None
        for s in node.src:
            if s not in seen and s not in memory and s.device is not None and not is_storage(s) \
                    and (s.op in ELEMENTWISE or s.op in GroupOp.Movement or s.op is Ops.REDUCE):
                seen.add(s)
                waiting.append(s)
    rows = {prod(end.max_shape[i:]) for i in range(len(end.shape))}
    return next((node for node in found if _count_reduced(node) in rows), found[0] if found else None)


def _is_costly(end: UOp, memory: frozenset[UOp]) -> bool:
    """Whether a node is made of memory by elements alone, with functions of `SERIES`, in rows of a size."""
    if not end.shape or not isinstance(end.shape[-1], int) or end.shape[-1] < LEAST_ROW: return False
    waiting, seen = [end], {end}
    for node in waiting:
        for s in node.src if node.op in ELEMENTWISE else node.src[:1]:
            loaded = s in memory or s.op is Ops.CONTIGUOUS or is_storage(s)
            if loaded or s in seen or s.device is None: continue
            if len(seen) > MOST_NODES or not (s.op in ELEMENTWISE or s.op in VIEWS): return False
            seen.add(s)
            waiting.append(s)
    return any(node.op in SERIES for node in waiting)


def _is_statistic(node: UOp) -> bool:
    return node.op is Ops.REDUCE and node.arg[0] in KINDS and _count_reduced(node) > 1


def _count_reduced(node: UOp) -> int:
    """How many values a REDUCE makes one of; 0 of a symbolic number."""
    extents = node.src[0].shape[:node.arg[1]]
    return 0 if any(isinstance(extent, UOp) for extent in extents) else prod(extents)


class NormRows(Epilogue):
    """The expressions of rows: `expression` of the result, and `statistics`, in which Sum(part=i) is the i-th
    of them. Positions are `_Place`s until dimensions are known."""

    def __init__(self, space: Space, end: UOp, indices: Indices, memory: frozenset[UOp], column: Affine,
                 n: int) -> None:
        self.column, self.n, self.stored = column, n, memory
        self.statistics: list[Statistic] = []
        self.by_index: dict[tuple[UOp, tuple[int, ...]], int] = {}
        self.rows: list[Indices] = []  # of each statistic
        super().__init__(space, end, end, frozenset(), indices, is_storage)

    def _make(self, node: UOp, indices: Indices, want: DType) -> Expression:
        if number(node) is not None or self.memory(node): return self._leaf(node, indices, want)
        if node in self.stored and node is not self.end: return self._load(node, indices)
        if node.device is None and (made := self._position(node, indices, want)) is not None:
            return made
        if node.op in GroupOp.Movement:
            try: return self.value(node.src[0], self.space.through(node, indices), want)
            except NotAffine: return self._load(node, indices)
        if _is_statistic(node) and (made := self._statistic(node, indices)) is not None: return made
        if node.op in ELEMENTWISE and node.dtype in (*NODES, *dtypes.weaks) and self.beside < MOST_NODES:
            self.beside += 1
            return self._apply(node, indices, want)
        if node is self.end: raise Unfused(f"{node.op.name} of {node.dtype.name}")
        return self._load(node, indices)

    def _statistic(self, node: UOp, indices: Indices) -> Expression | None:
        """A REDUCE along rows of the result; None of another."""
        if _count_reduced(node) != self.n or len(self.statistics) == MOST_STATISTICS: return None
        columns = self.leaves(self.column)
        if any(self.leaves(index) & columns for index in indices): return None
        key = (node, tuple(x for index in indices for x in (*index.key(), -1)))
        if (known := self.by_index.get(key)) is None:
            along = self.space.digits(self.column, node.src[0].shape[:node.arg[1]])
            term = self.value(node.src[0], (*along, *indices), node.dtype)
            self.statistics.append(Statistic(KINDS[node.arg[0]], term))
            self.rows.append(indices)
            known = self.by_index[key] = len(self.statistics) - 1
        return Sum(node.dtype, known)

    def leaves(self, *indices: Affine) -> set[int]:
        """The ranges that indices are made of, as far as they are divided."""
        return {leaf for index in indices for r in index.strides for leaf in self.space.leaves(r)}

    def _position(self, node: UOp, indices: Indices, want: DType) -> Expression | None:
        """A value made of constants, where it is affine in the indices, in the node's dtype; an integer of
        another width in int32, as only casts and comparisons take it."""
        if node.op in (*GroupOp.Movement, Ops.CAST) or not node.shape: return None
        if (form := fit_form(node)) is None: return None
        if form.factors: raise Unfused("a position known only when it runs")
        dtype = want if node.dtype in dtypes.weaks else node.dtype
        if dtype not in NODES and not dtypes.is_int(dtype): raise Unfused(f"positions of {dtype.name}")
        strides: dict[int, int] = {}
        offset = form.offset
        for index, by in zip(indices, form.strides, strict=True):
            offset += by * index.offset
            for r, stride in index.strides.items(): strides[r] = strides.get(r, 0) + by * stride
        least, most = self.space.bounds(Affine(offset, strides))
        if least < dtypes.int32.min or most > dtypes.int32.max: raise Unfused("positions beyond int32")
        dtype = dtype if dtype in NODES else dtypes.int32
        if not any(strides.values()): return Constant(truncate[dtype](offset), dtype)
        return _Place(tuple(sorted(strides.items())), offset).cast(dtype)


@dataclass(frozen=True)
class _Place(Expression):
    """`offset + Σ stride · range`, of ranges by number."""
    strides: tuple[tuple[int, int], ...]
    offset: int
    dtype: DType = dtypes.int32


# **** specs ****

def _spec(end: UOp, first: UOp | None,
          memory: frozenset[UOp]) -> tuple[NormSpec, tuple[UOp, ...], UOp | None]:
    """The spec of a node, what it loads, and its symbolic number of rows; `first` is a statistic, None of
    elements. Raises `Unfused`, `NotAffine` or `SpecError` where there is none."""
    space, n = Space(), largest(end.shape[-1]) if first is None else _count_reduced(first)
    column = space.range(n)
    indices = _indices(space, end, column, n)
    rows = NormRows(space, end, indices, memory, column, n)
    if first is not None and not rows.statistics:
        raise Unfused("a reduction that is not along rows of the result")
    own = set(range(len(space.extents))) - space.divided.keys() - rows.leaves(column)
    if any(rows.leaves(*each) != own for each in rows.rows): raise Unfused("a statistic that rows share")
    out = space.lies(end.shape, indices)
    lies = [space.resolve(each) for _, each in rows.loads]
    places = list(dict.fromkeys(node for root in (rows.expression, *(s.term for s in rows.statistics))
                                for node in walk(root) if isinstance(node, _Place)))
    where = [space.resolve(Affine(place.offset, dict(place.strides))) for place in places]
    dims = row_dims(space, column, (out, *lies, *where))
    inputs = list(dict.fromkeys(node for node, _ in rows.loads))
    known: dict[Expression, Expression] = {}
    for i, ((node, _), each) in enumerate(zip(rows.loads, lies, strict=True), 1):
        m, along, *batch = (dim.strides[i] for dim in (dims.m, dims.n, *dims.batch))
        known[Load(i - 1, node.dtype, 0, 0)] = Load(inputs.index(node), node.dtype, m, along, tuple(batch),
                                                    each.offset)
    for i, (place, each) in enumerate(zip(places, where, strict=True), 1 + len(lies)):
        known[place] = _position_in(dims, i, each.offset)
    statistics = tuple(Statistic(s.op, substitute(s.term, known)) for s in rows.statistics)
    result = Result(end.dtype, dims.m.strides[0], dims.n.strides[0], tuple(d.strides[0] for d in dims.batch),
                    out.offset)
    symbol = dims.m.extent if isinstance(dims.m.extent, UOp) else None
    computed = Computed(result, substitute(rows.expression, known))
    spec = NormSpec(largest(dims.m.extent), n, statistics, (computed,),
                    tuple(largest(d.extent) for d in dims.batch), symbol is not None)
    return spec, tuple(inputs), symbol


def _indices(space: Space, end: UOp, column: Affine, n: int) -> Indices:
    """Ranges of a result: its last dimensions are a row, or it has one number for each row."""
    shape, inner, split = end.shape, 1, len(end.shape)
    while split and inner != n and isinstance(shape[split - 1], int) and n % shape[split - 1] == 0:
        split -= 1
        inner *= shape[split]
    if inner != n: return space.ranges(shape)
    rows = space.ranges(shape[:split])
    return (*rows, *space.digits(column, shape[split:]))


@dataclass(frozen=True)
class RowDims:
    """Dimensions with their strides in the result, the loads and the positions."""
    m: Dim
    n: Dim
    batch: tuple[Dim, ...]


def row_dims(space: Space, column: Affine, indexed: tuple[Affine, ...]) -> RowDims:
    def dim(r: int) -> Dim: return Dim(space.extents[r], tuple(index.strides.get(r, 0) for index in indexed))

    columns = [leaf for r in column.strides for leaf in space.leaves(r)]
    along = [dim(r) for r in columns]
    while len(along) > 1:
        if (one := along[-2].join_inner(along[-1])) is None: raise Unfused("a row in several dimensions")
        along[-2:] = [one]
    found = [dim(r) for r in range(len(space.extents)) if r not in space.divided and r not in columns]
    if any(stride < 0 for each in found for stride in each.strides): raise Unfused("a flipped dimension")
    rows = merge_dims(found, (0,)) or [Dim(1, (0,) * len(indexed))]
    if sum(isinstance(each.extent, UOp) for each in rows) > 1: raise Unfused("two symbolic dimensions")
    m = max(rows, key=lambda each: (isinstance(each.extent, UOp), largest(each.extent)))
    if isinstance(m.extent, UOp) and m.extent.op is not Ops.PARAM: raise Unfused("an expression of rows")
    return RowDims(m, along[0], tuple(each for each in rows if each is not m))


def _position_in(dims: RowDims, number: int, offset: int) -> Expression:
    """Returns a position in dimensions."""
    terms: list[tuple[Expression, int]] = [(Position("n"), dims.n.strides[number]),
                                           (Position("m"), dims.m.strides[number])]
    terms += [(Position(i), dim.strides[number]) for i, dim in enumerate(dims.batch)]
    made: Expression = Constant(offset, dtypes.int32)
    for position, by in terms:
        if by: made = position * by + made
    return made


# **** calls ****

def _call_kernel(match: NormMatch, inputs: list[UOp]) -> UOp:
    spec, end = match.how.spec, match.end
    m: sint = spec.m if match.rows is None else match.rows
    return match.how.call(end.device, [program.Output(end.shape, end.dtype)], inputs,
                          NAME if spec.statistics else "elements", rows=m,
                          variables=[] if match.rows is None else [match.rows],
                          flops=spec.flops // spec.m * m)[0]
