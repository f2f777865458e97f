"""Matmuls of int8 codes with matrices in tiles: integers are exact on every level and by AMX tiles, and a
layer of W8A8 gives what rounded inputs give."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tinygrad import Tensor, Variable
from tinygrad.dtype import dtypes

from tests.support.cpu.cpu_quant_case import BEST, F32, LEVELS, bits_of, built, matmul, run, tiles
from tinygrad_nv.cpu.isa import AMX, AVX512_BF16, ISA
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import SpecError
from tinygrad_nv.explain import explain
from tinygrad_nv.functional import multiplies_codes, prepare_matrix
from tinygrad_nv.hooks import disabled
from tinygrad_nv.models.llama import multiply
from tinygrad_nv.quant.activations import QWeight
from tinygrad_nv.quant.readers.reader import Activations
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import INT8, UINT8, QType, Scale, per_channel_scale
from tinygrad_nv.tile.quant_gemm.spec import QuantGemmSpec
from tinygrad_nv.tile.templates import TABLE

TYPE = INT8 @ per_channel_scale()
TILED = replace(TYPE, layout="tiles")
ROWS = Scale(1, 0)
AMX_EMULATED = ISA("amx", bf16=True, vnni=True, emulated=True)
EPS = 2.0 ** -24


def spec_of(m: int, n: int, k: int, symbolic: bool = False) -> QuantGemmSpec:
    """Sums as they are, in int32."""
    return matmul(TILED, m, n, k, dtypes.int8, dtypes.int32, 5, symbolic)


def codes(*shape: int) -> np.ndarray:
    """All of int8, many at its ends."""
    drawn = np.random.default_rng(shape).integers(-160, 160, shape)
    return drawn.clip(-128, 127)


def sums(spec: QuantGemmSpec, level: ISA, x: np.ndarray, w: np.ndarray, order: list[int] | None = None,
         **changes: int) -> np.ndarray:
    stored = tiles(TYPE, *w.shape, {"codes": bits_of(w, dtypes.int8), "scales": bits_of(w[:, :1], F32)})
    return run(built(spec, level, **changes), spec, x, {"codes": stored["codes"]}, order)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_sums_are_exact_on_every_level(level: ISA):
    """One row and several, outputs that are no whole tiles, parts in any order."""
    for m, n, k in ((1, 37, 96), (29, 37, 160)):
        x, w = codes(m, k), codes(n, k)
        got = sums(spec_of(m, n, k), level, x, w, [2, 0, 1], parts=3)
        np.testing.assert_array_equal(got, x @ w.T)


@pytest.mark.parametrize("k", [96, 128])
def test_sums_of_amx_tiles_are_exact(k: int):
    """Rows and outputs that are no whole tiles, several blocks of rows, steps of 32 and of 64 columns."""
    x, w = codes(70, k), codes(37, k)
    got = sums(spec_of(70, 37, k), AMX_EMULATED, x, w, [1, 2, 0], parts=3, block_m=32)
    np.testing.assert_array_equal(got, x @ w.T)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("level", [*LEVELS, AMX_EMULATED], ids=str)
def test_the_ends_of_int8(level: ISA):
    """−128 has no opposite in a byte, and two products of such do not fit 16 bits."""
    m, n, k = 17, 16, 1024       # sums up to 2^24, which float32 holds
    for left, right in ((-128, -128), (-128, 127), (127, -128)):
        x, w = np.full((m, k), left), np.full((n, k), right)
        np.testing.assert_array_equal(sums(spec_of(m, n, k), level, x, w), x @ w.T)


@pytest.mark.parametrize("level", [BEST, AMX_EMULATED], ids=str)
def test_rows_known_at_launch(level: ISA):
    spec, w = spec_of(40, 20, 64, symbolic=True), codes(20, 64)
    for m in (1, 16, 33):
        x = codes(m, 64)
        np.testing.assert_array_equal(sums(spec, level, x, w), x @ w.T)


def test_the_reference():
    """In plain tinygrad, of rows that lie apart."""
    spec, x, w = spec_of(3, 20, 64), codes(3, 64), codes(20, 64)
    arrays = {"codes": w.astype(np.int8), "scales": np.ones((20, 1), np.float32)}
    stored = QTensor.of(TYPE, w.shape, arrays, "CPU")
    a = np.pad(x, ((0, 0), (0, 5))).astype(np.int8).reshape(-1)
    given = {"a": Tensor(a, device="CPU"), "codes": stored.with_layout("tiles").buffers["codes"].flatten()}
    np.testing.assert_array_equal(TABLE.reference(spec, given)[0].numpy(), x @ w.T)


def test_templates():
    for m, level, template in ((1, AMX, "codes_dots"), (17, AMX, "codes_amx"),
                               (64, AVX512_BF16, "codes_dots")):
        found = TABLE.choose(spec_of(m, 4096, 4096), CPU(level, 8, 48 << 10, 2 << 20))
        assert found is not None
        assert found.template == template


def layer(n: int, k: int, static: float | None = None) -> tuple[QWeight, QWeight]:
    """A matrix whose codes are multiplied, and the same with rounded inputs."""
    how = Activations("int8", Scale(0, 0) if static else ROWS, bool(static))
    scales = np.random.default_rng((n, k)).uniform(.001, .01, (n, 1)).astype(np.float32)
    arrays = {"codes": codes(n, k).astype(np.int8), "scales": scales}
    matrix = QTensor.of(TYPE, (n, k), arrays, "CPU")
    return QWeight(prepare_matrix(matrix, codes=True), how, static, codes=True), QWeight(matrix, how, static)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("static", [None, .02])
@pytest.mark.parametrize("m", [1, 40])
def test_a_layer_is_that_of_rounded_inputs(m: int, static: float | None):
    """Codes are the same, bit for bit. The integers are exact: three roundings of float32 and one bias's."""
    n, k = 48, 192
    ours, theirs = layer(n, k, static)
    x = Tensor(np.random.default_rng(m).standard_normal((m, k)).astype(np.float32), device="CPU").realize()
    bias = Tensor.ones(n, device="CPU").contiguous().realize()
    made = multiply(x, ours, bias)
    first, second = (str(each.template) for each in explain(made).kernels)
    assert first == "quantize"
    assert second.startswith("codes")
    rounded, w = theirs.inputs(x).numpy().astype(np.float64), theirs.matrix.dequantize().numpy()
    exact = rounded @ w.astype(np.float64).T + 1
    # inputs and elements of the reference are rounded once each
    assert (np.abs(made.numpy() - exact) <= 8 * EPS * (np.abs(rounded) @ np.abs(w).T + 1)).all()
    with disabled(): np.testing.assert_array_equal(multiply(x, ours, bias).numpy(), made.numpy())


