"""Attention in graphs: which spec is found, and why none is. Nothing runs."""
from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from tinygrad_nv import Device, Tensor, Variable, disabled, dtypes, explain
from tinygrad_nv.patterns.attention_positions import Form, fitted, linear
from tinygrad_nv.tile.attention import FULL, AttentionSpec, Band
from tinygrad_nv.tile.expression import Sum, loads, show
from tinygrad_nv.tile.spec import GemmSpec

BF16, F16, F32 = dtypes.bfloat16, dtypes.float16, dtypes.float32
B, H, T, S, D = 2, 4, 24, 40, 64
CAUSAL = Band(last=0)
SCALED = Sum() * 0.125


DEVICE = "EMU:80"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMU_ARCH", "sm_80")  # read when the device is opened
    assert Device[DEVICE].driver.properties.arch == "sm_80"


def of(*shape: int, dtype: DType = BF16, device: str | None = None) -> Tensor:
    return Tensor.empty(*shape, dtype=dtype, device=device or DEVICE)


def operands(heads: int = H, dtype: DType = BF16, rows: int = T) -> tuple[Tensor, Tensor, Tensor]:
    return of(B, H, rows, D, dtype=dtype), of(B, heads, S, D, dtype=dtype), of(B, heads, S, D, dtype=dtype)


def found(*tensors: Tensor) -> AttentionSpec:
    """The spec of the one kernel that makes the tensors."""
    (kernel,) = explain(*tensors).kernels
    assert isinstance(kernel.spec, AttentionSpec), kernel.reason
    return kernel.spec


def left(*tensors: Tensor) -> str:
    """Why there is no attention of ours, after checking that there is none."""
    lowered = explain(*tensors)
    assert not any(isinstance(kernel.spec, AttentionSpec) for kernel in lowered.kernels)
    words = [*(kernel.reason for kernel in lowered.kernels), *lowered.notes]
    return "; ".join(word for word in words if word.startswith("attention: "))


def positions(rows: int = T, columns: int = S) -> tuple[Tensor, Tensor]:
    return Tensor.arange(rows).reshape(rows, 1), Tensor.arange(columns).reshape(1, columns)


def scores(dtype: DType = BF16) -> tuple[Tensor, Tensor]:
    """Scaled scores in float32, and v."""
    q, k, v = operands(dtype=dtype)
    return (q @ k.transpose(-1, -2)).float() * 0.125, v


def attended(x: Tensor, v: Tensor) -> Tensor: return x.softmax(-1).cast(v.dtype) @ v


# **** spellings ****

def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v


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


# **** masks ****

MASKS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Band, int, int]] = {
    "causal": (lambda r, c: c <= r, CAUSAL, 0, S),
    "causal, turned": (lambda r, c: r >= c, CAUSAL, 0, S),
    "strictly before": (lambda r, c: c < r, Band(last=-1), 0, S),
    "not after": (lambda r, c: (c > r).logical_not(), CAUSAL, 0, S),
    "at the end": (lambda r, c: c <= r + (S - T), CAUSAL, S - T, S),
    "window": (lambda r, c: (c <= r) & (c > r - 7), Band(-6, 0), 0, S),
    "window by distance": (lambda r, c: (r - c >= 0) & (r - c < 7), Band(-6, 0), 0, S),
    "window at the end": (lambda r, c: (c <= r + 16) & (c > r + 9), Band(-6, 0), 16, S),
    "around": (lambda r, c: (c - r < 4) & (r - c < 4), Band(-6, 0), 3, S),
    "from": (lambda r, c: c >= r, Band(first=0), 0, S),
    "twice": (lambda r, c: (c * 2 <= r * 2 + 1), CAUSAL, 0, S),
    "keys": (lambda r, c: c < 17, FULL, 0, 17),
    "keys and causal": (lambda r, c: (c < 17) & (c <= r), CAUSAL, 0, 17),
    "in floats": (lambda r, c: c.float() <= r.float(), CAUSAL, 0, S),
    "all": (lambda r, c: c >= 0, FULL, 0, S),
}


