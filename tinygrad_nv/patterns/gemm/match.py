"""Matmuls: every contraction of a graph to a kernel of ours, where a template takes it.

Protocol. `rewrite` is a rewrite of hooks/. It visits the graph once, sums first, and makes a `MatmulMatch` of
each contraction: the region of its epilogue, a `GemmSpec` with its schedule, and the parameters. Then the
graph is built anew with a call in place of each region's end. The result is dense in the order of that node's
dimensions.

A contraction that no template takes is left as it is, and `program.miss` says why. Devices are ours as
patterns/target.py says; NV_GEMM=0 leaves all to tinygrad.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import ALLOW_TF32, prod
from tinygrad.uop.ops import Ops, UOp, sint

from tinygrad_nv import config
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import building, program
from tinygrad_nv.patterns.contraction import (
    LOADS,
    OUT,
    A,
    B,
    Contraction,
    Dim,
    MatmulReduce,
    Side,
    Unsupported,
    arithmetic,
    contract_sides,
    is_storage,
    operands,
    product,
    side,
)
from tinygrad_nv.patterns.epilogue import Epilogue, Unfused, ends, is_normalised, usable
from tinygrad_nv.patterns.index import Affine, Indices, NotAffine, Space, largest
from tinygrad_nv.patterns.quant_gemm.match import is_dequantised, match_quantised
from tinygrad_nv.patterns.rewriting import rebuilt, write_through
from tinygrad_nv.patterns.target import Chosen, Target, choose, target_of
from tinygrad_nv.runtime.observe import ranges
from tinygrad_nv.tile.expression import Apply, Expression, Load, Sum, loads
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, Result

NAME = "gemm"


@dataclass(frozen=True)
class MatmulMatch:
    """A contraction and its epilogue, ready to be called. `rows` is the symbolic number of rows."""
    end: UOp
    region: frozenset[UOp]
    how: Chosen
    inputs: tuple[UOp, ...]
    rows: UOp | None


def rewrite(sink: UOp) -> UOp:
    """The graph with calls for its matmuls."""
    if not config.get("NV_GEMM"): return sink
    matcher = _MatmulMatcher(sink)
    matches = matcher.matches()
    if not matches and not matcher.norms: return sink

    def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
        if node in matcher.norms: return node.replace(src=tuple(map(new, node.src))).contiguous()
        if (found := matches.get(node)) is None: return None
        inputs = [new(x) for x in found.inputs]
        total = min((x for x in found.region if x.op is Ops.REDUCE), key=matcher.place.__getitem__)
        result = building.attempt(NAME, total, lambda: call_kernel(found, inputs, found.end.dtype))
        if result is None: return None
        ranges.carry_region(found.region, result)
        return result
    return write_through(rebuilt(matcher.nodes, change))


# **** matching ****

class _MatmulMatcher:
    """One graph: who uses what, and which nodes are parts of matches."""

    def __init__(self, sink: UOp) -> None:
        self.nodes = tuple(sink.toposort(enter_calls=False))
        self.ends: dict[UOp, MatmulMatch] = {}
        self.inside: set[UOp] = set()
        self.operands: set[UOp] = set()
        self.norms: set[UOp] = set()    # operands of tinygrad's matmuls, which would compute them again

    def matches(self) -> dict[UOp, MatmulMatch]:
        """The matches, by their ends."""
        products = [found for node in self.nodes if node.op is Ops.REDUCE
                    and (found := product(node)) is not None and target_of(node.device) is not None]
        if not products: return {}
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.consumers: dict[UOp, list[UOp]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for one in dict.fromkeys(node.src):
                if one in self.consumers: self.consumers[one].append(node)
        self.multiplied = {node for found in products for node in (found.mul, *found.chain)}
        self.operands = {each for found in products for each in operands(found)}
        for found in products: self.match(found)
        self.norms = {each for found in products if found.total not in self.inside
                      for each in operands(found) if is_normalised(each, self.is_memory)}
        return self.ends

    def is_memory(self, node: UOp) -> bool:
        """Whether a node is storage from its beginning, or will be the result of a kernel of ours."""
        return node in self.ends or is_storage(node)

    def is_read(self, node: UOp) -> bool:
        """Whether an epilogue reads a node from memory: also what will be stored as the operand of a matmul.
        A norm before matmuls and a residual is computed once, not in each kernel that reads it."""
        return node in self.operands or self.is_memory(node)

    def is_taken(self, node: UOp) -> bool:
        """Whether a node belongs to a match, or to a product that may become one."""
        return node in self.inside or node in self.multiplied

    def match(self, found: MatmulReduce) -> None:
        """Takes in a contraction, with as much after it as can be, or says why not."""
        reason = ""
        if (target := target_of(found.total.device)) is None or found.total in self.inside: return
        closed = ends(found.total, self.consumers, self.place, self.is_taken)
        regions = usable(closed, self.consumers)
        for end, region in regions or [(found.total, frozenset((found.total,)))]:
            try: made = match_matmul(found, end, region, target, self.is_memory, read=self.is_read)
            except (Unfused, NotAffine) as no: reason = reason or str(no)
            except SpecError as error: reason = reason or error.found
            except Unsupported as no:
                reason = str(no)
                if no.final: break
            else:
                self.ends[end] = made
                self.inside |= region
                return
        if reason: program.miss(NAME, found.total, reason)


def match_matmul(found: MatmulReduce, end: UOp, region: frozenset[UOp], target: Target,
            memory: Callable[[UOp], bool],
            last: Callable[[Expression], Expression] = lambda value: value,
            read: Callable[[UOp], bool] | None = None) -> MatmulMatch:
    """The match of a region, whose result is `last` of its end's values; the epilogue takes what is `read`
    from memory (by default what is in `memory`). Raises `Unsupported`, `Unfused`,
    `NotAffine` or `SpecError` where there is none."""
    if any(map(is_dequantised, operands(found))):
        # as codes, a matrix that would have to be copied is read from where it is
        with contextlib.suppress(Unsupported, Unfused, NotAffine, SpecError):
            return _match_operands(found, end, region, target, lambda node: is_dequantised(node)
                                   or memory(node),
                            last, read or memory, codes=True)
    return _match_operands(found, end, region, target, memory, last, read or memory)


def _match_operands(found: MatmulReduce, end: UOp, region: frozenset[UOp], target: Target,
             memory: Callable[[UOp], bool], last: Callable[[Expression], Expression],
             read: Callable[[UOp], bool], codes: bool = False) -> MatmulMatch:
    """Returns the match of a region; with `codes` the right operand is a matrix of codes."""
    space = Space()
    kept = space.ranges(end.shape)
    tail = Epilogue(space, found.total, end, region, kept, read)
    summed = space.ranges(found.total.src[0].shape[:found.total.arg[1]])
    places = [_sides(found, space, summed + at, memory) for at in tail.paths]
    a, b, numbers, part = _parts(space, places)
    entries = [(node, space.resolve(lies)) for node, lies in tail.loads]
    out = space.lies(end.shape, kept)
    dims = contract_sides(space, a, b, out, [lies for _, lies in entries], bool(part))
    if words := arithmetic(found, dims.a.dtype, dims.b.dtype): raise Unsupported(words, final=True)
    extras = list(dict.fromkeys(node for node, _ in entries))
    loads = [_load(dims, i, extras.index(node), node, lies) for i, (node, lies) in enumerate(entries)]
    spec = _spec(dims, out, last(_finish_expression(tail.expression, loads, numbers)), part, len(numbers))
    rows = dims.m.extent if isinstance(dims.m.extent, UOp) else None
    if (known := match_quantised(spec, dims.b.storage)) is not None:
        inputs = (dims.a.storage, *known[1], *extras)
        with contextlib.suppress(Unsupported):
            return MatmulMatch(end, region, choose(known[0], target, inputs=len(inputs)), inputs, rows)
    if codes: raise Unsupported("no matrix of codes")
    inputs = (dims.a.storage, dims.b.storage, *extras)
    return MatmulMatch(end, region, choose(spec, target, inputs=len(inputs)), inputs, rows)


def _sides(found: MatmulReduce, space: Space, at: Indices,
           memory: Callable[[UOp], bool]) -> tuple[Side, Side]:
    at = found.indices(space, at)
    a, b = (side(space, one, space.over(found.mul.shape, one.shape, at), found.strip, memory)
            for one in found.mul.src)
    return a, b


def _parts(space: Space, places: list[tuple[Side, Side]]) -> tuple[Side, Side, list[int], int]:
    """The operands, which part of the second each path is, and how far the parts are apart. Paths differ in
    one operand only, by the same number of elements each."""
    places = [(a.resolve(space), b.resolve(space)) for a, b in places]
    if len(places) == 1: return *places[0], [0], 0
    first = places[0]
    if any(one.storage is not mine.storage or one.lies.strides != mine.lies.strides
           for place in places for one, mine in zip(place, first, strict=True)):
        raise Unfused("sums of different operands")
    offsets = [[place[number].lies.offset for place in places] for number in (0, 1)]
    moving = next((number for number in (0, 1) if len(set(offsets[1 - number])) == 1), None)
    if moving is None: raise Unfused("parts of both operands")
    steps = sorted(offsets[moving])
    part = steps[1] - steps[0]
    if steps != [steps[0] + i * part for i in range(len(steps))]: raise Unfused("parts at uneven distances")
    base = places[offsets[moving].index(steps[0])]
    return base[1 - moving], base[moving], [steps.index(offset) for offset in offsets[moving]], part


# **** specs ****

def _spec(dims: Contraction, out: Affine, epilogue: Expression, part: int, parts: int) -> GemmSpec:
    m, n = largest(dims.m.extent), largest(dims.n.extent)
    row, column = dims.m.strides[OUT], dims.n.strides[OUT]
    result = Result(epilogue.dtype, row if m > 1 else _round_up(n) * column, column if n > 1 else 1,
                    tuple(d.strides[OUT] for d in dims.batch), out.offset)
    a, b = _operand(dims, dims.a, A, dims.m), _operand(dims, dims.b, B, dims.n)
    batch, tf32 = tuple(largest(d.extent) for d in dims.batch), a.dtype == dtypes.float32 and bool(ALLOW_TF32)
    return GemmSpec(m, n, largest(dims.k.extent), a, b, result, batch, epilogue, parts, part,
                    isinstance(dims.m.extent, UOp), tf32)


def _operand(dims: Contraction, one: Side, number: int, mn: Dim) -> Operand:
    k = dims.k.strides[number]
    # the stride of a single row is free: one that is aligned
    row = mn.strides[number] if largest(mn.extent) > 1 else _round_up(largest(dims.k.extent)) * k
    return Operand(one.dtype, row, k, tuple(d.strides[number] for d in dims.batch), one.lies.offset)


def _round_up(extent: int) -> int: return -(-extent // 16) * 16


def _load(dims: Contraction, number: int, parameter: int, node: UOp, lies: Affine) -> Load:
    i = LOADS + number
    return Load(parameter, node.dtype, dims.m.strides[i], dims.n.strides[i],
                tuple(d.strides[i] for d in dims.batch), lies.offset)


def _finish_expression(root: Expression, loads: list[Load], parts: list[int]) -> Expression:
    """Returns an expression with its loads and parts in place of their numbers."""
    known: dict[int, Expression] = {}

    def make(node: Expression) -> Expression:
        if isinstance(node, Sum): return replace(node, part=parts[node.part])
        if isinstance(node, Load): return loads[node.parameter]
        if not isinstance(node, Apply): return node
        if id(node) not in known: known[id(node)] = replace(node, args=tuple(map(make, node.args)))
        return known[id(node)]
    return make(root)


# **** calls ****

def call_kernel(match: MatmulMatch, inputs: Sequence[UOp], dtype: DType, words: str = "") -> UOp:
    """Returns the result of a match's kernel, which the graph has as `dtype`."""
    made, rows, end = match.how.spec, match.rows, match.end
    spec = getattr(made, "gemm", made)      # of a QuantGemmSpec
    m: sint = spec.m if rows is None else rows
    return match.how.call(end.device, [program.Output(end.shape, dtype)], inputs, words=words, rows=m,
                            variables=[] if rows is None else [rows], flops=spec.flops // spec.m * m,
                            nbytes=_bytes(made, m))[0]


def _bytes(made: Any, m: sint) -> sint:
    """Returns the bytes that a kernel reads and writes if it reads nothing twice."""
    spec: GemmSpec = getattr(made, "gemm", made)

    def read(dtype: DType, m_stride: int, n_stride: int, batch: tuple[int, ...]) -> sint:
        fixed = prod(e for e, s in zip(spec.batch, batch, strict=True) if s) * (spec.n if n_stride else 1)
        return m * (fixed * dtype.itemsize) if m_stride else fixed * dtype.itemsize
    total = read(spec.out.dtype, 1, 1, spec.batch)
    total += read(spec.a.dtype, 1, 0, spec.a.batch) * spec.k
    if made is spec: total += read(spec.b.dtype, 0, 1, spec.b.batch) * (spec.k * spec.parts)
    else: total += made.matrix_nbytes
    for each in loads(spec.epilogue): total += read(each.dtype, each.m, each.n, each.batch)
    return total
