"""Bounds of a Tensor's elements from its graph alone, before anything runs.

Protocol: `interval(tensor, assume)` is an `Interval`: every element lies between `least` and `most`, unless
it is NaN, which `nan` says can be. What is in memory is taken for any finite number of its dtype (integers:
any), or for what `assume` says of a tensor. Each operation widens bounds by its rounding: 4 units in the last
place of its dtype, which covers exp2 and log2 of every target (2 units, docs/numerics.md), sums of n by n.

An operation that is not known here has no bounds, and may be NaN. Intervals forget that two operands are one:
x · x is known to be a square, x - max x to be at most 0, e / Σ e of e ≥ 0 to be at most 1, and comparisons
that choose between what they compare to be maxima and minima; x - x is not known to be 0.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import prod
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv.numerics.policy import REACH

INF, LARGEST = math.inf, 3.4028234663852886e38      # float32's
UNITS = 4       # in the last place, which an operation may be off
SAME = {*GroupOp.Movement, Ops.CONTIGUOUS, Ops.CONTIGUOUS_BACKWARD, Ops.DETACH, Ops.COPY} - {Ops.PAD}


@dataclass(frozen=True)
class Interval:
    """Elements lie between `least` and `most`, or, where `nan` says so, may be NaN."""
    least: float
    most: float
    nan: bool = False

    @property
    def finite(self) -> bool:
        """Whether every element is a finite number."""
        return not self.nan and self.least > -INF and self.most < INF

    def within(self, least: float, most: float) -> bool:
        """Whether every element is a number of a range."""
        return not self.nan and self.least >= least and self.most <= most

    def __str__(self) -> str: return f"{self.least:.6g} … {self.most:.6g}" + (" or NaN" if self.nan else "")


ANYTHING = Interval(-INF, INF, True)


def interval(tensor: Tensor, assume: Mapping[Tensor, tuple[float, float]] | None = None) -> Interval:
    """Bounds of the elements of a tensor; `assume` are those of others that it is made of."""
    known = {each.uop: Interval(*bounds) for each, bounds in (assume or {}).items()}
    for node in tensor.uop.toposort(): known.setdefault(node, _of(node, known))
    return known[tensor.uop]


def _of(node: UOp, known: dict[UOp, Interval]) -> Interval:
    """Returns the interval of a node whose sources are known."""
    op = node.op
    if op is Ops.CONST: return _constant(node.arg)
    if op in (Ops.BUFFER, Ops.PARAM): return in_memory(node.dtype)
    if node.dtype == dtypes.void or not node.src: return ANYTHING
    src = [known[each] for each in node.src]
    if op in SAME: return src[0]
    if op is Ops.PAD: return hull(src[0], Interval(0, 0))
    if op is Ops.CAST: return _cast(src[0], node.dtype)
    if op in (Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ): return Interval(0, 1)
    if op is Ops.REDUCE: return _reduce(node, src[0])
    if op is Ops.WHERE: return _choose(node, src)
    if op is Ops.MAX: return _largest(src[0], src[1])
    if op is Ops.MUL and (made := _share(node, known) or _magnitude(node, known)) is not None: return made
    if op is Ops.ADD and _below_largest(node): return Interval(-INF, 0.0, add(*src).nan)
    if (compute := COMPUTED.get(op)) is None: return ANYTHING
    made = square(src[0]) if op is Ops.MUL and node.src[0] is node.src[1] else compute(*src)
    return _widen(made, node.dtype)


# **** leaves and casts ****

def _constant(value: object) -> Interval:
    number = float(value) if isinstance(value, int | float) else math.nan
    return ANYTHING if math.isnan(number) else Interval(number, number)


def in_memory(dtype: DType) -> Interval:
    """Any finite number of a dtype."""
    if dtypes.is_int(dtype) or dtypes.is_bool(dtype): return Interval(float(dtype.min), float(dtype.max))
    return Interval(-largest(dtype), largest(dtype)) if dtype in REACH else ANYTHING


def largest(dtype: DType) -> float:
    """The largest finite number of a float dtype."""
    bits, _, high = REACH[dtype]
    # of e4m3 the last code is NaN, and the number before it the largest
    return 448.0 if dtype == dtypes.fp8e4m3 else math.ldexp(1 - 2.0 ** -bits, high)


def _cast(of: Interval, dtype: DType) -> Interval:
    """Rounded outward; beyond the dtype's numbers lies infinity, or, of integers, anything."""
    if dtype in REACH: return _widen(of, dtype)
    if dtypes.is_bool(dtype): return Interval(0, 1)
    if not dtypes.is_int(dtype): return of
    fits = of.finite and of.least >= dtype.min and of.most <= dtype.max
    return Interval(math.trunc(of.least), math.trunc(of.most)) if fits else in_memory(dtype)


