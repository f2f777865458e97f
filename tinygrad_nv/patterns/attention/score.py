"""Operations on a score between q kᵀ and its exponential, as an expression in float32.

Protocol. `Score` translates the exponent of an attention's weights, from the indices of a weight: an
`Epilogue` (patterns/epilogue.py) whose sums are the products of q and k, with these differences:

* Floats of 16 bits become float32, and casts between them are left out: scores are never rounded on the way,
  which the graph may ask for and which only loses.
* The maximum of a row is a `Top`: `strip_row_max` takes it, and whatever else is subtracted of it, away. A
softmax does not change by what is added to a whole row.
* Positions are `ScorePlace`s: affine in the ranges of the space and in a launch's variables. What becomes of
them
  (Position, a band) is for mask.py, which knows the dimensions.
* A value beside the scores that is no arithmetic of what is in memory is loaded, however large; one of
  positions that is none (a quotient) from storage made for it.

Constants are folded as they come, and stand on the right of what they are added to or multiplied with.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeGuard

from tinygrad.dtype import DType, dtypes, truncate
from tinygrad.helpers import all_int
from tinygrad.uop.ops import GroupOp, Ops, UOp

from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.attention.fitted import fit_form
from tinygrad_nv.patterns.epilogue import ELEMENTWISE, NAMES, Epilogue, Unfused, number
from tinygrad_nv.patterns.index import Affine, Indices, NotAffine, Space
from tinygrad_nv.patterns.positions import linear
from tinygrad_nv.patterns.rewriting import value_in_storage
from tinygrad_nv.tile import operations
from tinygrad_nv.tile.expression import Apply, Constant, Expression, walk

FLOATS = (dtypes.float32, dtypes.float16, dtypes.bfloat16)
LOG2_E = 1.4426950408889634
PASSED = {Ops.CONTIGUOUS, Ops.NOOP}  # of one value, which no other node reads


@dataclass(frozen=True)
class Top(Expression):
    """The maximum of a row of scores."""
    dtype: DType = dtypes.float32


@dataclass(frozen=True)
class ScorePlace(Expression):
    """`offset + Σ stride · range + Σ factor · variable`, of ranges by number and variables by name."""
    offset: int
    strides: tuple[tuple[int, int], ...]
    factors: tuple[tuple[str, int], ...] = ()
    dtype: DType = dtypes.int32

    @property
    def lies(self) -> Affine:
        """Index of the place, without the variables."""
        return Affine(self.offset, dict(self.strides))


def place(offset: int, strides: dict[int, int], factors: dict[str, int]) -> Expression:
    """A `ScorePlace`; where it is a number, that."""
    kept = (tuple(sorted((k, f) for k, f in made.items() if f)) for made in (strides, factors))
    made = ScorePlace(offset, *kept)  # type: ignore[arg-type]
    return made if made.strides or made.factors else Constant(offset, dtypes.int32)


def add(x: Expression, y: Expression, by: int = 1) -> Expression | None:
    """Returns x + by · y of places and whole constants, None of anything else."""
    if not (is_whole(x) and is_whole(y)): return None
    (ox, sx, fx), (oy, sy, fy) = map(_parts, (x, y))
    for mine, others in ((sx, sy), (fx, fy)):
        for key, factor in others.items(): mine[key] = mine.get(key, 0) + by * factor
    return place(ox + by * oy, sx, fx)


def is_whole(x: Expression) -> bool:
    """Whether it is a place, or a constant of integers."""
    return isinstance(x, ScorePlace) or (isinstance(x, Constant) and x.dtype == dtypes.int32)


def _parts(x: Expression) -> tuple[int, dict, dict]:
    if isinstance(x, ScorePlace): return x.offset, dict(x.strides), dict(x.factors)
    assert isinstance(x, Constant)
    return int(x.value), {}, {}


class Score(Epilogue):
    """The expression of the exponent of one attention's weights. `columns` are the ranges of the keys: a row
    is what does not depend on them."""

    def __init__(self, space: Space, root: UOp, end: UOp, region: frozenset[UOp], indices: Indices,
                 memory: Callable[[UOp], bool], columns: frozenset[int]) -> None:
        self.columns = columns
        super().__init__(space, root, end, region, indices, memory)

    def _make(self, node: UOp, indices: Indices, want: DType) -> Expression:
        if node is self.root: return self._sum(indices)
        if node not in self.region: return self._leaf(node, indices, want)
        if node.op in PASSED: return self.value(node.src[0], indices, want)
        if node.op in GroupOp.Movement:
            return self.value(node.src[0], self.space.through(node, indices), want)
        if node.op is Ops.REDUCE and node.arg[0] is Ops.MAX: return self._top(indices)
        if node.op not in ELEMENTWISE: raise Unfused(f"{node.op.name} of scores before the softmax")
        return self._apply(node, indices, want)

    def _top(self, indices: Indices) -> Expression:
        moving = {part for i in map(self.space.resolve, indices) for part in i.strides}
        if moving & {leaf for r in self.columns for leaf in self.space.leaves(r)}:
            raise Unfused("a maximum that is not of a row")
        return Top()

    def _apply(self, node: UOp, indices: Indices, want: DType) -> Expression:
        if dtypes.is_int(node.dtype) and (node.dtype.itemsize < 4 or dtypes.is_unsigned(node.dtype)):
            raise Unfused(f"scores computed in {node.dtype.name}, which wraps")
        if node.op is Ops.CAST:
            arg = self.value(node.src[0], indices, kind(node.src[0].dtype))
            return cast(arg, kind(node.dtype, want))
        if node.op is Ops.POW:
            base = super()._apply(node, indices, kind(node.dtype, want))
            return fold_constants(base) if isinstance(base, Apply) else base
        own = kind(node.dtype, want)
        if node.op in GroupOp.Comparison:
            strong = next((s.dtype for s in node.src if s.dtype not in dtypes.weaks), node.src[0].dtype)
            own = kind(strong)
        wants = [dtypes.bool if node.op is Ops.WHERE and not i else own for i in range(len(node.src))]
        args = [self.value(s, self.space.over(node.shape, s.shape, indices), each)
                for s, each in zip(node.src, wants, strict=True)]
        if node.op is Ops.CMPEQ: return negate(apply("not_equal", args, dtypes.bool))
        name = "and" if node.op is Ops.MUL and own == dtypes.bool else NAMES[node.op]
        return apply(name, args, dtypes.bool if node.op in GroupOp.Comparison else own)

    def _leaf(self, node: UOp, indices: Indices, want: DType) -> Expression:
        if (value := number(value_in_storage(node))) is not None:
            dtype = kind(node.dtype, want)
            if dtypes.is_int(dtype) and value != int(value): raise Unfused("a fraction among integers")
            return Constant(truncate[dtype](value) if dtype == dtypes.float32 else value, dtype)
        if self.memory(node): return self._load(node, indices)
        if node.device is None: return self._compute(node, indices, want)
        if node.op in GroupOp.Movement:
            try: return self.value(node.src[0], self.space.through(node, indices), want)
            except NotAffine: return self._load(node, indices)
        if node.op in ELEMENTWISE and self.beside < 64 and (self._is_computed(node) or _has_places(node)):
            self.beside += 1
            return self._apply(node, indices, want)
        return self._load(node, indices)

    def _compute(self, node: UOp, indices: Indices, want: DType) -> Expression:
        """A value of no device: of constants, positions and variables."""
        if not node.shape and (scalar := linear(node)) is not None and node.dtype != dtypes.bool:
            return cast(place(scalar.offset, {}, dict(scalar.factors)), kind(node.dtype, want))
        wide = [extent for extent in node.shape if not _is_one(extent)]
        if (node.op is Ops.REDUCE or len(wide) == 1) and node.op is not Ops.CAST \
                and (form := fit_form(node)) is not None:
            strides: dict[int, int] = {}
            offset = form.offset
            for index, by in zip(map(self.space.resolve, indices), form.strides, strict=True):
                offset += by * index.offset
                for r, stride in index.strides.items(): strides[r] = strides.get(r, 0) + by * stride
            return cast(place(offset, strides, dict(form.factors)), kind(node.dtype, want))
        if node.op in GroupOp.Movement:
            return self.value(node.src[0], self.space.through(node, indices), want)
        if node.op in PASSED: return self.value(node.src[0], indices, want)
        if node.op in ELEMENTWISE: return self._apply(node, indices, want)
        return self._store(node, indices, want)

    def _store(self, node: UOp, indices: Indices, want: DType) -> Expression:
        """A value made of constants that is no arithmetic here, in storage: of its own it has none."""
        if not all_int(node.shape): raise Unfused(f"a {node.op.name} of positions, of symbolic extent")
        dtype, device = kind(node.dtype, want), self.root.device
        assert device is not None
        room = program.storage(program.Output(node.shape, dtype), device)
        value = node if node.dtype == dtype else node.cast(dtype)
        return super()._load(room.after(room.store(value)), indices)

    def _load(self, node: UOp, indices: Indices) -> Expression:
        if node in self.region: raise Unfused("scores are stored before the softmax")
        loaded = super()._load(node, indices)
        return cast(loaded, kind(node.dtype))


def kind(dtype: DType, want: DType = dtypes.void) -> DType:
    """The dtype that values of a dtype are computed in."""
    if dtype in dtypes.weaks and want not in (dtypes.void, *dtypes.weaks): return kind(want)
    if dtype in FLOATS or dtype == dtypes.weakfloat: return dtypes.float32
    if dtype == dtypes.bool: return dtype
    if dtypes.is_int(dtype) or dtype == dtypes.weakint: return dtypes.int32
    raise Unfused(f"scores of {dtype.name}")


def _is_one(extent: object) -> bool: return isinstance(extent, int) and extent == 1


def _has_places(node: UOp) -> bool:
    """Whether a part of a small value is made of positions, and cannot be left to a kernel of its own."""
    return any(s.device is None and s.op is not Ops.CONST and s._shape for s in node.src)


# **** nodes ****

def cast(x: Expression, dtype: DType) -> Expression:
    """Returns a value cast to a dtype."""
    if x.dtype == dtype: return x
    if isinstance(x, Constant):
        value = {dtypes.bool: bool, dtypes.int32: int}.get(dtype, float)(x.value)
        return Constant(value, dtype)
    if _is_choice(x): return _choose_value(x, [cast(each, dtype) for each in x.args[1:]], dtype)
    return Apply("cast", (x,), dtype)


def _is_choice(x: Expression) -> TypeGuard[Apply]:
    """Whether a value is one of two constants: what `ones.tril()` is made of."""
    return isinstance(x, Apply) and x.op == "where" and all(isinstance(each, Constant) for each in x.args[1:])


def _choose_value(choice: Apply, values: list[Expression], dtype: DType) -> Expression:
    return fold_constants(Apply("where", (choice.args[0], *values), dtype))


def apply(op: str, args: list[Expression], dtype: DType) -> Expression:
    """An operation, folded where its arguments are constants, one of two constants, or places."""
    choice = next(filter(_is_choice, args), None)
    if choice is not None and all(arg is choice or isinstance(arg, Constant) for arg in args):
        both = [[each if arg is choice else arg for arg in args] for each in choice.args[1:]]
        return _choose_value(choice, [apply(op, one, dtype) for one in both], dtype)
    if op in ("add", "mul") and isinstance(args[0], Constant): args = args[::-1]
    if op == "less": return _less(args[0], args[1])
    if op in ("add", "sub") and dtype == dtypes.int32:
        whole = add(args[0], args[1], -1 if op == "sub" else 1)
        if whole is not None: return whole
    if op == "mul" and isinstance(args[0], ScorePlace) and isinstance(args[1], Constant):
        whole = add(Constant(0, dtypes.int32), args[0], int(args[1].value))
        assert whole is not None
        return whole
    if op == "not_equal" and args[0].dtype == dtypes.bool:
        for one, other in (args, args[::-1]):
            if isinstance(other, Constant): return negate(one) if other.value else one
        return Apply("xor", tuple(args), dtypes.bool)
    return fold_constants(Apply(op, tuple(args), dtype))


def _less(x: Expression, y: Expression) -> Expression:
    """x < y; of places (also as floats, which hold them exactly) as place < 0."""
    bare = [_strip_cast(x), _strip_cast(y)]
    if all(is_whole(each) for each in bare) and (whole := add(bare[0], bare[1], -1)) is not None:
        zero = Constant(0, dtypes.int32)
        return fold_constants(Apply("less", (whole, zero), dtypes.bool))
    return fold_constants(Apply("less", (x, y), dtypes.bool))


def _strip_cast(x: Expression) -> Expression:
    if isinstance(x, Apply) and x.op == "cast" and isinstance(x.args[0], ScorePlace): return x.args[0]
    if isinstance(x, Constant) and x.dtype == dtypes.float32 and abs(x.value) < 2**24 and \
    x.value == int(x.value): return Constant(int(x.value), dtypes.int32)
    return x


def negate(x: Expression) -> Expression:
    """Returns not x."""
    if isinstance(x, Constant): return Constant(not x.value, dtypes.bool)
    assert x.dtype == dtypes.bool
    if isinstance(x, Apply):
        zero = Constant(0, dtypes.int32)
        if x.op == "less" and isinstance(x.args[0], ScorePlace) and x.args[1] == zero:
            other = add(Constant(-1, dtypes.int32), x.args[0], -1)  # not d < 0 is -1 - d < 0
            assert other is not None
            return Apply("less", (other, zero), dtypes.bool)
        if x.op in ("and", "or"):
            return Apply("or" if x.op == "and" else "and", tuple(map(negate, x.args)), dtypes.bool)
        if x.op == "less" and x.args[1] == Constant(1, dtypes.int32) and isinstance(x.args[0], Apply) \
                and x.args[0].op == "cast" and x.args[0].args[0].dtype == dtypes.bool:
            return x.args[0].args[0]
    return Apply("less", (Apply("cast", (x,), dtypes.int32), Constant(1, dtypes.int32)), dtypes.bool)


def fold_constants(node: Apply) -> Expression:
    """An operation of constants as a constant; products of constants as one."""
    args, op = node.args, node.op
    numbers = [arg.value for arg in args if isinstance(arg, Constant)]
    if len(numbers) == len(args):
        value = operations.fold(op, *numbers)
        return node if value is None else Constant(truncate[node.dtype](value), node.dtype)
    if node.dtype == dtypes.bool: return _condition(node)
    last = args[-1]
    if op == "mul" and isinstance(last, Constant) and node.dtype == dtypes.float32:
        if last.value == 1: return args[0]
        inner = args[0]
        if isinstance(inner, Apply) and inner.op == "mul" and isinstance(inner.args[1], Constant):
            return Apply("mul", (inner.args[0], Constant(truncate[node.dtype](
                inner.args[1].value * last.value), node.dtype)), node.dtype)
    if op == "add" and isinstance(last, Constant) and last.value == 0: return args[0]
    if op == "where" and isinstance(args[0], Constant): return args[1] if args[0].value else args[2]
    return node


def _condition(node: Apply) -> Expression:
    """Conditions without constants in them."""
    if node.op == "where":
        condition, yes, no = node.args
        if isinstance(yes, Constant) and isinstance(no, Constant):
            if yes.value == no.value: return yes
            return condition if yes.value else negate(condition)
    if node.op in ("and", "or"):
        for one, other in (node.args, node.args[::-1]):
            if isinstance(other, Constant): return one if bool(other.value) == (node.op == "and") else other
    return node


# **** from an exponent to a score ****

def strip_row_max(x: Expression) -> Expression:
    """Returns the score of an exponent of 2: in natural units, without what is the same for a whole row.
    Raises `Unfused` if a maximum stands elsewhere than in a difference."""
    rest = _without_top(x)
    if rest is None: raise Unfused("weights that do not depend on scores")
    if isinstance(rest, Apply) and rest.op == "mul" and isinstance(rest.args[1], Constant):
        by = rest.args[1].value / LOG2_E
        return _times(rest.args[0], 1.0 if abs(by - 1) < 1e-6 else by)
    return _times(rest, 1 / LOG2_E)


def _times(x: Expression, by: float) -> Expression:
    return x if by == 1 else apply("mul", [x, Constant(truncate[dtypes.float32](by))], dtypes.float32)


def _without_top(x: Expression) -> Expression | None:
    """x without terms that are multiples of a row's maximum; None where nothing else is there."""
    if isinstance(x, Top): return None
    if not isinstance(x, Apply): return x
    if _is_row(x): return None
    if x.op in ("add", "sub"):
        left, right = map(_without_top, x.args)
        if left is None: return right if right is None or x.op == "add" else _times(right, -1.0)
        return left if right is None else apply(x.op, [left, right], x.dtype)
    if x.op == "mul" and isinstance(x.args[1], Constant):
        inner = _without_top(x.args[0])
        return None if inner is None else apply("mul", [inner, x.args[1]], x.dtype)
    if _has_top(x): raise Unfused("a row's maximum that is not subtracted")
    return x


def _is_row(x: Expression) -> bool:
    """Whether a value is made of a row's maximum alone, as one that guards against rows of -inf."""
    return _has_top(x) and all(isinstance(node, (Top, Constant, Apply)) for node in walk(x))


def _has_top(x: Expression) -> bool:
    return any(isinstance(node, Top) for node in walk(x))
