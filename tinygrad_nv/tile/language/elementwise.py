"""Element operations of the tile language: the rows of tile/operations.py, and some more that only programs
of users need.

Protocol: `ROWS` has a row for each [fn] of an `apply` (ir.py), with its C and its PTX where one instruction
or expression computes it. C cells are over vectors (cpu/vector.h, cpu/language/language.h).
"""
from __future__ import annotations

import math

from tinygrad_nv.tile.operations import OPERATIONS, Operation


def _truncate(a: int, b: int) -> int: return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_MORE = (
    # integers, towards zero; anything divided by 0 is 0, with no remainder
    Operation("quotient", 2, lambda a, b: _truncate(int(a), int(b)), cost=20, ptx_integer="div.{kind}",
              c_integer="quotient_i({0}, {1})", c_unsigned="(vi)quotient_u((vu){0}, (vu){1})"),
    Operation("remainder", 2, lambda a, b: int(a) - int(b) * _truncate(int(a), int(b)), cost=24,
              ptx_integer="rem.{kind}", c_integer="remainder_i({0}, {1})",
              c_unsigned="(vi)remainder_u((vu){0}, (vu){1})"),
    # by 32 and more gives 0, or the sign
    Operation("shift_left", 2, lambda a, b: int(a) << int(b), ptx_integer="shl.b32",
              c_integer="shift_left_i({0}, {1})"),
    Operation("shift_right", 2, lambda a, b: int(a) >> int(b), ptx_integer="shr.{kind}",
              c_integer="shift_right_i({0}, {1})", c_unsigned="(vi)shift_right_u((vu){0}, (vu){1})"),
    Operation("mul_high", 2, lambda a, b: int(a) * int(b) >> 32, cost=4, ptx_integer="mul.hi.{kind}",
              c_integer="mul_high_i({0}, {1})", c_unsigned="(vi)mul_high_u((vu){0}, (vu){1})"),
    # of numbers that are at most about 1, as in a softmax: results below 2^-126 are 0
    Operation("exp2_small", 1, lambda x: 2.0**x, cost=8, series=True, ptx_f32="ex2.approx.f32",
              c_float="exp2_small({0})"),
    Operation("floor", 1, lambda x: math.floor(x), cost=2, ptx_f32="cvt.rmi.f32.f32",
              c_float="__builtin_elementwise_floor({0})"),
    Operation("abs", 1, abs, exact=True, ptx_f32="abs.f32", ptx_integer="abs.{kind}",
              c_float="__builtin_elementwise_abs({0})", c_integer="__builtin_elementwise_abs({0})",
              c_unsigned="{0}"),
    # PTX: after a reduction of the argument by multiples of 2 pi
    Operation("sin", 1, math.sin, cost=16, ptx_f32="sin.approx.f32", c_float="sin_({0})"),
)
ROWS = OPERATIONS | {each.name: each for each in _MORE}
