"""Python's statements in kernels: what they do on the CPU and in the interpreter is what Python does."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from tinygrad_nv.language import *

VALUES = np.array([-2.0, -0.3, 0.5, 2.0, 7.0], np.float32)


def run(fn: Any, *arrays: Any, grid: int = 5, **constants: Any) -> np.ndarray:
    """The result of a kernel of `grid` programs; the interpreter's is the same."""
    made = kernel(grid=(grid,))(fn)
    given = [Tensor(np.asarray(x)) for x in arrays or (VALUES,)]
    result = made(*given, **constants).numpy()
    np.testing.assert_array_equal(result, made.interpret(*given, **constants))
    return result


def test_return_ends_a_program():
    def early(x: KTile["n", f32], out: OTile["n", f32]):
        i = tile.program_id(0)
        if i >= x.shape[0]: return
        v = x[i]
        if v < 0.0:
            out[i] = -v
            return
        elif v > 1.0:
            if v > 5.0: return
            out[i] = 1.0
            return
        out[i] = v * 10
    made = run(early, grid=9, out=Tensor.zeros(5))     # what no program writes stays
    np.testing.assert_array_equal(made, np.array([2, 0.3, 5, 1, 0], np.float32))


def clipped(v: Any, low: float, high: float) -> Any:
    if v < low: return low
    if v > high: return high
    return v


def sign(v: Any) -> Any:
    if v > 0.0: return 1.0
    elif v < 0.0: return -1.0
    else: return 0.0


def test_functions_return_from_branches():
    def helped(x: KTile["n", f32], out: OTile["n", f32]):
        i = tile.program_id(0)
        out[i] = clipped(x[i], -0.5, 3.0) * sign(x[i])
    np.testing.assert_array_equal(run(helped), np.array([0.5, 0.3, 0.5, 2, 3], np.float32))


def test_returns_that_constants_decide():
    def chosen(x: KTile["n", f32], out: OTile["n", f32], *, negate: bool):
        def pick(v: Any) -> Any:
            if negate: return -v
            return tile.cast(v, f32)
        out[:] = pick(x[:])
    np.testing.assert_array_equal(run(chosen, grid=1, negate=True), -VALUES)
    np.testing.assert_array_equal(run(chosen, grid=1, negate=False), VALUES)


def factorial(n: int) -> int: return 1 if n < 2 else n * factorial(n - 1)


def test_functions_see_variables_as_they_are():
    def live(x: KTile["n", f32], out: OTile["n", f32]):
        scale = 1.0
        def scaled(v: Any) -> Any: return v * scale
        first = scaled(x[:])
        scale = 2.0
        out[:] = first + scaled(x[:]) + factorial(4)
    np.testing.assert_array_equal(run(live, grid=1), VALUES * 3 + 24)


def test_a_function_of_each_iteration():
    def inner(x: KTile["n", f32], out: OTile["n", f32]):
        total = tile.zeros((5,))
        for i in tile.range(3):
            def times(v: Any) -> Any: return v * (i + 1).to(f32)  # noqa: B023
            total = total + times(x[:])
        out[:] = total
    np.testing.assert_array_equal(run(inner, grid=1), VALUES + VALUES * 2 + VALUES * 3)


class State(NamedTuple):
    total: Any
    count: Any


def test_tuples_in_loops():
    def named(x: KTile["n", f32], out: OTile["n", f32]):
        state = State(0.0, 0)
        for i in tile.range(x.shape[0]):
            state = State(state.total + x[i], state.count + 2)
        a, b = 1, 1
        for _ in tile.range(6): a, b = b, a + b
        out[:] = state.total * state.count.to(f32) + a.to(f32)
    np.testing.assert_array_equal(run(named, np.arange(5, dtype=np.float32), grid=1), np.full(5, 113))


def test_loops_in_loops():
    def nested(out: OTile["n", int32], x: KTile["n", int32]):
        i, total, steps = tile.program_id(0), 0, 0
        value = x[i]
        while value > 1:
            for j in tile.range(value):
                if j % 2 == 0:
                    total += j
                else:
                    k = j
                    while k > 3:
                        k = k // 2
                        steps += 1
                    total -= k
            value = value // 2
        out[i] = total * 100 + steps
    def want(v: int) -> int:
        total = steps = 0
        while v > 1:
            for j in range(v):
                if j % 2 == 0: total += j
                else:
                    k = j
                    while k > 3: k, steps = k // 2, steps + 1
                    total -= k
            v //= 2
        return total * 100 + steps
    x = np.array([0, 1, 5, 12, 23], np.int32)
    made = kernel(grid=(5,))(nested)
    got = made(x=Tensor(x)).numpy()
    np.testing.assert_array_equal(got, [want(int(v)) for v in x])
    np.testing.assert_array_equal(got, made.interpret(x=Tensor(x)))


