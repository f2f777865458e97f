"""Wrong programs in the tile language: shapes, dtypes, indices and arguments of its functions."""
from __future__ import annotations

import numpy as np
from tinygrad import Tensor, dtypes

from tests.support.error.language_case import Case, Wrong, check
from tinygrad_nv.language import *

wrong = Wrong()


@wrong("tile.dot of (8, 16) and (8, 16): 16 columns meet 8 rows", "tile.transpose(b) turns one round")
def dot_of_shapes_that_do_not_meet(x, out):
    a = x[:, :]
    out[:, :] = tile.dot(a, a)  # here


@wrong("the first operand of tile.dot is 16xf32", "a tile of two axes", "reshape it")
def dot_of_vectors(v): tile.dot(v[:], v[:])  # here


@wrong("the second operand of tile.dot is 2.0", "a tile of two axes")
def dot_with_a_number(x): tile.dot(x[:, :], 2.0)  # here


@wrong("the first operand of tile.dot is x[8, 16]", "load it with blocks")
def dot_of_tensors(x): tile.dot(x, x)  # here


@wrong("the second operand of tile.dot is 16xf32")
def matmul_operator(x, v): x[:, :] @ v[:]  # here


@wrong("an accumulator 8x4xf32", "(8, 8) of f32", "tile.zeros((8, 8), f32)")
def accumulator_of_another_shape(x): tile.dot(x[:, :], x[:, :].T, tile.zeros((8, 4)))  # here


@wrong("an accumulator 8x8xbf16", "tile.zeros((8, 8), f32)")
def accumulator_of_another_dtype(x): tile.dot(x[:, :], x[:, :].T, tile.zeros((8, 8), bf16))  # here


@wrong("tile.dot of f32 and bf16", "two tiles of one dtype", "tile.cast(x, bf16)")
def dot_of_two_dtypes(x): tile.dot(x[:, :], x[:, :].T.to(bf16))  # here


@wrong("tile.dot of s32 and s32", "a float, int8 or uint8")
def dot_of_int32(n): tile.dot(n[:, :], n[:, :].T)  # here


@wrong("tile.dot_dequant_i8 of 16x8xf32", "a tile of int8")
def dequantised_floats(x): tile.dot_dequant_i8(x[:, :], x[:, :].T, 1.0)  # here


@wrong("tiles of shapes (8, 16) and (8,)", "the same extents, or 1", "x[:, None] or x[None, :]")
def broadcast(x): x[:, :] + tile.arange(8)  # here


@wrong("8x16xf32 reshaped to (3, 5)", "a shape of 128 elements")
def reshape(x): x[:, :].reshape(3, 5)  # here


@wrong("a tile with extent -1", "extents of 1 and more")
def reshape_to_minus_one(x): x[:, :].reshape(-1)  # here


@wrong("8x16xf32 broadcast to (4, 8, 17)", "1 where they differ")
def broadcast_to(x): x[:, :].broadcast_to(4, 8, 17)  # here


@wrong("axis 2 of 8x16xf32", "an axis from -2 to 1")
def axis(x): tile.sum(x[:, :], axis=2)  # here


@wrong("axis 16xf32 of 16xf32", "a constant integer", "tile.maximum and tile.minimum compare two tiles")
def max_of_two(v): tile.max(v[:], v[:])  # here


@wrong("axes (0, 0) of 8x16xf32", "each of 0 to 1 once")
def transpose_axes(x): tile.transpose(x[:, :], 0, 0)  # here


@wrong("the transpose of 16xf32", "a tile of two axes or more")
def transpose_of_a_vector(v): return v[:].T  # here


@wrong("a tile 8x5xf32 stored to (8, 16)", "one that broadcasts to it")
def stored_shape(x, out): out[:, :] = tile.zeros((8, 5))  # here


@wrong("a tile with extent 0", "extents of 1 and more")
def no_elements(x): tile.zeros((0, 4))  # here


@wrong("2.5 as an extent of a tile", "an integer or a block")
def half_an_element(x): tile.zeros((2.5, 4))  # here


@wrong("s32, known only when the kernel runs, where Python needs an integer", "a keyword argument",
       "fixed when a kernel is built")
def size_from_memory(n): tile.zeros((n[0, 0], 4))  # here


@wrong("tile.arange(4, 4)", "a stop above the start")
def empty_arange(x): tile.arange(4, 4)  # here


# **** indices ****

@wrong("a store to x[8, 16], which is an input", "an output of the kernel", "x: OTile[...]")
def store_to_an_input(x): x[0, :] = 0.0  # here


