"""DEV=CPU: gradients of attention by flash kernels, forward and backward, against float64; a training
step; and attention within documents, each to the bit as if it were alone."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType

from tests.emu.models.test_paged_llama import trained as llama
from tests.support.cpu.cpu_backward_case import here
from tests.support.patterns.documents_case import Documents, bounds
from tests.support.patterns.training_case import (
    BF16,
    F16,
    F32,
    HIDDEN,
    Scores,
    Three,
    attended,
    causal,
    largest,
    made,
    near,
    normal,
    scaled,
    seen,
    specs,
    stored,
    templates,
)
from tinygrad_nv import Context, Tensor, TinyJit, dtypes, explain
from tinygrad_nv.cpu.attention import flash
from tinygrad_nv.cpu.attention.backward import kernel as backward
from tinygrad_nv.cpu.kernel import CPUKernel
from tinygrad_nv.functional import document_attention, scaled_dot_product_attention
from tinygrad_nv.patterns.attention.named import FlashAttention, attend
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.attention.backward_spec import BackwardSpec
from tinygrad_nv.tile.attention.dropout import keeps
from tinygrad_nv.tile.attention.spec import AttentionSpec

DTYPES = pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
SEED = np.array([0x9E3779B9, 17], np.uint32)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels of ours."""
    monkeypatch.setenv("NV_CPU", "1")


def held(x: torch.Tensor, dtype: DType = F32) -> Tensor: return stored(x, "CPU", dtype)


def trained(operands: Three, attention: Attention, scores: Scores, dtype: DType = F32,
            seed: int = 9) -> tuple[AttentionSpec, BackwardSpec]:
    """Gradients of an attention's three operands, held against float64; the specs of its two kernels."""
    q, k, v = (held(x, dtype) for x in operands)
    grad = normal(*operands[0].shape[:3], operands[2].shape[-1], seed=seed, dtype=dtype)
    wanted = attention(q, k, v).gradient(q, k, v, gradient=held(grad, dtype))
    assert {"flash", "flash_backward"} <= set(templates(*wanted))
    found = specs(*wanted)
    Tensor.realize(*wanted)
    near(wanted, operands, scores, grad)
    return found


def in_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.scaled_dot_product_attention(k, v, is_causal=True, enable_gqa=True)


@pytest.mark.sampled(1)
@DTYPES
def test_causal_with_heads_that_share_keys(dtype: DType):
    forward, _ = trained(made(b=2, heads=4, rows=150, dtype=dtype), in_order, causal(150, 150), dtype)
    assert forward.band.last == 0
    assert forward.batch[2] == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [1, 40])
def test_all_see_all(rows: int):
    """Query heads of a key head are rows of one matrix where there is one row of each."""
    trained(made(heads=4, rows=rows, d=24, d_v=40), lambda q, k, v: q.scaled_dot_product_attention(
        k, v, enable_gqa=True), scaled(24))


