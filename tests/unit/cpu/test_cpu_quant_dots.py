"""Matmuls of activations in bytes with matrices in tiles: integers of every level, and their scales."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes
from tinygrad.helpers import Context

from tests.support.cpu.cpu_quant_case import (
    BEST,
    BF16,
    F16,
    F32,
    LEVELS,
    TYPES,
    built,
    default,
    elements,
    in_bytes,
    matmul,
    run,
    stored,
    tiles,
)
from tinygrad_nv import disabled
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.quant_gemm import byte_panels
from tinygrad_nv.explain import explain
from tinygrad_nv.patterns.quant_gemm.named import prepare_matrix, quant_matmul
from tinygrad_nv.quant import types
from tinygrad_nv.quant.readers.online import SCHEMES, quantise
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import QType
from tinygrad_nv.tile.templates import TABLE

EPS = 2.0 ** -24
RNG = np.random.default_rng
MORE = {"int8 channel": TYPES["int8 channel"], "awq": TYPES["awq"], "gptq 2 bits": TYPES["gptq 2 bits"],
        "gptq 3 bits": TYPES["gptq 3 bits"], "MXFP4": TYPES["MXFP4"], "NVFP4": TYPES["NVFP4"].of_rows()}
NAMES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", *MORE]


def finite(type: QType, n: int, k: int) -> dict[str, np.ndarray]:
    """Random buffers: of 8-bit floats all numbers, of both signs, that are neither infinity nor NaN."""
    made = stored(type, n, k, 1)
    least = {dtypes.fp8e4m3: 0x7f, dtypes.fp8e5m2: 0x7c}.get(type.element.dtype, 0)
    signs = RNG(k).integers(0, 2, n * k) << 7
    if least: made["codes"] = (RNG(n).integers(0, least, n * k) | signs).astype(np.uint8)
    return made


def check(type: QType, m: int, n: int, k: int, level: isa.ISA = BEST, dtype: DType = BF16,
          symbolic: bool = False) -> None:
    """Activations that are integers of which the largest is 127 are exactly bytes. Others are within 6 ε
    Σ |x w| sqrt k of float32, of elements and activations that are each rounded some times."""
    spec = matmul(replace(type, layout="tiles"), m + symbolic, n, k, dtype, F32, 5, symbolic, int8=True)
    kernel = built(spec, level)
    assert kernel.kernel.name.startswith("quant_dots")
    x = RNG(m).integers(-9, 10, (m, k)).astype(np.float32)
    given = stored(type, n, k, whole=True)
    order = given["order"].view(np.int32) if type.permuted else np.arange(k)
    x[:, order[::32]] = 127
    got = run(kernel, spec, x, tiles(type, n, k, given))
    np.testing.assert_array_equal(got, x @ elements(type, n, k, given).T)
    given = stored(type, n, k, 1)
    order = given["order"].view(np.int32) if type.permuted else np.arange(k)
    # of 8 bits, which every dtype holds
    x = np.rint(RNG(m).standard_normal((m, k)).clip(-3.9, 3.9).astype(np.float32) * 64) / 64
    y, w = in_bytes(x, order).astype(np.float64), elements(type, n, k, given).astype(np.float64)
    error = np.abs(run(kernel, spec, x, tiles(type, n, k, given)) - y @ w.T)
    # without its minimum an element may be larger
    most = np.abs(y) @ (np.abs(w) + type.mins * np.abs(w).max()).T
    assert (error <= 6 * EPS * np.sqrt(k) * most).all()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMES)
def test_types(name: str):
    type = TYPES[name].of_rows()
    k = 512 if type.outer is not None else 3 * max(type.scale.columns, 32)
    check(type, 3, 37, k)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q6_K", "Q3_K", "Q5_1", "NVFP4"])
@pytest.mark.parametrize("level", LEVELS[:-1], ids=str)
def test_levels(level: isa.ISA, name: str):
    check(TYPES[name].of_rows(), 5, 21, 512, level)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q6_K", "Q4_K", "Q5_1", "awq", "MXFP4", "gptq 2 bits"])
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_many_rows(level: isa.ISA, name: str):
    """Of panels, the last of fewer columns: exact, and with the bits of one row alone."""
    type, (m, n, k) = replace(TYPES[name].of_rows(), layout="tiles"), (byte_panels.FEWEST_ROWS + 6, 21, 768)
    check(TYPES[name].of_rows(), m, n, k, level, symbolic=True)
    given = tiles(TYPES[name].of_rows(), n, k, stored(TYPES[name].of_rows(), n, k, 1))
    x = RNG(m).standard_normal((m, k)).astype(np.float32)
    many, alone = (matmul(type, rows, n, k, out=F32, int8=True) for rows in (m, 1))
    got, one = run(built(many, level), many, x, given), built(alone, level)
    for i in range(m): assert got[i].tobytes() == run(one, alone, x[i:i + 1], given)[0].tobytes()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_activations_that_are_not_quantised(level: isa.ISA):
    """Sums of K products in the order of k, of elements that are rounded three times."""
    for name in ("Q4_0", "Q8_0", "Q5_1", "gptq 3 bits", "e4m3 blocks", "e5m2 channel", "nvfp4 divided",
                 "nf4"):
        type, (m, n, k) = TYPES[name].of_rows(), (5, 21, 512)
        spec, given = matmul(replace(type, layout="tiles"), m, n, k), finite(type, n, k)
        x = RNG(m).standard_normal((m, k)).astype(np.float32)
        w = elements(type, n, k, given).astype(np.float64)
        got = run(built(spec, level), spec, x, tiles(type, n, k, given))
        error = np.abs(got - x.astype(np.float64) @ w.T)
        assert (error <= 4 * EPS * np.sqrt(k) * (np.abs(x) @ np.abs(w.T))).all()


@pytest.mark.skipif(not BEST.bf16, reason="no dot products of bfloat16 here")
@pytest.mark.parametrize("name", ["awq", "gptq 2 bits", "MXFP4", "NVFP4", "nf4", "Q8_0", "int8 channel",
                                  "uint8 tensor"])
def test_pairs_of_bfloat16(name: str):
    """As exact as float32's sums, but for codebooks that bfloat16 has not: within half its last place."""
    type, m, n = TYPES[name].of_rows(), 3, 37
    k = 2 * max(type.scale.columns, 64)
    spec, given = matmul(replace(type, layout="tiles"), m, n, k, BF16, F32, 5), stored(type, n, k, 1)
    x = np.rint(RNG(m).standard_normal((m, k)).clip(-3.9, 3.9).astype(np.float32) * 32) / 32
    w = elements(type, n, k, given).astype(np.float64)
    error = np.abs(run(built(spec), spec, x, tiles(type, n, k, given)) - x.astype(np.float64) @ w.T)
    eps = 2.0 ** -9 if name == "nf4" else 4 * EPS * np.sqrt(k)
    assert (error <= eps * (np.abs(x) @ np.abs(w.T))).all()


