"""DEV=EMU: matmuls with 2:4 sparse matrices are one kernel, exact for integers, and their reference computes
the same, on a CPU too."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType

from tests.support.patterns.on_emu import emu
from tinygrad_nv import Tensor, dtypes, explain, hooks
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import multiplies_sparse, sparse_matmul
from tinygrad_nv.quant.sparse import SparseTensor, compress, two_of_four
from tinygrad_nv.quant.tensor import in_memory

__all__ = ["emu"]
BF16, F16, F32, E4M3, INT8 = dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.fp8e4m3, dtypes.int8
TORCH = {BF16: torch.bfloat16, F16: torch.float16, E4M3: torch.float8_e4m3fn, INT8: torch.int8}
N, K = 72, 256
rng = np.random.default_rng(7)
W = rng.integers(-4, 5, (N, K)).astype(np.float64)
KEPT = two_of_four(np.abs(W))
SCALES = 2.0 ** rng.integers(-3, 3, (N, 1))


def bits(values: np.ndarray, dtype: DType) -> np.ndarray:
    made = torch.from_numpy(values).to(TORCH[dtype])
    return made.view(torch.uint8 if dtype.itemsize == 1 else torch.uint16).numpy()


def matrix(dtype: DType, device: str | None = None) -> SparseTensor:
    """With scales where elements are codes."""
    arrays = compress(bits(W, dtype), KEPT)
    if dtype.itemsize == 1: arrays["scales"] = SCALES.astype(np.float32)
    return SparseTensor.of(dtype, (N, K), arrays, device)


def inputs(m: int, dtype: DType, device: str | None = None) -> tuple[Tensor, np.ndarray]:
    x = np.random.default_rng(m).integers(-4, 5, (m, K)).astype(np.float64)
    raw = Tensor(bits(x, dtype).reshape(-1).view(np.uint8), device=device)
    return raw.bitcast(in_memory(dtype)).reshape(m, K).contiguous().realize(), x


def answer(x: np.ndarray, dtype: DType) -> np.ndarray:
    return x @ (W * KEPT).T * (SCALES.T if dtype.itemsize == 1 else 1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("m", [1, 7, 70])
@pytest.mark.parametrize("dtype", [BF16, F16, E4M3, INT8], ids=str)
@pytest.mark.parametrize("where", ["EMU", "reference", "CPU"])
def test_integers_are_exact(dtype: DType, m: int, where: str):
    device = "CPU" if where == "CPU" else None
    x, values = inputs(m, dtype, device)
    bias = Tensor(np.arange(N, dtype=np.float32), device=device).realize()
    codes = dtype.itemsize == 1
    scale = Tensor(2.0 ** (np.arange(m).reshape(m, 1) % 6), dtype=F32, device=device).realize()
    given = (x, matrix(dtype, device), bias, scale if codes else None, F32)
    if where == "reference":
        with hooks.disabled(): found = sparse_matmul(*given).numpy()
    else:
        made = sparse_matmul(*given)
        if where == "EMU": assert [each.template for each in explain(made).kernels] == ["sparse_wgmma"]
        found = made.numpy()
    wanted = answer(values, dtype) * (scale.numpy() if codes else 1) + np.arange(N)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("arch", "dtype"), [("sm_80", BF16), ("sm_80", INT8), ("sm_89", E4M3)], ids=str)
def test_architectures(arch: str, dtype: DType, monkeypatch: pytest.MonkeyPatch):
    """A device of an architecture has a number of its own."""
    monkeypatch.setenv("EMU_ARCH", arch)
    device = f"EMU:{arch[3:]}"
    x, values = inputs(20, dtype, device)
    made = sparse_matmul(x, matrix(dtype, device), dtype=F32)
    assert [each.template for each in explain(made).kernels] == ["sparse_mma"]
    np.testing.assert_array_equal(made.numpy(), answer(values, dtype))
    assert multiplies_sparse(dtype, (N, K), device)


def test_fp8_begins_with_sm_89(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EMU_ARCH", "sm_80")
    x, values = inputs(4, E4M3, "EMU:80")
    made = sparse_matmul(x, matrix(E4M3, "EMU:80"), dtype=F32)
    assert "begins with sm_89" in str(explain(made))
    np.testing.assert_array_equal(made.numpy(), answer(values, E4M3))
    assert not multiplies_sparse(E4M3, (N, K), "EMU:80")


@pytest.mark.parametrize("static", [True, False])
def test_one_scale_and_results_of_16_bits(static: bool):
    x, values = inputs(5, E4M3)
    scale = 0.5 if static else Tensor([[0.5]]).contiguous().realize()
    made = sparse_matmul(x, matrix(E4M3), x_scale=scale)
    wanted = torch.from_numpy(answer(values, E4M3) * 0.5).to(torch.bfloat16).double().numpy()
    assert made.dtype == BF16
    np.testing.assert_array_equal(made.float().numpy(), wanted)


def test_gradients():
    """Of x and of the bias."""
    (x, _), bias = inputs(20, BF16), Tensor.zeros(N, dtype=F32).contiguous().realize()
    of_x, of_bias = sparse_matmul(x, matrix(BF16), bias, dtype=F32).sum().gradient(x, bias)
    wanted = torch.from_numpy((W * KEPT).sum(0)).to(torch.bfloat16).double().numpy()
    np.testing.assert_array_equal(of_x.float().numpy(), np.tile(wanted, (20, 1)))
    np.testing.assert_array_equal(of_bias.numpy(), np.full(N, 20))


def test_dtypes_without_a_kernel():
    assert not multiplies_sparse(F32, (N, K), None)
    assert not multiplies_sparse(BF16, (N, K + 2), None)


def test_what_does_not_fit_is_refused():
    (x, _), w = inputs(4, BF16), matrix(BF16)
    bias = Tensor.zeros(N - 1)
    for words, call in {"x of float": lambda: sparse_matmul(x.float(), w),
                        "bias of shape": lambda: sparse_matmul(x, w, bias),
                        "scales of x": lambda: sparse_matmul(x, w, x_scale=Tensor.ones(3, 1)),
                        "dtype of int": lambda: sparse_matmul(x, w, dtype=dtypes.int32),
                        "metadata of": lambda: SparseTensor(BF16, (N, K), w.values, w.metadata[:1])
                        }.items():
        with pytest.raises(SpecError, match=words): call()
    with pytest.raises(ValueError, match="not two are kept"): compress(bits(W, BF16), KEPT[:, ::-1] | KEPT)
