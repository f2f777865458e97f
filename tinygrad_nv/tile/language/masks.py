"""Masks of loops over blocks: blocks that a mask leaves nothing of are not computed, others compare no more
than they must.

Protocol: `clamp_masks(program)` looks at each `where(cond, scores, other)` in a loop whose condition compares
indices, `columns <= rows` or `columns < n`, which is the same for all of a block where the block is far from
the edge:

    the mask becomes a branch, which blocks take that are not wholly inside
    where other is -inf, and an iteration with nothing but -inf is proved to change nothing
    (unmasked.py), the loop ends ahead of the first block that is wholly outside; where a column of -inf is
    proved to change nothing of its row, too, the mask has `skip`: it need not be computed

Both are decided by the loop's index against sums of scalars, the largest and least elements of both sides:
of int32 alone, and where the numbers that are added fit. An index grows from iteration to iteration, so that
after a block that is wholly outside all are.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinygrad.dtype import dtypes

from tinygrad_nv.tile.language.ir import Line, Op, Program, Region, TileType, Value
from tinygrad_nv.tile.language.unmasked import changes_nothing, constant_of, hides_columns

LEAST = 256         # elements of a mask that is worth a branch
SCALARS = ("constant", "program_id", "apply", "cast")
PURE = ("constant", "iota", "apply", "cast", "broadcast", "reshape")
S32, BOOL = TileType(dtypes.int32), TileType(dtypes.bool)


@dataclass(frozen=True)
class Sum:
    """Scalars, each once, and a number."""
    scalars: tuple[Value, ...] = ()
    number: int = 0

    def plus(self, other: Sum) -> Sum: return Sum((*self.scalars, *other.scalars), self.number + other.number)


@dataclass(frozen=True)
class Less:
    """left < right + more, element by element of two sides: the least and the largest of each."""
    left: tuple[Sum, Sum]
    right: tuple[Sum, Sum]
    more: int = 0

    def inside(self) -> tuple[Sum, Sum]:
        """Two sums: it holds of all elements where the first, of the largest of the left side, is at most the
        second, the least of the right one."""
        return self.left[1].plus(Sum((), 1 - self.more)), self.right[0]


def _fits(number: int) -> bool: return -2**31 <= number < 2**31


def clamp_masks(program: Program) -> Program:
    """The program with its masks bounded; itself where it has none."""
    _Pass(program).region(program.body)
    return program


class _Pass:
    """Looks at loops, the innermost first."""

    def __init__(self, program: Program) -> None:
        self.makers = {each: op for op in program.body.walk() for each in op.results}

    def region(self, region: Region) -> None:
        made: list[Op] = []
        for op in region.ops:
            for inner in op.regions: self.region(inner)
            made += self._loop(op) if op.name == "for" else [op]
        region.ops[:] = made

    def _loop(self, op: Op) -> list[Op]:
        region, ahead = op.regions[0], list[Op]()
        masks = [one for one in region.ops if self._is_mask(one)]
        for mask in masks:
            less = self._comparisons(mask.operands[0])
            if not less: continue
            if constant_of(mask.operands[2], self.makers) == -math.inf and \
                    hides_columns(op, mask, self.makers):
                mask.attributes = {**mask.attributes, "skip": True}
            op = self._end_loop(op, mask, less, ahead)
        for mask in masks:
            if (less := self._comparisons(mask.operands[0])) and math.prod(mask.result.shape) >= LEAST:
                self._put_in_branch(region, mask, less)
        return [*ahead, op]

    def _is_mask(self, op: Op) -> bool:
        if op.name != "apply" or op.attributes["fn"] != "where" or len(op.result.shape) != 2: return False
        return dtypes.is_float(op.result.dtype) and constant_of(op.operands[2], self.makers) is not None

    # **** what a condition compares ****

    def _comparisons(self, value: Value) -> list[Less]:
        """Comparisons that all have to hold; empty where a condition is anything else."""
        op = self.makers.get(value)
        if op is None: return []
        if op.name in ("broadcast", "reshape"): return self._comparisons(op.operands[0])
        if op.name != "apply": return []
        fn = op.attributes["fn"]
        if fn == "less": return self._less(op, False)
        if fn == "xor" and constant_of(op.operands[1], self.makers) is True:
            inner = self.makers.get(op.operands[0])
            return self._less(inner, True) if inner is not None and inner.name == "apply" and \
                inner.attributes["fn"] == "less" else []
        if fn == "and":
            sides = [self._comparisons(each) for each in op.operands]
            return [each for side in sides for each in side] if all(sides) else []
        return []

    def _less(self, op: Op, negated: bool) -> list[Less]:
        """a < b; negated: b <= a."""
        if op.operands[0].dtype != dtypes.int32: return []
        sides = [(self._extreme(each, False), self._extreme(each, True)) for each in op.operands]
        (a_low, a_high), (b_low, b_high) = sides
        if a_low is None or a_high is None or b_low is None or b_high is None: return []
        if negated: return [Less((b_low, b_high), (a_low, a_high), 1)]
        return [Less((a_low, a_high), (b_low, b_high))]

    def _extreme(self, value: Value, high: bool) -> Sum | None:
        """The least or the largest element of a tile of indices; None where that is no sum of scalars."""
        known = constant_of(value, self.makers)
        if isinstance(known, int): return Sum((), known)
        op = self.makers.get(value)
        if not value.shape and (op is None or op.name != "apply" or op.attributes["fn"] != "add"):
            return Sum((value,))
        if op is None: return None
        if op.name == "iota": return Sum((), op.result.shape[0] - 1 if high else 0)
        if op.name in ("broadcast", "reshape"): return self._extreme(op.operands[0], high)
        if op.name != "apply" or op.attributes["fn"] not in ("add", "sub"): return None
        left, right = (self._extreme(each, high) for each in op.operands)
        if left is None or right is None: return None
        if op.attributes["fn"] == "add": return left.plus(right)
        return None if right.scalars or constant_of(op.operands[1], self.makers) is None else \
            left.plus(Sum((), -right.number))

    # **** the loop's end ****

    def _end_loop(self, op: Op, mask: Op, compared: Sequence[Less], ahead: list[Op]) -> Op:
        """The loop with an end ahead of blocks that a mask leaves nothing of."""
        index = op.regions[0].arguments[0]
        other = constant_of(mask.operands[2], self.makers)
        ends = [each for each in compared if each.left[0].scalars.count(index) == 1]
        if other != -math.inf or not ends or not changes_nothing(op, mask, self.makers): return op
        for less in ends:
            # nothing is left where the least of the left side is not below the largest of the right one
            low, high = less.left[0], less.right[1]
            added = [each for each in low.scalars if each is not index]
            write = _Scalars(ahead, self.makers, mask.line)
            number = high.number + less.more - low.number
            if not _fits(number): continue
            if not all(self._outside(each, op) for each in (*added, *high.scalars)): continue
            if not added and not high.scalars and self._most(op.operands[1]) <= number: continue
            inside = set(op.regions[0].walk())
            end = write.total([write.copy_scalar(each, inside) for each in high.scalars], number)
            for each in added: end = write.apply("sub", [end, write.copy_scalar(each, inside)], S32)
            stop = write.apply("min", [op.operands[1], end], S32)
            op = self._replace_operands(op, (op.operands[0], stop, *op.operands[2:]))
        return op

    def _most(self, value: Value) -> float:
        """A bound of a scalar: a number, or the least of those that it is the minimum of."""
        known, op = constant_of(value, self.makers), self.makers.get(value)
        if isinstance(known, int): return known
        if op is None or op.name != "apply" or op.attributes["fn"] != "min": return math.inf
        return min(map(self._most, op.operands))

    def _outside(self, value: Value, op: Op) -> bool:
        """Whether a scalar can be computed ahead of a loop."""
        made = self.makers.get(value)
        if made is None: return value not in op.regions[0].arguments
        inside = any(made is each for each in op.regions[0].walk())
        return not inside or (made.name in SCALARS and all(self._outside(each, op) for each in made.operands))

    def _replace_operands(self, op: Op, operands: tuple[Value, ...]) -> Op:
        made = replace(op, operands=operands)
        self.makers.update(dict.fromkeys(op.results, made))
        return made

    # **** blocks inside ****

    def _put_in_branch(self, region: Region, mask: Op, compared: Sequence[Less]) -> None:
        """The mask in a branch, with what it alone needs."""
        ahead = list[Op]()
        write = _Scalars(ahead, self.makers, mask.line)
        if not all(self._is_known(each, region, mask) for less in compared
                   for each in (*less.left[1].scalars, *less.right[0].scalars)): return
        if not all(_fits(each.number) for less in compared for each in less.inside()): return
        test: Value | None = None
        for less in compared:
            high, low = (write.total(each.scalars, each.number) for each in less.inside())
            outside = write.apply("less", [low, high], BOOL)
            test = outside if test is None else write.apply("or", [test, outside], BOOL)
        assert test is not None
        mine = self._alone(region, mask)
        masked = Value(mask.result.type)
        inner = replace(mask, results=(masked,))
        sides = (Region((), [*(each for each in region.ops if each in mine), inner], (masked,)),
                 Region((), [], (mask.operands[1],)))
        branch = Op("if", (test,), mask.results, {}, sides, mask.line)
        self.makers[masked] = inner
        self.makers[mask.result] = branch
        region.ops[:] = [one for each in region.ops if each not in mine
                         for one in ((*ahead, branch) if each is mask else (each,))]

    def _is_known(self, value: Value, region: Region, mask: Op) -> bool:
        """Whether a scalar is there where the mask is."""
        made = self.makers.get(value)
        return made is None or made not in region.ops or region.ops.index(made) < region.ops.index(mask)

    def _alone(self, region: Region, mask: Op) -> set[Op]:
        """Operations of a region that make a mask's condition and nothing else."""
        uses: dict[Value, set[Op]] = {}
        for op in region.walk():
            for each in (*op.operands, *(one for inner in op.regions for one in inner.yields)):
                uses.setdefault(each, set()).add(op)
        kept, mine = set(region.yields), {mask}
        for op in reversed(region.ops[:region.ops.index(mask)]):
            if op.name in PURE and op.result.shape and op.result not in kept and \
                    uses.get(op.result, set()) <= mine and op.result is not mask.operands[1]: mine.add(op)
        return mine - {mask}


