"""Wrong calls of kernels in the tile language: arguments, outputs, grids, schedules, gradients, devices."""
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, Variable

from tinygrad_nv.errors import EffectError, LanguageError, NVError, ScheduleError, ShapeError, SpecError
from tinygrad_nv.language import *


def place(fn: Any) -> str: return f"{__file__}:{getattr(fn, 'fn', fn).__code__.co_firstlineno}"


def refused(call: Callable[[], Any], error: type[NVError], *words: str) -> None:
    """A call that raises an error of this type with all words, one of them what is expected or what to do."""
    with pytest.raises(error) as raised: call()
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)
    assert raised.value.expected or raised.value.fix


def full(*shape: int) -> Tensor: return Tensor.ones(*shape).contiguous().realize()


X, Y = full(8, 16), full(16, 8)


@kernel(grid=lambda M: (M,))
def scaled(x: KTile["M", "N", f32], out: OTile["M", "N", f32], *, scale: float = 1.0):
    i = tile.program_id(0)
    out[i, :] = x[i, :] * scale


@kernel
def matmul(a: KTile["M", "K", f32], b: KTile["K", "N", f32]) -> OTile["M", "N", f32]:
    T = tile.context()
    return tile.dot(a[T.m, :], b[:, T.n])


# **** arguments ****

@pytest.mark.parametrize(("call", "words"), [
    (lambda: scaled(), ("called without x", "the arguments (x, out, *, scale=1.0)")),
    (lambda: scaled(X, X, X), ("too many positional arguments", "scale=1.0")),
    (lambda: scaled(X, scal=2.0), ("unexpected keyword argument 'scal'", "scale=1.0")),
    (lambda: scaled(X.numpy()), ("argument x is a ndarray", "a Tensor")),
    (lambda: scaled([1.0]), ("argument x is a list", "a Tensor")),
    (lambda: scaled(3.0), ("argument x is 3.0", 'a Tensor: KTile["M", "N", f32]')),
    (lambda: scaled(None), ("argument x is None", 'a Tensor: KTile["M", "N", f32]')),
    (lambda: scaled(X, scale={}), ("argument scale is a dict", "a number")),
    (lambda: scaled(X, scale=max), ("argument scale is a builtin_function_or_method", "a number")),
    (lambda: matmul(X, SimpleNamespace(K=1)), ("argument b is a SimpleNamespace", "Tensors .K and .V")),
    (lambda: scaled(X[:Variable("n", 1, 8).bind(4)]),
     ("x has the symbolic shape (…, 16)", "pad to the largest")),
    (lambda: scaled(Tensor.empty(0, 16)),
     ("x of shape (0, 16) has no elements", "leave the call out where there are none")),
    (lambda: scaled(Tensor.empty(8, 16, device="PYTHON")), ("on PYTHON", "CPU, EMU or CUDA", "x.to('CPU')"))])
def test_arguments(call: Callable[[], Any], words: tuple[str, ...]):
    kernel_of = matmul if "argument b" in words[0] else scaled
    refused(call, LanguageError, f"kernel {kernel_of.fn.__name__} ({place(kernel_of)})", *words)


@pytest.mark.parametrize(("call", "words"), [
    (lambda: scaled(X.cast(f16)), ("argument x is of f16", "f32, as", "cast it")),
    (lambda: scaled(full(16)), ("argument x has 1 dimensions, (16,)", '"N", f32]: 2')),
    (lambda: matmul(X, X), ("argument b: dimension 0", "is 8, not 16", "K=16, from argument a")),
    (lambda: scaled(X, Y), ("argument out: dimension 0", "is 16, not 8", "M=8, from argument x")),
    (lambda: scaled(X, X.cast(f16)), ("argument out is of f16", "f32, as OTile"))])
def test_shapes_and_dtypes(call: Callable[[], Any], words: tuple[str, ...]):
    kernel_of = matmul if "argument b" in words[0] else scaled
    refused(call, ShapeError, f"kernel {kernel_of.fn.__name__} ({place(kernel_of)}): ", *words)


def test_tensors_on_two_devices():
    refused(lambda: matmul(X, Y.to("PYTHON")), SpecError, "tensors on CPU and PYTHON", "one device for all")


def test_tensors_of_64_bits():
    @kernel(grid=(1,))
    def wide(x: KTile["M", "N"], out: OTile["M", "N", f32]):
        out[0, 0] = x[0, 0]
    refused(lambda: wide(X.cast("long")), LanguageError,
            f"{__file__}:{wide.fn.__code__.co_firstlineno + 2}: ",
            "x[8, 16] of long", "a tensor of f32, bf16", "cast it before the call: x.cast(…)")


def test_a_constant_of_another_type():
    at = f"{__file__}:{scaled.fn.__code__.co_firstlineno + 3}: "
    refused(lambda: scaled(X, scale="a"), LanguageError, at, "'a' (str) in an operation on tiles")


