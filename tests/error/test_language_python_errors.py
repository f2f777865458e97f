"""Wrong programs in the tile language: Python that the running kernel cannot have."""
from __future__ import annotations

import contextlib
import math

import numpy as np

from tests.support.error.language_case import Case, Wrong, check
from tinygrad_nv.language import *

wrong = Wrong()


# **** truth ****

@wrong("a condition of 8x16xbool", "a scalar", "tile.any, tile.all or tile.where")
def if_of_a_tile(x, out):
    if x[:, :] > 0:  # here
        out[:, :] = 1.0


@wrong("a condition of 16xbool", "a scalar", "tile.any, tile.all or tile.where")
def while_of_a_tile(v):
    a = v[:]
    while a > 0:  # here
        a = a - 1


@wrong("a tile (16xbool) where Python needs True or False", "`&`, `|`, `~` between conditions")
def and_of_tiles(v): (v[:] > 0) and (v[:] < 1)  # here


@wrong("a scalar that is known when the kernel runs (bool)", "`&`, `|`, `~` between conditions")
def or_of_scalars(v, out):
    a = v[0]
    if a > 0 or a < 1:  # here
        out[0, 0] = 1.0


@wrong("a scalar that is known when the kernel runs (bool)", "`&`, `|`, `~` between conditions")
def not_of_a_scalar(v, out):
    if not v[0] > 0:  # here
        out[0, 0] = 1.0


@wrong("a tile (16xbool) where Python needs True or False", "`&`, `|`, `~` between conditions")
def chained_comparison(v): return 0 < v[:] < 1  # here


@wrong("a scalar that is known when the kernel runs (bool)", "tile.where(condition, x, y)")
def conditional_expression(v): 1.0 if v[0] > 0 else 2.0  # here


@wrong("a scalar that is known when the kernel runs (bool)", "as a statement")
def assertion(v):
    assert v[0] > 0  # here


@wrong("a scalar that is known when the kernel runs (bool)", "tile.maximum and tile.minimum for max and min")
def builtin_max(v): max(v[0], 1.0)  # here


@wrong("a tile (16xf32) taken apart element by element", "tile.gather")
def membership(v):
    if 3.0 in v[:]:  # here
        pass


# **** loops and branches ****

@wrong("variable 'y' has no value here", "before the loop or branch that assigns it", "y = tile.zeros(…)")
def variable_of_a_loop(x, out):
    for i in tile.range(4):
        y = x[i, :]
    out[0, :] = y  # here


@wrong("variable 'y' has no value here", "assign y first")
def shape_of_a_variable_of_a_loop(x):
    for i in tile.range(4):
        y = x[i, :]
    return y.shape  # here


@wrong("variable 'i' has no value here", "assign i first")
def index_after_the_loop(out):
    for i in tile.range(4):
        out[i, :] = 0.0
    out[i, :] = 1.0  # here


@wrong("variable 'y' has no value here", "assign y first")
def variable_of_a_branch(x, out):
    if x[0, 0] > 0:
        y = x[0, :]
    out[0, :] = y  # here


@wrong("acc enters the loop as 16xbf16 and leaves it as 16xf32", "make it 16xf32 from the beginning")
def dtype_in_a_loop(x):
    acc = tile.zeros((16,), bf16)
    for i in tile.range(4):  # here
        acc = acc.to(f32) + x[i, :]


@wrong("acc enters the loop as 16xf32 and leaves it as 8x16xf32", "one shape and dtype")
def shape_in_a_loop(x):
    acc = tile.zeros((16,))
    for _ in tile.range(4):  # here
        acc = acc + x[:, :]


@wrong("acc enters the loop as 1x16xf32 and leaves it as 1x1x16xf32")
def growing_shape(x):
    acc = x[0, :][None]
    for _ in tile.range(4):  # here
        acc = (acc + acc)[None]


@wrong("state is 2 values before the loop and 3 after", "as many")
def growing_tuple(x):
    state = (0, 1)
    for i in tile.range(4):  # here
        state = (*state, i)


@wrong("s is 'a' before the loop and 'ab' after", "tiles and numbers change in a loop", "range(…)")
def text_in_a_loop(x):
    s = "a"
    for _ in tile.range(3):  # here
        s = s + "b"