class _Scalars:
    """Writes scalar operations to a list."""

    def __init__(self, ops: list[Op], makers: dict[Value, Op], line: Line | None) -> None:
        self.ops, self.makers, self.line = ops, makers, line
        self.copies: dict[Value, Value] = {}

    def _emit(self, name: str, operands: Sequence[Value], to: TileType, **attributes: object) -> Value:
        made = Value(to)
        op = Op(name, tuple(operands), (made,), attributes, (), self.line)
        self.ops.append(op)
        self.makers[made] = op
        return made

    def apply(self, fn: str, operands: Sequence[Value], to: TileType) -> Value:
        """A row of the table."""
        return self._emit("apply", operands, to, fn=fn)

    def total(self, scalars: Sequence[Value], number: int) -> Value:
        """Their sum."""
        made: Value | None = None
        for each in scalars: made = each if made is None else self.apply("add", [made, each], S32)
        if made is not None and not number: return made
        plain = self._emit("constant", (), S32, value=number)
        return plain if made is None else self.apply("add", [made, plain], S32)

    def copy_scalar(self, value: Value, inside: set[Op]) -> Value:
        """A scalar; one of the operations `inside` is computed again."""
        op = self.makers.get(value)
        if op is None or op not in inside: return value
        if value not in self.copies:
            given = [self.copy_scalar(each, inside) for each in op.operands]
            self.copies[value] = self._emit(op.name, given, value.type, **op.attributes)
        return self.copies[value]