@wrong("an index of 3 entries for x[8, 16] of 2 axes", "one entry for each axis")
def too_many_indices(x): x[0, 0, 0]  # here


@wrong("an index of 1 entries for x[8, 16] of 2 axes", "only in kernels without a grid=")
def too_few_indices(x): x[0]  # here


@wrong("an index of f32", "integers", "tile.cast(i, int32)")
def float_index(x, v): x[0, v[0]]  # here


@wrong("index 1.5 of x[8, 16]", "integers")
def half_an_index(x): x[0, 1.5]  # here


@wrong("an index of 16xbool", "integers")
def mask_as_an_index(x, v): x[0, v[:] > 0]  # here


@wrong("'a' (str) in an operation on tiles", "a tile or a number")
def text_as_an_index(x): x["a", 0]  # here


@wrong("index -1 along axis 0 of x[8, 16]", "0 to 7", "write 7")
def index_from_the_end(x): x[-1, 0]  # here


@wrong("slice ::2 of axis 0 of x[8, 16]", "without a step", "start + step * tile.arange(n)")
def slice_with_a_step(x): x[::2, :]  # here


@wrong("slice s32:s32 of axis 0", "constants", "tile.block(start, size)")
def slice_from_a_program(x):
    p = tile.program_id(0)
    x[p:p + 4, :]  # here


@wrong("slice :-1 of axis 1 of x[8, 16]", "0 <= start < stop")
def slice_from_the_end(x): x[:, :-1]  # here


@wrong("two `...` in one index")
def two_ellipses(x): x[..., 0, ...]  # here


@wrong("index 0 of a tile (8x16xf32)", "None, which make new axes", "tile.gather(x, index, axis)")
def element_of_a_tile(x):
    a = x[:, :]
    a[0, 0]  # here


@wrong("an assignment to elements of a tile (8x16xf32)", "x = tile.where(condition, value, x)")
def assigned_element(x):
    a = x[:, :]
    a[0, :] = 0.0  # here


@wrong("a mask of 16xf32", "bool", "compare it: x != 0")
def float_mask(x, v): tile.load(x, 0, tile.arange(16), mask=v[:])  # here


@wrong("other=Tile(f32)", "a number known when the kernel is built", "tile.where(mask, x, other)")
def computed_other(x): tile.load(x, 0, tile.arange(16), other=x[0, 0])  # here


@wrong("an access to 16xf32", "a tensor that the kernel was called with")
def store_to_a_tile(x, out): tile.store(x[0, :], out, 0)  # here


# **** dtypes ****

@wrong("a condition of 8x16xf32", "bool", "compare it: x != 0")
def float_condition(x): tile.where(x[:, :], 1.0, 0.0)  # here


@wrong("shift_left of f32", "a dtype that has it")
def shifted_floats(x): x[:, :] << 1  # here


@wrong("and of f32", "a dtype that has it")
def float_and(x): x[:, :] & 1  # here


@wrong("a bitcast of 8x16xf32 to signed char", "float32, int32 and uint32 to each other, or to two float16")
def bitcast_of_sizes(x): tile.bitcast(x[:, :], int8)  # here


@wrong("a bitcast of f32 to two f16", "a tile of one axis or more")
def bitcast_of_a_scalar(x): tile.bitcast(x[0, 0], f16)  # here


@wrong("a tile of double", "one of f32, bf16, f16")
def float64(x): x[:, :].to(dtypes.float64)  # here


@wrong("a tile of long", "s32, u32")
def int64(x): x[:, :].to(dtypes.int64)  # here


@wrong("a tile of 'float32'", "one of f32, bf16, f16")
def dtype_as_text(x): tile.zeros((4,), "float32")  # here


@wrong("a tile of <class 'float'>", "one of f32, bf16, f16")
def python_type(x): x[:, :].to(float)  # here


@wrong("atomic max on out[8, 16] of f32", "one of s32, u32")
def atomic_of_a_dtype(x, out): tile.atomic_max(out, 1.0, 0, 0)  # here


@wrong("a store to x[8, 16], which is an input", "an output of the kernel")
def atomic_on_an_input(x): tile.atomic_add(x, 1.0, 0, 0)  # here


@wrong("the histogram of 8x16xf32", "a tile of integers", "tile.cast(x, int32)")
def histogram_of_floats(x): tile.histogram(x[:, :], 4)  # here


@wrong("tile.gather of 8x16xf32 with 8x16xf32", "int32 indices with as many axes")
def gather_by_floats(x): tile.gather(x[:, :], x[:, :], 1)  # here