def _widen(of: Interval, dtype: DType) -> Interval:
    """Returns the interval that rounding to a dtype may make of one."""
    if dtype not in REACH: return of
    bits, low, _ = REACH[dtype]
    def move(x: float, sign: int) -> float:
        if math.isinf(x) or x == 0: return x
        x += sign * (abs(x) * UNITS * 2.0 ** (1 - bits) + 2.0 ** max(low, -1074))
        return math.copysign(INF, x) if abs(x) > largest(dtype) else x
    return Interval(move(of.least, -1), move(of.most, 1), of.nan)


# **** operations ****

def hull(a: Interval, b: Interval) -> Interval:
    """The smallest that has both."""
    return Interval(min(a.least, b.least), max(a.most, b.most), a.nan or b.nan)


def _corners(compute: Callable[[float, float], float], a: Interval, b: Interval) -> Interval:
    """Returns the interval of a function that is monotone in each: the extremes of the four corners, NaN
    where one is."""
    found = [compute(x, y) for x in (a.least, a.most) for y in (b.least, b.most)]
    numbers = [each for each in found if not math.isnan(each)]
    nan = a.nan or b.nan or len(numbers) < len(found)
    return Interval(min(numbers), max(numbers), nan) if numbers else ANYTHING


def add(a: Interval, b: Interval) -> Interval:
    """a + b: NaN of ∞ - ∞ alone."""
    clash = (a.most == INF and b.least == -INF) or (a.least == -INF and b.most == INF)
    least, most = a.least + b.least, a.most + b.most
    return Interval(-INF if math.isnan(least) else least, INF if math.isnan(most) else most,
                    a.nan or b.nan or clash)


def multiply(a: Interval, b: Interval) -> Interval:
    """a · b: NaN of 0 · ∞ alone."""
    zero = (a.least <= 0 <= a.most and (b.least == -INF or b.most == INF)) or \
           (b.least <= 0 <= b.most and (a.least == -INF or a.most == INF))
    made = _corners(lambda x, y: 0.0 if 0 in (x, y) else x * y, a, b)
    return Interval(made.least, made.most, a.nan or b.nan or zero)


def square(a: Interval) -> Interval:
    """a · a."""
    ends = (a.least * a.least, a.most * a.most)
    return Interval(0.0 if a.least <= 0 <= a.most else min(ends), max(ends), a.nan)


def reciprocal(a: Interval) -> Interval:
    """1 / a: an infinity of 0, of either sign, as 0 may be -0."""
    if a.least > 0 or a.most < 0: return _corners(lambda x, _: 1 / x, a, Interval(1, 1))
    return Interval(-INF, INF, a.nan)


def _power_of_two(x: float) -> float: return INF if x > 1030 else 0.0 if x < -1080 else 2.0 ** x


def _exp2(a: Interval) -> Interval: return Interval(_power_of_two(a.least), _power_of_two(a.most), a.nan)


def _log2(a: Interval) -> Interval:
    def log(x: float) -> float: return -INF if x <= 0 else INF if x == INF else math.log2(x)
    return Interval(log(a.least), log(a.most), a.nan or a.least < 0)


def _root(a: Interval) -> Interval:
    def root(x: float) -> float: return math.sqrt(max(x, 0.0))
    return Interval(root(a.least), root(a.most), a.nan or a.least < 0)


def _sine(a: Interval) -> Interval: return Interval(-1, 1, a.nan or not a.finite)


def _cut(x: float) -> float: return math.trunc(x) if math.isfinite(x) else x


def _largest(a: Interval, b: Interval) -> Interval:
    """The maximum: of NaN either may come out, by target."""
    return Interval(max(a.least, b.least), max(a.most, b.most), a.nan or b.nan)


def _smallest(a: Interval, b: Interval) -> Interval:
    return Interval(min(a.least, b.least), min(a.most, b.most), a.nan or b.nan)


COMPUTED: dict[Ops, Callable[..., Interval]] = {
    Ops.ADD: add, Ops.MUL: multiply, Ops.RECIPROCAL: reciprocal, Ops.EXP2: _exp2, Ops.LOG2: _log2,
    Ops.SQRT: _root, Ops.SIN: _sine, Ops.NEG: lambda a: Interval(-a.most, -a.least, a.nan),
    Ops.SUB: lambda a, b: add(a, Interval(-b.most, -b.least, b.nan)),
    Ops.FDIV: lambda a, b: multiply(a, reciprocal(b)),
    Ops.TRUNC: lambda a: Interval(_cut(a.least), _cut(a.most), a.nan)}


def _choose(node: UOp, src: list[Interval]) -> Interval:
    """One of two; where what is compared is what is chosen, the larger or the smaller."""
    test, one, other = node.src
    if test.op is Ops.CMPLT and {*test.src} == {one, other}:
        return _largest(src[1], src[2]) if one is test.src[1] else _smallest(src[1], src[2])
    return hull(src[1], src[2])


