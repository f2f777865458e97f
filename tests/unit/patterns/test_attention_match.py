"""Attention in graphs: which spec is found, and why none is. Nothing runs."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from tinygrad.dtype import DType, dtypes

from tests.support.patterns.attention_graph import (
    BF16,
    CAUSAL,
    F16,
    F32,
    SCALED,
    B,
    D,
    H,
    S,
    T,
    by_hand,
    found,
    left,
    of,
    operands,
    positions,
    scores,
    use,
)
from tinygrad_nv import Tensor, disabled, explain
from tinygrad_nv.tile.attention.spec import FULL, AttentionSpec
from tinygrad_nv.tile.expression import show
from tinygrad_nv.tile.gemm.spec import GemmSpec


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None: use(monkeypatch)


# **** spellings ****

def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = q.matmul(k.transpose(-1, -2), dtype=F32) / 8
    return x.softmax(-1).cast(v.dtype) @ v


def cast_operands(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = q.float() @ k.float().transpose(-1, -2) * 0.125
    return x.softmax(-1).cast(v.dtype) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (Tensor.einsum("bhtd,bhsd->bhts", q, k) * 0.125).softmax(-1)
    return Tensor.einsum("bhts,bhsd->bhtd", w, v).contiguous()


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = (k @ q.transpose(-1, -2) * 0.125).softmax(-2)
    return w.transpose(-1, -2) @ v


def unnormalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = (q @ k.transpose(-1, -2)).float() * 0.125
    e = (x - x.max(-1, keepdim=True)).exp()
    return (e.cast(v.dtype) @ v) / e.sum(-1, keepdim=True)


def unshifted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = ((q @ k.transpose(-1, -2)).float() * 0.125).exp()
    return (e.cast(v.dtype) @ v) / e.sum(-1, keepdim=True)


def reciprocal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.transpose(-1, -2) * 0.125).exp()
    return (e * e.sum(-1, keepdim=True).reciprocal()) @ v


def base_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = ((q @ k.transpose(-1, -2)).float() * (0.125 / math.log(2))).exp2()
    return (e / e.sum(-1, keepdim=True)).cast(v.dtype) @ v


def scaled_after_the_maximum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    x = (q @ k.transpose(-1, -2)).float()
    e = ((x - x.max(-1, keepdim=True)) * 0.125).exp()
    return (e / e.sum(-1, keepdim=True)).cast(v.dtype) @ v


def flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All heads of the batch as one dimension."""
    q, k, v = (x.reshape(-1, x.shape[-2], D) for x in (q, k, v))
    return by_hand(q, k, v)


def library(q: Tensor, k: Tensor, v: Tensor) -> Tensor: return q.scaled_dot_product_attention(k, v)


def contiguous_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """CONTIGUOUS of a value that is no Tensor's any more."""
    return by_hand(q, k, v).contiguous()


SPELLINGS = [by_hand, in_float32, cast_operands, einsum, keys_first, unnormalised, unshifted, reciprocal,
             base_two, scaled_after_the_maximum, flat, library, contiguous_scores]


@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("spelled", SPELLINGS, ids=lambda f: f.__name__)
def test_however_it_is_written(spelled: Callable[[Tensor, Tensor, Tensor], Tensor], dtype: DType):
    spec = found(spelled(*operands(dtype=dtype)))
    assert (spec.s_q, spec.s_kv, spec.d, spec.d_v, spec.matrices) == (T, S, D, D, B * H)
    assert (spec.band, spec.symbolic, spec.q.dtype) == (FULL, (), dtype)
    score = show(spec.score)
    assert score == "(sum * 0.125)" or score.startswith("(sum * 0.125"), score


def test_the_result_is_what_the_graph_makes_of_it():
    q, k, v = operands()
    assert found(by_hand(q, k, v)).out.dtype == BF16
    first, second = explain(by_hand(q, k, v).float()).kernels
    assert isinstance(first.spec, AttentionSpec)
    assert (first.spec.out.dtype, second.template) == (BF16, None)
    w = (q @ k.transpose(-1, -2) * 0.125).softmax(-1)
    assert found(w.matmul(v, dtype=F32)).out.dtype == F32


