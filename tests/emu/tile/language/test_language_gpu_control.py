"""Loops and branches: kernels of the tile language on the emulated GPU against the interpreter."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad.dtype import dtypes

from tests.support.tile.language_gpu_case import checked, program, ref
from tinygrad_nv.tile.language import control as K
from tinygrad_nv.tile.language import elements as E
from tinygrad_nv.tile.language import memory as M
from tinygrad_nv.tile.language import reductions as R
from tinygrad_nv.tile.language import values as V

F32, BF16, S32 = dtypes.float32, dtypes.bfloat16, dtypes.int32


def summed(x, n, o):
    acc = E.zeros((48,), F32)
    for k in K.range_(0, M.load(n, 0)): acc = acc + x[k, :]
    o[:] = acc


@pytest.mark.parametrize("count", [0, 1, 9])
def test_for(count: int) -> None:
    """No iteration at all leaves what was carried in."""
    made = program(summed, [ref("o", F32, 48, out=True), ref("x", F32, 9, 48), ref("n", S32, 1)])
    checked(made, integers=True, ulps=0, n=np.array([count]))


def swapped(x, o):
    a, b = x[0, :], x[1, :]
    for _ in K.range_(0, 7): a, b = b, a + b
    o[0, :] = a
    o[1, :] = b


def test_carried_values_change_places() -> None:
    made = program(swapped, [ref("o", BF16, 2, 100, out=True), ref("x", BF16, 2, 100)])
    checked(made, integers=True, ulps=0)


def collatz(x, o):
    n, c = M.load(x, 0), 0
    while n != 1:
        if n % 2 == 0: n = n // 2
        else: n = 3 * n + 1
        c = c + 1
    o[0] = c


@pytest.mark.parametrize("first", [1, 27])
def test_while(first: int) -> None:
    checked(program(collatz, [ref("o", S32, 1, out=True), ref("x", S32, 1)]), x=np.array([first]))


def halved(x, o):
    v = x[:, :]
    while R.max_(R.max_(v, 1), 0) > 1.0: v = v * 0.5
    o[:, :] = v


def test_a_condition_through_shared_memory() -> None:
    made = program(halved, [ref("o", F32, 16, 50, out=True), ref("x", F32, 16, 50)])
    checked(made, ulps=0, x=np.random.default_rng(0).random((16, 50)).astype(np.float32) * 100)


def chosen(x, o):
    v = x[:]
    if R.sum_(v, 0) > 0:
        w = R.cumsum(v * 2.0, 0)
        M.store(o, 1.0, 100)
    else: w = v - 1.0
    o[V_BLOCK] = w + v


V_BLOCK = slice(0, 100)


@pytest.mark.parametrize("sign", [1, -1])
def test_if(sign: int) -> None:
    """What a branch makes of a value that both sides and the code behind use."""
    made = program(chosen, [ref("o", BF16, 101, out=True), ref("x", BF16, 100)])
    checked(made, integers=True, x=np.full(100, sign * 1.5, np.float32))


def nested(x, o):
    total = V.scalar(0, S32) + 0
    for i in K.range_(0, 5):
        for j in K.range_(i, 5):
            if (i + j) % 2 == 0: total = total + M.load(x, i * 5 + j)
    o[0] = total


def test_nested() -> None:
    checked(program(nested, [ref("o", S32, 1, out=True), ref("x", S32, 25)]))