@wrong("tile.gather of (8, 16) with (4, 4) along axis 1", "the same extents of other axes")
def gather_of_other_rows(x): tile.gather(x[:, :], tile.zeros((4, 4), int32), 1)  # here


@wrong("the ranks of 8x16xf32", "a tile of int32 with one axis", "tile.reshape(x, n)")
def ranks_of_floats(x): tile.ranks(x[:, :], 4)  # here


@wrong("bins=0", "a positive constant")
def ranks_of_nothing(x): tile.ranks(tile.arange(8), 0)  # here


# **** operands ****

@wrong("tensor x[8, 16] in an operation on tiles", "a tile of it", "tile.load(x, rows, cols)")
def tensor_as_a_tile(x): x + 1.0  # here


@wrong("tensor x[8, 16] in an operation on tiles", "tile.load(x, rows, cols)")
def exp_of_a_tensor(x): tile.exp(x)  # here


@wrong("x[8, 16] (TensorRef) along an axis", "a tile", "tile.load(x, …)")
def sum_of_a_tensor(x): tile.sum(x)  # here


@wrong("3.0 (float) along an axis", "tile.full")
def sum_of_a_number(x): tile.sum(3.0)  # here


@wrong("tensor out[8, 16] in an operation on tiles", "load a part first")
def added_to_a_tensor(x, out): out += x[:, :]  # here


@wrong("tensor x[8, 16] taken apart row by row", "for i in tile.range(n)", "x[i, :]")
def rows_of_a_tensor(x):
    for row in x: row + 1.0  # here


@wrong("None (NoneType) in an operation on tiles", "keyword arguments")
def none(x): x[:, :] + None  # here


@wrong("[1, 2] (list) in an operation on tiles", "a tile or a number")
def a_list(v): tile.maximum(v[:], [1, 2])  # here


@wrong("arithmetic with a block of 16", "moved by + and -", "block.indices", "int(block)")
def compared_block(x): return tile.block(0, 16) < 3  # here


@wrong("300 as u8", "0 to 255", "tile.cast(x, int32)")
def number_beyond_a_dtype(v): v[:].to(uint8) + 300  # here


@wrong("-2 to the power of a tile", "a positive number")
def power_of_a_negative_number(v): (-2) ** v[:]  # here


@wrong("a ndarray of shape (16,) in an operation on tiles", "call the kernel with it, as a Tensor")
def an_array(v): np.ones(16) + v[:]  # here


CONSTANT = Tensor([1.0])


@wrong("a Tensor of shape (1,) in an operation on tiles", "call the kernel with it")
def a_tensor_of_the_module(v): v[:] + CONSTANT  # here


@wrong("tile has no 'softmx'", "write softmax")
def unknown_function(x): tile.softmx(x[:, :])  # here


@wrong("a tile (8x16xf32) has no 'sum'", "write tile.sum(x, …)")
def unknown_method(x): x[:, :].sum()  # here


@wrong("tensor x[8, 16] has no 'device'", "dtype, ndim, shape")
def unknown_attribute_of_a_tensor(x): return x.device  # here


@wrong("1 results of a combining function of 2 tiles", "one for each tile")
def results_of_a_combination(x): tile.reduce((x[:, :], x[:, :]), 1, lambda a, b, c, d: a)  # here


@wrong("TypeError", "takes 1 positional argument but 2 were given")
def arguments_of_a_combination(x): tile.reduce(x[:, :], 1, lambda a: a)  # here


@wrong("a combining function that makes bool of float", "scalars of the same dtype")
def dtype_of_a_combination(x): tile.scan(x[:, :], 1, lambda a, b: (a + b) > 0)  # here


@wrong("tile.softmax_online of 16xf32", "scores of two axes")
def softmax_of_a_vector(v): tile.softmax_online(v[:])  # here


@wrong("dropout with p=1.5", "a constant from 0 to below 1")
def dropout(x): tile.dropout_in_kernel(x[:, :], 1.5)  # here


@wrong("7 in tile.philox", "a key of two words", "(seed, 0)")
def philox_with_a_number(x): tile.philox(7, (0, 0, 0, 0))  # here


@wrong("tile.context() in a kernel with grid=", "tile.program_id(axis)")
def context_with_a_grid(x): tile.context()  # here


@wrong("tile.row_index of None", "a block")
def rows_without_a_context(x): tile.row_index()  # here


@wrong("tile.program_id(3)", "0, 1 or 2")
def fourth_axis(x): tile.program_id(3)  # here


@wrong("TypeError: load() got an unexpected keyword argument 'masc'")
def keyword(x): tile.load(x, 0, 0, masc=True)  # here


@wrong.parametrized
def test_program(case: Case): check(case)
