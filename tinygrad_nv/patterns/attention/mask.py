"""Elements of the scores that a mask hides: the part of the mask that is a band, and the rest as conditions.

Protocol. `masks` takes the conditions off a score: `where(c, x, −inf)`, `x + where(c, 0, −inf)`, negations,
conjunctions and positive factors of these. `make_mask` knows where each place lies in the dimensions
(`Strides`), and sorts the conditions: a place of row and column alone, with opposite factors, bounds a
`Band`; of the column alone, how many keys there are; all others stay in the score, with positions where the
places were.

A bound may depend on a launch's variables: that is where row 0 stands, `start`, and all bounds of one band
must agree on it.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tinygrad.dtype import dtypes

from tinygrad_nv.patterns.attention.score import ScorePlace, apply, negate
from tinygrad_nv.patterns.epilogue import Unfused
from tinygrad_nv.patterns.positions import AffineForm, add_forms
from tinygrad_nv.tile.attention.spec import Band
from tinygrad_nv.tile.expression import Apply, Constant, Expression, Load, Position, Sum, walk, where

HIDDEN = Constant(float("-inf"), dtypes.float32)
NOTHING = Constant(0.0, dtypes.float32)
Factors = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Strides:
    """Strides of something along the dimensions of an attention."""
    m: int
    n: int
    batch: tuple[int, int, int]
    offset: int


@dataclass(frozen=True)
class Mask:
    """A finished score: what each row sees of how many keys (None: all), from where."""
    score: Expression
    band: Band
    start: AffineForm
    keys: AffineForm | None


# **** conditions ****

def masks(x: Expression) -> tuple[Expression, list[Expression]]:
    """A score, and conditions that all hold where it is not hidden."""
    if not isinstance(x, Apply): return x, []
    if x.op == "where":
        for hidden, shown, condition in ((x.args[2], x.args[1], x.args[0]),
                                         (x.args[1], x.args[2], negate(x.args[0]))):
            if hidden == HIDDEN:
                rest, more = masks(shown)
                return rest, [*conjuncts(condition), *more]
    if x.op == "add":
        (left, one), (right, other) = map(masks, x.args)
        if one or other:
            if NOTHING in (left, right): return (right if left == NOTHING else left), [*one, *other]
            return apply("add", [left, right], x.dtype), [*one, *other]
    if x.op == "mul" and isinstance(x.args[1], Constant) and 0 < x.args[1].value < float("inf"):
        rest, conditions = masks(x.args[0])
        if conditions: return apply("mul", [rest, x.args[1]], x.dtype), conditions
    return x, []


def conjuncts(condition: Expression) -> list[Expression]:
    """The parts of a condition that must all hold."""
    if isinstance(condition, Apply) and condition.op == "and":
        return [part for arg in condition.args for part in conjuncts(arg)]
    return [] if condition == Constant(True, dtypes.bool) else [condition]


def place_below_zero(condition: Expression) -> ScorePlace | None:
    """The place of a condition that one is below 0."""
    if not isinstance(condition, Apply) or condition.op != "less": return None
    place, zero = condition.args
    return place if isinstance(place, ScorePlace) and zero == Constant(0, dtypes.int32) else None


def places(*expressions: Expression) -> list[ScorePlace]:
    """Every place of some expressions, once."""
    seen: set[Expression] = set()
    return [node for one in expressions for node in walk(one, seen) if isinstance(node, ScorePlace)]


# **** bands ****

class _Bounds:
    """Bounds of columns that conditions amount to. `rows` is how many rows there are."""

    def __init__(self, single: bool) -> None:
        self.single = single
        self.first: list[AffineForm] = []   # columns from row + this
        self.last: list[AffineForm] = []    # columns up to row + this
        self.keys: list[AffineForm] = []    # columns below this

    def take(self, along: Strides, factors: Factors) -> bool:
        """Takes in a condition `m · row + n · column + offset + variables < 0`, or says it is none."""
        if any(along.batch) or not along.n: return False
        if along.m not in (0, -along.n) and not self.single: return False
        by, rest = abs(along.n), AffineForm(along.offset, (), factors)
        if by > 1 and factors: return False
        if along.n > 0:  # column < row − rest / by
            limit = AffineForm((-rest.offset - 1) // by, (), _negative(factors))
            if along.m: self.last.append(limit)
            else: self.keys.append(add_forms(limit, AffineForm(1, ())))
            return True
        if not along.m and not self.single: return False
        self.first.append(AffineForm(rest.offset // by + 1, (), factors))  # column > row + rest / by
        return True

    def band(self) -> tuple[Band, AffineForm]:
        """The band, and where row 0 stands."""
        bounds = self.first + self.last
        moving = {bound.factors for bound in bounds}
        if len(moving) > 1: raise Unfused("a mask whose bounds depend on different variables")
        first = max((bound.offset for bound in self.first), default=None)
        last = min((bound.offset for bound in self.last), default=None)
        # causal, where it can be: the last column that a row sees is its own
        at = max(0, last) if last is not None else 0
        band = Band(None if first is None else first - at, None if last is None else last - at)
        return band, AffineForm(at, (), moving.pop() if moving else ())


def _negative(factors: Factors) -> Factors: return tuple((name, -factor) for name, factor in factors)


def make_mask(score: Expression, conditions: list[Expression], along: Mapping[ScorePlace, Strides],
              loads: list[Load], rows: int) -> Mask:
    """Returns the mask of a spec. Raises `Unfused` for what has no place in one."""
    bounds = _Bounds(rows == 1)
    kept = []
    for condition in dict.fromkeys(conditions):
        place = place_below_zero(condition)
        if place is None or not bounds.take(along[place], place.factors): kept.append(condition)
    # of one row it would be a band: that is tried next
    if any(p.factors and not along[p].m for p in places(*kept)):
        raise Unfused("a mask that depends on a variable of the launch")
    band, start = bounds.band()
    if band.full: start = next((_moving(p) for p in places(score, *kept) if p.factors), start)
    for condition in kept: score = where(condition, score, float("-inf"))
    if len(bounds.keys) > 1 and len({limit.factors for limit in bounds.keys}) > 1:
        raise Unfused("several limits of the keys that depend on different variables")
    keys = min(bounds.keys, key=lambda limit: limit.offset, default=None)
    return Mask(_place_expression(score, along, loads, start), band, start, keys)


def _moving(place: ScorePlace) -> AffineForm:
    """The variables of a place, counted up: where nothing else does, they may say where row 0 stands."""
    up = max(factor for _, factor in place.factors) > 0
    return AffineForm(0, (), place.factors if up else _negative(place.factors))


def _place_expression(root: Expression, along: Mapping[ScorePlace, Strides], loads: list[Load],
                      start: AffineForm) -> Expression:
    """Returns an expression with loads in place of their numbers and positions in place of places."""
    known: dict[int, Expression] = {}

    def of(node: Expression) -> Expression:
        if isinstance(node, ScorePlace): return _position(node, along[node], start)
        if isinstance(node, Load): return loads[node.parameter]
        if isinstance(node, Sum): return Sum()
        if not isinstance(node, Apply): return node
        if id(node) not in known: known[id(node)] = replace(node, args=tuple(map(of, node.args)))
        return known[id(node)]
    return of(root)


def _position(place: ScorePlace, along: Strides, start: AffineForm) -> Expression:
    times = 0
    if place.factors:  # by whole multiples of where row 0 stands
        times = dict(place.factors).get(start.factors[0][0], 0) // start.factors[0][1] if start.factors else 0
        if place.factors != tuple((name, times * factor) for name, factor in start.factors):
            raise Unfused("a score or mask that depends on variables of the launch")
    offset = along.offset - times * start.offset
    axes = [(Position("n"), along.n), (Position("m"), along.m), (Position("start"), times),
            *((Position(i), stride) for i, stride in enumerate(along.batch))]
    made: Expression | None = None
    for axis, stride in axes:
        if not stride: continue
        if made is not None and stride == -1: made = made - axis
        else:
            term: Expression = axis if stride == 1 else axis * stride
            made = term if made is None else made + term
    if made is None: return Constant(offset, dtypes.int32)
    return made + offset if offset else made
