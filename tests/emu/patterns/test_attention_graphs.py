"""DEV=EMU, checks on: attention as graphs have it, by one kernel of ours, against float64."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType

from tests.support.patterns.attention_graph_case import (
    BF16,
    DEVICES,
    F16,
    F32,
    HIDDEN,
    causal,
    close,
    made,
    near,
    normal,
    of,
    scaled,
    seen,
    stored,
    use,
)
from tinygrad_nv import Device, Tensor, TinyJit, Variable, disabled, dtypes, explain
from tinygrad_nv.tile.attention.spec import AttentionSpec

BOTH = pytest.mark.parametrize("gpu", DEVICES, indirect=True)
DEVICE = DEVICES["sm_80"]


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The device of a test's tensors: an A100, or what it is parametrized with."""
    device = use(monkeypatch, getattr(request, "param", "sm_80"))
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", device)
    yield
    Device[device].synchronize()


# **** the library's own ****

@pytest.mark.sampled(9)
@BOTH
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
def test_the_library_s_attention(dtype: DType, seed: int):
    operands = made(heads=4, kv=2, dtype=dtype, seed=seed)
    q, k, v = of(operands, dtype)
    y = q.scaled_dot_product_attention(k, v, enable_gqa=True)
    assert near(y, operands, scaled).batch[2] == 2


@pytest.mark.sampled(2)
@BOTH
@pytest.mark.parametrize(("rows", "keys"), [(20, 20), (150, 150), (1, 33), (70, 40), (33, 129)])
def test_causal(rows: int, keys: int):
    operands = made(b=2, rows=rows, keys=keys)
    q, k, v = of(operands)
    spec = near(q.scaled_dot_product_attention(k, v, is_causal=True), operands, causal(rows, keys))
    if rows > 1: assert spec.band.last == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("d", [16, 32, 72, 128])
def test_heads_of_other_widths(d: int):
    operands = made(rows=17, keys=100, d=d)
    q, k, v = of(operands)
    near(q.scaled_dot_product_attention(k, v), operands, lambda x: x / d**0.5)


def test_one_key_head_for_all():
    operands = made(b=2, heads=4, kv=1, rows=9)
    q, k, v = of(operands)
    near(q.scaled_dot_product_attention(k, v, is_causal=True), operands, causal(9, 150))


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_masks_in_memory(kind: str):
    operands = made()
    q, k, v = of(operands)
    values = normal(20, 150, seed=9)
    if kind == "bool":
        mask = Tensor((values > 0).numpy(), device=DEVICE).contiguous().realize()
        near(q.scaled_dot_product_attention(k, v, attn_mask=mask), operands,
             lambda x: torch.where(values > 0, x * 0.125, HIDDEN))
    else:
        near(q.scaled_dot_product_attention(k, v, attn_mask=stored(values)), operands,
             lambda x: x * 0.125 + values.to(x.dtype))


# **** by hand ****