def test_the_ends_of_e8m0():
    """0 is 2^-127, 255 NaN."""
    type = types.MXFP4
    for int8 in (False, True):
        spec, given = matmul(replace(type, layout="tiles"), 1, 16, 32, int8=int8), stored(type, 16, 32)
        x = np.full((1, 32), 127, np.float32)
        given["scales"][:] = 0
        want = elements(type, 16, 32, given)
        assert np.abs(want).max() == 6 * 2.0 ** -127
        kernel, want = built(spec), (x @ (want * 2.0 ** 100).T * 2.0 ** -100).astype(np.float32)
        np.testing.assert_array_equal(run(kernel, spec, x, tiles(type, 16, 32, given)), want)
        given["scales"][3] = 255
        got = run(kernel, spec, x, tiles(type, 16, 32, given))
        assert list(np.nonzero(np.isnan(got[0]))[0]) == [3]


@pytest.mark.parametrize(("name", "m"), [("Q4_0", 3), ("Q8_0", 40), ("Q4_K", 3), ("Q6_K", 3),
                                         ("int8 channel", 3), ("awq", 40)])
def test_rows_of_extreme_numbers(name: str, m: int):
    """A row with NaN or infinity is NaN; of very large numbers, and of 0, it is as others are; one so small
    that the reciprocal of its scale overflows is 0. The other rows stay as they were, bit by bit."""
    type = TYPES[name].of_rows()
    n, k = 37, 3 * max(type.scale.columns, 32)
    spec, given = matmul(replace(type, layout="tiles"), m, n, k, int8=True), stored(type, n, k, 1)
    kernel, laid, x = built(spec), tiles(type, n, k, given), RNG(m).standard_normal((m, k)).astype(np.float32)
    before = run(kernel, spec, x, laid)
    for numbers in ([np.nan], [np.inf], [-np.inf], [np.inf, np.nan], [-np.nan] * 32, [3e38, np.nan]):
        wrong = x.copy()
        wrong[1, 5:5 + len(numbers)] = numbers
        got = run(kernel, spec, wrong, laid)
        assert np.isnan(got[1]).all(), numbers
        np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(before, 1, 0))
    for scale in (2.0 ** 100, 2.0 ** -100, 0):  # exact, with every sum
        extreme = x.copy()
        extreme[1] *= np.float32(scale)
        np.testing.assert_array_equal(run(kernel, spec, extreme, laid)[1], before[1] * np.float32(scale))
    one = x.copy()
    one[1], one[1, 0] = 0, 1e36
    want = 1e36 * elements(type, n, k, given)[:, 0].astype(np.float64)
    assert (np.abs(run(kernel, spec, one, laid)[1] - want) <= 1e-4 * np.abs(want).max()).all()
    tiny = x.copy()
    tiny[1] *= np.float32(1e-39)
    assert not run(kernel, spec, tiny, laid)[1].any()


