"""Rotary positions by name: torch's numbers and gradients, one kernel each, the same bits when captured.
Norms of transformers are computed once, whatever residual or matmul reads them; kernels have a bound on
their arguments."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from tinygrad import Tensor, TinyJit, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops
from torch.nn.functional import gelu, layer_norm, rms_norm, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.support.tile.reference_case import right, run, storages
from tinygrad_nv import disabled, explain
from tinygrad_nv.cpu import isa
from tinygrad_nv.cpu.target import CPU, host
from tinygrad_nv.errors import KernelError, SpecError
from tinygrad_nv.functional import rotate_heads
from tinygrad_nv.patterns import program
from tinygrad_nv.patterns.program import Output
from tinygrad_nv.runtime.cpu.arguments import check_arguments
from tinygrad_nv.runtime.note import note_of
from tinygrad_nv.tile.rope.spec import Angles, RopeGradientSpec, RopeSpec
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
LEVELS = [each for each in (isa.PORTABLE, isa.AVX2, isa.AVX512) if not isa.why_not(each.level)]
B, T, H, KV, D = 2, 7, 3, 1, 32
pytestmark = pytest.mark.usefixtures("cpu_device")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", LEVELS, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_every_instruction_set(dtype: DType, level: isa.ISA):
    """Heads that vectors divide and others; the same bits by any number of parts."""
    target = replace(host(), isa=level)
    for kind in (RopeSpec, RopeGradientSpec):
        for d, half in ((32, 16), (26, 11)):
            spec = kind(B, T, H, KV, d, half, dtype, Angles(F32, half, half * T, 1))
            given, schedule = storages(spec, seed=d), TABLE.choose(spec, target)
            found = [run(spec, replace(schedule, parts=parts), target, given) for parts in (1, 3)]
            for name, each in found[0].items(): assert torch.equal(each, found[1][name])
            right(spec, given, found[0])


def normal(seed: int) -> Tensor:
    """q|k|v."""
    made = np.random.default_rng(seed).standard_normal((B, T, (H + 2 * KV) * D))
    return Tensor(made.astype(np.float32)).realize()


def angles(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    made = np.random.default_rng(5).uniform(-4, 4, shape)
    return np.cos(made).astype(np.float32), np.sin(made).astype(np.float32)


def theirs(x: torch.Tensor, cos: np.ndarray, sin: np.ndarray) -> tuple[torch.Tensor, ...]:
    """q, k and v by transformers, of q|k|v."""
    q, k, v = x.reshape(B, T, -1, D).transpose(1, 2).split([H, KV, KV], 1)
    both = [torch.from_numpy(np.concatenate([each, each], -1)).double() for each in (cos, sin)]
    both = [each.expand(B, T, D) for each in both]
    return *apply_rotary_pos_emb(q, k, *both), v


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(T, D // 2), (B, T, D // 2)], ids=["positions", "documents"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_gradients_are_those_of_torch(dtype: DType, shape: tuple[int, ...]):
    """float32 within 1e-5 of the largest, else two roundings; also of large numbers."""
    random, (cos, sin) = np.random.default_rng(1), angles(*shape)
    x, *grads = (random.standard_normal(each).astype(np.float32) for each in
                 ((B, T, (H + 2 * KV) * D), (B, H, T, D), (B, KV, T, D), (B, KV, T, D)))
    x[0, 0], x[0, 1] = x[0, 0] * 1e4, 0
    held = Tensor(x).cast(dtype).contiguous().realize()
    tables = [Tensor(each).contiguous().realize() for each in (cos, sin)]
    given = [Tensor(each).cast(dtype).contiguous().realize() for each in grads]

    def made() -> list[Tensor]:
        outs = rotate_heads(held, *tables, H, KV)
        loss = sum(((a.float() * b.float()).sum() for a, b in zip(outs, given, strict=True)), Tensor(0.0))
        return [*outs, loss.gradient(held)[0]]
    found = made()
    names = [each.template for each in explain(*found).kernels]
    assert names.count("rope") == 2, names
    true = torch.from_numpy(held.float().numpy()).double().requires_grad_()
    outs = theirs(true, cos, sin)
    sum((a * torch.from_numpy(b.float().numpy()).double()).sum() for a, b in zip(outs, given, strict=True)
        ).backward()
    error = {F32: 1e-6, BF16: 2.0**-7, F16: 2.0**-9}[dtype]
    for mine, wanted in zip(found, (*outs, true.grad), strict=True):
        exact = wanted.detach().numpy()
        off = np.abs(mine.float().numpy() - exact)
        assert (off <= error * (np.abs(exact) + 1e-2 * np.abs(exact).max())).all()
    with disabled(): plain = [each.float().numpy() for each in made()]
    for mine, other in zip(found, plain, strict=True):
        off = np.abs(mine.float().numpy() - other)
        assert (off <= error * (np.abs(other) + 1e-2 * np.abs(other).max())).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_some_results_are_derived(used: tuple[int, ...]):
    """tinygrad does not say of which results the gradients are."""
    x = normal(2)
    cos, sin = angles(T, D // 2)

    def made() -> Tensor:
        outs = rotate_heads(x, Tensor(cos), Tensor(sin), H, KV)
        return sum(((outs[i] * outs[i] * (i + 1)).sum() for i in used), Tensor(0.0)).gradient(x)[0]
    found = made().numpy()
    with disabled(): np.testing.assert_allclose(found, made().numpy(), rtol=1e-5, atol=1e-5)
    assert np.abs(found).max() > 1


def test_rows_of_a_table_are_read_where_they_lie():
    """And a captured step has the same bits."""
    x = normal(3)
    cos, sin = (Tensor(each).realize()[3:3 + T] for each in angles(20, D // 2))
    assert [each.template for each in explain(*rotate_heads(x, cos, sin, H, KV)).kernels] == ["rope"]

    def step() -> Tensor: return rotate_heads(x, cos, sin, H, KV)[0].square().sum().gradient(x)[0].realize()
    once, captured = step().numpy(), TinyJit(step)
    for _ in range(4): np.testing.assert_array_equal(captured().numpy(), once)


WIDTH, HEADS, INNER = 64, 2, 96
Value = Tensor | torch.Tensor
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
