"""Dots whose right operand a loop makes, with their sides exchanged: wgmma takes the left one from registers.

Protocol: where a loop adds a @ b to what it carries, of an `a` that it loads and a `b` of 16-bit floats that
it makes of fewer bytes, as of codes and scales, it adds bᵀ @ aᵀ to the transpose instead. Then `b` needs no
way through shared memory. A transpose is another order of registers: only what is behind the loop moves.
"""
from __future__ import annotations

import math
import operator
from dataclasses import replace

from tinygrad_nv.tile.lanes import FLOAT16S
from tinygrad_nv.tile.language.gpu.dots import GROUP_ROWS, LEAST, MOST_COLUMNS, WARPS, source_of
from tinygrad_nv.tile.language.gpu.pipelining import adds_alone
from tinygrad_nv.tile.language.ir import Op, Program, Region, TileType, Value
from tinygrad_nv.tile.language.ranges import uses

MAKERS = ("apply", "cast", "bitcast", "broadcast", "reshape", "transpose", "halves", "interleave", "constant",
          "iota")


def exchange_sides(program: Program, warps: int, arch: str) -> Program:
    """A program for so many warps; itself where it has no such dots."""
    if arch != "sm_90a" or warps % WARPS: return program
    body = _Exchange(program, warps).region(program.body)
    return program if body is program.body else replace(program, body=body)


class _Exchange:
    """Regions of a program."""

    def __init__(self, program: Program, warps: int) -> None:
        self.groups, self.uses = warps // WARPS, uses(program.body)
        self.makers = {each: op for op in program.body.walk() for each in op.results}

    def region(self, region: Region) -> Region:
        """The region with its loops exchanged; itself where nothing is."""
        made: list[Op] = []
        for op in region.ops:
            inner = tuple(map(self.region, op.regions))
            dots = [one for each in op.regions[:1] if op.name == "for" for one in each.ops
                    if self._changes_sides(one, op)]
            whole = op if all(map(operator.is_, inner, op.regions)) else replace(op, regions=inner)
            made += self._loop(whole, dots) if dots else [whole]
        return region if made == region.ops else Region(region.arguments, made, region.yields)

    def _changes_sides(self, dot: Op, loop: Op) -> bool:
        if dot.name != "dot" or dot.operands[1].dtype not in FLOAT16S: return False
        m, n = dot.result.shape
        if n % (GROUP_ROWS * self.groups) or n & n - 1 or m & m - 1 or not LEAST <= m <= MOST_COLUMNS:
            return False
        (left, _), (right, _) = (source_of(each, self.makers) for each in dot.operands[:2])
        load, region = self.makers.get(left), loop.regions[0]
        loaded = load is not None and load in region.ops and load.name == "load_block"
        return loaded and adds_alone(dot, loop, self.uses) and self._is_made(right, region, _nbytes(right))

    def _is_made(self, value: Value, region: Region, nbytes: int) -> bool:
        """Whether a region makes a value of tiles of fewer bytes, without dots and reductions."""
        op = self.makers.get(value)
        if value in region.arguments or (op is not None and op.name == "load_block"):
            return _nbytes(value) < nbytes
        if op is None or op.name not in MAKERS: return False
        return all(self._is_made(each, region, nbytes) for each in op.operands)

    def _loop(self, op: Op, dots: list[Op]) -> list[Op]:
        """The loop with the transposes of what it carries, and the operations around it."""
        region, before, after = op.regions[0], list[Op](), list[Op]()
        operands, arguments = list(op.operands), list(region.arguments)
        yields, results, ops = list(region.yields), list(op.results), list(region.ops)
        for dot in dots:
            place = region.arguments.index(dot.operands[2]) - 1
            operands[3 + place] = self._transpose(op.operands[3 + place], before, dot)
            arguments[1 + place] = _transpose_of(dot.operands[2])
            results[place] = _transpose_of(op.results[place])
            after.append(_transposition(results[place], op.results[place], dot))
            at, ahead = ops.index(dot), list[Op]()
            right, left = (self._transpose(each, ahead, dot) for each in dot.operands[1::-1])
            yields[place] = _transpose_of(dot.result)
            ops[at:at + 1] = [*ahead, replace(dot, operands=(right, left, arguments[1 + place]),
                                              results=(yields[place],))]
        body = Region(tuple(arguments), ops, tuple(yields))
        return [*before, replace(op, operands=tuple(operands), results=tuple(results), regions=(body,)),
                *after]

    def _transpose(self, value: Value, to: list[Op], dot: Op) -> Value:
        """The transpose of a tile, which may be what it is the transpose of."""
        op = self.makers.get(value)
        if op is not None and op.name == "transpose": return op.operands[0]
        to.append(_transposition(value, _transpose_of(value), dot))
        return to[-1].result


def _nbytes(value: Value) -> int: return math.prod(value.shape) * value.dtype.itemsize


def _transpose_of(value: Value) -> Value: return Value(TileType(value.dtype, value.shape[::-1]))


def _transposition(value: Value, made: Value, dot: Op) -> Op:
    return Op("transpose", (value,), (made,), {"permutation": (1, 0)}, line=dot.line)
