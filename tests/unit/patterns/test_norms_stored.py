"""Norms of transformers are computed once, whatever residual or matmul reads them; kernels have a bound on
their arguments."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tinygrad.uop.ops import Ops
from torch.nn.functional import gelu, layer_norm, rms_norm, scaled_dot_product_attention

from tinygrad_nv import Tensor, dtypes, explain
from tinygrad_nv.cpu.target import CPU
from tinygrad_nv.errors import KernelError, SpecError
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.program import Output
from tinygrad_nv.runtime.cpu.arguments import check_arguments
from tinygrad_nv.runtime.note import note_of
from tinygrad_nv.tile.template import GPU

WIDTH, HEADS, INNER = 64, 2, 96
Value = Tensor | torch.Tensor
pytestmark = pytest.mark.usefixtures("cpu_device")


class Layers:
    """Parts of a transformer, in tinygrad or in float64 by torch, with the same weights in the same order.
    `int8`: matrices are codes times a scale, for torch the float64 that this is."""

    def __init__(self, tinygrad: bool, int8: bool = False) -> None:
        self.tinygrad, self.int8, self.random = tinygrad, int8, np.random.default_rng(0)

    def made(self, *shape: int) -> np.ndarray: return self.random.standard_normal(shape).astype(np.float32)

    def given(self, x: np.ndarray) -> Value:
        return Tensor(x).realize() if self.tinygrad else torch.from_numpy(x).double()

    def vector(self) -> Value: return self.given(self.made(WIDTH))

    def matmul(self, x: Value, inputs: int, outputs: int) -> Value:
        made, bias = self.made(inputs, outputs) / np.float32(inputs ** 0.5), self.given(self.made(outputs))
        if not self.int8: return x @ self.given(made) + bias
        scale = np.abs(made).max(keepdims=True) / 127
        codes, factor = np.round(made / scale).astype(np.int8), self.given(scale)
        wide = Tensor(codes).realize().float() if self.tinygrad else torch.from_numpy(codes).double()
        return x @ (wide * factor) + bias

    def layer_norm(self, x: Value) -> Value:
        w, b = self.vector(), self.vector()
        if not isinstance(x, Tensor): return layer_norm(x, (WIDTH,), w, b, 1e-5)
        away = x - x.mean(-1, keepdim=True)
        return away * (away.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w + b

    def rms_norm(self, x: Value) -> Value:
        w = self.vector()
        if not isinstance(x, Tensor): return rms_norm(x, (WIDTH,), w, 1e-5)
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w

    def attention(self, x: Value) -> Value:
        q, k, v = (self.matmul(x, WIDTH, WIDTH).reshape(x.shape[0], HEADS, -1).transpose(0, 1)
                   for _ in range(3))
        if isinstance(q, Tensor): made = (q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5).softmax(-1) @ v
        else: made = scaled_dot_product_attention(q, k, v)
        return self.matmul(made.transpose(0, 1).reshape(*x.shape), WIDTH, WIDTH)

    def fed(self, x: Value) -> Value:
        h = self.matmul(x, WIDTH, INNER)
        return self.matmul(h.gelu() if isinstance(h, Tensor) else gelu(h, approximate="tanh"), INNER, WIDTH)


def post(of: Layers, x: Value, layers: int) -> Value:
    """BERT: the norm's result is the residual, too."""
    for _ in range(layers):
        x = of.layer_norm(of.attention(x) + x)
        x = of.layer_norm(of.fed(x) + x)
    return x


def behind(of: Layers, x: Value, layers: int) -> Value:
    """Gemma: norms before and behind each part."""
    for _ in range(layers):
        x = x + of.rms_norm(of.attention(of.rms_norm(x)))
        x = x + of.rms_norm(of.fed(of.rms_norm(x)))
    return of.rms_norm(x)


