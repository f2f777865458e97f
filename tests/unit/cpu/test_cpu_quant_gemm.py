"""Matmuls with quantised matrices on the CPU: every type, level and dtype, and awkward extents."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from tinygrad import Tensor, Variable, dtypes
from tinygrad.helpers import Context

from tests.support.cpu.cpu_quant_case import (
    BEST,
    BF16,
    F16,
    F32,
    LEVELS,
    TYPES,
    built,
    elements,
    matmul,
    run,
    stored,
)
from tinygrad_nv.cpu import isa
from tinygrad_nv.explain import explain
from tinygrad_nv.patterns.quant_gemm.named import quant_matmul
from tinygrad_nv.quant import types
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import QType

EPS = 2.0 ** -24
RNG = np.random.default_rng


def width(type: QType) -> int:
    """Columns that are no multiple of much else than what the type asks for."""
    if type.outer is not None and type.outer.columns: return 512
    if type.scale.columns > 1: return 3 * type.scale.columns
    return 150


def check(type: QType, m: int, n: int, k: int, level: isa.ISA = BEST) -> None:
    """Integers come out exactly; other numbers within 4 ε Σ |x w| sqrt k of float32, where sums have any
    order and each element of the matrix is rounded three times."""
    spec = matmul(type, m, n, k, gap=3)
    kernel = built(spec, level)
    x = RNG(m).integers(-4, 5, (m, k)).astype(np.float32)
    given = stored(type, n, k, whole=True)
    if type.element.name != "nf4":
        np.testing.assert_array_equal(run(kernel, spec, x, given), x @ elements(type, n, k, given).T)
    given, x = stored(type, n, k, 1), RNG(m).standard_normal((m, k)).astype(np.float32)
    w = elements(type, n, k, given).astype(np.float64)
    error = np.abs(run(kernel, spec, x, given) - x.astype(np.float64) @ w.T)
    assert (error <= 4 * EPS * np.sqrt(k) * (np.abs(x).astype(np.float64) @ np.abs(w.T))).all()


@pytest.mark.sampled(9)
@pytest.mark.parametrize("m", [3, 33])
@pytest.mark.parametrize("name", TYPES)
def test_types(name: str, m: int):
    check(TYPES[name], m, 21, width(TYPES[name]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["Q5_1", "Q6_K", "nf4", "gptq 2 bits", "e4m3 blocks", "int8 g24"])
@pytest.mark.parametrize("level", LEVELS[:-1], ids=str)
def test_levels(level: isa.ISA, name: str):
    check(TYPES[name], 2, 21, width(TYPES[name]), level)
    check(TYPES[name], 19, 21, width(TYPES[name]), level)


@pytest.mark.parametrize("m", [1, 2, 7, 9])
def test_rows(m: int):
    check(types.Q4_0, m, 37, 96)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_activations_of_16_bits(dtype: object, m: int):
    """Elements may be rounded to the dtype before they are multiplied: integers below 2^8 are not."""
    for type, k in ((types.Q4_0, 96), (types.INT8 @ types.per_group_scale(16), 48)):
        spec = matmul(type, m, 40, k, dtype, F32)
        x, given = RNG(m).integers(-4, 5, (m, k)).astype(np.float32), stored(type, 40, k, whole=True)
        np.testing.assert_array_equal(run(built(spec), spec, x, given), x @ elements(type, 40, k, given).T)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("m", [2, 40])
def test_parts_change_no_bit(m: int):
    spec, given = matmul(types.Q4_K, m, 150, 512), stored(types.Q4_K, 150, 512)
    x = RNG(0).standard_normal((m, 512)).astype(np.float32)
    made = [run(built(spec, parts=parts), spec, x, given, range(parts)[::-1]) for parts in (1, 2, 3)]
    for other in made[1:]: np.testing.assert_array_equal(made[0], other)


# **** in graphs ****

def tensor(type: QType, n: int, k: int) -> QTensor:
    return QTensor.of(type, (n, k), stored(type, n, k, whole=True))


@pytest.mark.usefixtures("cpu_device")
def test_quant_matmul_is_a_kernel():
    w, bias = tensor(types.Q4_1, 24, 64), Tensor(RNG(0).integers(-9, 9, 24)).cast(BF16).realize()
    x = Tensor(RNG(0).integers(-4, 5, (2, 5, 64))).cast(BF16).realize()
    for some in (x, x[:, 1:4], x[:, 2], x + 1):
        shown = explain(quant_matmul(some, w, bias))
        assert [each.template for each in shown.kernels][-1] == "quant_gemv"
        got = quant_matmul(some, w, bias).float().numpy()
        sums = torch.from_numpy(some.float().numpy() @ w.dequantize().T.numpy()).bfloat16()
        want = sums + torch.from_numpy(bias.float().numpy()).bfloat16()
        np.testing.assert_array_equal(got, want.float().numpy())
    assert "uint4 g32 mins" in str(shown)


@pytest.mark.usefixtures("cpu_device")
def test_a_symbolic_number_of_rows():
    w, x = tensor(types.Q8_0, 20, 64), Tensor(RNG(0).integers(-4, 5, (30, 64))).float().realize()
    rows = Variable("rows", 1, 30).bind(7)
    want = (x @ w.dequantize().T).numpy()[:7]
    for some, more in ((x[:rows], 0), (x[:rows] + 1, 1)):
        made = quant_matmul(some, w)
        assert "quant_gemm" in [each.template for each in explain(made).kernels]
        np.testing.assert_array_equal(made.contiguous().realize()[:7].numpy(),
                                      want + more * w.dequantize().sum(1).numpy())


@pytest.mark.usefixtures("cpu_device")
def test_what_no_kernel_takes_runs_its_reference():
    w, x = tensor(types.Q8_0, 20, 64), Tensor(RNG(0).integers(-4, 5, (3, 64))).cast(F16).realize()
    made = quant_matmul(x, w, Tensor.ones(20).contiguous())
    assert "a bias of float to half" in str(explain(made))
    want = (x.float() @ w.dequantize().T).numpy().astype(np.float16).astype(np.float32) + 1
    np.testing.assert_array_equal(made.numpy(), want)


@pytest.mark.parametrize("rows", [1, 70])
def test_matrices_that_a_graph_dequantises_are_multiplied_as_codes(rows: int):
    """Cast(int8) · scale by rows or as a whole, in either order; scales of columns are no type of matrix."""
    random = np.random.default_rng(rows)
    codes = random.integers(-128, 128, (160, 96)).astype(np.int8)
    x, bias = random.standard_normal((rows, 96), np.float32), random.standard_normal(160, np.float32)
    with Context(DEV="CPU"):
        given, added, c = Tensor(x).realize(), Tensor(bias).realize(), Tensor(codes).realize()
        made = []
        for shape in ((160, 1), (1, 1), (1,), (1, 96)):
            scale = random.uniform(1e-3, 2e-3, shape).astype(np.float32)
            s = Tensor(scale).realize()
            w = s * c.cast(dtypes.float32) if shape == (1, 1) else c.float() * s
            y = (given @ w.T + added).relu()
            taken = any("quant" in (kernel.template or "") for kernel in explain(y).kernels)
            assert taken == (shape != (1, 96))
            made.append((y, x.astype(np.float64) @ (codes * scale.astype(np.float64)).T + bias))
        Tensor.realize(*(y for y, _ in made))
        for y, exact in made: np.testing.assert_allclose(y.numpy(), np.maximum(exact, 0), atol=1e-5)