# **** results ****

def nothing(x: KTile["M", "N", f32]): x[0, 0] + 1.0
def no_store(x: KTile["M", "N", f32], out: OTile["M", "N", f32]): out = x[:, :]  # noqa: F841
def unknown_size(x: KTile["M", "N", f32], out: OTile["Q", f32]): out[0] = x[0, 0]
def unknown_dtype(x: KTile["M", "N", f32], out: OTile["M"]): out[0] = x[0, 0]
def unknown_shape(x: KTile["M", "N", f32], out: OTile): out[0, 0] = x[0, 0]
def without_a_mode(x: KTile["M", "N", f32], out: OTile["M", f32], *, mode: str): out[0] = float(mode)
def wrong_annotation(x: KTile["M", "N", f32], out: OTile["M", undefined]): out[0] = x[0, 0]


@pytest.mark.parametrize(("fn", "words"), [
    (nothing, ("stores nothing", "a returned tile, or stores to outputs annotated as OTile")),
    (no_store, ("stores nothing", "out = … names another tile")),
    (unknown_size, ('the shape of out: OTile["Q", f32] is not known', "a size for Q",
                    "keyword argument of type int")),
    (unknown_dtype, ('out: OTile["M"] has no dtype', "OTile[…, f32]")),
    (unknown_shape, ("the shape of out: OTile[...] is not known", "a size for the leading dimensions")),
    (without_a_mode, ("called without mode", "the arguments (x, out, *, mode)"))])
def test_outputs(fn: Any, words: tuple[str, ...]):
    refused(lambda: kernel(grid=(1,))(fn)(X), LanguageError, f"kernel {fn.__name__} ({place(fn)})", *words)


def test_an_annotation_that_cannot_be_evaluated():
    refused(lambda: kernel(grid=(1,))(wrong_annotation)(X), ShapeError,
            "the annotation of out in wrong_annotation",
            "name 'undefined' is not defined", "names that are there")


def test_an_output_without_brackets_has_the_shape_of_its_tensor():
    assert kernel(grid=(1,))(unknown_shape)(X, Tensor.zeros(8, 16)).sum().item() == 1


def test_a_returned_tile_of_another_size():
    @kernel
    def short(a: KTile["M", "K", f32]) -> OTile["M", "K", f32]:
        return tile.zeros((3, 5))
    refused(lambda: short(X), LanguageError, f"{__file__}:{short.fn.__code__.co_firstlineno + 2}: ",
            "a returned tile with 3 elements along axis -2", "64", "tile.context().m rows")


# **** grids and schedules ****

def one(x: KTile["M", "N", f32], out: OTile["M", "N", f32]): out[0, 0] = x[0, 0]


