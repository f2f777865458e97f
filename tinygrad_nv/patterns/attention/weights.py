"""The weights of an attention: exponentials divided by their sum, and the products on both sides of them.

Protocol. From the second product of an attention backwards, with the indices of each node in one `Space`:

    operand = weighted(second)                  which side of it is made of exponentials
    at, divisor = tail(total, end)              from the result to the product; a division after it
    exponential, at = weights(operand, divisor) divided by Σ over the keys of the same exponential, by its
                                                indices, before the product or after it
    first = first_product(exponential)          q kᵀ

What is otherwise raises `Unfused`, with what is in the way.
"""
from __future__ import annotations

from tinygrad.dtype import dtypes
from tinygrad.uop.ops import GroupOp, Ops, UOp, sint

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.attention.score import FLOATS, PASSED
from tinygrad_nv.patterns.contraction import MatmulReduce, Unsupported, is_storage, product
from tinygrad_nv.patterns.epilogue import Unfused, number
from tinygrad_nv.patterns.index import Affine, Indices, Space, same
from tinygrad_nv.patterns.rewriting import value_in_storage

NAME = "attention"  # what `program.miss` calls it


def strip_views(node: UOp) -> UOp:
    """Returns the node that a value is a view and cast of."""
    while node.op in GroupOp.Movement or node.op in PASSED or (node.op is Ops.CAST and node.dtype in FLOATS
                                                               and node.src[0].dtype in FLOATS):
        node = node.src[0]
    return node


def weights_operand(second: MatmulReduce) -> int | None:
    """Returns which operand of a product is made of exponentials, as the weights of an attention are. Weights
    that are stored, since a Tensor holds them, are reported."""
    for i, source in enumerate(second.mul.src):
        value = value_in_storage(node := strip_views(source))
        if value is not node and _exponential(strip_views(value)):
            program.miss(NAME, second.total, "the weights are used elsewhere too: a tensor holds them")
        elif _exponential(node): return i
    return None


def _exponential(node: UOp) -> bool:
    if node.op is Ops.EXP2: return True
    return node.op is Ops.MUL and {strip_views(s).op for s in node.src} == {Ops.EXP2, Ops.RECIPROCAL}


def _descend(space: Space, node: UOp, at: Indices) -> tuple[UOp, Indices]:
    end = strip_views(node)
    while node is not end:
        if node.op in GroupOp.Movement: at = space.through(node, at)
        node = node.src[0]
    return node, at


def tail(space: Space, total: UOp, end: UOp, at: Indices) -> tuple[Indices, tuple[UOp, Indices] | None]:
    """The indices of the product from those of the end, and what it is divided by on the way."""
    divided: tuple[UOp, Indices] | None = None
    node, narrowed = end, 0
    while node is not total:
        if node.op is Ops.CAST:
            narrowed += divided is None and node.dtype != node.src[0].dtype
            if narrowed > 1: raise Unfused("a result that is rounded twice")
            if narrowed and node.dtype == dtypes.float32: raise Unfused("a result that is rounded on the way")
            node = node.src[0]
        elif node.op is Ops.MUL:
            if divided is not None: raise Unfused("a result that is divided twice")
            left = _leads_to(node.src[0], total)
            by = node.src[int(left)]
            divided = by, space.over(node.shape, by.shape, at)
            own = node.src[1 - int(left)]
            node, at = own, space.over(node.shape, own.shape, at)
        else: node, at = node.src[0], space.through(node, at)
    return at, divided


def _leads_to(node: UOp, total: UOp) -> bool:
    while node is not total and (node.op in GroupOp.Movement or node.op in (Ops.CAST, Ops.MUL)):
        if node.op is Ops.MUL: return any(_leads_to(s, total) for s in node.src)
        node = node.src[0]
    return node is total


def weights(space: Space, node: UOp, at: Indices, columns: Indices,
            divided: tuple[UOp, Indices] | None) -> tuple[UOp, Indices]:
    """The exponential, and its indices. Raises `Unfused` unless its sum over the keys divides it."""
    node, at = _descend(space, node, at)
    if node.op is Ops.MUL:
        if divided is not None: raise Unfused("weights that are divided before and after the product")
        operands = [_descend(space, s, space.over(node.shape, s.shape, at)) for s in node.src]
        exponential, reciprocal = sorted(operands, key=lambda pair: pair[0].op is not Ops.EXP2)
        node, at = exponential
    elif divided is None: raise Unfused("weights that are not normalised")
    else: reciprocal = _descend(space, *divided)
    total, where = _descend(space, *_divisor(space, reciprocal[0].src[0], reciprocal[1]))
    if total.op is not Ops.REDUCE or total.arg[0] is not Ops.ADD or total.arg[1] != len(columns):
        raise Unfused("weights that are not divided by their sum")
    extents = total.src[0].shape[:total.arg[1]]
    if not all(map(same, extents, (_extent(space, c) for c in columns))):
        raise Unfused("weights that are divided by a sum over other keys")
    inner, inside = _descend(space, total.src[0], columns + where)
    if inner is not node or any(space.resolve(x).key() != space.resolve(y).key()
                                for x, y in zip(at, inside, strict=True)):
        raise Unfused("weights that are divided by the sum of others")
    return node, at


def _divisor(space: Space, node: UOp, at: Indices) -> tuple[UOp, Indices]:
    """The sum of `(sum == 0).where(1, sum)`: where that is 0 all weights are, whatever divides them. Of other
    divisors, themselves."""
    guard, where = _descend(space, node, at)
    if guard.op is not Ops.WHERE: return node, at
    condition, instead, total = guard.src
    if condition.op is Ops.CMPNE and number(condition.src[1]) is True: condition = condition.src[0]
    elif condition.op is Ops.CMPNE: instead, total = total, instead
    elif condition.op is not Ops.CMPEQ: return node, at
    if condition.src[0] is not total or number(condition.src[1]) != 0 or not number(instead): return node, at
    return total, space.over(guard.shape, total.shape, where)


def _extent(space: Space, index: Affine) -> sint:
    return space.extents[next(iter(index.strides))] if index.strides else 1


def first_product(exponential: UOp) -> MatmulReduce:
    """The product that an exponential is made of. What is stored with CONTIGUOUS is looked into last."""
    for stops in ({Ops.CONTIGUOUS}, set[Ops]()):
        waiting, seen, found = [exponential.src[0]], set[UOp](), list[MatmulReduce]()
        while waiting:
            node = waiting.pop()
            if node in seen or node.op in stops or node.op is Ops.CALL or _is_buffer(node): continue
            seen.add(node)
            if node.op is Ops.REDUCE and node.device is not None and (one := product(node)) is not None:
                found.append(one)
            else: waiting += node.src
        if len(found) > 1: raise Unsupported(f"scores of {len(found)} products", final=True)
        if found: return found[0]
    raise Unsupported("", final=True)


def _is_buffer(node: UOp) -> bool: return node.op is not Ops.CONTIGUOUS and is_storage(node)
