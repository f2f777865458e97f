"""Codes that the matmul before them makes.

Protocol. With a static scale codes are elements of x: no statistic of x is needed first. `quantize_before`
looks for a matmul that x is made of by elementwise operations, and whose result has no other user: one of a
named function, or one of the graph whose operands are memory or elements of it (patterns/gemm). It gives that
matmul with all of this in its epilogue, rounded to x's dtype before it is quantised, as the graph says; also
of equal parts of the columns, as in silu(gate) · up of one matmul. The matmul that stores its result, which
named.py has made by then, has no user any more, and is not run.

Scales of rows and groups are not made so: the largest |x| of 128 columns is spread over the threads of a
tile, that of a row over several CTAs.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass

from tinygrad.dtype import DType
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv import config
from tinygrad_nv.errors import SpecError
from tinygrad_nv.patterns import building, sparse_gemm
from tinygrad_nv.patterns.contraction import Unsupported, is_storage, product
from tinygrad_nv.patterns.epilogue import ELEMENTWISE, MOST_INSIDE, MOVED, NODES, Epilogue, Unfused
from tinygrad_nv.patterns.gemm import match as gemm
from tinygrad_nv.patterns.index import Affine, NotAffine, Space, largest
from tinygrad_nv.patterns.named import Uses
from tinygrad_nv.patterns.named_matmul import NamedMatmul
from tinygrad_nv.patterns.norm.match import row_dims
from tinygrad_nv.patterns.quant_gemm import named as quant
from tinygrad_nv.patterns.rewriting import value_in_storage
from tinygrad_nv.patterns.scaled_gemm import named as scaled
from tinygrad_nv.patterns.target import Target
from tinygrad_nv.tile.expression import Expression, Load, Sum, substitute

Codes = Callable[[Expression], Expression]
MATMULS: Mapping[type, Callable[..., NamedMatmul]] = {
    scaled.ScaledMatmul: scaled.matmul_of, quant.QuantMatmul: quant.matmul_of,
    sparse_gemm.SparseMatmul: sparse_gemm.matmul_of}
NAME = "codes of a matmul"


@dataclass(frozen=True)
class _Region:
    """A matmul's result, and all that is made of it: `end` alone is used elsewhere, by one call."""
    root: UOp
    end: UOp
    nodes: frozenset[UOp]


def quantize_before(uses: Uses, target: Target, codes: Codes, dtype: DType) -> tuple[UOp | None, str]:
    """Returns the codes of a call's argument by the matmul before it, as `dtype`; or None, and why not: \"\"
    where no matmul ends there."""
    reason = ""
    if not config.get("NV_GEMM"): return None, reason
    for region in _regions(uses):
        def make(region: _Region = region) -> UOp:
            way = _quantize_named_matmul if region.root.op is Ops.GETTUPLE else _quantize_graph_matmul
            try: return way(uses, region, target, codes, dtype)
            except (Unfused, NotAffine) as no: raise Unsupported(str(no)) from no
            except SpecError as error: raise Unsupported(f"{error.found}, not {error.expected}") from error
        try: value = building.attempt(NAME, region.root, make)
        except Unsupported as no: reason = reason or str(no)
        else:
            if value is not None: return value, ""
    return None, reason


# **** regions ****

def _regions(uses: Uses) -> Iterator[_Region]:
    """The regions that end with a call's argument, that of the nearest matmul first."""
    end = uses.call.src[1]
    if uses.users[end] != [uses.call]: return
    waiting, roots, inside = [end], list[UOp](), set[UOp]()
    for node in waiting:
        if _is_matmul(node): roots.append(node)
        elif node not in inside and len(inside) < MOST_INSIDE and _is_fusable(node):
            inside.add(node)
            waiting += node.src if node.op in ELEMENTWISE else node.src[:1]
    for root in dict.fromkeys(roots):
        if (nodes := _close_region(root, end, inside, uses)) is not None: yield _Region(root, end, nodes)


def _is_fusable(node: UOp) -> bool:
    return node.op in MOVED or (node.op in ELEMENTWISE and node.dtype in NODES)


def _is_matmul(node: UOp) -> bool:
    if node.op is Ops.GETTUPLE: return node.src[0].op is Ops.FUNCTION and type(node.src[0].arg.aux) in MATMULS
    if node.op is not Ops.REDUCE or (found := product(node)) is None: return False
    return all(_is_plain(each) for each in found.mul.src)