def by_hand(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    x = q.matmul(k.transpose(-1, -2), dtype=F32) * 0.125
    return change(x).softmax(-1).cast(v.dtype) @ v


CONDITIONS: dict[str, Callable] = {
    "window": lambda r, c: (c <= r + 130) & (c > r + 100),
    "around": lambda r, c: (c - r < 40) & (r - c < 40),
    "prefix": lambda r, c: (c <= r) | (c < 67),
    "keys": lambda r, c: (c < 77) & (r >= 0),
    "nothing for some": lambda r, c: c < r - 4,
    "every third": lambda r, c: c * 3 <= r * 3 + 200,
}


@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_of_positions(name: str):
    operands, condition = made(), CONDITIONS[name]
    rows, columns = Tensor.arange(20).reshape(20, 1), Tensor.arange(150).reshape(1, 150)
    def hidden(x: Tensor) -> Tensor: return condition(rows, columns).where(x, -float("inf"))
    near(by_hand(*of(operands), hidden), operands, seen(20, 150, condition))


def test_conditions_that_are_no_arithmetic_here():
    """Blocks of 16 see each other: quotients of positions are stored, by a kernel each."""
    operands = made()
    rows, columns = Tensor.arange(20).reshape(20, 1), Tensor.arange(150).reshape(1, 150)
    same = (rows // 16) == (columns // 16)
    spec = near(by_hand(*of(operands), lambda x: same.where(x, -float("inf"))), operands,
                seen(20, 150, lambda r, c: r // 16 == c // 16), kernels=3)
    assert spec.parameters == (dtypes.int32, dtypes.int32)


def test_a_maximum_that_is_guarded():
    """Rows of -inf alone, kept from NaN by hand."""
    operands = made()
    q, k, v = of(operands)
    rows, columns = Tensor.arange(20).reshape(20, 1), Tensor.arange(150).reshape(1, 150)
    x = (columns < rows - 3).where(q.matmul(k.transpose(-1, -2), dtype=F32) * 0.125, -float("inf"))
    top = x.max(-1, keepdim=True)
    e = (x - (top == -float("inf")).where(0, top)).exp()
    near((e / e.sum(-1, keepdim=True)).cast(BF16) @ v, operands, seen(20, 150, lambda r, c: c < r - 3))


@pytest.mark.sampled(1)
@BOTH
def test_a_score_with_everything():
    """ALiBi, a soft-cap, a bias in memory, a causal mask."""
    operands, slopes, bias = made(), torch.tensor([0.5, 0.25]), normal(20, 150, seed=5)
    rows, columns = Tensor.arange(20).reshape(20, 1), Tensor.arange(150).reshape(1, 150)
    slope, memory = stored(slopes, F32), stored(bias)

    def ours(x: Tensor) -> Tensor:
        x = (x / 5).tanh() * 5 + slope.reshape(2, 1, 1) * (columns - rows).float() + memory
        return (columns <= rows + 100).where(x, -float("inf"))

    def theirs(x: torch.Tensor) -> torch.Tensor:
        r, c = torch.arange(20)[:, None], torch.arange(150)[None, :]
        x = torch.tanh(x * 0.125 / 5) * 5 + slopes.to(x.dtype)[:, None, None] * (c - r).to(x.dtype)
        return torch.where(c <= r + 100, x + bias.to(x.dtype), HIDDEN)
    near(by_hand(*of(operands), ours), operands, theirs)


@pytest.mark.parametrize("maximum", [True, False])
def test_weights_that_are_divided_after_the_product(maximum: bool):
    operands = made()
    q, k, v = of(operands)
    x = q.matmul(k.transpose(-1, -2), dtype=F32) * 0.125
    e = (x - x.max(-1, keepdim=True) if maximum else x).exp()
    near((e.cast(BF16) @ v) / e.sum(-1, keepdim=True), operands, scaled)


def test_a_result_that_lies_sideways():
    operands = made(keys=40)
    q, k, v = of(operands)
    w = (Tensor.einsum("bhtd,bhsd->bhts", q, k) * 0.125).softmax(-1)
    y = Tensor.einsum("bhts,bhsd->bhtd", w, v)
    y.realize()
    close(torch.tensor(y.float().numpy()).double(), operands, scaled, BF16)


def test_heads_beside_rows():
    """[B, T, H, D] in and [B, T, H · D] out, by one kernel."""
    operands = made(b=2, heads=4, kv=2)
    q, k, v = (stored(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in operands)
    y = q.scaled_dot_product_attention(k, v, enable_gqa=True).transpose(1, 2).reshape(2, 20, 256).contiguous()
    assert len(explain(y).kernels) == 1
    got = torch.tensor(y.float().numpy()).double().reshape(2, 20, 4, 64).transpose(1, 2)
    close(got, operands, scaled, BF16)


def test_keys_that_lie_by_columns():
    operands = made()
    q, _, v = of(operands)
    k = stored(operands[1].transpose(-1, -2).contiguous()).transpose(-1, -2)
    near(by_hand(q, k, v), operands, scaled, kernels=2)


def test_one_visible_column_is_copied_bit_for_bit():
    q, k, v = made()
    rows, columns = Tensor.arange(20).reshape(20, 1), Tensor.arange(150).reshape(1, 150)
    one = (columns >= rows * 7) & (columns <= rows * 7)
    y = by_hand(*of((q, k, v)), lambda x: one.where(x, -float("inf")))
    assert torch.equal(torch.tensor(y.float().numpy()), v[:, :, torch.arange(20) * 7].float())


# **** symbolic ****

def step(q: Tensor, cache: Tensor, start: object, window: int | None = None) -> Tensor:
    """Rows at start, start + 1, … over a cache [2, 1, H_kv, capacity, D]."""
    rows = q.shape[2]
    end = start + rows
    k, v = cache[0, :, :, :end], cache[1, :, :, :end]
    x = q.reshape(1, 2, 2, rows, 64) @ k.unsqueeze(2).transpose(-1, -2) * 0.125
    r, c = Tensor.arange(rows).reshape(rows, 1) + start, Tensor.arange(end).reshape(1, end)
    mask = c <= r if window is None else (c <= r) & (c > r - window)
    return mask.where(x, -float("inf")).softmax(-1) @ v.unsqueeze(2)


@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("rows", [1, 6])
def test_a_captured_step_serves_every_start(rows: int, window: int | None):
    """Beyond what is written the cache is uninitialised: reading it would be found."""
    k, v = made(kv=2, keys=120)[1:]
    cache = Tensor.empty(2, 1, 2, 200, 64, dtype=BF16, device=DEVICE).contiguous()
    cache[:, :, :, :120].assign(stored(torch.stack([k, v]))).realize()
    @TinyJit
    def run(q: Tensor, start: object) -> Tensor: return step(q, cache, start, window).realize()
    for i, start in enumerate((3, 0, 57, 95, 31)):
        q = normal(1, 4, rows, 64, seed=i)
        y = run(stored(q), Variable("start", 0, 110).bind(start))
        end = start + rows
        bounds = seen(rows, end, lambda r, c, start=start: (c <= r + start) & (
            c > r + start - (window or 1000)))
        close(torch.tensor(y.float().numpy()).double().reshape(1, 4, rows, 64),
              (q, k[:, :, :end], v[:, :, :end]), bounds, BF16)


@pytest.mark.slow
@pytest.mark.sampled(1)
@BOTH
def test_rows_and_start_that_vary():
    """Prefill in pieces: s_q, s_kv and start are all arguments."""
    q, k, v = made(heads=4, kv=2, rows=48, keys=120)
    cache, rows = stored(torch.stack([k, v])), stored(q)
    for count, start in ((1, 0), (48, 70), (17, 3), (33, 64)):
        n, at = Variable("n", 1, 48).bind(count), Variable("start", 0, 72).bind(start)
        y = step(rows[:, :, :n], cache, at).contiguous()
        (spec,) = [kernel.spec for kernel in explain(y).kernels if kernel.template]
        assert spec.symbolic == ("s_q", "s_kv", "start")
        got = torch.tensor(y[:, :, :, :count].float().numpy()).double().reshape(1, 4, count, 64)
        end = start + count
        close(got, (q[:, :, :count], k[:, :, :end], v[:, :, :end]),
              seen(count, end, lambda r, c, start=start: c <= r + start), BF16)


# **** what shares ****

@pytest.mark.slow
def test_training_is_as_without_attention():
    """Gradients use what is between the products: nothing is matched, and nothing is wrong."""
    operands = made(rows=16, keys=24)
    def graph() -> list[Tensor]:
        q, k, v = of(operands)
        y = by_hand(q, k, v)
        return [y, *(y.float() * y.float()).sum().gradient(q, k, v)]
    ours = graph()
    assert not any(isinstance(kernel.spec, AttentionSpec) for kernel in explain(*ours).kernels)
    Tensor.realize(*ours)
    with disabled():
        theirs = graph()
        Tensor.realize(*theirs)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one.float().numpy(), other.float().numpy(), rtol=0.05, atol=0.02)


def test_two_layers_one_after_the_other():
    """The result of one attention is an operand of the next."""
    operands = made(rows=40, keys=40)
    q, k, v = of(operands)
    first = q.scaled_dot_product_attention(k, v)
    second = first.scaled_dot_product_attention(k, v)
    kernels = explain(second).kernels
    assert [isinstance(kernel.spec, AttentionSpec) for kernel in kernels] == [True, True]
    between = torch.tensor(q.scaled_dot_product_attention(k, v).float().numpy()).bfloat16()
    close(torch.tensor(second.float().numpy()).double(), (between, *operands[1:]), scaled, BF16)