class Sums:
    """What a user keeps state in."""
    total = 0.0


@wrong("attribute 'total' of a Sums assigned in a loop or branch", "tuples, lists and dicts", "total = …")
def attribute_in_a_loop(x):
    sums = Sums()
    for i in tile.range(4):
        sums.total = sums.total + x[i, 0]  # here


@wrong("1099511627776 as a bound of a loop", "an integer of 32 bits")
def large_bound(x):
    for _ in tile.range(2 ** 40):  # here
        pass


@wrong("rows is 0 values before the loop and 1 after", "as many")
def list_of_a_loop(x, out):
    rows = []
    for i in tile.range(4):  # here
        rows.append(x[i, :])
    out[0, :] = rows[0]


@wrong("counts is 1 values before the loop and 2 after", "as many")
def numbers_of_a_loop(x, out):
    counts = [0]
    for _ in tile.range(4):  # here
        counts.append(3)
    out[0, 0] = tile.cast(len(counts), f32)


@wrong("found is 1 values or 0, as a branch goes", "as many")
def list_of_a_branch(x, out):
    found = []
    if x[0, 0] > 0:  # here
        found.append(1)
    out[0, 0] = tile.cast(len(found), f32)


def noted(x, rows): rows.append(x)


@wrong("a tile (16xf32) of a loop or branch, used outside of it", "assign it to a variable")
def list_of_another_function(x, out):
    rows = []
    for i in tile.range(4):
        noted(x[i, :], rows)
    out[0, :] = rows[0]  # here


@wrong("y is 4xf32 or 5xf32, as a branch goes", "one shape and dtype on both sides")
def shapes_of_a_branch(x):
    if x[0, 0] > 0:  # here
        y = tile.zeros((4,))
    else:
        y = tile.zeros((5,))
    return y


@wrong("y is Tile(16xf32) or None, as a branch goes", "tiles or numbers")
def nothing_of_a_branch(x, out):
    y = None
    if x[0, 0] > 0:  # here
        y = x[0, :]
    out[0, :] = y


@wrong("the function's result is Tile(16xf32) or None, as a branch goes")
def result_of_a_branch(x, out):
    def positive(v):
        if tile.sum(v) > 0:  # here
            return v
    out[0, :] = positive(x[0, :])


@wrong("`break` in a loop that the running kernel decides", "guard what follows with `if`")
def break_of_a_loop(x):
    for i in tile.range(4):  # here
        if x[i, 0] > 0:
            break


@wrong("`continue` in a loop that the running kernel decides", "guard what follows with `if`")
def continue_of_a_loop(x, out):
    for i in tile.range(4):  # here
        if x[i, 0] > 0:
            continue
        out[i, 0] = 1.0


@wrong("`return` in a loop that the running kernel decides", "a body that runs to its end")
def return_of_a_loop(x):
    for i in tile.range(4):  # here
        if x[i, 0] > 0:
            return


@wrong("`break` in a branch that the running kernel decides", "guard what follows with `if`")
def break_of_a_branch(x):
    for i in range(4):
        if x[i, 0] > 0:  # here
            break


@wrong("`else` in a loop that the running kernel decides")
def else_of_a_loop(out):
    for i in tile.range(4):  # here
        out[i, 0] = 0.0
    else:
        out[0, 0] = 1.0


@wrong("scaled(…) uses 'scale', which this loop or branch changes", "def scaled(…, scale)")
def variable_of_a_function(x, out):
    scale = 1.0

    def scaled(v): return v * scale
    for i in tile.range(4):  # here
        out[i, :] = scaled(x[i, :])
        scale = scale + 1.0


@wrong("step=0", "a positive constant")
def no_step(x):
    for _ in tile.range(0, 4, 0):  # here
        pass


@wrong("step=-1", "a positive constant", "`while`")
def backwards(x):
    for _ in tile.range(8, 0, -1):  # here
        pass


@wrong("8x16xf32 as a bound of a loop", "a scalar of integers")
def tile_as_a_bound(x):
    for _ in tile.range(x[:, :]):  # here
        pass