def _reduce(node: UOp, src: Interval) -> Interval:
    """A sum of n, or the largest of n."""
    if node.arg[0] is Ops.MAX: return src
    count = prod(node.src[0].max_shape) // max(prod(node.max_shape), 1)
    if node.arg[0] is not Ops.ADD: return ANYTHING
    nan = src.nan or (src.least == -INF and src.most == INF)
    made = Interval(src.least * count, src.most * count, nan)
    if node.dtype not in REACH: return made
    slack = max(abs(made.least), abs(made.most)) * count * 2.0 ** (1 - REACH[node.dtype][0])
    if not math.isinf(slack): made = Interval(made.least - slack, made.most + slack, nan)
    # no rounding makes a sum negative of numbers that are not
    made = Interval(max(made.least, 0.0) if src.least >= 0 else made.least,
                    min(made.most, 0.0) if src.most <= 0 else made.most, nan)
    return _widen(made, node.dtype)


# **** two operands that are one ****

def _magnitude(node: UOp, known: dict[UOp, Interval]) -> Interval | None:
    """|x|, which is x times its sign."""
    for x, sign in (node.src, node.src[::-1]):
        if sign.op is Ops.WHERE and sign.src[0].op is Ops.CMPNE and sign.src[0].src[0] is x \
                and sign.src[1].op is Ops.WHERE and sign.src[1].src[0].op is Ops.CMPLT \
                and sign.src[1].src[0].src[0] is x and known[sign].within(-1, 1):
            of = known[x]
            least = 0.0 if of.least <= 0 <= of.most else min(abs(of.least), abs(of.most))
            return Interval(least, max(abs(of.least), abs(of.most)), of.nan)
    return None


def _row_statistic(node: UOp, op: Ops, of: UOp) -> bool:
    """Whether a node has, for each element of `of`, the reduction of a row that the element is in: ends with
    the reduced axes of length 1, the others in order."""
    shape = tuple(node.shape)
    while node.op in (Ops.RESHAPE, Ops.DETACH, Ops.CONTIGUOUS): node = node.src[0]
    if node.op is not Ops.REDUCE or node.arg[0] is not op: return False
    source, axes = node.src[0], int(node.arg[1])
    order = source.arg if source.op is Ops.PERMUTE else tuple(range(len(source.shape)))
    if (source.src[0] if source.op is Ops.PERMUTE else source) is not of: return False
    kept = tuple(1 if i in order[:axes] else extent for i, extent in enumerate(of.shape))
    return list(order[axes:]) == sorted(order[axes:]) and shape == kept


def _below_largest(node: UOp) -> bool:
    """x + -1 · max x; also as safe.softmax_safe has it, with infinities in the place of numbers."""
    for x, other in (node.src, node.src[::-1]):
        if other.op is Ops.MUL and other.src[1].op is Ops.CONST and other.src[1].arg == -1:
            of, shift = other.src[0], _without(x, INF)
            # what is shifted by is at least the largest number of the row, or all of the row is -inf
            if _row_statistic(of, Ops.MAX, x): return True
            capped = _without(_without(of, INF), -INF)
            if shift is not x and _row_statistic(capped, Ops.MAX, shift): return True
    return False


def _without(node: UOp, value: float) -> UOp:
    """x of a node that is x, and a finite number where x is an infinity: float32's largest, or 0 of -inf."""
    if node.op is not Ops.WHERE or node.src[1].op is not Ops.CONST: return node
    if node.src[1].arg != (LARGEST if value > 0 else 0.0): return node
    inner = node.src[2]
    while inner.op is Ops.WHERE: inner = inner.src[2]
    return node.src[2] if _equals(node.src[0], inner, value) else node


def _equals(node: UOp, x: UOp, value: float) -> bool:
    """Whether a condition is x == value."""
    if node.op is Ops.CMPEQ: one, other = node.src
    elif node.op is Ops.CMPNE and node.src[0].op is Ops.CMPNE and node.src[1].op is Ops.CONST \
            and node.src[1].arg is True: one, other = node.src[0].src
    else: return False
    return one is x and other.op is Ops.CONST and other.arg == value


def _share(node: UOp, known: dict[UOp, Interval]) -> Interval | None:
    """e · 1 / Σ e of e ≥ 0: a share, or 0 / 0."""
    for e, other in (node.src, node.src[::-1]):
        if other.op is not Ops.RECIPROCAL or known[e].least < 0: continue
        total, guarded = other.src[0], False
        if total.op is Ops.WHERE and _equals(total.src[0], total.src[2], 0) and total.src[1].op is Ops.CONST \
                and total.src[1].arg == 1: total, guarded = total.src[2], True
        if _row_statistic(total, Ops.ADD, e):
            vanishes = not guarded and _may_vanish(e)
            return _widen(Interval(0.0, 1.0, known[e].nan or known[e].most == INF or vanishes), node.dtype)
    return None


def _may_vanish(e: UOp) -> bool:
    """Whether a row of exponentials can be 0: not where its largest was taken off it, as one is 1."""
    shifted = e.src[0] if e.op is Ops.EXP2 else e
    while shifted.op is Ops.MUL and shifted.src[1].op is Ops.CONST: shifted = shifted.src[0]
    return not (e.op is Ops.EXP2 and shifted.op is Ops.ADD and _below_largest(shifted))
