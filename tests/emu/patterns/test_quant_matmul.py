"""DEV=EMU: matmuls with quantised matrices, as models call them, by kernels of ours."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.cpu.cpu_quant_case import TYPES, stored
from tests.support.patterns.on_emu import emu
from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.functional import prepare_matrix, quant_matmul
from tinygrad_nv.quant import types
from tinygrad_nv.quant.tensor import QTensor
from tinygrad_nv.quant.types import QType

__all__ = ["emu"]
N, K = 40, 512
# bitsandbytes' int8
LAST = {"int8 last": QType(types.INT8, types.per_channel_scale(), outer=types.per_tensor_scale(),
                           outer_last=True)}


def matrix(type: QType, seed: int = 1) -> QTensor:
    return QTensor.of(type, (N, K), stored(type, N, K, seed))


def rows(m: int, k: int = K) -> Tensor:
    made = np.random.default_rng(m).standard_normal((m, k)).astype(np.float32)
    return Tensor(made).cast(dtypes.bfloat16).realize()


def templates(x: Tensor) -> list[str | None]: return [each.template for each in explain(x).kernels]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "m", "template"), [
    ("awq", 1, "quant_gemv"), ("Q4_0", 40, "quant_wgmma"), ("e4m3 blocks", 3, "quant_gemv"),
    ("uint8 tensor", 3, "quant_gemv"), ("NVFP4", 2, "quant_gemv"), ("Q4_K", 20, "quant_wgmma"),
    ("nf4", 2, "quant_gemv"), ("nvfp4 divided", 2, "quant_gemv"), ("int8 last", 20, "quant_wgmma"),
    ("mxfp6", 2, "quant_gemv")])
def test_prepared_matrices(name: str, m: int, template: str):
    """Fragments, by one kernel; the same as dequantised elements give."""
    w, x = matrix({**TYPES, **LAST}[name]), rows(m)
    bias = Tensor.ones(N, dtype=dtypes.bfloat16).contiguous().realize()
    laid = prepare_matrix(w)
    assert laid.type.layout == "fragments"
    assert prepare_matrix(laid) is laid
    made = quant_matmul(x, laid, bias)
    assert templates(made) == [template]
    wanted = x.float().numpy().astype(np.float64) @ w.dequantize().numpy().astype(np.float64).T + 1
    assert np.abs(made.float().numpy() - wanted).max() <= 2 ** -7 * np.abs(wanted).max()


@pytest.mark.parametrize("type", [TYPES["nvfp4 divided"], LAST["int8 last"]], ids=str)
def test_outer_scales_multiply(type: QType):
    """By reciprocals, to a unit of float32's last place; and by those that came last."""
    w = matrix(type)
    made, exact = w.with_multipliers().dequantize().numpy(), w.dequantize().numpy()
    assert w.with_multipliers().type == replace(type, divided=False, outer_last=False)
    assert np.abs(made - exact).max() <= 2 ** -22 * np.abs(exact).max()
    plain = matrix(TYPES["NVFP4"])
    assert plain.with_multipliers() is plain


@pytest.mark.slow
def test_act_order_gathers_activations():
    type = replace(TYPES["gptq 2 bits"], scale=types.per_group_scale(64, dtypes.float16))
    w, x = matrix(type), rows(2)
    made = quant_matmul(x, prepare_matrix(w))
    assert "quant_gemv" in templates(made)
    wanted = x.float().numpy() @ w.dequantize().numpy().T
    assert np.abs(made.float().numpy() - wanted).max() <= 2 ** -7 * np.abs(wanted).max()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(K,), (2, 3, K)])
def test_rows_of_any_shape(shape: tuple[int, ...]):
    w, count = matrix(TYPES["Q4_0"]), int(np.prod(shape))
    x = rows(6).flatten()[:count].reshape(shape).contiguous().realize()
    made = quant_matmul(x, prepare_matrix(w))
    assert templates(made) == ["quant_gemv"]
    wanted = x.float().numpy() @ w.dequantize().numpy().T
    assert made.shape == wanted.shape
    assert np.abs(made.float().numpy() - wanted).max() <= 2 ** -7 * np.abs(wanted).max()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["int8 g24", "int8 columns"])
def test_what_has_no_kernel_stays_as_it_is(name: str):
    w, x = matrix(TYPES[name]), rows(2)
    assert prepare_matrix(w) is w
    made = quant_matmul(x, w)
    assert "quant_gemv" not in templates(made)
    wanted = x.float().numpy() @ w.dequantize().numpy().T
    assert np.abs(made.float().numpy() - wanted).max() <= 2 ** -6 * np.abs(wanted).max()


def test_codes_that_are_no_numbers_stay_as_they_are():
    type = types.E4M3 @ types.per_channel_scale()
    given = stored(type, N, K) | {"codes": np.full(N * K, 0x7F, np.uint8)}
    w = QTensor.of(type, (N, K), given)
    assert prepare_matrix(w) is w


def test_the_gradient_of_activations():
    w = prepare_matrix(matrix(TYPES["Q4_0"]))
    x = Tensor(np.random.default_rng(0).standard_normal((2, K)).astype(np.float32)).cast(dtypes.bfloat16)
    x = x.contiguous().realize()
    quant_matmul(x, w).float().sum().backward()
    wanted = w.dequantize().numpy().sum(0)
    assert x.grad is not None
    assert np.abs(x.grad.float().numpy() - wanted).max() <= 2 ** -6 * np.abs(wanted).max()