@wrong("f32 as a bound of a loop", "a scalar of integers", "tile.cast(n, int32)")
def float_as_a_bound(x):
    for _ in tile.range(x[0, 0]):  # here
        pass


@wrong("2.5 as a bound of a loop", "an integer")
def half_a_bound(x):
    for _ in tile.range(2.5):  # here
        pass


@wrong("s32, known only when the kernel runs, where Python needs an integer", "fixed when a kernel is built")
def python_range(n):
    for _ in range(n[0, 0]):  # here
        pass


@wrong("a tile.range that Python iterates over", "a `for` statement")
def comprehension(x): [x[i, :] for i in tile.range(4)]  # here


@wrong("a tile.range that Python iterates over", "write the loop as a statement")
def generator_expression(x): sum(x[i, 0] for i in tile.range(4))  # here


@wrong("a tile.range that Python iterates over")
def enumerated(x):
    for _ in enumerate(tile.range(4)):  # here
        pass


# **** what a tile is not ****

@wrong("a tile (16xf32) taken apart element by element", "operations on the whole tile", "tile.scan")
def elements(v):
    for _ in v[:]:  # here
        pass


@wrong("a tile (2xf32) taken apart element by element")
def unpacked(x):
    a, b = tile.zeros((2,))  # here
    return a + b


@wrong("f32, known only when the kernel runs, where Python needs a number", "write tile.exp")
def python_math(v): math.exp(v[0])  # here


@wrong("f32, known only when the kernel runs, where Python needs a number")
def python_float(v): float(v[0])  # here


@wrong("does not support ufuncs")
def numpy_function(v): np.exp(v[:])  # here


@wrong("a tile (16xbool) given to NumPy", "functions of `tile`")
def numpy_where(v): np.where(v[:] > 0, 1, 0)  # here


@wrong("the value of f32 as text, before the kernel runs", "x.shape, x.dtype", "kernel.interpret(…)")
def printed(v): print(v[0])  # here


@wrong("the value of f32 as text, before the kernel runs")
def formatted(v): return f"{v[0]:.3f}"  # here


@wrong("a tile to the power of 0.5", "tile.exp2(tile.log2(x) * y)")
def root(v): v[:] ** 0.5  # here


# **** statements ****

@wrong("`try` in a kernel", "a running kernel raises nothing", "tile.where")
def exceptions(v, out):
    try:  # here
        out[0, 0] = 1 / v[0]
    except ZeroDivisionError:
        out[0, 0] = 0.0


@wrong("`with` of a nullcontext", "enter it where the kernel is called")
def context_manager(v, out):
    with contextlib.nullcontext():  # here
        out[0, 0] = v[0]


@wrong("`global TOTAL` in a kernel", "store to an output")
def global_variable(v):
    global TOTAL  # here
    TOTAL = v[0]


@wrong("`nonlocal total` in a kernel", "return the value")
def nonlocal_variable(v, out):
    total = 0.0

    def add(x):
        nonlocal total  # here
        total = total + x
    add(v[0])
    out[0, 0] = total


@wrong("kernel generator is a generator or coroutine", "without yield")  # here
def generator(v): yield v[0]


@wrong("kernel coroutine is a generator or coroutine", "async and await")  # here
async def coroutine(v): return v[0]


@wrong("a function that calls itself without end", "functions that end", "write a loop")
def recursion(x):
    def endless(n): return endless(n + 1)  # here
    endless(0)


@wrong("NameError: name 'undefined_name' is not defined", "names of the function", "import or define it")
def unknown_name(out): out[:, :] = undefined_name  # here


@wrong("ValueError: too many values to unpack", "correct the line")
def unpacking(x):
    a, b = (*x.shape, 1)  # here
    return a, b


@wrong("ZeroDivisionError: division by zero")
def division(out): out[0, 0] = 1 / 0  # here


@wrong("a tile returned from a kernel with grid=", "stores to outputs", "OTile[...]")
def returned(x):
    return x[:, :]  # here


@wrong("a kernel that returns tuple", "one tile, or nothing")
def returned_tuple(x):
    return x[:, :], x[:, :]  # here


@wrong.parametrized
def test_program(case: Case): check(case)