@pytest.mark.parametrize("name", [name for name in MASKS if name != "all"])
@pytest.mark.parametrize("applied", ["where", "added", "filled"])
def test_masks_that_are_bands(name: str, applied: str):
    condition, band, start, keys = MASKS[name]
    seen = condition(*positions())
    x, v = scores()
    if applied == "where": x = seen.where(x, -float("inf"))
    elif applied == "added": x = x + seen.where(0, -float("inf"))
    else: x = x.masked_fill(seen.logical_not(), -float("inf"))
    spec = found(attended(x, v))
    assert (spec.band, spec.start, spec.s_kv) == (band, start, keys)
    assert show(spec.score) == "(sum * 0.125)"


def test_triangles_of_the_library():
    x, v = scores()
    full = Tensor.full((T, S), -float("inf"), buffer=False)
    assert found(attended(x + full.triu(1), v)).band == CAUSAL
    seen = Tensor.ones(T, S, dtype=dtypes.bool, buffer=False).tril()
    assert found(attended(seen.where(x, -float("inf")), v)).band == CAUSAL
    q, k, v = operands()
    assert found(q.scaled_dot_product_attention(k, v, is_causal=True)).band == CAUSAL


def test_a_mask_before_the_scale():
    q, k, v = operands()
    rows, columns = positions()
    x = (columns <= rows).where((q @ k.transpose(-1, -2)).float(), -float("inf")) * 0.125
    spec = found(attended(x, v))
    assert (spec.band, show(spec.score)) == (CAUSAL, "(sum * 0.125)")


@pytest.mark.parametrize("long", [300, 1000])
def test_positions_of_long_sequences(long: int):
    q, k, v = of(1, 1, long, D), of(1, 1, long, D), of(1, 1, long, D)
    assert found(q.scaled_dot_product_attention(k, v, is_causal=True)).band == CAUSAL


def test_a_prefix_that_all_see_is_a_condition():
    x, v = scores()
    rows, columns = positions()
    spec = found(attended(((columns <= rows) | (columns < 5)).where(x, -float("inf")), v))
    assert spec.band == FULL
    assert show(spec.score).startswith("where(or((((n - m) + -1) < 0), ((n + -5) < 0)), (sum * 0.125)")


def test_blocks_of_a_sequence_are_bands_and_conditions():
    """A band, and beside it a condition in memory."""
    x, v = scores()
    rows, columns = positions()
    seen = (columns <= rows) & of(B, 1, 1, S, dtype=dtypes.bool)
    spec = found(attended(seen.where(x, -float("inf")), v))
    assert spec.band == CAUSAL
    (load,) = loads(spec.score)
    assert (load.dtype, load.m, load.n, load.batch) == (dtypes.bool, 0, 1, (S, 0, 0))


def test_masks_in_memory():
    q, k, v = operands()
    for mask, strides in ((of(T, S), (S, 1, (0, 0, 0))), (of(H, T, S), (S, 1, (0, T * S, 0))),
                          (of(B, 1, 1, S), (0, 1, (S, 0, 0))),
                          (of(T, S, dtype=dtypes.bool), (S, 1, (0, 0, 0))),
                          (of(B, H, T, S, dtype=F32), (S, 1, (0, T * S, 0)))):
        spec = found(q.scaled_dot_product_attention(k, v, attn_mask=mask))
        (load,) = loads(spec.score)
        assert (load.m, load.n, load.batch, load.dtype) == (*strides, mask.dtype)
        assert spec.band == FULL


def test_conditions_of_values_in_memory():
    """Documents packed into one sequence."""
    x, v = scores()
    mine, theirs = of(B, 1, T, 1, dtype=dtypes.int32), of(B, 1, 1, S, dtype=dtypes.int32)
    spec = found(attended((mine == theirs).where(x, -float("inf")), v))
    assert [(load.m, load.n) for load in loads(spec.score)] == [(1, 0), (0, 1)]


def test_large_negative_numbers_are_no_hidden_columns():
    """Rows that see nothing are not the same."""
    x, v = scores()
    rows, columns = positions()
    spec = found(attended((columns <= rows).where(x, -1e9), v))
    assert spec.band == FULL
    assert "-1e+09" in show(spec.score)


# **** scores ****

def test_soft_caps():
    x, v = scores()
    spec = found(attended((x / 30).tanh() * 30, v))
    assert "exp2" in show(spec.score)
    assert show(spec.score).endswith("* 30)")


