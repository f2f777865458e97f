"""DEV=EMU, checks on: attention of float32 as graphs have it, by one kernel of ours, against float64; and
gradients of graphs, which are tinygrad's."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tinygrad import dtypes

from tests.support.patterns import attention_graph_case as case
from tests.support.patterns.attention_graph_case import (
    BF16,
    DEVICES,
    F32,
    HIDDEN,
    causal,
    close,
    made,
    near,
    normal,
    scaled,
    seen,
)
from tests.support.patterns.training_case import gradients
from tinygrad_nv import LLM, Context, Device, Tensor, TinyJit, Variable, explain
from tinygrad_nv.models.dense import DenseKVCache
from tinygrad_nv.tile.attention.spec import AttentionSpec

BOTH = pytest.mark.parametrize("gpu", DEVICES, indirect=True)


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An A100, or what the test is parametrized with."""
    device = case.use(monkeypatch, getattr(request, "param", "sm_80"))
    yield
    Device[device].synchronize()


def stored(x: torch.Tensor) -> Tensor: return case.stored(x, F32)


def of(operands: tuple[torch.Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]: return case.of(operands, F32)


def by_hand(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    return change(q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v


# **** the library's own ****

@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_the_library_s_attention(seed: int):
    operands = made(heads=4, kv=2, dtype=F32, seed=seed)
    q, k, v = of(operands)
    spec = near(q.scaled_dot_product_attention(k, v, enable_gqa=True), operands, scaled)
    assert isinstance(spec, AttentionSpec)
    assert spec.q.dtype == F32


@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize(("rows", "keys"), [(150, 150), (1, 33), (33, 129)])
def test_causal(rows: int, keys: int):
    operands = made(b=2, rows=rows, keys=keys, dtype=F32)
    q, k, v = of(operands)
    near(q.scaled_dot_product_attention(k, v, is_causal=True), operands, causal(rows, keys))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("d", [5, 20, 72, 256])
def test_heads_of_any_width(d: int):
    operands = made(rows=17, keys=100, d=d, dtype=F32)
    q, k, v = of(operands)
    near(q.scaled_dot_product_attention(k, v), operands, lambda x: x / d**0.5)


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_masks_in_memory(kind: str):
    operands, values = made(dtype=F32), normal(20, 150, seed=9, dtype=F32)
    q, k, v = of(operands)
    if kind == "bool":
        mask = (stored(values) > 0).contiguous().realize()
        near(q.scaled_dot_product_attention(k, v, attn_mask=mask), operands,
             lambda x: torch.where(values > 0, x * 0.125, HIDDEN))
    else:
        near(q.scaled_dot_product_attention(k, v, attn_mask=stored(values)), operands,
             lambda x: x * 0.125 + values.to(x.dtype))


def test_cross_attention_of_heads_beside_rows():
    """[B, T, H, D] in and [B, T, H · D] out."""
    operands = made(b=2, heads=4, kv=4, rows=20, keys=77, dtype=F32)
    q, k, v = (stored(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in operands)
    y = q.scaled_dot_product_attention(k, v).transpose(1, 2).reshape(2, 20, 256).contiguous()
    assert len(explain(y).kernels) == 1
    got = torch.tensor(y.numpy()).double().reshape(2, 20, 4, 64).transpose(1, 2)
    close(got, operands, scaled, F32)


def test_tensor_cores_are_not_asked():
    operands = made(dtype=F32)
    with Context(ALLOW_TF32=1): near(by_hand(*of(operands)), operands, scaled)


# **** by hand ****

@pytest.mark.sampled(1)
@BOTH
def test_a_score_with_everything():
    """ALiBi, a soft-cap, a bias in memory, a causal mask."""
    operands, slopes, bias = made(dtype=F32), torch.tensor([0.5, 0.25]), normal(20, 150, seed=5, dtype=F32)
    rows, columns = Tensor.arange(20).reshape(20, 1), Tensor.arange(150).reshape(1, 150)
    slope, memory = stored(slopes), stored(bias)

    def ours(x: Tensor) -> Tensor:
        x = (x / 5).tanh() * 5 + slope.reshape(2, 1, 1) * (columns - rows).float() + memory
        return (columns <= rows + 100).where(x, -float("inf"))

    def theirs(x: torch.Tensor) -> torch.Tensor:
        r, c = torch.arange(20)[:, None], torch.arange(150)[None, :]
        x = torch.tanh(x * 0.125 / 5) * 5 + slopes.to(x.dtype)[:, None, None] * (c - r).to(x.dtype)
        return torch.where(c <= r + 100, x + bias.to(x.dtype), HIDDEN)
    near(by_hand(*of(operands), ours), operands, theirs)


@pytest.mark.slow
def test_rows_that_see_nothing():
    operands = made(dtype=F32)
    rows, columns = Tensor.arange(20).reshape(20, 1), Tensor.arange(150).reshape(1, 150)
    near(by_hand(*of(operands), lambda x: (columns < rows - 4).where(x, -float("inf"))), operands,
         seen(20, 150, lambda r, c: c < r - 4))


def test_one_visible_column_is_copied_bit_for_bit():
    q, k, v = made(dtype=F32)
    rows, columns = Tensor.arange(20).reshape(20, 1), Tensor.arange(150).reshape(1, 150)
    one = (columns >= rows * 7) & (columns <= rows * 7)
    y = by_hand(*of((q, k, v)), lambda x: one.where(x, -float("inf")))
    assert torch.equal(torch.tensor(y.numpy()), v[:, :, torch.arange(20) * 7])


def test_results_of_16_bits():
    operands = made(dtype=F32)
    y = by_hand(*of(operands)).cast(BF16)
    assert len(explain(y).kernels) == 1
    close(torch.tensor(y.float().numpy()).double(), operands, scaled, BF16)


# **** symbolic ****

@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize("rows", [1, 6])
def test_a_captured_step_serves_every_start(rows: int):
    """Beyond what is written the cache is uninitialised: reading it would be found."""
    k, v = made(kv=2, keys=120, dtype=F32)[1:]
    cache = Tensor.empty(2, 1, 2, 200, 64, dtype=F32, device=stored(k).device).contiguous()
    cache[:, :, :, :120].assign(stored(torch.stack([k, v]))).realize()

    @TinyJit
    def run(q: Tensor, start: object) -> Tensor:
        end = start + rows
        x = q.reshape(1, 2, 2, rows, 64) @ cache[0, :, :, :end].unsqueeze(2).transpose(-1, -2) * 0.125
        r, c = Tensor.arange(rows).reshape(rows, 1) + start, Tensor.arange(end).reshape(1, end)
        return ((c <= r).where(x, -float("inf")).softmax(-1) @ cache[1, :, :, :end].unsqueeze(2)).realize()
    for i, start in enumerate((3, 0, 57, 95, 31)):
        q = normal(1, 4, rows, 64, seed=i, dtype=F32)
        y, end = run(stored(q), Variable("start", 0, 110).bind(start)), start + rows
        close(torch.tensor(y.numpy()).double().reshape(1, 4, rows, 64), (q, k[:, :, :end], v[:, :, :end]),
              seen(rows, end, lambda r, c, start=start: c <= r + start), F32)


@pytest.mark.slow
def test_a_language_model_in_float32(tiny: Path):
    """One attention a layer in prefill and in decode steps; test_device_jit.py has its tokens."""
    ours = LLM(tiny, device="EMU", max_num_seqs=1)
    cache = DenseKVCache.create(ours.config, 64, F32, device="EMU")
    for taken in (1, 20):
        tokens = Tensor.empty(1, taken, dtype=dtypes.int32, device=ours.model.device)
        at = Variable("start", 0, 8).bind(3)
        step = ours.model.step(tokens, at, cache, Variable("last", 0, taken).bind(taken - 1))
        specs = [kernel.spec for kernel in explain(step).kernels if isinstance(kernel.spec, AttentionSpec)]
        assert len(specs) == ours.config.num_layers
        assert {spec.q.dtype for spec in specs} == {F32}


# **** gradients, mixed dtypes ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("spelling", ["by hand", "library"])
def test_gradients(spelling: str):
    """Of graphs that were spelled by hand, and of the library's attention."""
    operands = made(b=1, heads=2, rows=24, keys=40, d=64, dtype=F32)
    q, k, v = of(operands)
    y = by_hand(q, k, v) if spelling == "by hand" else q.scaled_dot_product_attention(k, v)
    grad = normal(1, 2, 24, 64, seed=9, dtype=F32)
    (y * stored(grad)).sum().backward()
    got = [torch.tensor(x.grad.numpy()).double() for x in (q, k, v)]
    for one, exact in zip(got, gradients(operands, scaled, grad), strict=True):
        assert (one - exact).abs().max() <= 2e-6 * exact.abs().max()
    close(torch.tensor(y.numpy()).double(), operands, scaled, F32)


def test_keys_and_values_of_16_bits_are_widened_first():
    """By a kernel each; they are exact in float32."""
    q, k, v = made(dtype=F32)
    k, v = k.bfloat16(), v.bfloat16()
    y = by_hand(stored(q), case.stored(k).float(), case.stored(v).float())
    near(y, (q, k.float(), v.float()), scaled, kernels=3)
