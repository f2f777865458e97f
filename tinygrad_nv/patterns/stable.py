"""e · 1 / (1 + e), of an exponential e, in a form that holds where e is infinite.

Protocol. `rewrite` is the first rewrite of hooks/: every family, every target and tinygrad's own kernels
compute what it leaves. With d = 1 / (k (1 + e)), a product with both e and d among its factors has instead

    e · d   →   1 / k where e > c, else e · d

where c is so large that the quotient rounds to that; e = ∞ with d = 0 would be NaN. The derivatives of
sigmoid, silu, tanh, the approximation of gelu and log(1 + e) are such products, and e is ∞ from x = -88.7
down. A bound of e itself would change d, which is the forward value.

tinygrad has rules of its own in its code generation, e · d → 1 - d. They are not what is used here: 1 - d has
no correct digit where e < 2^-24 (of float16, 2^-11), the product has all of them. And they come too late: a
kernel of ours has taken the graph before, and where d is in memory, an activation that is kept for the
backward pass, the kernel that reads it does not know what it is: there tinygrad's own give NaN as well.

Factors are found through products, casts, and sums that have them in both terms (second derivatives).
Products keep their order, but for numbers, which come last.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from tinygrad.dtype import dtypes, least_upper_dtype
from tinygrad.uop.ops import Ops, UOp

from tinygrad_nv.patterns.epilogue import number
from tinygrad_nv.patterns.rewriting import rebuilt, value_in_storage

MOST_DEEP = 12  # nodes between a product and its factors; the derivatives above have up to 7


def rewrite(sink: UOp) -> UOp:
    """The graph without products ∞ · 0 that have a finite limit."""
    nodes = tuple(sink.toposort(enter_calls=False))
    found = {_strip(pair[0]) for node in nodes
             if node.op is Ops.RECIPROCAL and (pair := _exponential(node)) is not None}
    # forward passes end here: nothing but 1 + e has e
    if not found or not any(s in found and node.op is not Ops.ADD for node in nodes for s in node.src):
        return sink

    def change(node: UOp, new: Callable[[UOp], UOp]) -> UOp | None:
        return _product(node, *map(new, node.src)) if node.op is Ops.MUL else None
    return rebuilt(nodes, change)


def _exponential(d: UOp) -> tuple[UOp, float] | None:
    """e and k of d = 1 / (k (1 + e)), also of a d in memory; None of other nodes."""
    if (d := value_in_storage(d)).op is not Ops.RECIPROCAL: return None
    whole, k = _uncast(d.src[0]), 1.0
    if whole.op is Ops.MUL and (factor := number(whole.src[1])): whole, k = _uncast(whole.src[0]), factor
    if whole.op is not Ops.ADD: return None
    for one, e in (whole.src, whole.src[::-1]):
        if number(one) == 1 and _strip(e).op is Ops.EXP2: return e, k
    return None


def _uncast(node: UOp) -> UOp:
    while node.op is Ops.CAST and dtypes.is_float(node.dtype) and dtypes.is_float(node.src[0].dtype):
        node = node.src[0]
    return node


def _strip(e: UOp) -> UOp: return value_in_storage(_uncast(e))


def _factors(node: UOp, deep: int = MOST_DEEP) -> Iterator[UOp]:
    """The exponentials, and the quotients 1 / (1 + e), that a value is a multiple of."""
    node = _uncast(node)
    if value_in_storage(node).op is Ops.EXP2 or _exponential(node) is not None: yield node
    if not deep: return
    if node.op is Ops.MUL:
        for s in dict.fromkeys(node.src): yield from _factors(s, deep - 1)
    if node.op in (Ops.ADD, Ops.SUB):
        others = set(_factors(node.src[1], deep - 1))
        yield from (each for each in _factors(node.src[0], deep - 1) if each in others)


def _product(node: UOp, a: UOp, b: UOp) -> UOp | None:
    """A product over other sources, without e and d among its factors; None where these have no such pair."""
    if (pair := _pair(a, b)) is not None: e, d, both = pair
    elif (pair := _pair(b, a)) is not None:
        e, d, both = pair
        a, b = b, a
    else: return None
    rest, whole = _replace_factor(a, e, None), _replace_factor(b, d, both)
    assert whole is not None
    # e² · d² has two
    made = whole if rest is None else _product(node, rest, whole) or node.replace(src=(rest, whole))
    made, factor = _split_factor(made)
    return made if factor is None else made * factor


def _split_factor(node: UOp) -> tuple[UOp, float | None]:
    """A product without the numbers among its factors, and theirs. They come last: 2 x overflows float16 at
    x = 6e4, and ∞ · 0 is NaN where 2 (x · 0) is 0. tinygrad's code generation has the same order."""
    if node.op is not Ops.MUL: return node, None
    if (at := next((i for i, s in enumerate(node.src) if number(s) is not None), None)) is not None:
        value, (rest, factor) = number(node.src[at]), _split_factor(node.src[1 - at])
        assert value is not None
        if (rest.dtype, rest.shape) != (node.dtype, node.shape): return node, None
        return rest, value if factor is None else value * factor
    parts = {s: _split_factor(s) for s in dict.fromkeys(node.src)}
    factors = [factor for s in node.src if (factor := parts[s][1]) is not None]
    if not factors: return node, None
    return node.replace(src=tuple(parts[s][0] for s in node.src)), math.prod(factors)


def _pair(a: UOp, b: UOp) -> tuple[UOp, UOp, UOp] | None:
    """An exponential that is a factor of a, a quotient of it that is one of b, and what both make."""
    quotients = [(d, *found) for d in _factors(b) if (found := _exponential(d)) is not None]
    exponentials = {_strip(each): each for each in _factors(a)} if quotients else {}
    for d, e, k in quotients:
        if (factor := exponentials.get(_strip(e))) is not None:
            # the narrower dtype has the rounding, the wider one e: 2^17 is no float16
            wide = least_upper_dtype(e.dtype, d.dtype)
            above = 2.0**(min(map(_bits, (e, d))) + 2)
            return factor, d, (e > above).where(1 / k, e.cast(wide) * d.cast(wide)).cast(d.dtype)
    return None


def _bits(node: UOp) -> int:
    """Returns the bits of a value's significand; a number without a dtype of its own is computed in the
    default one."""
    return dtypes.finfo(dtypes.default_float if node.dtype in dtypes.weaks else node.dtype)[1]


def _replace_factor(node: UOp, old: UOp, new: UOp | None) -> UOp | None:
    """A value with another number in the place of one of its factors. None is 1."""
    if node is old: return new
    if node.op is Ops.CAST:
        inner = _replace_factor(node.src[0], old, new)
        return None if inner is None else inner.cast(node.dtype)
    if node.op is Ops.MUL:
        at = 0 if old in set(_factors(node.src[0])) else 1
        made, other = _replace_factor(node.src[at], old, new), node.src[1 - at]
        if made is None: return other
        return node.replace(src=(other, made) if at else (made, other))
    terms = (_replace_factor(s, old, new) for s in node.src)
    return node.replace(src=tuple(UOp.const(1.0) if term is None else term for term in terms))