@pytest.mark.parametrize("level", LEVELS[1:], ids=str)
def test_the_largest_bytes(level: isa.ISA):
    """Sums in 16 bits are of as many products as these hold."""
    for type in (types.UINT3, types.UINT4, types.UINT5, types.UINT6, types.INT8, types.UINT8):
        wide, k = type @ types.per_group_scale(32), 64
        given = stored(wide, 16, k, whole=True)
        for name in given.keys() & {"codes", "high"}: given[name][:] = 255 if type != types.INT8 else 128
        spec = matmul(replace(wide, layout="tiles"), 1, 16, k, int8=True)
        got = run(built(spec, level), spec, np.full((1, k), -127, np.float32), tiles(wide, 16, k, given))
        np.testing.assert_array_equal(got[0], elements(wide, 16, k, given).sum(1) * -127)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("m", [2, 40])
def test_parts_change_no_bit(m: int):
    type = types.Q4_K
    for int8 in (False, True):
        spec, given = matmul(replace(type, layout="tiles"), m, 150, 512, int8=int8), stored(type, 150, 512)
        x, given = RNG(0).standard_normal((m, 512)).astype(np.float32), tiles(type, 150, 512, given)
        made = [run(built(spec, parts=parts), spec, x, given, range(parts)[::-1]) for parts in (1, 2, 3)]
        for other in made[1:]: np.testing.assert_array_equal(made[0], other)


def test_levels_have_the_same_integers():
    """Scales of 1 leave integers alone, whose sums are exact: all levels agree in every bit."""
    type = types.INT8 @ types.per_group_scale(32)
    spec = matmul(replace(type, layout="tiles"), 3, 20, 320, int8=True)
    given = stored(type, 20, 320, whole=True)
    given["scales"] = np.ones(200, np.float32).view(np.uint8)
    x = RNG(0).integers(-9, 10, (3, 320)).astype(np.float32)
    x[:, ::32] = 127
    made = [run(built(spec, level), spec, x, tiles(type, 20, 320, given)) for level in LEVELS]
    for other in made: np.testing.assert_array_equal(made[0], other)


# **** in graphs ****

@pytest.mark.sampled(1)
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q5_1", "Q6_K", "Q3_K", "gptq 2 bits", "e4m3 blocks",
                                  "nf4"])
def test_a_prepared_matrix_is_the_same_matrix(name: str):
    type = TYPES[name]
    n, k = 21, 512 if type.outer is not None else max(96, type.scale.columns)
    w = QTensor.of(type, (n, k), stored(type, n, k, 1))
    made = prepare_matrix(w)
    type = type.of_rows()
    given = {each: data.bitcast(dtypes.uint8).numpy().reshape(-1)
             for each, data in w.of_rows().buffers.items()}
    assert made.type == replace(type, layout="tiles")
    for each, wanted in tiles(type, n, k, given).items():
        np.testing.assert_array_equal(made.buffers[each].bitcast(dtypes.uint8).numpy().reshape(-1), wanted)
    np.testing.assert_array_equal(made.dequantize().numpy(), w.dequantize().numpy())
    assert prepare_matrix(made) is made