def test_a_result_goes_where_it_is_stored():
    """[B, T, H · D], without a kernel that turns it."""
    q, k, v = operands()
    y = by_hand(q, k, v).transpose(1, 2).reshape(B, T, H * D).contiguous()
    spec = found(y)
    assert (spec.out.row, spec.out.batch) == (H * D, (T * H * D, D, 0))


# **** heads ****

def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.scaled_dot_product_attention(k, v, is_causal=True, enable_gqa=True)


def expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.reshape(B, 2, 1, S, D).expand(B, 2, 2, S, D).reshape(B, H, S, D) for x in (k, v))
    return q.scaled_dot_product_attention(k, v, is_causal=True)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As models/llama.py has it."""
    x = q.reshape(B, 2, 2, T, D).matmul(k.unsqueeze(2).transpose(-1, -2), dtype=F32) * 0.125
    rows, columns = positions()
    x = (columns <= rows).where(x, -float("inf"))
    return (x.softmax(-1).cast(v.dtype) @ v.unsqueeze(2)).reshape(B, H, T, D)


@pytest.mark.parametrize("spelled", [repeated, expanded, grouped], ids=lambda f: f.__name__)
def test_query_heads_of_a_key_head(spelled: Callable[[Tensor, Tensor, Tensor], Tensor]):
    spec = found(spelled(*operands(heads=2)))
    assert (spec.s_q, spec.band, spec.score) == (T, CAUSAL, SCALED)
    assert (spec.matrices, spec.batch[2], spec.k.batch[2], spec.v.batch[2]) == (B * H, 2, 0, 0)
    assert spec.q.batch[2] == T * D


def test_one_key_head():
    q, k, v = operands(heads=1)
    spec = found(q.scaled_dot_product_attention(k, v, is_causal=True))
    assert (spec.s_q, spec.batch, spec.k.batch) == (T, (1, B, H), (0, S * D, 0))


def test_rows_beside_heads():
    """[B, T, H, D], as projections make it."""
    q, k, v = of(B, T, H, D), of(B, S, 2, D), of(B, S, 2, D)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    spec = found(q.scaled_dot_product_attention(k, v, is_causal=True, enable_gqa=True))
    assert (spec.batch, spec.q.row, spec.k.row) == ((B, 2, 2), H * D, 2 * D)
    assert (spec.q.batch, spec.k.batch) == ((T * H * D, 2 * D, D), (S * 2 * D, D, 0))


def test_a_slice_of_a_cache_is_read_where_it_lies():
    cache = of(2, B, H, 128, D)
    k, v = cache[0, :, :, 8:8 + S], cache[1, :, :, 8:8 + S]
    spec = found(by_hand(of(B, H, T, D), k, v))
    assert (spec.k.offset, spec.v.offset) == (8 * D, (B * H * 128 + 8) * D)
    assert spec.k.batch[1] == 128 * D


def test_projections_of_one_matrix():
    """q, k and v side by side in one tensor."""
    qkv = of(B, T, 3, H, D)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    spec = found(by_hand(q, k, v))
    assert (spec.q.row, spec.k.offset, spec.v.offset) == (3 * H * D, H * D, 2 * H * D)


def test_keys_that_lie_by_columns_are_copied():
    q, _, v = operands()
    kernels = explain(by_hand(q, of(B, H, D, S).transpose(-1, -2), v)).kernels
    assert [isinstance(kernel.spec, AttentionSpec) for kernel in kernels] == [False, True]


def test_a_result_that_lies_sideways_is_turned():
    """einsum sums in an order of its own, and leaves a view of it."""
    q, k, v = operands()
    w = (Tensor.einsum("bhtd,bhsd->bhts", q, k) * 0.125).softmax(-1)
    first, second = explain(Tensor.einsum("bhts,bhsd->bhtd", w, v)).kernels
    assert isinstance(first.spec, AttentionSpec)
    assert second.template is None


def test_widths_that_differ():
    q, k, _ = operands()
    spec = found(by_hand(q, k, of(B, H, S, 32)))
    assert (spec.d, spec.d_v, spec.out.row) == (64, 32, 32)


# **** what is left ****

def test_weights_that_are_used_elsewhere():
    q, k, v = operands()
    w = (q @ k.transpose(-1, -2) * 0.125).softmax(-1)
    assert "the weights are used elsewhere too: a tensor holds them" in left(w @ v, w)
    assert "q kᵀ is used elsewhere too" in left(*(lambda x: (x.softmax(-1).cast(BF16) @ v, x.sum()))(
        q.matmul(k.transpose(-1, -2), dtype=F32)))


def test_operands_of_float32():
    assert found(by_hand(*operands(dtype=F32))).q.dtype == F32
    q, k, v = operands()
    x = (q.matmul(k.transpose(-1, -2), dtype=F32) * 0.125).softmax(-1)
    assert "v alone in float32" in left(x @ v.float())


def test_operands_of_float64():
    q, k, v = operands(dtype=dtypes.float64)
    assert "scores of double" in left((q @ k.transpose(-1, -2)).softmax(-1) @ v)


def test_heads_that_are_too_wide():
    q, k, v = of(1, 2, 16, 320), of(1, 2, 16, 320), of(1, 2, 16, 320)
    assert "heads of 320 and 320 elements" in left(by_hand(q, k, v))


def test_sums_that_are_others():
    x, v = scores()
    e, other = x.exp(), (x * 2).exp()
    assert left((e / other.sum(-1, keepdim=True)).cast(BF16) @ v) != ""
    assert "not normalised" in left(e.cast(BF16) @ v)
    half = e / e[..., :S // 2].sum(-1, keepdim=True)
    assert left(half.cast(BF16) @ v) != ""
    turned = e / e.sum(-1, keepdim=True).flip(-2)       # each row by another's
    assert left(turned.cast(BF16) @ v) != ""


def test_a_softmax_over_rows_is_none():
    q, k, v = operands()
    assert left((q @ k.transpose(-1, -2)).softmax(-2) @ v) != ""


def test_gradients_share_the_forward_pass():
    """Backward reads the weights: both directions are products, as without attention."""
    q, k, v = operands()
    y = by_hand(q, k, v)
    grads = y.float().sum().gradient(q, k, v)
    kernels = explain(y, *grads).kernels
    assert not any(isinstance(kernel.spec, AttentionSpec) for kernel in kernels)
    assert sum(isinstance(kernel.spec, GemmSpec) for kernel in kernels) >= 4


def test_the_setting_leaves_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_ATTENTION", "0")
    kernels = explain(by_hand(*operands())).kernels
    assert sum(isinstance(kernel.spec, GemmSpec) for kernel in kernels) == 2


def test_what_is_refused_is_as_without_us(monkeypatch: pytest.MonkeyPatch):
    """The graph that reaches the search for products is the very same."""
    q, k, v = of(1, 2, 16, 320), of(1, 2, 16, 320), of(1, 2, 16, 320)
    ours = explain(by_hand(q, k, v)).kernels
    monkeypatch.setenv("NV_ATTENTION", "0")
    theirs = explain(by_hand(q, k, v)).kernels
    assert [k.name for k in ours] == [k.name for k in theirs]


@pytest.mark.slow
def test_devices_that_are_not_ours_are_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU", "0")
    q, k, v = (of(1, 2, 16, D, device="CPU") for _ in range(3))
    assert all(kernel.template is None for kernel in explain(by_hand(q, k, v)).kernels)
    with disabled():
        assert all(kernel.template is None for kernel in explain(by_hand(*operands())).kernels)


def test_what_explain_tells():
    q, k, v = operands(heads=2)
    (kernel,) = explain(q.scaled_dot_product_attention(k, v, enable_gqa=True)).kernels
    assert kernel.template == "flash_mma"
    assert kernel.reason.startswith(f"1x{T}x{S}, 8 heads of 4, d 64, bf16, full, (sum * 0.125): flash_mma")
    assert kernel.flops == 4 * B * H * T * S * D
    assert kernel.bytes == 2 * D * (2 * B * H * T + 2 * B * 2 * S)