def embedded(of: Layers, x: Value, layers: int) -> Value:
    """ModernBERT: norms before each part, and one of the embeddings, which is the residual."""
    x = of.layer_norm(x)
    for _ in range(layers):
        x = x + of.attention(of.layer_norm(x))
        x = x + of.fed(of.layer_norm(x))
    return of.layer_norm(x)


Network = Callable[[Layers, Value, int], Value]


@pytest.mark.parametrize(("network", "int8", "rows", "norms"), [
    (post, False, 5, 8), (post, True, 1, 8), (behind, False, 5, 11), (embedded, False, 5, 10)])
def test_norms_of_a_transformer_are_one_kernel_each(network: Network, int8: bool, rows: int, norms: int):
    x = np.random.default_rng(1).standard_normal((rows, WIDTH)).astype(np.float32)
    y, deep = (network(Layers(True, int8), Tensor(x).realize(), layers) for layers in (2, 4))
    calls = deep.schedule_linear().src
    assert max(len(call.src) - 1 for call in calls) <= 9    # and does not grow with the layers
    notes = [note_of(call.src[0]) if call.src[0].op is Ops.PROGRAM else None for call in calls]
    found = Counter(note and note.template for note in notes)
    # tinygrad's own are those that write matrices of codes out
    assert found["norm"] == norms
    assert int8 or not found[None]
    exact = network(Layers(False, int8), torch.from_numpy(x).double(), 2)
    np.testing.assert_allclose(y.numpy(), exact.numpy(), atol=2e-5, rtol=2e-5)


# **** arguments ****

def test_values_of_more_tensors_than_a_kernel_takes_are_left_to_tinygrad():
    xs = np.random.default_rng(3).standard_normal((70, 4, 64)).astype(np.float32)
    given, w = [Tensor(x).realize() for x in xs], np.random.default_rng(4).integers(-2, 3, (64, 64))
    total = sum(given[1:], given[0])
    exact = torch.from_numpy(xs).double().sum(0)
    norm = total.layernorm()
    assert "norm: 70 inputs: a kernel of 77 arguments, at most 63" in str(explain(norm))
    np.testing.assert_allclose(norm.numpy(), layer_norm(exact, (64,)), atol=1e-5)
    matmul = given[0] @ Tensor(w.astype(np.float32)) + sum(given[2:], given[1])
    assert "gemv" in [kernel.template for kernel in explain(matmul).kernels]     # without what is added
    wanted = torch.from_numpy(xs[0]).double() @ torch.from_numpy(w).double() + exact - torch.from_numpy(xs[0])
    np.testing.assert_allclose(matmul.numpy(), wanted, atol=1e-4)


def test_kernels_with_more_arguments_than_a_launch_has_are_refused_by_name():
    given = [Tensor(np.full(4, i, np.float32)).realize() for i in range(63)]
    def called(count: int) -> Tensor:
        names = ", ".join(f"const float* x{i}" for i in range(count))
        text = f"void most(float* o, {names}) {{ for (int i = 0; i < 4; i++) o[i] = x{count - 1}[i]; }}"
        out = Output((4,), dtypes.float32)
        return Tensor(program.program("most", text, "CPU", [out], [x.uop for x in given[:count]])[0])
    assert called(62).tolist() == [61.0] * 4
    with pytest.raises(SpecError, match="a kernel of 64 arguments, at most 63"): called(63)
    check_arguments("most", 63)
    with pytest.raises(KernelError, match=r"kernel most with 64 arguments\n.*at most 63 on a CPU\n"
                       r".*contiguous\(\)"): check_arguments("most", 64)


def test_bounds_of_targets():
    assert not CPU.overfull(60, 3)
    assert CPU.overfull(60, 4) == "a kernel of 64 arguments, at most 63"
    assert not GPU.overfull(4095, 1)
    assert "32768 B of parameters, at most 32764" in GPU.overfull(4095, 2)
    # tensor maps lie at multiples of their alignment: 254 places of 128 B after the first
    assert not GPU.overfull(4, 1, 254)
    assert GPU.overfull(4, 1, 255)
