"""DEV=EMU: grouped matmuls of codes of 8 bits with scales, as a function: on an H100 a kernel, elsewhere the
reference."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tinygrad_nv import Tensor, disabled, dtypes, explain
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import quant_grouped_matmul, scaled_grouped_matmul
from tinygrad_nv.patterns.grouped_gemm.scaled import BLOCKS
from tinygrad_nv.quant.stack import QStack

EXPERTS, K, TOKENS, HIDDEN, WIDTH = 4, 2, 17, 272, 128
BF16 = dtypes.bfloat16


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None: monkeypatch.setenv("EMU_ARCH", "sm_90a")


@dataclass(frozen=True)
class Codes:
    """Whole numbers and powers of two, or any codes and scales: rows, and matrices (count, n, k)."""
    values: np.ndarray
    scales: np.ndarray
    square: bool

    @staticmethod
    def of(shape: tuple[int, ...], integers: bool, seed: int) -> Codes:
        random, square = np.random.default_rng(seed), len(shape) == 3
        values = random.integers(-2, 3, shape) if integers else random.standard_normal(shape) * 60
        codes = torch.from_numpy(values.astype(np.float64)).to(torch.float8_e4m3fn).double().numpy()
        blocks = (*shape[:-2], -(-shape[-2] // (128 if square else 1)), -(-shape[-1] // 128))
        scales = 2.0 ** random.integers(-2, 2, blocks) if integers else random.uniform(0.001, 0.01, blocks)
        return Codes(codes, scales.astype(np.float32), square)

    @property
    def answer(self) -> np.ndarray:
        wide = self.scales.astype(np.float64).repeat(128, -1)
        if self.square: wide = wide.repeat(128, -2)
        return self.values * wide[..., :self.values.shape[-2], :self.values.shape[-1]]

    def tensors(self, device: str) -> tuple[Tensor, Tensor]:
        bits = torch.from_numpy(self.values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return Tensor(bits, device=device).realize(), Tensor(self.scales, device=device).realize()

    def stack(self, device: str) -> QStack:
        count, n, k = self.values.shape
        codes, scales = self.tensors(device)
        return QStack(BLOCKS, (count, n, k), {"codes": codes.reshape(count * n, k),
                                              "scales": scales.reshape(-1, scales.shape[-1])})


class Layer:
    """Rows of a layer, of which none has expert 2; matrices of a half of it, with biases; a last block of
    rows and columns that is cut off."""

    def __init__(self, integers: bool, down: bool) -> None:
        random = np.random.default_rng(3)
        chances = random.random((TOKENS, EXPERTS))
        chances[:, 2] = 2
        self.experts = np.argsort(chances, axis=1)[:, :K].reshape(-1)
        self.down, self.order = down, np.argsort(self.experts, kind="stable").astype(np.int32)
        self.offsets = np.concatenate([[0], np.bincount(self.experts, minlength=EXPERTS).cumsum()])
        rows, n = (TOKENS * K, HIDDEN) if down else (TOKENS, WIDTH)
        self.x = Codes.of((rows, WIDTH if down else HIDDEN), integers, 1)
        self.w = Codes.of((EXPERTS * (1 if down else 2), n, self.x.values.shape[1]), integers, 2)
        self.weights = 2.0 ** random.integers(-2, 2, TOKENS * K)
        self.bias = random.integers(-4, 5, (EXPERTS, HIDDEN))

    def __call__(self, device: str, activation: str = "silu", dtype: object = BF16) -> Tensor:
        def on(values: np.ndarray, kind: type) -> Tensor:
            return Tensor(values.astype(kind), device=device).realize()
        routing = on(self.offsets, np.int32), on(self.order, np.int32)
        more = {"gather": K, "activation": activation}
        stack = self.w.stack(device)
        if self.down:
            bias = on(self.bias, np.float32).cast(dtype).realize()
            more = {"scatter": True, "weights": on(self.weights, np.float32), "bias": bias}
        elif not activation: stack = QStack(BLOCKS, (EXPERTS, 2 * WIDTH, HIDDEN), stack.buffers)
        return scaled_grouped_matmul(*self.x.tensors(device), stack, *routing, dtype=dtype, **more)

    @property
    def answer(self) -> np.ndarray:
        """Before an activation; results of `down` in the order of slots, others as rows lie."""
        x, w = self.x.answer, self.w.answer.reshape(EXPERTS, -1, self.x.values.shape[1])
        if not self.down:
            return np.einsum("rnk,rk->rn", w[self.experts[self.order]], x[self.order // K])
        rank = np.argsort(self.order)
        made = np.einsum("rnk,rk->rn", w[self.experts], x[rank]) + self.bias[self.experts]
        return made * self.weights[:, None]


@pytest.mark.parametrize("down", [pytest.param(False, marks=pytest.mark.slow), True])
def test_integers_are_exact(down: bool):
    """By a kernel of an H100, and by the reference, which runs elsewhere."""
    layer = Layer(True, down)
    wanted = torch.from_numpy(layer.answer).bfloat16().double().numpy()
    made = layer("EMU:90", "")
    (kernel,) = explain(made).kernels
    assert kernel.schedule is not None
    assert kernel.schedule.template == "grouped_scaled_wgmma"
    np.testing.assert_array_equal(made.float().numpy(), wanted)
    with disabled(): np.testing.assert_array_equal(layer("CPU", "").float().numpy(), wanted)


@pytest.mark.parametrize("dtype", [pytest.param(dtypes.float16, marks=pytest.mark.slow), BF16])
def test_gate_and_up_near_float64(dtype: object):
    layer = Layer(False, False)
    gate, up = np.split(layer.answer, 2, 1)
    wanted = gate / (1 + np.exp(-gate)) * up
    made = layer("EMU:90", dtype=dtype)
    assert all(each.template == "grouped_gemm" for each in explain(made).kernels)
    # what tensor cores may cut of sums of 8-bit floats (14 bits), of gate and of up; the result's rounding
    bound = 2.0 ** -9 + (2.0 ** -8 if dtype == BF16 else 2.0 ** -11)
    assert np.abs(made.float().numpy() - wanted).max() <= bound * np.abs(wanted).max()
    exact = layer("CPU", dtype=dtypes.float32)
    assert np.abs(exact.numpy() - wanted).max() <= 2.0 ** -20 * np.abs(wanted).max()


def test_what_has_no_kernel_says_so():
    layer = Layer(True, True)
    told = str(explain(layer("EMU:90", dtype=dtypes.float32)))
    assert "results of float" in told


def test_a_stack_of_blocks_is_dequantised_elsewhere():
    """Floats times such a stack: no template reads scales of blocks of rows."""
    layer = Layer(True, True)
    x = layer.x.answer.astype(np.float32)
    rows = [Tensor(each.astype(np.int32), device="CPU").realize() for each in (layer.offsets, layer.order)]
    made = quant_grouped_matmul(Tensor(x, device="CPU"), layer.w.stack("CPU"), *rows, scatter=True,
                                weights=Tensor(layer.weights.astype(np.float32), device="CPU"))
    wanted = layer.answer - layer.bias[layer.experts] * layer.weights[:, None]
    np.testing.assert_array_equal(made.numpy(), wanted)


def test_refused():
    layer = Layer(True, False)
    (x, s), stack = layer.x.tensors("CPU"), layer.w.stack("CPU")
    offsets = Tensor(np.array([0, TOKENS, TOKENS, TOKENS, TOKENS], np.int32), device="CPU")
    for words, given in ((r"scales of x, float \(17, 2\)", (x, s[:, :2], stack, offsets)),
                         (r"x of float \(17, 272\)", (x.float(), s, stack, offsets)),
                         (r"offsets of s32 \(4,\)", (x, s, stack, offsets[:4]))):
        with pytest.raises(SpecError, match=words): scaled_grouped_matmul(*given, activation="silu")
    odd = QStack(BLOCKS, (2, 136, 128), {"codes": Tensor.zeros(272, 128, dtype=dtypes.uint8, device="CPU"),
                                         "scales": Tensor.zeros(4, 1, device="CPU")})
    with pytest.raises(SpecError, match="gate and up of 136 rows"):
        scaled_grouped_matmul(x[:, :128], s[:, :1], odd, offsets[:2], activation="silu")