@pytest.mark.parametrize(("grid", "words"), [
    ((0,), ("is (0,): no programs", "1 and more")), ((-1,), ("is (-1,): no programs",)),
    ((1, 70000), ("70000 programs along y", "1 to 65535", "count them along x")),
    ((1,) * 4, ("is (1, 1, 1, 1)", "one to three integers")), ((1.5,), ("is (1.5,)", "cdiv(N, BM)")),
    ("a", ("is 'a'", "one to three integers")), (lambda M: None, ("is None", "one to three integers")),
    (lambda M: M / 2, ("is 4.0", "cdiv(N, BM)")), (lambda Q: (Q,),
                                                   ("asks for Q", "names of dimensions or constants: M, N")),
    (lambda M: (M // 0,), (f"{__file__}:", "ZeroDivisionError", "for M=8"))])
def test_grids(grid: Any, words: tuple[str, ...]):
    refused(lambda: kernel(grid=grid)(one)(X), LanguageError, f"kernel one ({place(one)})", *words)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Schedule(block=(0, 4)), ("block_m=0 of a Schedule", "an integer from 1 to 4096")),
    (lambda: Schedule(blok=(64, 64)), ("blok of a Schedule", "block_m, block_n")),
    (lambda: Schedule(block=(1, 2, 3)), ("block=(1, 2, 3)", "rows and columns, as (128, 64)")),
    (lambda: Schedule(block=5.5), ("block=5.5", "rows and columns")),
    (lambda: Schedule(swizzle="z"), ("swizzle 'z'", "one of xor, 128B")),
    (lambda: Schedule(warps="4"), ("warp_count='4'", "an integer")),
    (lambda: Schedule().with_(QQ=3), ("QQ of a Schedule", "block_m, block_n")),
    (lambda: matmul.with_schedule("fast"),
     ("'fast' as the schedule of kernel matmul", "Schedule(block=(128, 64)")),
    (lambda: kernel(one).schedule(block=(64, 64)).wraps(8), ("'wraps' of a Schedule", "warps, stages"))])
def test_schedules(make: Callable[[], Any], words: tuple[str, ...]): refused(make, ScheduleError, *words)


def test_tiles_that_do_not_fit():
    @kernel(grid=(1,))
    def large(x: KTile["M", "N", f32], out: OTile["M", "N", f32]):
        a = tile.zeros((2048, 2048)) + x[0, 0]
        out[:, :] = tile.sum(a.T + a)
    refused(lambda: large(X).realize(), ScheduleError, "the tiles of large take", "at most 4194304",
            "smaller blocks")


@pytest.mark.parametrize("given", [len, int, (1,), scaled, "x"])
def test_what_is_no_function(given: Any):
    refused(lambda: kernel(given), LanguageError, "@kernel on a ", "a Python function",
            "@kernel(grid=…, schedule=…)")


# **** gradients, and what is outside of a kernel ****

def test_a_gradient_that_is_not_given():
    refused(lambda: scaled(X).sum().gradient(X), LanguageError,
            f"a gradient of kernel scaled ({place(scaled)})",
            "@scaled.defvjp")


@pytest.mark.parametrize(("gradient", "words"), [
    (lambda g: g.sum(), ("gives f32 of shape () for input 0", "a Tensor of shape (8, 16), or None")),
    (lambda g: 3.0, ("gives 3.0 for input 0",)), (lambda g: (g, g), ("gives 2 gradients", "at most 1"))])
def test_gradients(gradient: Callable[[Any], Any], words: tuple[str, ...]):
    own = kernel(grid=lambda M: (M,))(scaled.fn)
    own.defvjp(lambda inputs, outputs, gradients: gradient(gradients[0]))
    refused(lambda: own(X).sum().gradient(X), LanguageError, f"defvjp of kernel scaled ({place(scaled)})",
            *words)


@pytest.mark.parametrize("operation",
                         [lambda: tile.zeros((4,)), lambda: tile.program_id(0), lambda: tile.arange(4),
                                       lambda: tile.context(), lambda: tile.exp(1.0)])
def test_operations_outside_of_a_kernel(operation: Callable[[], Any]):
    refused(operation, LanguageError, "outside of a kernel", "inside a function with @kernel",
            "decorate the function")


def test_names_that_tile_does_not_have():
    refused(lambda: tile.matmull, LanguageError, "tile has no 'matmull'")
    assert not hasattr(tile, "matmull")
    np.testing.assert_equal(hasattr(tile, "dot"), True)


# **** programs that follow a result ****

def test_a_result_that_is_not_the_first_tensor_s():
    @kernel
    def product(a: KTile["M", "K", f32], b: KTile["K", "N", f32]):
        T = tile.context()
        return tile.dot(a[T.m, :], b[:, T.n])
    line = f"{__file__}:{product.fn.__code__.co_firstlineno + 3}"
    refused(lambda: product(X, full(16, 200)), LanguageError, line, "axis 1 of b[16, 200] has 200 elements",
            "has 16 columns", 'annotate the result: def kernel(…) -> OTile["M", "N", f32]')


def test_outputs_that_programs_leave_out_some_of():
    @kernel
    def two(x: KTile["M", "N", f32], y: KTile["L", f32], a: OTile["M", "N", f32], b: OTile["L", f32]):
        T = tile.context()
        a[T.m, :] = x[T.m, :]
        b[T.m] = y[T.m]
    assert [each.shape for each in two(X, full(8))] == [(8, 16), (8,)]
    refused(lambda: two(X, full(300)), LanguageError, "axis 0 of b[300] has 300 elements", "has 8 rows")


def test_program_ids_of_kernels_without_a_grid():
    @kernel
    def one(x: KTile["N", f32], out: OTile["N", f32]):
        rows = tile.block(tile.program_id(0) * 64, 64)
        out[rows] = x[rows]
    refused(lambda: one(full(300)), LanguageError, "tile.program_id in a kernel without grid=",
            "@kernel(grid=…)", "m, n and batch")


def test_tiles_with_more_axes_than_the_result():
    @kernel
    def one(a: KTile[f32], x: KTile["N", f32]): return x[tile.context().m] * a
    refused(lambda: one(Tensor(2.0), full(9)), LanguageError,
            "a returned tile (64xf32) of a result of shape ()", "annotate the result")


def test_a_donated_tensor_that_is_another_argument():
    @kernel
    def copied(x: KTile["N", f32], out: OTile["N", f32]):
        T = tile.context()
        out[T.m] = x[T.m]
    x = full(9)
    refused(lambda: copied(x, donate(x)), EffectError, "out is donated, and x is the same memory",
            "x.clone()")


def test_operations_that_a_dtype_does_not_have():
    @kernel
    def both(x: KTile["N", f32]) -> OTile["N", f32]: return x[tile.context().m] & x[tile.context().m]
    refused(lambda: both(full(9)), LanguageError, "and of f32", "tile.cast(x, int32)")
