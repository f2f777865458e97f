"""Ranges of integers that are known before a kernel runs: bounds, multiples, and how they go along the last
axis.

Protocol: `Ranges(program)` looks at all operations once; `of(value)` is a `Known`. Along the last axis,
groups of `run` elements grow by one from element to element, groups of `same` are equal; a value at the
beginning of each group of `run` is a multiple of `multiple`. Groups begin at multiples of their size, and
all three are powers of two up to MOST. It supposes that 32-bit sums of a kernel's own indices do not wrap.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tinygrad.dtype import DType, dtypes

from tinygrad_nv.tile.language.ir import Op, Program, Region, TensorParameter, Value, select_numbers

MOST = 1 << 30
LOW, HIGH = -(1 << 31), (1 << 31) - 1
LIMITS = {dtypes.int8: (-128, 127), dtypes.uint8: (0, 255), dtypes.int16: (-1 << 15, (1 << 15) - 1),
          dtypes.uint16: (0, (1 << 16) - 1), dtypes.uint32: (0, (1 << 32) - 1), dtypes.bool: (0, 1)}


@dataclass(frozen=True)
class Known:
    """An integer, or the elements of a tile of them."""
    low: int = LOW
    high: int = HIGH
    multiple: int = 1
    run: int = 1
    same: int = 1

    def group_multiple(self, group: int) -> int:
        """Returns the number that the first of each `group` elements is a multiple of."""
        return self.multiple if self.run == 1 else math.gcd(self.multiple, group)


NOTHING = Known()


def _power(x: int) -> int: return min(x & -x, MOST) if x else MOST


def _constant(x: int) -> Known: return Known(x, x, _power(abs(x)), 1, MOST)


class Ranges:
    """Ranges of a program's integers."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.known: dict[Value, Known] = {}
        self.makers: dict[Value, Op] = {}
        self.loops: dict[Value, Op] = {}        # by their indices
        self._region(program.body)

    def of(self, value: Value) -> Known:
        """Returns what is known of a value."""
        return self.known.get(value) or _clip_range(NOTHING, value.dtype)

    def inside(self, tensor: TensorParameter, axis: int, starts: Sequence[Value], size: int) -> bool:
        """Whether so many elements of an axis, or the one of an index, are known to lie inside of a
        tensor."""
        known, end = self.of(starts[axis]), tensor.shape[axis]
        if known.low < 0 or (axis == tensor.symbolic and not self._is_row(starts[axis], size)): return False
        if tensor.among and not axis: return True
        length = self.length(starts) if tensor.among else end
        least = length if isinstance(length, int) else self.of(length).low
        return known.high + size <= least or self._fits(starts[axis], size, length)

    def _is_row(self, start: Value, size: int) -> bool:
        """Whether an index of a symbolic axis is the one row that a program has: there are as many."""
        op = self.makers.get(start)
        return size <= 1 and self.program.rows == 1 and op is not None and op.name == "program_id" \
            and op.attributes["axis"] == 0

    def length(self, starts: Sequence[Value]) -> Value:
        """The number of elements of a tensor that was chosen."""
        op = self.makers[starts[0]]
        return op.results[len(op.attributes["choices"])]

    def _fits(self, start: Value, size: int, end: Value | int) -> bool:
        """Whether blocks within a loop's step, by multiples of a number that has room for them, stop at an
        end or ahead of it."""
        made, ahead = self.makers.get(start), 0
        if made is not None and made.name == "apply" and made.attributes["fn"] == "add":
            start, other = sorted(made.operands, key=lambda each: each not in self.loops)
            ahead = self.of(other).high if self.of(other).low >= 0 else HIGH
        if (op := self.loops.get(start)) is None: return False
        return ahead + size <= min(self.of(each).multiple for each in op.operands[:3]) and \
            self._is_at_most(op.operands[1], end)

    def _is_at_most(self, value: Value, other: Value | int) -> bool:
        if isinstance(other, int): return self.of(value).high <= other
        if value is other: return True
        op = self.makers.get(value)
        if op is None or op.name != "apply" or self.of(value).low < 0: return False
        fn, (a, *others) = op.attributes["fn"], op.operands
        if fn == "min": return any(self._is_at_most(each, other) for each in op.operands)
        if fn == "quotient": return self.of(others[0]).low >= 1 and self._is_at_most(a, other)
        if fn == "shift_right": return self._is_at_most(a, other)
        return fn in ("mul", "shift_left") and self._is_floor(fn, a, others[0], other)

    def _is_floor(self, fn: str, a: Value, factor: Value, other: Value | int) -> bool:
        """Whether a times a factor is a quotient by it, of what is at most another, times it."""
        op, back = self.makers.get(a), {"mul": "quotient", "shift_left": "shift_right"}[fn]
        return op is not None and op.name == "apply" and op.attributes["fn"] == back and \
            op.operands[1] is factor and self._is_at_most(op.operands[0], other)

    def _region(self, region: Region) -> None:
        for op in region.ops:
            self.makers.update(dict.fromkeys(op.results, op))
            if op.name == "select":
                for each in op.results:
                    numbers = select_numbers(op, each)
                    self.known[each] = Known(min(numbers), max(numbers), _power(math.gcd(*numbers)), 1, MOST)
            if op.name == "for": self._loop(op)
            for number, inner in enumerate(op.regions):
                before = dict(self.known) if op.name == "if" else {}
                if op.name == "if": self._suppose(op.operands[0], not number)
                self._region(inner)
                self.known |= before
                if op.name == "while" and not number: self._limit_body(op)
            if len(op.results) == 1 and not dtypes.is_float(op.result.dtype):
                rule = getattr(self, f"_{op.name}", None)
                if rule is None or op.name == "for": continue
                self.known[op.result] = _clip_range(rule(op), op.result.dtype)

    def _loop(self, op: Op) -> None:
        self.loops[op.regions[0].arguments[0]] = op
        start, stop, step = map(self.of, op.operands[:3])
        last = max(stop.high - min(start.multiple, stop.multiple, step.multiple), start.low)
        if start.low == start.high and step.low == step.high:
            last = start.low + max(last - start.low, 0) // step.low * step.low
        self.known[op.regions[0].arguments[0]] = Known(start.low, last, min(start.multiple, step.multiple), 1,
                                                       MOST)

    def _limit_body(self, op: Op) -> None:
        """Limits what the body of a `while` is given by the condition under which it runs."""
        test, body = op.regions
        given, left = dict(zip(test.arguments, body.arguments, strict=True)), [(test.yields[0], True)]
        while left:
            value, holds = left.pop()
            made = self.makers.get(value)
            if made is None or made.name != "apply": continue
            fn, (a, *others) = made.attributes["fn"], made.operands
            if fn == "and" and holds: left += [(each, True) for each in made.operands]
            elif fn == "xor" and self.of(others[0]).low == 1: left.append((a, not holds))
            elif fn == "less" and a in given and not dtypes.is_float(a.dtype):
                known, bound = self.of(given[a]), self.of(others[0])
                self.known[given[a]] = replace(known, high=min(known.high, bound.high - 1)) if holds else \
                    replace(known, low=max(known.low, bound.low))

    def _suppose(self, condition: Value, holds: bool) -> None:
        """Narrows what is known of the scalars that a condition compares."""
        op = self.makers.get(condition)
        if op is None or op.name != "apply": return
        fn = op.attributes["fn"]
        if fn == "xor" and self.of(op.operands[1]) == _constant(1):
            self._suppose(op.operands[0], not holds)
        elif fn == ("and" if holds else "or"):
            for each in op.operands: self._suppose(each, holds)
        elif fn == "less" and op.operands[0].dtype == dtypes.int32:
            a, b = op.operands if holds else op.operands[::-1]    # a < b, or a <= b
            low, high = self.of(a), self.of(b)
            self.known[a] = replace(low, high=max(low.low, min(low.high, high.high - holds)))
            self.known[b] = replace(high, low=min(high.high, max(high.low, low.low + holds)))

    # **** operations ****

    def _constant(self, op: Op) -> Known: return _constant(int(op.attributes["value"]))

    def _program_id(self, op: Op) -> Known:
        return Known(0, self.program.grid[op.attributes["axis"]] - 1, 1, 1, MOST)

    def _iota(self, op: Op) -> Known: return Known(0, op.result.shape[0] - 1, MOST, MOST, 1)

    def _broadcast(self, op: Op) -> Known:
        found, source = self.of(op.operands[0]), op.operands[0].shape
        if not source or source[-1] != op.result.shape[-1]:
            return replace(found, multiple=_each(found), run=1, same=MOST)
        return found

    def _reshape(self, op: Op) -> Known:
        found, source, shape = self.of(op.operands[0]), op.operands[0].shape, op.result.shape
        if source and shape and source[-1] == shape[-1]: return found
        return replace(found, multiple=_each(found), run=1, same=MOST if found.same == MOST else 1)

    def _transpose(self, op: Op) -> Known:
        found = self.of(op.operands[0])
        return replace(found, multiple=_each(found), run=1, same=MOST if found.same == MOST else 1)

    def _cast(self, op: Op) -> Known:
        source, target = op.operands[0].dtype, op.result.dtype
        if dtypes.is_float(source): return NOTHING
        found = self.of(op.operands[0])
        if target in (dtypes.int32, dtypes.uint32):
            inside = found.low >= 0 and found.high <= HIGH
            return found if inside else replace(NOTHING, same=found.same)
        return replace(NOTHING, same=found.same)

    def _where(self, a: Known, b: Known, test: Known) -> Known:
        return Known(min(a.low, b.low), max(a.high, b.high), min(_each(a), _each(b)), 1,
                     min(a.same, b.same, test.same))

    def _apply(self, op: Op) -> Known:
        fn, given = op.attributes["fn"], list(map(self.of, op.operands))
        if fn == "where": return self._where(given[1], given[2], given[0])
        same = min(each.same for each in given)
        if len(given) != 2: return Known(same=same)
        a, b = given
        if fn == "add": return _sum(a, b, same)
        if fn == "sub": return _sum(a, Known(-b.high, -b.low, _each(b), 1, b.same), same)
        if fn == "mul":
            ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
            return Known(min(ends), max(ends), min(_each(a) * _each(b), MOST), 1, same)
        if fn == "less": return Known(0, 1, 1, 1, _equal_run(a, b, same))
        if fn in ("max", "min"):
            pick = max if fn == "max" else min
            return Known(pick(a.low, b.low), pick(a.high, b.high), min(_each(a), _each(b)), 1, same)
        if fn == "quotient" and a.low >= 0 and b.low >= 1: return self._quotient(a, b, same)
        if fn == "remainder" and a.low >= 0 and b.low >= 1:
            return Known(0, min(a.high, b.high - 1), min(_each(a), _each(b)), 1, same)
        if fn == "shift_left" and a.low >= 0 and b.low == b.high and 0 <= b.low < 31:
            return Known(a.low << b.low, a.high << b.low, min(_each(a) << b.low, MOST), 1, same)
        if fn == "shift_right" and a.low >= 0 and b.low == b.high and 0 <= b.low < 31:
            return Known(a.low >> b.low, a.high >> b.low, 1, 1, same)
        if fn == "and" and (a.low >= 0 or b.low >= 0):
            return Known(0, min(each.high for each in given if each.low >= 0), max(_each(a), _each(b)), 1,
                         same)
        return Known(same=same)

    def _quotient(self, a: Known, b: Known, same: int) -> Known:
        exact = b.low == b.high and _power(b.low) == b.low
        return Known(a.low // b.high, a.high // b.low, max(_each(a) // b.low, 1) if exact else 1, 1, same)


def _each(x: Known) -> int:
    """Returns the number that every element is a multiple of."""
    return x.multiple if x.run == 1 else 1


def _sum(a: Known, b: Known, same: int) -> Known:
    run = max(min(a.run, b.same), min(a.same, b.run), 1)
    return Known(a.low + b.low, a.high + b.high, math.gcd(a.group_multiple(run), b.group_multiple(run)), run,
                 same)


def _equal_run(a: Known, b: Known, same: int) -> int:
    """Elements side by side of a < b that are equal: a group of a grows within multiples of what it is
    compared with."""
    group = min(a.run, b.same)
    return max(same, math.gcd(math.gcd(group, a.group_multiple(group)), b.group_multiple(group)))


def _clip_range(x: Known, dtype: DType) -> Known:
    """Returns what is known of a number that wraps around: all of its dtype, where it may be beyond; it stays
    a multiple of powers of two."""
    low, high = LIMITS.get(dtype, (LOW, HIGH))
    if x.low >= low and x.high <= high: return x
    return replace(x, low=low, high=high, multiple=min(x.multiple, 1 << 8 * dtype.itemsize))


def uses(region: Region) -> Mapping[Value, list[Op]]:
    """The operations that take each value, those in regions within included; a region's yields are uses of
    the operation that has the region."""
    made: dict[Value, list[Op]] = {}
    for op in region.walk():
        for each in op.operands: made.setdefault(each, []).append(op)
        for inner in op.regions:
            for each in inner.yields: made.setdefault(each, []).append(op)
    return made
