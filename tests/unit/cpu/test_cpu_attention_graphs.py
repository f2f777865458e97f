"""Attention in graphs on the CPU: which spec is found and by which template, and results against float64
within twice the error of float32 arithmetic of the same dtypes."""
from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from tinygrad.dtype import DType

from tests.support.patterns.attention_graph import attended, by_hand
from tinygrad_nv import Tensor, TinyJit, Variable, dtypes, explain
from tinygrad_nv.cpu.attention.schedules import CPUFlash
from tinygrad_nv.functional import scaled_dot_product_attention, varlen_attention
from tinygrad_nv.tile.attention.spec import AttentionSpec, Band

F32, BF16, F16 = dtypes.float32, dtypes.bfloat16, dtypes.float16
TORCH = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16}
UNIT = {F32: 2.0**-24, BF16: 2.0**-8, F16: 2.0**-11}
B, H, T, S, D = 2, 4, 80, 96, 64  # more rows than a decode kernel takes
CAUSAL = Band(last=0)


def of(*shape: int, dtype: DType = F32, seed: int = 0) -> Tensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return Tensor(values, device="CPU").cast(dtype).realize()


def operands(heads: int = H, dtype: DType = F32, rows: int = T, keys: int = S) -> tuple[Tensor, ...]:
    return of(B, H, rows, D, dtype=dtype), of(B, heads, keys, D, dtype=dtype, seed=1), \
        of(B, heads, keys, D, dtype=dtype, seed=2)


def found(*tensors: Tensor) -> AttentionSpec:
    """The spec of the one kernel that makes the tensors, by our template."""
    (kernel,) = explain(*tensors).kernels
    assert isinstance(kernel.spec, AttentionSpec), kernel.reason
    assert isinstance(kernel.schedule, CPUFlash)
    assert kernel.template == "flash"
    return kernel.spec


def wide(x: Tensor) -> torch.Tensor: return torch.from_numpy(x.float().numpy()).double()


def near(out: Tensor, dtype: DType, *given: Tensor, mask: torch.Tensor | None = None, **how: Any) -> None:
    """Twice the error of scores and softmax in float32 with weights of the dtype, the result's rounding, and
    that of scores where a row has few columns."""
    q, k, v = map(wide, given)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, **how)
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(D)
    if how.get("is_causal"):
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -torch.inf)
    if mask is not None: scores = scores + mask.float()
    plain = (scores.softmax(-1).to(TORCH[dtype]).float() @ v.float()).double()
    top = scores[scores > -1e30].abs().max()
    bound = 2 * (plain - exact).abs().max() + (UNIT[dtype] + 2.0**-23 * (1 + top)) * exact.abs()
    assert ((wide(out) - exact).abs() <= bound).all()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_method_and_by_hand(causal: bool, dtype: DType):
    given = operands(2, dtype, S)
    out = given[0].scaled_dot_product_attention(*given[1:], is_causal=causal, enable_gqa=True)
    spec = found(out)
    assert (spec.matrices, spec.s_q) == (B * H, S)
    assert (spec.band, spec.q.dtype) == (CAUSAL if causal else Band(), dtype)
    near(out, dtype, *given, is_causal=causal)
    q, k, v = operands(dtype=dtype)
    assert found(by_hand(q, k, v)).s_kv == S


def test_masks():
    q, k, v = operands()
    keys = Tensor(np.arange(S) < 70, device="CPU").realize()
    mask = of(B, 1, T, S, seed=3)
    out = q.scaled_dot_product_attention(k, v, attn_mask=mask)
    found(out)
    near(out, F32, q, k, v, mask=wide(mask))
    hidden = q.scaled_dot_product_attention(k, v, attn_mask=keys.reshape(1, 1, 1, S).expand(B, 1, T, S))
    found(hidden)
    near(hidden, F32, q, k, v, mask=torch.where(torch.arange(S) < 70, 0.0, -torch.inf).double().expand(T, S))


def test_the_mask_of_transformers():
    """−3.4e38 where a row may not look, added; causal with a cache of 16 tokens."""
    q, k, v = operands()
    at, column = torch.arange(T)[:, None] + S - T, torch.arange(S)
    added = torch.where(column <= at, 0.0, torch.finfo(torch.float32).min)[None, None]
    mask = Tensor(added.numpy(), device="CPU").realize()
    scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(D)) + mask
    out = attended(scores, v)
    found(out)
    near(out, F32, q, k, v, mask=added.double())