def test_constants_unroll_and_keep_their_zeros():
    def unrolled(x: KTile["n", f32], out: OTile["n", f32], *, signs: str):
        total = x[:] * 0.0
        for i, each in enumerate(signs):
            if each == "+": total = total + x[i]
            elif i == 3: break
            else: continue
        out[:] = tile.where(x[:] < 0.0, -0.0, total)
    made = run(unrolled, grid=1, signs="+-+-+")
    np.testing.assert_array_equal(made, [0, 0, -1.5, -1.5, -1.5])
    np.testing.assert_array_equal(np.signbit(made), True)


@pytest.mark.parametrize(("fn", "want"), [
    (lambda x: tile.sum(x), lambda x: x.sum(dtype=int)), (lambda x: tile.cumsum(x),
                                                          lambda x: x.cumsum(dtype=int)),
    (lambda x: tile.mean(x), lambda x: x.mean(dtype=np.float32)), (lambda x: abs(x),
                                                                   lambda x: abs(x.astype(int))),
    (lambda x: divmod(x.to(int32), 7)[0], lambda x: x.astype(int) // 7),
    (lambda x: divmod(x.to(int32), 7)[1], lambda x: x.astype(int) % 7),
    (lambda x: x * np.float32(0.5), lambda x: x * np.float32(0.5)),
    (lambda x: np.int32(2) - x, lambda x: 2 - x.astype(int)), (lambda x: round(x / 4),
                                                               lambda x: np.round(x / 4))])
def test_operators_and_sums_of_bytes(fn: Callable[[Any], Any], want: Callable[[Any], Any]):
    x = np.array([100, 120, -100, 33, 90], np.int8)

    def applied(x: KTile["n", int8], out: OTile["n", f32]): out[:] = tile.cast(fn(x[:]), f32)
    np.testing.assert_allclose(run(applied, x, grid=1), np.broadcast_to(want(x), 5), rtol=1e-6)


def test_slices_reach_to_the_end():
    def tail(x: KTile["n", f32], out: OTile["n", f32]): out[0:3] = x[2:]
    np.testing.assert_array_equal(run(tail, grid=1, out=Tensor.zeros(5)), [0.5, 2, 7, 0, 0])


def test_elements_of_lists_and_dicts_in_loops():
    def groups(x: KTile["n", f32], out: OTile["n", f32]):
        sums, state = [0.0, tile.zeros((5,)), [1, 2]], {"last": 0.0, "count": 0}
        for i in tile.range(x.shape[0]):
            sums[0] = sums[0] + x[i]
            sums[1] += x[:]
            sums[2][1] = sums[2][1] + 2
            if x[i] > 0.0:
                state["last"] = x[i]
            state["count"] += 1
        last = state["last"] * state["count"].to(f32)
        out[:] = sums[1] + sums[0] * 1000.0 + sums[2][1].to(f32) + last + sums[2][0]
    x = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(run(groups, x, grid=1), x * 5 + 10_000 + 12 + 20 + 1)


def test_lists_that_keep_their_length_in_loops():
    """The last two elements, and a list that Python's own loop makes."""
    def window(x: KTile["n", f32], out: OTile["n", f32]):
        last, steps = [0.0, 0.0], []
        for step in range(3): steps.append(step)
        for i in tile.range(x.shape[0]):
            last.append(x[i])
            last.pop(0)
        out[:] = last[0] * 10.0 + last[1] + float(sum(steps))
    np.testing.assert_array_equal(run(window, np.arange(5, dtype=np.float32), grid=1), np.full(5, 37.0))


def test_numbers_of_numpy_and_powers():
    def scaled(x: KTile["n", f32], out: OTile["n", f32], *, scale: float,
               n: int): out[:] = 2.0 ** x[:] * scale + n
    made = run(scaled, np.arange(5, dtype=np.float32), grid=1, scale=np.float32(0.5), n=np.int64(5))
    np.testing.assert_array_equal(made, 2.0 ** np.arange(5) / 2 + 5)
