"""Elements, rows and blocks: kernels of the tile language on the emulated GPU against the interpreter."""
from __future__ import annotations

import numpy as np
import pytest
from tinygrad.dtype import DType, dtypes

from tests.support.tile.language_gpu_case import checked, program, ref
from tinygrad_nv.tile.language import context as C
from tinygrad_nv.tile.language import elements as E
from tinygrad_nv.tile.language import memory as M
from tinygrad_nv.tile.language import reductions as R
from tinygrad_nv.tile.language import values as V
from tinygrad_nv.tile.language.schedule import TileSchedule

F32, F16, BF16, S32 = dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int32
NARROW = (dtypes.int8, dtypes.uint8, dtypes.int16, dtypes.uint16)
PLAIN = (F32, F16, BF16, S32, dtypes.uint32, *NARROW)
E4M3, E5M2, BOOL = dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.bool


def add(x, y, o):
    i = C.block(C.program_id(0) * 256, 256)
    o[i] = x[i] + y[i]


@pytest.mark.parametrize("n", [1024, 1000, 777, 5])
@pytest.mark.parametrize("dtype", [F32, BF16, F16, S32, dtypes.int8, dtypes.uint16], ids=str)
def test_add(dtype: DType, n: int) -> None:
    made = program(add, [ref("o", dtype, n, out=True), ref("x", dtype, n), ref("y", dtype, n)],
                   grid=(-(-n // 256),))
    checked(made, ulps=0)


def test_vectors_are_wide() -> None:
    """Elements that lie side by side are loaded 16 bytes at once, those of a tensor of odd rows alone."""
    from tinygrad_nv.tile.language.gpu import build
    from tinygrad_nv.tile.template import GPU
    texts = [build(program(add, [ref(name, BF16, n, out=name == "o") for name in "oxy"], grid=(4,)),
                   TileSchedule(warps=1), GPU("sm_80")).ptx for n in (1024, 1023)]
    assert texts[0].count("ld.global.nc.v4.b32") == 2
    assert texts[0].count("ld.global") == 2
    assert "ld.global.nc.b16" in texts[1]


def arithmetic(x, y, o):
    a, b = x[:], y[:]
    o[0, :] = a * b - a
    o[1, :] = E.maximum(a, b)
    o[2, :] = E.minimum(a, b)
    o[3, :] = E.where(a < b, a, b + b)
    o[4, :] = E.abs_(a)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_arithmetic(dtype: DType, arch: str) -> None:
    tensors = [ref("o", dtype, 5, 150, out=True), ref("x", dtype, 150), ref("y", dtype, 150)]
    checked(program(arithmetic, tensors), arch=arch, ulps=1)


def whole(x, y, o):
    a, b = x[:], y[:]
    o[0, :] = a // b
    o[1, :] = a % b
    o[2, :] = a << (b & 7)
    o[3, :] = a >> (b & 7)
    o[4, :] = (a & b) ^ (a | 5)
    o[5, :] = V.apply("quotient", a, b)
    o[6, :] = V.apply("remainder", a, b)


@pytest.mark.parametrize("dtype", [S32, dtypes.uint32, *NARROW], ids=str)
def test_integers(dtype: DType) -> None:
    """Of 0, too, that they are divided by."""
    tensors = [ref("o", dtype, 7, 150, out=True), ref("x", dtype, 150), ref("y", dtype, 150)]
    y = np.random.default_rng(1).integers(0 if dtypes.is_unsigned(dtype) else -9, 9, 150)
    checked(program(whole, tensors), y=y)


def functions(x, o):
    a = x[:]
    o[0, :] = E.exp2(a)
    o[1, :] = E.log2(a * a + 0.5)
    o[2, :] = E.sqrt(a * a)
    o[3, :] = E.sin(a * 50.0)
    o[4, :] = E.floor(a * 3.0)
    o[5, :] = E.round_(a * 3.0)
    o[6, :] = E.tanh(a)
    o[7, :] = a / (a * a + 1.0)
    o[8, :] = 1.0 / (a * a + 1.0)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_functions(dtype: DType) -> None:
    """sin of 200 in float32 is off by the rounding of its argument, 2^-17."""
    tensors = [ref("o", dtype, 9, 200, out=True), ref("x", dtype, 200)]
    checked(program(functions, tensors), ulps=4)


def casts(x, o, p, q):
    a = x[:]
    o[:] = a
    p[:] = a
    q[:] = a != 0


@pytest.mark.parametrize("target", [*PLAIN, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("source", [*PLAIN, BOOL, E4M3, E5M2], ids=str)
def test_casts(source: DType, target: DType) -> None:
    """Bit for bit."""
    tensors = [ref("o", target, 70, out=True), ref("p", F32, 70, out=True), ref("q", BOOL, 70, out=True),
               ref("x", source, 70)]
    checked(program(casts, tensors), arch="sm_89", ulps=0)


def bits(x, o): o[:] = E.bitcast(E.bitcast(x[:], S32) ^ 1, F32)


def test_bitcast() -> None:
    checked(program(bits, [ref("o", F32, 64, out=True), ref("x", F32, 64)]), ulps=0)


def halves(x, o, p):
    o[:, :] = E.bitcast(x[:, :] ^ 1, o.dtype).reshape(o.shape[0], o.shape[1])
    p[:, :] = E.bitcast(x[:, :], o.dtype)[:, :, :].transpose(0, 2, 1).reshape(2 * x.shape[0], x.shape[1])


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("warps", [1, 8])
def test_words_as_halves(dtype: DType, warps: int) -> None:
    tensors = [ref("o", dtype, 8, 64, out=True), ref("p", dtype, 16, 32, out=True), ref("x", S32, 8, 32)]
    checked(program(halves, tensors), TileSchedule(warps=warps), ulps=0)


# **** rows ****

def softmax(x, o):
    rows = C.block(C.program_id(0) * 16, 16)
    o[rows, :] = R.softmax(M.load(x, rows, slice(None), other=-E.INF))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("shape", "warps"), [((32, 128), 1), ((30, 100), 4), ((16, 513), 4), ((16, 513), 8)])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_softmax(dtype: DType, shape: tuple[int, int], warps: int) -> None:
    tensors = [ref("o", dtype, *shape, out=True), ref("x", dtype, *shape)]
    checked(program(softmax, tensors, grid=(-(-shape[0] // 16),)), TileSchedule(warps=warps), ulps=8)


def layer_norm(x, w, b, o):
    rows = C.block(C.program_id(0) * 4, 4)
    v = V.cast(x[rows, :], F32)
    d = v - R.mean(v, 1, keepdims=True)
    o[rows, :] = d * E.rsqrt(R.mean(d * d, 1, keepdims=True) + 1e-5) * w[:] + b[:]


@pytest.mark.parametrize("shape", [(8, 256), (9, 304)])
def test_layer_norm(shape: tuple[int, int]) -> None:
    """Beyond 304 columns what is loaded is 0 and 512 elements are averaged: so the mean is of the tile."""
    tensors = [ref("o", BF16, *shape, out=True), ref("x", BF16, *shape), ref("w", BF16, shape[1]),
               ref("b", BF16, shape[1])]
    checked(program(layer_norm, tensors, grid=(-(-shape[0] // 4),)))


# **** places ****

def beyond(x, o):
    b = C.block(C.program_id(0) * 40 - 20, 40)
    o[b] = M.load(x, b, other=3)


@pytest.mark.parametrize("dtype", [F32, BF16, dtypes.int8], ids=str)
def test_blocks_beyond_both_ends(dtype: DType) -> None:
    made = program(beyond, [ref("o", dtype, 64, out=True), ref("x", dtype, 64)], grid=(4,))
    checked(made, ulps=0)


def indexed(x, i, o):
    at = M.load(i, C.program_id(0))
    o[C.program_id(0), :] = M.load(x, at, slice(None), other=-1)


def test_a_row_that_is_not_there() -> None:
    made = program(indexed, [ref("o", F32, 4, 48, out=True), ref("x", F32, 9, 48), ref("i", S32, 4)],
                   grid=(4,))
    checked(made, ulps=0, i=np.array([3, -1, 9, 8]))


def gathered(x, i, o): o[:, :] = x[i[:], :]
def scattered(x, i, o): o[i[:], :] = x[:, :]


def test_rows_by_index() -> None:
    where = np.random.default_rng(0).permutation(55)[:10]
    tensors = [ref("o", BF16, 10, 64, out=True), ref("x", BF16, 50, 64), ref("i", S32, 10)]
    checked(program(gathered, tensors), ulps=0, i=where)
    tensors = [ref("o", BF16, 50, 64, out=True), ref("x", BF16, 10, 64), ref("i", S32, 10)]
    checked(program(scattered, tensors), ulps=0, i=where)


def test_rows_by_index_are_loaded_wide() -> None:
    """Whatever an index is, rows of whole vectors begin at a multiple of these."""
    from tinygrad_nv.tile.language.gpu import build
    from tinygrad_nv.tile.template import GPU
    for columns, wide in ((64, True), (63, False)):
        made = program(gathered, [ref("o", F32, 16, columns, out=True), ref("x", F32, 30, columns),
                                  ref("i", S32, 16)])
        assert ("ld.global.nc.v4.f32" in build(made, TileSchedule(warps=1), GPU("sm_80")).ptx) == wide


def masked(x, o):
    j = C.program_id(0) * 128 + M.arange(128)
    v = M.load(x, j, mask=j < 300, other=5)
    M.store(o, v + 1, j, mask=j < 300)


def test_masks() -> None:
    made = program(masked, [ref("o", F32, 400, out=True), ref("x", F32, 400)], grid=(4,))
    checked(made, ulps=0)


def turned(x, o): o[:, :] = x[:, :].T


@pytest.mark.parametrize("shape", [(16, 64), (20, 48), (128, 64), (1, 7)])
@pytest.mark.parametrize("dtype", [F32, BF16, dtypes.int8, BOOL], ids=str)
def test_transpose(dtype: DType, shape: tuple[int, int]) -> None:
    checked(program(turned, [ref("o", dtype, *shape[::-1], out=True), ref("x", dtype, *shape)]), ulps=0)


def reshaped(x, o): o[:, :] = x[:, :].reshape(*o.shape)


@pytest.mark.parametrize(("source", "target"), [((16, 64), (64, 16)), ((6, 8), (16, 3)), ((5, 7), (7, 5))])
def test_reshape(source: tuple[int, int], target: tuple[int, int]) -> None:
    checked(program(reshaped, [ref("o", F32, *target, out=True), ref("x", F32, *source)]), ulps=0)


def cube(x, o): o[:, :, :] = x[:, :, :].transpose(2, 0, 1) + M.arange(4)[:, None, None]


def test_three_axes() -> None:
    made = program(cube, [ref("o", F32, 4, 3, 6, out=True), ref("x", F32, 3, 6, 4)])
    checked(made, ulps=0)


U32 = dtypes.uint32


def turns(x, y, o, p):
    a, b = x[:, :], y[:, :]
    o[:, :] = E.interleave(a, b)
    index = M.arange(p.shape[0] // 2)
    p[:] = E.interleave(index * 3, index - 7)


@pytest.mark.parametrize("warps", [1, 8])
@pytest.mark.parametrize(("columns", "vector"), [(64, 8), (64, 1), (37, 8), (37, 1)])
@pytest.mark.parametrize("dtype", [F32, BF16, BOOL], ids=str)
def test_elements_in_turn(dtype: DType, columns: int, vector: int, warps: int) -> None:
    """Side by side in a thread, or in threads side by side, of which each has both operands."""
    tensors = [ref("o", dtype, 3, 2 * columns, out=True), ref("p", S32, 1024, out=True),
               ref("x", dtype, 3, columns), ref("y", dtype, 3, columns)]
    found = checked(program(turns, tensors), TileSchedule(warps=warps, vector=vector), ulps=0)
    np.testing.assert_array_equal(found["p"][:4], [0, -7, 3, -6])


def rotations(x, by, o, p):
    o[0, :] = E.rotate_left(x[:], 13)
    o[1, :] = E.rotate_left(x[:], by[:])
    p[:] = E.rotate_left(E.bitcast(x[:], S32), 32 + 1)


def test_words_are_turned() -> None:
    x = np.random.default_rng(0).integers(0, 1 << 32, 100, np.uint32)
    by = np.arange(-3, 97, dtype=np.int32).view(np.uint32)
    tensors = [ref("o", U32, 2, 100, out=True), ref("p", S32, 100, out=True), ref("x", U32, 100),
               ref("by", U32, 100)]
    found = checked(program(rotations, tensors), x=x, by=by)
    np.testing.assert_array_equal(found["o"][0], x << np.uint32(13) | x >> np.uint32(19))
    np.testing.assert_array_equal(found["o"][1, 3], x[3])


def logarithms(x, o):
    o[0, :] = E.log_normal(x[:])
    o[1, :] = E.log_near_one(x[:])


def test_logarithms_of_normal_numbers() -> None:
    """The second has few units of error beside its result; the first beside 1."""
    near = 1 + np.arange(-40, 40) * 2.0**-23
    x = np.concatenate([near, 2.0 ** np.linspace(-126, 127, 400)]).astype(np.float32)
    tensors = [ref("o", F32, 2, len(x), out=True), ref("x", F32, len(x))]
    found = checked(program(logarithms, tensors), ulps=2, x=x)["o"]
    exact = np.log(np.float64(x))
    assert (np.abs(found[1] - exact) <= 4 * 2.0**-24 * np.abs(exact)).all()
    assert (np.abs(found[0] - exact) <= 2.0**-21 * np.maximum(np.abs(exact), 1)).all()
    assert (found[1, :40] < 0).all()


def extremes(x, y, o, p):
    o[0], o[1], o[2] = R.max_(x[:], 0), R.min_(x[:], 0), R.sum_(x[:], 0)
    p[0], p[1], p[2] = R.max_(y[:, :]), R.min_(y[:, :]), R.sum_(y[:, :])


@pytest.mark.parametrize("warps", [1, 4, 16, 32])
@pytest.mark.parametrize("n", [1, 32, 1000])
def test_words_of_a_warp_are_reduced_at_once(n: int, warps: int) -> None:
    """Lanes are reduced by redux.sync, with signs and without, and many warps once again."""
    from tinygrad_nv.tile.language.gpu import build
    from tinygrad_nv.tile.template import GPU
    random, schedule = np.random.default_rng(n), TileSchedule(warps=warps)
    x, y = random.integers(-1 << 31, 1 << 31, n, np.int32), random.integers(0, 1 << 32, (3, n), np.uint32)
    tensors = [ref("o", S32, 3, out=True), ref("p", U32, 3, out=True), ref("x", S32, n), ref("y", U32, 3, n)]
    made = program(extremes, tensors)
    checked(made, schedule, x=x, y=y)
    assert ("redux.sync.min.s32" in build(made, schedule, GPU("sm_80")).ptx) == (n >= 32)
def pairs(x, y, o, p):
    even, odd = E.deinterleave(x[:, :])
    o[:, :] = E.interleave(odd, even + 1)
    p[:, :] = V.cast(E.interleave(y[:, :], E.abs_(even)), p.parameter.dtype)


@pytest.mark.parametrize("shape", [(3, 64), (1, 2), (5, 24), (2, 4)], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, S32, dtypes.int8], ids=str)
def test_pairs_are_taken_apart_and_put_together(dtype: DType, shape: tuple[int, int]) -> None:
    half = (shape[0], shape[1] // 2)
    tensors = [ref("o", dtype, *shape, out=True), ref("p", F32, *shape, out=True), ref("x", dtype, *shape),
               ref("y", dtype, *half)]
    checked(program(pairs, tensors), ulps=0)


def test_pairs_stay_in_their_threads() -> None:
    """No shared memory and no shuffle lies between loads, pairs and stores of one dtype."""
    from tinygrad_nv.tile.language.gpu import build
    from tinygrad_nv.tile.template import GPU

    def swap(x, o): o[:, :] = E.interleave(*reversed(E.deinterleave(x[:, :])))
    made = build(program(swap, [ref("o", BF16, 4, 256, out=True), ref("x", BF16, 4, 256)]),
                 TileSchedule(warps=4), GPU("sm_80"))
    assert (made.dynamic_smem, "shfl" in made.ptx, "bar.sync" in made.ptx) == (0, False, False)
    assert "ld.global.nc.v4.b32" in made.ptx
    assert "st.global.v4.b32" in made.ptx


def add_squares(x, o):
    even, odd = E.deinterleave(M.arange(2 * x.shape[0]) * 3)
    o[:, :] = x[:, :] + even[:, None] * even[None, :] + odd[None, :]


@pytest.mark.parametrize("warps", [1, 4])
def test_pairs_of_indices_are_made_in_every_layout(warps: int) -> None:
    """Pairs of rows and of columns are computed, not moved through shared memory."""
    from tinygrad_nv.tile.language.gpu import build
    from tinygrad_nv.tile.template import GPU

    made = program(add_squares, [ref("o", S32, 64, 64, out=True), ref("x", S32, 64, 64)])
    assert "bar.sync" not in build(made, TileSchedule(warps=warps), GPU("sm_80")).ptx
    checked(made, TileSchedule(warps=warps), ulps=0)