def _is_plain(operand: UOp) -> bool:
    """Whether an operand is memory, or elements of it, and not what an exponential has stored: one made of
    sums may be of a match larger than a matmul, gathered matrices or an attention's probabilities."""
    ends = [node for node in _elements(operand) if not _sources(node)]
    values = [_value_in_memory(node) for node in ends]
    return all(is_storage(node) or node.op is Ops.GETTUPLE or node.device is None for node in ends) and not \
        any(node.op is Ops.EXP2 for value in values if value is not None for node in _elements(value))


def _elements(value: UOp) -> list[UOp]:
    """The nodes that a value is made of, element by element, up to memory, sums and the like."""
    found, known = [value], {value}
    for node in found:
        new = [each for each in _sources(node) if each not in known]
        found += new
        known.update(new)
    return found


def _sources(node: UOp) -> tuple[UOp, ...]:
    """Returns the nodes that a node is made of, element by element."""
    if node.op in ELEMENTWISE: return tuple(dict.fromkeys(node.src))
    return node.src[:1] if node.op in GroupOp.Movement else ()


def _value_in_memory(node: UOp) -> UOp | None:
    """The value that memory is given in this graph; None of others."""
    if node.op is Ops.CONTIGUOUS: return node.src[0]
    return value if (value := value_in_storage(node)) is not node else None


def _close_region(root: UOp, end: UOp, inside: Set[UOp], uses: Uses) -> frozenset[UOp] | None:
    """A result and all that is made of it up to the end, if that is of the nodes `inside`."""
    found = [root]
    for node in found:
        if node is end: continue
        for user in uses.users[node]:
            if user not in inside: return None
            if user not in found: found.append(user)
    return frozenset(found)


# **** matmuls ****

def _quantize_graph_matmul(uses: Uses, region: _Region, target: Target, codes: Codes, dtype: DType) -> UOp:
    """By a matmul of the graph."""
    total = product(uses.new(region.root))
    assert total is not None
    nodes = frozenset(map(uses.new, region.nodes))
    match = gemm.match_matmul(total, uses.new(region.end), nodes, target, is_storage, codes)
    return gemm.call_kernel(match, match.inputs, dtype)


def _quantize_named_matmul(uses: Uses, region: _Region, target: Target, codes: Codes, dtype: DType) -> UOp:
    """By a matmul that is known by name."""
    function = region.root.src[0]
    matmul = MATMULS[type(function.arg.aux)](function.arg.aux, target, *map(uses.new, function.src[1:]))
    root, end = uses.new(region.root), uses.new(region.end)
    space = Space()
    indices = space.ranges(end.shape)
    tail = Epilogue(space, root, end, frozenset(map(uses.new, region.nodes)), indices, is_storage)
    paths = [space.lies(root.shape, path) for path in tail.paths]
    out, *lies = (space.resolve(each) for each in (space.lies(end.shape, indices), *paths,
                                                   *(each for _, each in tail.loads)))
    dims = row_dims(space, indices[-1], (out, *lies))
    n, count = largest(end.shape[-1]), len(paths)
    if dims.batch or largest(dims.m.extent) != matmul.gemm.m or dims.n.extent != n:
        raise Unfused(f"{n} columns of rows that are not the matmul's")
    if (n > 1 and dims.n.strides[1] != 1) or (matmul.gemm.m > 1 and dims.m.strides[1] != matmul.gemm.n):
        raise Unfused("elements in another order than the matmul's")
    parts = _parts(lies[:count], n, matmul.gemm.n)
    extras = list(dict.fromkeys(node for node, _ in tail.loads))
    known: dict[Expression, Expression] = {Sum(root.dtype, i): Sum(root.dtype, part)
                                           for i, part in enumerate(parts)}
    for i, ((node, _), each) in enumerate(zip(tail.loads, lies[count:], strict=True)):
        m, along = (dim.strides[1 + count + i] for dim in (dims.m, dims.n))
        known[Load(i, node.dtype, 0, 0)] = Load(extras.index(node), node.dtype, m, along, (), each.offset)
    after = codes(substitute(tail.expression, known))
    made = matmul.with_epilogue(after, len(parts), extras)
    return made.call(target, dtype)[0].reshape(end.shape)


def _parts(paths: list[Affine], n: int, whole: int) -> list[int]:
    """Returns which part of the columns each path to the result is. Raises `Unfused` where they are not
    all."""
    parts = [path.offset // n for path in paths]
    apart = any(path.offset % n or path.strides != paths[0].strides for path in paths)
    if apart or sorted(parts) != list(range(whole // n)) or whole % n:
        raise Unfused("not all of the matmul's columns, or in another order")
    return parts