def test_neighbours_quantise_their_input_once():
    """Projections that are matrices of their own, of one norm."""
    parts = [layer(n, 96)[0] for n in (32, 48, 64)]
    x = Tensor(np.random.default_rng(0).standard_normal((3, 96)).astype(np.float32), device="CPU").realize()
    normed = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    made = Tensor.cat(*(multiply(normed, part) for part in parts), dim=-1)
    found = [each.template for each in explain(made).kernels]
    assert (found.count("quantize"), found.count("codes_dots")) == (1, 3)


def test_symbolic_rows():
    weight, x = layer(32, 64)[0], Tensor(codes(12, 64).astype(np.float32), device="CPU").realize()
    rows = Variable("rows", 1, 12).bind(9)
    got = multiply(x[:rows], weight).sum(1).pad(((0, 12 - rows),)).contiguous().numpy()
    np.testing.assert_array_equal(got[:9], multiply(x, weight).sum(1).numpy()[:9])


def test_what_is_dequantised():
    """Groups, zero points, rows that are no whole steps, floats."""
    def takes(type: QType, k: int = 64, element: str = "int8") -> bool:
        return multiplies_codes(type, (32, k), element, ROWS, "CPU")
    assert takes(TYPE)
    assert takes(INT8 @ Scale(0, 0))
    assert not takes(INT8 @ Scale(1, 32))
    assert not takes(QType(UINT8, ROWS, shift=128))
    assert not takes(QType(INT8, ROWS, zeros=True))
    assert not takes(TYPE, 72)
    assert not takes(TYPE, element="e4m3")
    with pytest.raises(SpecError, match="codes of activations, b of int8"):
        matmul(replace(TILED, scale=Scale(1, 32)), 3, 16, 64, dtypes.int8, dtypes.int32)