def test_alibi():
    x, v = scores()
    rows, columns = positions()
    spec = found(attended(x + of(H, 1, 1, dtype=F32) * (columns - rows).float(), v))
    assert show(spec.score) == "((sum * 0.125) + (x0[b] * (n - m).f32))"
    assert spec.batch == (B, H, 1)


def test_biases_are_loaded():
    x, v = scores()
    spec = found(attended(x + of(H, T, S), v))
    (load,) = loads(spec.score)
    assert (load.batch, load.m, load.n) == ((0, T * S, 0), S, 1)


def test_terms_of_a_row_alone_do_not_matter():
    x, v = scores()
    spec = found(attended(x - x.max(-1, keepdim=True) * 0.5, v))
    assert show(spec.score) == "(sum * 0.125)"


# **** symbolic ****

def symbolic(rows: int | UOp, start: UOp, window: int | None = None, heads: int = 2) -> Tensor:
    """A step over a cache: rows at start, start + 1, …"""
    q, cache = of(1, H, 16, D)[:, :, :rows], of(2, 1, heads, 128, D)[:, :, :, :start + rows]
    k, v = cache[0], cache[1]
    x = q.reshape(1, heads, H // heads, rows, D) @ k.unsqueeze(2).transpose(-1, -2) * 0.125
    r, c = Tensor.arange(rows).reshape(rows, 1) + start, Tensor.arange(start + rows).reshape(1, start + rows)
    seen = c <= r if window is None else (c <= r) & (c > r - window)
    return seen.where(x, -float("inf")).softmax(-1) @ v.unsqueeze(2)


def bound(name: str, least: int, most: int) -> UOp: return Variable(name, least, most).bind(least)


def test_a_start_that_varies():
    spec = found(symbolic(8, bound("start", 0, 100)))
    assert (spec.symbolic, spec.s_q, spec.s_kv, spec.start) == (("s_kv", "start"), 8, 108, 100)
    assert (spec.band, spec.score, spec.batch) == (CAUSAL, SCALED, (1, 2, 2))


def test_rows_and_a_start_that_vary():
    spec = found(symbolic(bound("rows", 1, 16), bound("start", 0, 100)))
    assert (spec.symbolic, spec.s_q, spec.s_kv, spec.start) == (("s_q", "s_kv", "start"), 16, 116, 100)
    assert spec.band == CAUSAL


def test_a_window_of_a_varying_start():
    assert found(symbolic(8, bound("start", 0, 100), 5)).band == Band(-4, 0)
    spec = found(symbolic(1, bound("start", 0, 100), 5))
    assert (spec.s_q, spec.band.first, spec.symbolic) == (1, -4, ("s_kv", "start"))


def test_keys_that_vary():
    n = bound("n", 1, 64)
    q, k, v = of(1, H, 8, D), of(1, H, 64, D)[:, :, :n], of(1, H, 64, D)[:, :, :n]
    spec = found(by_hand(q, k, v))
    assert (spec.symbolic, spec.s_kv, spec.band) == (("s_kv",), 64, FULL)


def test_a_mask_that_ends_the_keys():
    """A whole cache, of which so many are written."""
    n = bound("n", 1, S)
    x, v = scores()
    _, columns = positions()
    spec = found(attended((columns < n).where(x, -float("inf")), v))
    assert (spec.symbolic, spec.s_kv, spec.band) == (("s_kv",), S, FULL)


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


def test_other_devices_are_left():
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


# **** positions ****

def test_positions_are_fitted():
    assert fitted(Tensor.arange(9).uop) == Form(0, (1,))
    assert fitted(Tensor.arange(3, 90, 7).uop) == Form(3, (7,))
    assert fitted(Tensor.arange(20, 0, -2).uop) == Form(20, (-2,))
    assert fitted((Tensor.arange(40) * Tensor.arange(40)).uop) is None
    assert fitted(Tensor.arange(700).uop) == Form(0, (1,))


def test_extents_of_variables():
    n, m = Variable("n", 1, 9), Variable("m", 1, 9)
    assert linear(5) == Form(5, ())
    assert linear(n * 2 + m + 3) == Form(3, (), (("m", 1), ("n", 2)))
    assert linear(n * m) is None