@pytest.mark.usefixtures("cpu_device")
def test_what_has_no_tiles_stays_as_it_is():
    for name, k in (("mxfp6", 64), ("nf4", 80), ("int8 g24", 72)):
        w = QTensor.of(TYPES[name], (4, k), stored(TYPES[name], 4, k))
        assert prepare_matrix(w) is w


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("cpu_device")
@pytest.mark.parametrize(("asked", "allowed", "dtype", "int8"), [
    ("auto", True, BF16, True), ("auto", False, BF16, False), ("auto", True, F32, True),
    ("float", True, BF16, False), ("int8", False, F32, True)])
def test_what_is_quantised(asked: str, allowed: bool, dtype: DType, int8: bool,
                           monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_QUANT_ACTIVATIONS", asked)
    w = QTensor.of(types.Q4_K, (21, 256), stored(types.Q4_K, 21, 256, 1))
    x = Tensor(RNG(0).standard_normal((3, 256)).astype(np.float32)).cast(dtype).realize()
    made, tiled = quant_matmul(x, w), quant_matmul(x, prepare_matrix(w), int8=allowed)
    assert [each.template for each in explain(tiled).kernels] == ["quant_dots"]
    assert ("a of int8" in str(explain(tiled))) == int8
    got, want = tiled.float().numpy(), made.float().numpy()
    error = np.abs(got - want).max() / np.abs(want).max()
    assert (2e-4 if int8 else 0) <= error <= (1e-2 if int8 or dtype == BF16 else 1e-6)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("int8", [False, True])
def test_the_reference_is_what_kernels_compute(int8: bool):
    type, m, n, k = TYPES["gptq 2 bits"], 3, 20, 96
    spec, given = matmul(replace(type, layout="tiles"), m, n, k, int8=int8), stored(type, n, k, 1)
    x = RNG(0).standard_normal((m, k)).astype(np.float32)
    got = run(built(spec), spec, x, tiles(type, n, k, given))
    with Context(DEV="CPU"), disabled():
        w = QTensor.of(type, (n, k), given).with_layout("tiles")
        matrix = {name: each.flatten() for name, each in w.buffers.items()}
        made, = TABLE.reference(spec, {"a": Tensor(x).flatten(), **matrix})
        np.testing.assert_allclose(got, made.numpy(), rtol=1e-5, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("m", [1, 2, 8, 9, 33])
def test_rows(m: int):
    check(types.Q4_0, m, 40, 96, dtype=F16)
    check(types.Q4_K, m, 16, 256, symbolic=True)


def test_codes_of_one_row_are_fetched_ahead():
    """Each line of a block once, of all planes; not for more rows, and not where a block is no vector's."""
    def fetches(name: str, m: int, level: isa.ISA = isa.AVX512_BF16) -> int:
        spec = matmul(replace(TYPES[name], layout="tiles"), m, 64, 256, F32, F32, int8=True)
        target, schedule = default(spec, level)
        return TABLE.build(spec, schedule, target).source.count("__builtin_prefetch")
    assert [fetches(name, 1) for name in ("Q8_0", "Q4_K", "Q6_K")] == [8, 4, 6]
    assert fetches("Q8_0", 4) == 0
    assert fetches("Q8_0", 1, isa.AVX2) == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("k", [64, 192])
def test_columns_that_fill_no_block(k: int):
    """Blocks of 128 columns, of which the last has 64: as fp8 directories have them."""
    type = SCHEMES["fp8_per_block"]
    w, x = (RNG(rows).standard_normal((rows, k)).astype(np.float32) for rows in (128, 3))
    matrix = QTensor.of(type, (128, k), quantise(type, "w", lambda _: w), "CPU")
    made = quant_matmul(Tensor(x, device="CPU").realize(), prepare_matrix(matrix))
    assert [kernel.template for kernel in explain(made).kernels] == ["quant_dots"]
    exact = matrix.dequantize().numpy().astype(np.float64)
    bound = 6 * EPS * np.sqrt(k) * np.abs(x) @ np.abs(exact).T
    assert (np.abs(made.numpy() - x @ exact.T) <= bound).all()
