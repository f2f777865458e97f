"""Matmuls with gathered matrices, found in graphs: `x @ weight[experts].transpose(-1, -2)`.

Protocol. `rewrite` is a rewrite of hooks/, before that of contractions. tinygrad's gather is a sum over the
experts of weight where the expert's number is that of the index; with the matmul around it

    out[slot, n] = Σ_k x[slot // g, k] · Σ_e (experts[slot] = e ? w[e, n, k] : 0)

which reads k · n numbers for every slot. Indices say what is what: n is in w and not in x, slots are what
else the result has. In its place stand the order of slots by expert (patterns/router/rows.py), once for all
that have the same experts, and a matmul of rows with the matrix of their group, gathered and scattered
(tile/grouped_gemm/spec.py): a matrix is read once for the slots of its expert.

What is not of this form is left to tinygrad, and `program.miss` says why. NV_GEMM=0 leaves all to tinygrad.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinygrad.dtype import dtypes
from tinygrad.helpers import prod
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv import config
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import building, program
from tinygrad_nv.patterns.attention.fitted import fit_form
from tinygrad_nv.patterns.contraction import (
    MatmulReduce,
    Side,
    Unsupported,
    arithmetic,
    is_exact,
    is_storage,
    product,
    side,
)
from tinygrad_nv.patterns.epilogue import number
from tinygrad_nv.patterns.index import Affine, Indices, NotAffine, Space, largest
from tinygrad_nv.patterns.rewriting import rebuilt, write_through
from tinygrad_nv.patterns.router.rows import check_sorted, sort_in_rewrite
from tinygrad_nv.patterns.target import Chosen, Target, choose, target_of
from tinygrad_nv.runtime.observe import ranges
from tinygrad_nv.tile.expression import short
from tinygrad_nv.tile.gemm.spec import FLOAT16S
from tinygrad_nv.tile.grouped_gemm.spec import GroupedGemmSpec, MixedGroupedSpec
from tinygrad_nv.tile.router.spec import GroupRowsSpec
from tinygrad_nv.tile.templates import TABLE

NAME = "grouped_gemm"


@dataclass(frozen=True)
class GatheredMatmul:
    """A matmul with gathered matrices, ready to be called: what takes the place of `end`. `tokens` is their
    number where it is symbolic."""
    end: UOp
    total: UOp
    how: Chosen
    rows: GroupRowsSpec
    x: UOp
    w: UOp
    experts: UOp
    tokens: UOp | None


def rewrite(sink: UOp) -> UOp:
    """The graph with calls for its matmuls with gathered matrices."""
    if not config.get("NV_GEMM"): return sink
    nodes = tuple(sink.toposort(enter_calls=False))
    gathers = [(found, gathered) for node in nodes if node.op is Ops.REDUCE
               and (found := product(node)) is not None and (gathered := _gather(found)) is not None]
    if not gathers: return sink
    users: dict[UOp, list[UOp]] = {}
    for node in nodes:
        for one in dict.fromkeys(node.src): users.setdefault(one, []).append(node)
    made = [match for found, gathered in gathers if (match := _match(found, gathered, users)) is not None]
    matches = {match.end: match for match in made}
    if not matches: return sink
    sorts: dict[tuple[UOp, GroupRowsSpec], tuple[UOp, ...]] = {}

    def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
        if (match := matches.get(node)) is None: return None
        x, w, experts = (new(each) for each in (match.x, match.w, match.experts))
        result = building.attempt(NAME, match.total, lambda: _call_kernel(match, x, w, experts, sorts))
        if result is None: return None
        ranges.carry_region(frozenset({match.end, match.total}), result)
        return result
    return write_through(rebuilt(nodes, change))


# **** what is found ****

@dataclass(frozen=True)
class _Gather:
    """Operand `number` of a product: a view of `total`, Σ_e (experts = position ? w : 0) of `where`."""
    number: int
    total: UOp
    where: UOp
    compared: UOp
    experts: UOp
    position: UOp


def _gather(found: MatmulReduce) -> _Gather | None:
    """The operand that is gathered, if there is one."""
    for i, operand in enumerate(found.mul.src):
        total = _base(operand)
        if total.op is not Ops.REDUCE or total.arg != (Ops.ADD, 1): continue
        where = _base(total.src[0])
        if where.op is not Ops.WHERE or number(where.src[2]) != 0: continue
        if (compared := _equality(where.src[0])) is None: continue
        for position, experts in (compared.src, compared.src[::-1]):
            if position.device is None and experts.device is not None and dtypes.is_int(experts.dtype):
                return _Gather(i, total, where, compared, experts, position)
    return None


def _base(node: UOp) -> UOp:
    """Returns the node that a tensor is a view and cast of."""
    while node.op in GroupOp.Movement or node.op is Ops.CAST: node = node.src[0]
    return node


def _equality(node: UOp) -> UOp | None:
    """The comparison of a condition a == b, which tinygrad has as a != b != true."""
    while node.op in GroupOp.Movement: node = node.src[0]
    if node.op is Ops.CMPEQ: return node
    if node.op is not Ops.CMPNE or number(node.src[1]) is not True: return None
    return node.src[0] if node.src[0].op is Ops.CMPNE else None


# **** matching ****

def _match(found: MatmulReduce, gather: _Gather, users: dict[UOp, list[UOp]]) -> GatheredMatmul | None:
    """The match; None, or a miss, where there is none."""
    if (target := target_of(found.total.device)) is None: return None
    if TABLE.family(target.kind, GroupedGemmSpec) is None: return None
    try: return _match_matmul(found, gather, target, users)
    except SpecError as error: reason = error.found
    except (NotAffine, Unsupported) as no: reason = str(no)
    if reason: program.miss(NAME, found.total, reason)
    return None


def _match_matmul(found: MatmulReduce, gather: _Gather, target: Target,
             users: dict[UOp, list[UOp]]) -> GatheredMatmul:
    chain = _chain(found.total, users)
    end, space = chain[-1], Space()
    kept = space.ranges(end.shape)
    at = kept
    for node in reversed(chain[1:]):
        if node.op in GroupOp.Movement: at = space.through(node, at)
    summed = space.ranges(found.total.src[0].shape[:found.total.arg[1]])
    read = _read(found, gather, end, space, found.indices(space, summed + at))
    if words := arithmetic(found, read.x.dtype, read.w.dtype): raise Unsupported(words)
    kinds = [short(dtype) for dtype in (end.dtype, read.x.dtype, read.w.dtype)]
    mixed = kinds[:2] == ["f32", "f32"] and read.w.dtype in FLOAT16S and \
        TABLE.family(target.kind, MixedGroupedSpec) is not None
    if len(set(kinds)) > 1 and not mixed:
        raise Unsupported("results of {}, rows of {}, matrices of {}".format(*kinds))
    return _arrange_match(found, space, read, space.lies(end.shape, kept), end, target)


def _chain(total: UOp, users: dict[UOp, list[UOp]]) -> list[UOp]:
    """The sum, and the views of all of it that follow while nothing else has it, to a cast that rounds it."""
    chain = [total]
    while len(after := users.get(chain[-1], [])) == 1:
        node, = after
        rounds = node.op is Ops.CAST and node.dtype in FLOAT16S
        if not rounds and node.op not in (Ops.RESHAPE, Ops.PERMUTE): break
        chain.append(node)
        if rounds: break
    return chain


@dataclass(frozen=True)
class _Read:
    """Rows, matrices and experts that a kernel reads, over ranges that are not divided; `e` is that of
    experts."""
    x: Side
    w: Side
    experts: Side
    e: int


def _read(found: MatmulReduce, gather: _Gather, end: UOp, space: Space, at: Indices) -> _Read:
    """The operands at the indices of a product. Raises `Unsupported` or `NotAffine`."""
    mul = found.mul
    gathered, other = mul.src[gather.number], mul.src[1 - gather.number]
    # rows of 16-bit floats that give results of float32 are widened
    strip = found.strip and end.dtype in FLOAT16S
    x = side(space, other, space.over(mul.shape, other.shape, at), strip, is_storage)
    inner = space.range(gather.total.src[0].shape[0])
    if not inner.strides: raise Unsupported("one expert")
    if not (_is_widened(gathered, gather.total) and _is_widened(gather.total.src[0], gather.where)):
        raise Unsupported("matrices that are rounded")
    outer = _through(space, gathered, space.over(mul.shape, gathered.shape, at), gather.total)
    where = _through(space, gather.total.src[0], (inner, *outer), gather.where)
    w_source, shape = gather.where.src[1], gather.where.shape
    w = side(space, w_source, space.over(shape, w_source.shape, where), found.strip, is_storage)
    if w.copied: raise Unsupported("matrices that are computed")
    condition, compared = gather.where.src[0], gather.compared
    where = _through(space, condition, space.over(shape, condition.shape, where), compared)
    experts, position = (space.over(compared.shape, each.shape, where) for each in
                         (gather.experts, gather.position))
    _check_position(space, gather.position, position, inner)
    number_of = side(space, gather.experts, experts, False, is_storage)
    x, w, number_of = (each.resolve(space) for each in (x, w, number_of))
    return _Read(x, w, number_of, *space.resolve(inner).strides)


def _is_widened(node: UOp, base: UOp) -> bool:
    """Whether the casts of what is a view and cast of `base` lose nothing."""
    while node is not base:
        if node.op is Ops.CAST and not is_exact(node.src[0].dtype, node.dtype): return False
        node = node.src[0]
    return True


def _through(space: Space, node: UOp, at: Indices, base: UOp) -> Indices:
    """The indices of what a node is a view, a cast or the negation of."""
    while node is not base:
        if node.op in GroupOp.Movement: at = space.through(node, at)
        elif node.op is Ops.CMPNE: at = space.over(node.shape, node.src[0].shape, at)
        node = node.src[0]
    return at


def _check_position(space: Space, node: UOp, at: Indices, inner: Affine) -> None:
    """Raises `Unsupported` where an expert is not compared with its own number."""
    at = _through(space, node, at, base := _base(node))
    form = fit_form(base)
    if form is None or form.factors:
        raise Unsupported("experts are compared with other numbers than their own")
    strides: dict[int, int] = {}
    offset = form.offset
    for index, factor in zip(map(space.resolve, at), form.strides, strict=True):
        offset += index.offset * factor
        for r, stride in index.strides.items(): strides[r] = strides.get(r, 0) + stride * factor
    own = {r: stride for r, stride in strides.items() if stride}
    if offset or own != space.resolve(inner).strides:
        raise Unsupported("experts are compared with other numbers than their own")


# **** places ****

def _arrange_match(found: MatmulReduce, space: Space, read: _Read, out: Affine, end: UOp,
              target: Target) -> GatheredMatmul:
    """Returns the match of operands that lie as kernels read them. Raises `Unsupported`."""
    extents = [largest(extent) for extent in space.extents]
    x, w, experts = read.x.lies.strides, read.w.lies.strides, read.experts.lies.strides
    inner = sorted(out.strides, key=out.strides.__getitem__)
    columns = [r for r in inner if w.get(r)]
    slots = [r for r in inner if not w.get(r)]
    summed = [r for r in w if r not in out.strides and r != read.e]
    n, k, groups = (prod(extents[r] for r in some) for some in (columns, summed, [read.e]))
    rows = prod(extents[r] for r in slots)
    if any(x.get(r) for r in columns) or any(experts.get(r) for r in (*columns, *summed)) or x.get(read.e):
        raise Unsupported("an expert for each column")
    if any(stride and r not in out.strides and not w.get(r) for r, stride in (*x.items(), *experts.items())):
        raise Unsupported("a sum over slots")
    ways = {r: stride for r, stride in w.items() if r != read.e}
    if not _dense([*sorted(summed, key=ways.__getitem__), *columns], ways, extents, 1) or w[read.e] != n * k \
            or read.w.lies.offset:
        raise Unsupported("matrices that do not lie as (experts, columns, summed)")
    if not _dense(columns, out.strides, extents, 1) or not _dense(slots, out.strides, extents, n):
        raise Unsupported("columns of a result that do not lie side by side")
    if not _dense(slots, experts, extents, 1): raise Unsupported("experts of slots in another order")
    shared = next((i for i, r in enumerate(slots) if x.get(r)), len(slots))
    gather = prod(extents[r] for r in slots[:shared])
    if {r: x.get(r) for r in summed} != {r: w[r] for r in summed} \
            or not _dense(slots[shared:], x, extents, k) or read.x.lies.offset:
        raise Unsupported("rows that do not lie one after the other")
    tokens = _symbol(space, slots)
    spec = GroupedGemmSpec(groups, rows, n, k, read.x.dtype, rows // gather, gather, scatter=True)
    if read.w.dtype != spec.dtype: spec = MixedGroupedSpec(**vars(spec), half=read.w.dtype)
    most = largest(tokens) if tokens is not None else rows
    sort = GroupRowsSpec(most, rows // most, groups, tokens is not None)
    check_sorted(sort, target)
    return GatheredMatmul(end, found.total, choose(spec, target), sort, read.x.storage, read.w.storage,
                          read.experts.storage, tokens)


def _dense(order: Sequence[int], strides: dict[int, int], extents: Sequence[int], pitch: int) -> bool:
    """Whether ranges, the innermost first, lie one inside the other, from a pitch on."""
    for r in order:
        if strides.get(r) != pitch: return False
        pitch *= extents[r]
    return True


def _symbol(space: Space, slots: Sequence[int]) -> UOp | None:
    """The symbolic number of tokens, which are the outermost of slots. Raises `Unsupported`."""
    found = [r for r, extent in enumerate(space.extents) if isinstance(extent, UOp)]
    if not found: return None
    tokens = space.extents[found[0]]
    if found != slots[-1:] or not isinstance(tokens, UOp) or tokens.op is not Ops.PARAM:
        raise Unsupported("a symbolic extent that is not the number of tokens")
    return tokens


# **** calls ****

def _call_kernel(match: GatheredMatmul, x: UOp, w: UOp, experts: UOp,
            sorts: dict[tuple[UOp, GroupRowsSpec], tuple[UOp, ...]]) -> UOp:
    spec, key = match.how.spec, (match.experts, match.rows)
    known = (experts >= 0) & (experts < spec.groups)
    zeroes = getattr(match.how.schedule, "zeroes", False)
    if key not in sorts:
        whole = zeroes and experts.dtype == dtypes.int32
        numbers = experts if whole else known.where(experts, spec.groups if zeroes else 0)
        sorts[key] = sort_in_rewrite(match.rows, match.how.target, numbers.cast(dtypes.int32), match.tokens)
    order, offsets = sorts[key]
    moved = spec.active_bytes + (spec.x_rows * spec.k + spec.rows * spec.columns) * spec.dtype.itemsize
    out = program.Output(match.end.shape, spec.dtype)
    made = match.how.call(match.end.device, [out], [x, w, offsets, order], NAME, flops=spec.flops,
                            nbytes=moved)[0]
    if zeroes: return made
    # tinygrad gives zeros for numbers that are no expert's, whose rows expert 0 has had
    return known.reshape(spec.rows, 1).where(made.reshape(spec.rows, spec.n), 0).reshape(match.end.shape)