def test_rows_of_a_cache_are_arguments():
    """A chunk of a prompt: where it stands varies, the kernel is one."""
    cache = of(2, B, 2, 128, D)
    begin = Variable("begin", 0, 40)

    @TinyJit
    def step(q: Tensor, at: Any) -> Tensor:
        k, v = (cache[i][:, :, :at + T] for i in range(2))
        row = Tensor.arange(T).reshape(T, 1) + at
        mask = Tensor.arange(128).reshape(1, 128)[:, :at + T] <= row
        return q.scaled_dot_product_attention(k, v, attn_mask=mask, enable_gqa=True).realize()
    for place in (0, 3, 40, 7):
        q = of(B, H, T, D, seed=place)
        keys = cache[:, :, :, :place + T].contiguous().realize()
        row = torch.arange(T)[:, None] + place
        mask = torch.where(torch.arange(place + T) <= row, 0.0, -torch.inf).double()
        near(step(q, begin.bind(place)), F32, q, keys[0], keys[1], mask=mask)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gradients(dtype: DType):
    """The forward pass is ours, with l; what has no kernel for the gradient falls back to the body."""
    given = operands(2, dtype, S)
    loss = scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True).float().square().sum()
    made = loss.gradient(*given)
    theirs = [wide(x).requires_grad_() for x in given]
    k, v = (x.repeat_interleave(2, 1) for x in theirs[1:])
    right_out = torch.nn.functional.scaled_dot_product_attention(theirs[0], k, v, is_causal=True)
    right_out.square().sum().backward()
    for mine, right in zip(made, theirs, strict=True):
        assert right.grad is not None
        assert (wide(mine) - right.grad).abs().max() <= 40 * UNIT[dtype] * right.grad.abs().max()


def test_ragged_batches_by_name():
    lengths = [50, 0, 65, 33]
    ends = np.cumsum([0, *lengths]).astype(np.int32)
    q, k, v = of(160, H, D), of(160, 2, D, seed=1), of(160, 2, D, seed=2)
    cu = Tensor(ends, device="CPU").realize()
    out = varlen_attention(q, k, v, cu, cu, 70, 70, causal=True)
    assert found(out).total == (160, 160)
    for first, last in itertools.pairwise(ends):
        if first == last: continue
        parts = [x[int(first):int(last)].transpose(0, 1).unsqueeze(0) for x in (out, q, k, v)]
        near(*parts[:1], F32, *parts[1:], is_causal=True)
    assert (out.numpy()[ends[-1]:] == 0).all()


def test_what_is_left_says_why():
    q, k, v = (of(1, 1, 8, 300) for _ in range(3))
    kernels = explain(by_hand(q, k, v))
    assert not any(isinstance(kernel.spec, AttentionSpec) for kernel in kernels.kernels)
    assert "at most 256" in "; ".join([*(kernel.reason for kernel in kernels.kernels), *kernels.notes])


@pytest.mark.parametrize("part", ["factor", "term"])
def test_a_variable_as_a_float_in_scores(part: str):
    q, k, v = operands()
    n = Tensor(Variable("n", 1, 9).bind(3)).cast(F32)
    x = q @ k.transpose(-1, -2)
    out = attended(x * (n * 0.04) if part == "factor" else x * 0.12 + n * -0.01 * Tensor.arange(S), v)
    assert isinstance(found(out), AttentionSpec)
    scores = wide(q) @ wide(k).transpose(-1, -2) * 0.12
    if part == "term": scores += torch.arange(S) * -0.03
    np.testing.assert_allclose(out.numpy(), scores.softmax(-1) @ wide(v), rtol=1e-5, atol=1e-5)


def test_scores_in_integers_that_wrap():
    q, k, v = operands()
    places = (Tensor.arange(S) + 200).cast(dtypes.uint8)
    out = attended(q @ k.transpose(-1, -2) * 0.12 + places.cast(F32) * 0.01, v)
    scores = wide(q) @ wide(k).transpose(-1, -2) * 0.12 + (torch.arange(S) + 200) % 256 * 0.01
    np.testing.assert_allclose(out.numpy(), scores.softmax(-1) @ wide(v), rtol=1e-5, atol=1e-5)