def test_soft_cap_scale_and_window():
    def near_by(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor: return ((r - c).abs() < 20) & (c <= r)
    mask = seen(100, 150, near_by)
    def scores(x: torch.Tensor) -> torch.Tensor:
        return torch.where(mask(x) == HIDDEN, HIDDEN, 5 * torch.tanh(x * 0.3 / 5))
    forward, _ = trained(made(rows=100, dtype=F32), lambda q, k, v: scaled_dot_product_attention(
        q, k, v, is_causal=True, window=20, scale=0.3, softcap=5), scores)
    assert (forward.band.first, forward.band.last) == (-19, 0)


@pytest.mark.sampled(1)
@DTYPES
def test_masks_in_memory(dtype: DType):
    """Some rows see nothing."""
    values = normal(2, 1, 40, 150, seed=5)
    values[0, 0, 30:] = -1
    mask = Tensor((values > 0).numpy(), device="CPU").contiguous().realize()
    trained(made(b=2, dtype=dtype), lambda q, k, v: q.scaled_dot_product_attention(k, v, attn_mask=mask),
            lambda x: torch.where(values > 0, x / 32**0.5, HIDDEN), dtype)


def test_a_mask_of_floats_and_its_gradient():
    operands, values = made(heads=4, dtype=F32), normal(4, 40, 150, seed=5, dtype=F32)
    bias = held(values)
    def biased(x: torch.Tensor) -> torch.Tensor: return x / 32**0.5 + values.to(x.dtype)
    trained(operands, lambda q, k, v: q.scaled_dot_product_attention(k, v, bias, enable_gqa=True), biased)
    q, k, v = map(held, operands)
    grad = normal(*operands[0].shape, seed=9, dtype=F32)
    y = q.scaled_dot_product_attention(k, v, bias, enable_gqa=True)
    (of_bias,) = y.gradient(bias, gradient=held(grad))
    wide = values.double().requires_grad_()
    exact = attended(*(x.double() for x in operands), lambda x: x / 32**0.5 + wide)
    (right,) = torch.autograd.grad(exact, wide, grad.double())
    assert (torch.tensor(of_bias.numpy()).double() - right).abs().max() <= 2.0**-18 * right.abs().max()


@pytest.mark.slow
def test_gradients_that_repeat_or_lie_otherwise():
    """As those of `(out * scale).sum()`; and where a head's elements are not side by side."""
    operands = made(dtype=F32)
    q, k, v = map(held, operands)
    for grad, whole in ((normal(1, 1, 1, 1, dtype=F32), lambda x: x.expand(1, 2, 40, 32)),
                        (normal(1, 32, 40, 2, dtype=F32), lambda x: x.permute(0, 3, 2, 1))):
        wanted = q.scaled_dot_product_attention(k, v).gradient(q, k, v, gradient=whole(held(grad)))
        # float32 alone rounds here: in another order than torch's
        near(wanted, operands, scaled(), whole(grad).contiguous(), c=4)


def test_nothing_of_all_pairs_is_in_memory():
    q, k, v = map(held, made(heads=1, kv=1, rows=128, keys=128, d=16, dtype=F32))
    y = in_order(q, k, v)
    wanted = [y, *y.gradient(q, k, v, gradient=q)]
    assert set(templates(*wanted)) == {"flash", None, "flash_backward"}
    assert largest(*wanted) < 128 * 128


def test_under_jit():
    @TinyJit
    def step(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
        wanted = in_order(q, k, v).gradient(q, k, v, gradient=grad)
        Tensor.realize(*wanted)
        return wanted
    for seed in range(4):
        operands = made(rows=20, keys=70, dtype=F32, seed=seed)
        grad = normal(1, 2, 20, 32, seed=seed + 9, dtype=F32)
        near(step(*map(held, operands), held(grad)), operands, causal(20, 70), grad)


@pytest.mark.slow
def test_the_gradient_of_a_gradient():
    """It is made of the function's body."""
    operands, grad = made(rows=20, keys=24, d=16, dtype=F32), normal(1, 2, 20, 16, seed=9, dtype=F32)
    q, k, v = map(held, operands)
    (dq,) = in_order(q, k, v).gradient(q, gradient=held(grad))
    twice = dq.square().sum().gradient(q, k, v)
    leaves = [x.double().requires_grad_() for x in operands]
    y = attended(*leaves, causal(20, 24, 16))
    (exact,) = torch.autograd.grad(y, leaves[:1], grad.double(), create_graph=True)
    for one, right in zip(twice, torch.autograd.grad(exact.square().sum(), leaves), strict=True):
        got = torch.tensor(one.numpy()).double()
        assert (got - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.slow
def test_attention_of_ours_can_be_switched_off(monkeypatch: pytest.MonkeyPatch):
    operands, grad = made(rows=20, keys=24, dtype=F32), normal(1, 2, 20, 32, seed=9, dtype=F32)
    for name in ("NV_ATTENTION", "NV_CPU"):
        monkeypatch.setenv(name, "0")
        q, k, v = map(held, operands)
        wanted = in_order(q, k, v).gradient(q, k, v, gradient=held(grad))
        assert not {"flash", "flash_backward"} & set(templates(*wanted))
        near(wanted, operands, causal(20, 24), grad)
        monkeypatch.setenv(name, "1")


# **** dropout ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_dropout(causal: bool, dtype: DType):
    """The elements that the seed says, forward and backward; query heads that share keys are told apart."""
    operands = made(2, 4, 2, 70, 90, dtype=dtype)
    q, k, v = (held(x, dtype) for x in operands)
    grad = normal(2, 4, 70, 32, seed=9, dtype=dtype)
    y = attend(FlashAttention(causal, kept=180), q, k, v, None, Tensor(SEED, device="CPU").realize())
    wanted = [y, *y.gradient(q, k, v, gradient=held(grad, dtype))]
    forward, backward = specs(*wanted)
    assert (forward.kept, backward.forward.kept) == (180, 180)
    Tensor.realize(*wanted)
    leaves = [x.double().requires_grad_() for x in operands]
    wide = [x.repeat_interleave(4 // x.shape[1], 1) for x in leaves]
    s = wide[0] @ wide[1].transpose(-1, -2) / 32**0.5
    if causal: s = torch.where(torch.ones_like(s).tril().bool(), s, -torch.inf)
    matrix, row, key = (x.astype(np.uint64) for x in np.ogrid[:8, :70, :90])
    found = torch.from_numpy(keeps(row, key, matrix, SEED.astype(np.uint64), 180)).view(s.shape)
    out = (s.softmax(-1) * found * (256 / 180)) @ wide[2]
    right = (out.detach(), *torch.autograd.grad(out, leaves, grad.double()))
    for mine, exact in zip(wanted, right, strict=True):
        wrong = (torch.from_numpy(mine.float().numpy()).double() - exact).abs().max()
        assert wrong < (1e-6 if dtype == F32 else 0.02) * exact.abs().max()


@pytest.mark.slow
def test_dropout_of_the_tensor_method():
    """Forward and backward drop the same: the result is linear in v, so ⟨dv, v⟩ = ⟨grad, out⟩."""
    q, k, v = map(held, made(1, 2, 2, 70, 70, dtype=F32))
    grad = held(normal(1, 2, 70, 32, seed=9, dtype=F32))
    with Context(TRAINING=1):
        y = q.scaled_dot_product_attention(k, v, is_causal=True, dropout_p=0.3)
        (dv,) = y.gradient(v, gradient=grad)
        assert specs(y, dv)[0].kept == 179
        Tensor.realize(y, dv)
    sums = [(a * b).sum().item() for a, b in ((dv, v), (grad, y))]
    assert abs(sums[0] - sums[1]) < 1e-5 * (dv * v).abs().sum().item()


# **** a model ****

@pytest.mark.slow
def test_a_step_of_a_language_model(monkeypatch: pytest.MonkeyPatch):
    """Its loss and gradients are those of tinygrad's kernels."""
    _, loss, gradients = llama("CPU", dtypes.float32)
    found = [type(kernel.spec) for kernel in explain(loss, *gradients).kernels]
    assert (found.count(AttentionSpec), found.count(BackwardSpec)) == (2, 2)
    ours = [each.numpy() for each in (loss, *gradients)]
    monkeypatch.setenv("NV_CPU", "0")
    _, loss, gradients = llama("CPU", dtypes.float32)
    assert {kernel.spec for kernel in explain(loss, *gradients).kernels} == {None}
    for mine, theirs in zip(ours, (loss, *gradients), strict=True):
        right = theirs.numpy()
        assert np.abs(mine - right).max() <= 2e-5 * np.abs(right).max()


# **** documents ****


C = 4.0     # of the error of plain float32
LENGTHS = [[100, 1, 1, 1, 130], [7] * 20, [260], []]    # within a tile and beyond it, tiny ones; padding
CASES: dict[str, dict[str, Any]] = {
    "causal": {}, "full": {"causal": False}, "window": {"window": 9},
    "both sides": {"causal": False, "window": 5},
    "softcap and scale": {"softcap": 2.0, "scale": 0.3, "window": 40}}


def values(tensors: list[Tensor]) -> list[np.ndarray]:
    Tensor.realize(*tensors)
    return [x.float().numpy() for x in tensors]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("how", CASES.values(), ids=CASES)
def test_gradients(how: dict[str, Any], sinks: bool) -> None:
    """At most C times as far from float64 as plain float32 is, or C units of the largest; the gradient of
    sinks, which tinygrad sums over all rows, or C units of the sum of magnitudes."""
    case = Documents.of(LENGTHS, 260, d=24, sinks=sinks)
    wanted, plain = case.plain(torch.float64, **how), case.plain(torch.float32, **how)
    made = case.ours("CPU", **how)
    assert [name for each in explain(*made).kernels if "flash" in (name := each.template or "")] == \
        ["flash", "flash_backward"]
    for got, exact, rough in zip(values(made), wanted, plain, strict=True):
        size = exact.abs().max()
        if got.ndim == 1: size, exact, rough = exact.abs().sum(), exact.sum((0, 2, 3)), rough.sum((0, 2, 3))
        most = C * max((rough - exact).abs().max().item(), 2**-24 * size.item())
        assert np.abs(got - exact.numpy()).max() <= most


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [dtypes.bfloat16, dtypes.float16], ids=str)
def test_halves(dtype: DType) -> None:
    """Within a unit of the largest, to which results are rounded, and what rounding p costs."""
    case = Documents.of(LENGTHS, 260, dtype=dtype)
    unit = {dtypes.bfloat16: 2**-8, dtypes.float16: 2**-11}[dtype]
    for got, exact in zip(values(case.ours("CPU")), case.plain(torch.float64), strict=True):
        assert np.abs(got - exact.numpy()).max() <= 2 * unit * exact.abs().max()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)], ids=["many heads", "one head"])
def test_a_document_is_as_if_it_were_alone(heads: tuple[int, int]) -> None:
    """To the bit; and all one document is the dense kernel."""
    case = Documents.of([[300, 2, 83]], 400, *heads)
    made = values(case.ours("CPU"))
    for at, n in ((0, 300), (300, 2), (302, 83)):
        q, k, v, grad = (Tensor(x[:, :, at:at + n].float().numpy()).realize() for x in case.arrays)
        out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        alone = values([out, *out.gradient(q, k, v, gradient=grad)])
        for got, wanted in zip(made, alone, strict=True):
            np.testing.assert_array_equal(got[:, :, at:at + n], wanted)
    for got in made: assert not got[:, :, 385:].any()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads", [(4, 2), (1, 1)], ids=["many heads", "one head"])
def test_garbage_stays_where_it_is(heads: tuple[int, int]) -> None:
    """NaN in padding and in another document reaches nothing: no bit differs."""
    case = Documents.of([[9, 40, 3, 100], [5]], 200, *heads)
    wanted, poisoned = values(case.ours("CPU", causal=False)), [x.clone() for x in case.arrays]
    for x in poisoned: x[0, :, 9:49] = x[0, :, 152:] = x[1, :, 5:] = torch.nan
    made = values(replace(case, arrays=tuple(poisoned)).ours("CPU", causal=False))
    for got, clean in zip(made, wanted, strict=True):
        for row, columns in ((0, slice(0, 9)), (0, slice(49, None)), (1, slice(None))):
            np.testing.assert_array_equal(got[row, :, columns], clean[row, :, columns])
        assert np.isnan(got[0, :, 9:49]).all()
        assert not got[0, :, 152:].any()
        assert not got[1, :, 5:].any()


def test_bounds_that_are_wrong_touch_nothing_else() -> None:
    """Of any numbers: the kernels end, and write their results alone."""
    case = Documents.of([[64]], 64)
    q, k, v, grad = (Tensor(x.float().numpy()).realize() for x in case.arrays)
    for seed in range(4):
        first, end = np.random.default_rng(seed).integers(-100, 200, (2, 1, 64)).astype(np.int32)
        out = document_attention(q, k, v, Tensor(first), Tensor(end))
        for each in values([out, *out.gradient(q, k, v, gradient=grad)]): assert each.shape[2] == 64


def specs_of(case: Documents) -> tuple[AttentionSpec, BackwardSpec]:
    found = [each.spec for each in explain(*case.ours("CPU")).kernels
             if "flash" in (each.template or "")]
    assert isinstance(found[0], AttentionSpec)
    assert isinstance(found[1], BackwardSpec)
    return found[0], found[1]


@pytest.mark.slow
def test_no_bit_depends_on_the_parts() -> None:
    """Several numbers of them, in any order: key heads, and blocks."""
    case = Documents.of([[100, 1, 29, 1, 70], [150]], 210)
    forward, gradient = specs_of(case)
    assert forward.documents
    assert gradient.forward.documents
    inputs = [x.float().numpy() for x in case.arrays]
    q, k, v, grad = (np.ascontiguousarray(x) for x in inputs)
    first, end = bounds(case.lengths, 210)
    wanted: list[np.ndarray] = []
    for parts in (1, 3, 7):
        def launched(kernel: CPUKernel, *arrays: np.ndarray, order: range = range(parts)) -> None:
            load(kernel)(*(x.reshape(-1).view(np.uint8) for x in arrays), order=order[::-1])
        out, logs = np.full_like(q, np.nan), np.full(q.shape[:3], np.nan, np.float32)
        how = replace(flash.default(forward, here()), parts=parts)
        launched(flash.build(forward, how), out, logs, q, k, v, first, end)
        delta, made = (grad * out).sum(-1), [np.full_like(x, np.nan) for x in (q, k, v)]
        other = replace(backward.default(gradient, here()), parts=parts)
        launched(backward.build(gradient, other), *made, q, k, v, grad, logs, delta, first, end)
        found = [out, logs, *made]
        assert not any(np.isnan(x).any() for x in found)
        for got, same in zip(found, wanted or found, strict=True): np.testing.assert_array_equal(got, same)
        wanted = wanted or found
