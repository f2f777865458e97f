"""DEV=EMU, checks on: attention as other people's models spell it, against float64."""
from __future__ import annotations

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
    Scores,
    close,
    made,
    near,
    normal,
    of,
    scaled,
    stored,
    use,
)
from tinygrad_nv import Device, Tensor, Variable, explain
from tinygrad_nv.tile.attention.spec import AttentionSpec
from tinygrad_nv.tile.decode.spec import DecodeSpec

BOTH = pytest.mark.parametrize("gpu", DEVICES, indirect=True)
SMALLEST = {BF16: -(2 - 2.0**-7) * 2.0**127, F16: -65504.0, F32: -(2 - 2.0**-23) * 2.0**127}


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    device = use(monkeypatch, getattr(request, "param", "sm_80"))
    yield device
    Device[device].synchronize()


def memory(x: torch.Tensor, gpu: str) -> Tensor:
    """Integers or conditions."""
    return Tensor(np.asarray(x), device=gpu).contiguous().realize()


def grid(rows: int, keys: int) -> tuple[Tensor, Tensor, torch.Tensor, torch.Tensor]:
    """Rows and columns, ours and torch's."""
    return (Tensor.arange(rows).reshape(rows, 1), Tensor.arange(keys).reshape(1, keys),
            torch.arange(rows)[:, None], torch.arange(keys)[None, :])


def attended(q: Tensor, k: Tensor, v: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(q.matmul(k.transpose(-1, -2), dtype=F32)).softmax(-1).cast(v.dtype) @ v


# **** masks ****

@pytest.mark.sampled(1)
@BOTH
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bf16", "f16", "f32"])
@pytest.mark.parametrize(("rows", "keys"), [(36, 220), (2, 600)])
def test_masks_of_the_smallest_numbers(gpu: str, dtype: DType, rows: int, keys: int):
    """Left-padded sequences: blocks of keys that a row does not see, before and after those that it does, and
    rows that see nothing, whose weights are all the same then."""
    kind = F16 if dtype == F16 else BF16
    operands, (r, c, tr, tc) = made(b=2, heads=1, kv=1, rows=rows, keys=keys, dtype=kind), grid(rows, keys)
    first, off = torch.tensor([keys // 3, keys - 20])[:, None, None, None], keys - rows
    mask = torch.where((tc >= first) & (tc <= tr + off), 0.0, SMALLEST[dtype])
    q, k, v = of(operands, kind)
    added = stored(mask, dtype)
    theirs: Scores = lambda x: x * 0.125 + mask.to(x.dtype)  # noqa: E731
    close_to(attended(q, k, v, lambda x: x * 0.125 + added), operands, theirs, kind)
    sees = (c >= memory(first.int(), gpu)) & (c <= r + off)
    y = attended(q, k, v, lambda x: x * 0.125 + sees.where(0.0, SMALLEST[dtype]))
    close_to(y, operands, theirs, kind)


def close_to(y: Tensor, operands: tuple[torch.Tensor, ...], theirs: Scores, dtype: DType) -> None:
    """Compares, also where conditions are stored by kernels of their own."""
    assert any(isinstance(kernel.spec, AttentionSpec | DecodeSpec) for kernel in explain(y).kernels)
    close(torch.tensor(y.float().numpy()).double(), operands, theirs, dtype)


@pytest.mark.sampled(1)
@BOTH
def test_gemma(gpu: str):
    """A soft-cap, then a sliding window whose mask is added."""
    operands, (r, c, tr, tc) = made(b=2, heads=4, kv=2, rows=90, keys=90), grid(90, 90)
    q, k, v = of(operands)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    hidden = ((c <= r) & (c > r - 33)).where(0.0, SMALLEST[BF16]).cast(BF16)
    y = attended(q, k, v, lambda x: (x * 0.0625 / 50).tanh() * 50 + hidden)
    near(y, operands, lambda x: torch.where((tc <= tr) & (tc > tr - 33), torch.tanh(x * 0.0625 / 50) * 50,
                                            SMALLEST[BF16]))


@pytest.mark.parametrize("guard", [lambda x: (x == 0).where(1, x), lambda x: (x != 0).where(x, 1)])
def test_sums_that_are_guarded_from_rows_that_see_nothing(gpu: str, guard: Callable[[Tensor], Tensor]):
    operands, seen = made(rows=20), normal(20, 150, seed=3) > 0
    seen[7] = False
    q, k, v = of(operands)
    s = memory(seen, gpu).where(q.matmul(k.transpose(-1, -2), dtype=F32) * 0.2, HIDDEN)
    e = (s - ((top := s.max(-1, keepdim=True)) == HIDDEN).where(0, top)).exp()
    near((e / guard(e.sum(-1, keepdim=True))).cast(BF16) @ v, operands,
         lambda x: torch.where(seen, x * 0.2, HIDDEN))


def test_prefixes_and_lengths_in_memory(gpu: str):
    """Of each sequence; one has no keys at all."""
    operands, (r, c, tr, tc) = made(b=3, rows=60, keys=60), grid(60, 60)
    prefix, length = torch.tensor([7, 30, 2]), torch.tensor([60, 0, 45])
    ours = [memory(x.int(), gpu).reshape(3, 1, 1, 1) for x in (prefix, length)]
    p, n = (x[:, None, None, None] for x in (prefix, length))
    sees, seen = ((c <= r) | (c < ours[0])) & (c < ours[1]), ((tc <= tr) | (tc < p)) & (tc < n)
    near(attended(*of(operands), lambda x: sees.where(x * 0.125, -float("inf"))), operands,
         lambda x: torch.where(seen, x * 0.125, HIDDEN))


def test_segments(gpu: str):
    """Documents side by side in a sequence."""
    operands, (r, c, tr, tc) = made(b=2, rows=60, keys=60), grid(60, 60)
    segments = torch.tensor([[0] * 20 + [1] * 25 + [2] * 15, [0] + [1] * 59])
    ours = memory(segments.int(), gpu)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    near(attended(*of(operands), lambda x: (
        (ours.reshape(2, 1, 60, 1) == ours.reshape(2, 1, 1, 60)) & (c <= r)).where(x * 0.125, -float("inf"))),
        operands, lambda x: torch.where(same & (tc <= tr), x * 0.125, HIDDEN))


def test_local_and_global_keys():
    operands, (r, c, tr, tc) = made(rows=100, keys=100), grid(100, 100)
    near(attended(*of(operands), lambda x: (((r - c).abs() <= 9) | (c < 4) | (r < 4)).where(
        x * 0.125, -float("inf"))), operands,
        lambda x: torch.where(((tr - tc).abs() <= 9) | (tc < 4) | (tr < 4), x * 0.125, HIDDEN))


# **** scores ****

def test_relative_biases_from_a_table(gpu: str):
    """T5: gathered by distance, no scale."""
    operands, (_, _, tr, tc) = made(b=2, rows=30, keys=40), grid(30, 40)
    table, bucket = normal(32, 2, seed=7), (tc - tr).abs() % 32
    ours, numbers = stored(table), memory(bucket.int(), gpu)
    near(attended(*of(operands), lambda x: x + ours[numbers].permute(2, 0, 1).unsqueeze(0)), operands,
         lambda x: x + table[bucket].permute(2, 0, 1).to(x.dtype), kernels=2)


def test_logarithms_of_distances():
    """KERPLE."""
    operands, (r, c, tr, tc) = made(rows=40, keys=40), grid(40, 40)
    bias, theirs = (1 + (r - c).abs().float() * 0.5).log() * 0.7, torch.log1p((tr - tc).abs() * 0.5) * 0.7
    near(attended(*of(operands), lambda x: (c <= r).where(x * 0.125 - bias, -float("inf"))), operands,
         lambda x: torch.where(tc <= tr, x * 0.125 - theirs.to(x.dtype), HIDDEN))


@pytest.mark.sampled(2)
@BOTH
@pytest.mark.parametrize(("rows", "heads"), [(1, 4), (3, 4), (12, 2)])
def test_alibi_over_a_cache(rows: int, heads: int):
    """Distances to rows that stand where the launch says: by kernels that divide the keys, and by others."""
    operands, slopes = made(heads=heads, kv=heads, rows=rows, keys=300), 2.0 ** -torch.arange(1, heads + 1)
    q, k, v = of(operands)
    start, slope = Variable("start", 0, 300 - rows).bind(231), stored(slopes, F32)
    end = start + rows
    r, c = Tensor.arange(rows).reshape(rows, 1) + start, Tensor.arange(end).reshape(1, end)
    y = attended(q, k[:, :, :end], v[:, :, :end], lambda x: (c <= r).where(
        x * 0.125 + slope.reshape(heads, 1, 1) * (c - r).float(), -float("inf")))
    tr, tc, seen = torch.arange(rows)[:, None] + 231, torch.arange(231 + rows), 231 + rows
    shown = operands[0], operands[1][:, :, :seen], operands[2][:, :, :seen]
    spec = near(y, shown, lambda x: torch.where(
        tc <= tr, x * 0.125 + slopes.to(x.dtype)[:, None, None] * (tc - tr), HIDDEN))
    assert isinstance(spec, AttentionSpec if rows == 12 else DecodeSpec)


# **** operands ****

def test_one_tensor_of_all_projections():
    """[B, T, H, 3 D], and [B, T, 3 D H] cut in three."""
    x, (_, _, r, c) = normal(2, 40, 4 * 3 * 32), grid(40, 40)
    for cut in (lambda t: [t.reshape(2, 40, 4, 96)[..., i:i + 32].transpose(1, 2) for i in (0, 32, 64)],
                lambda t: [part.reshape(2, 40, 4, 32).transpose(1, 2) for part in t.chunk(3, -1)]):
        y = Tensor.scaled_dot_product_attention(*cut(stored(x)), is_causal=True)
        near(y, tuple(cut(x)), lambda s: torch.where(c <= r, s / 32**0.5, HIDDEN))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [6, 24])
def test_a_tree_of_rows_behind_a_cache(gpu: str, rows: int):
    """Keys that are put together, a mask in memory for the new ones."""
    operands = made(heads=4, kv=2, rows=rows, keys=200 + rows)
    mask = torch.ones(rows, 200 + rows, dtype=torch.bool)
    mask[:, 200:] = (normal(rows, rows, seed=3) > 0) | torch.eye(rows, dtype=torch.bool)
    k, v = (stored(x[:, :, :200]).cat(stored(x[:, :, 200:]), dim=2) for x in operands[1:])
    y = stored(operands[0]).scaled_dot_product_attention(k, v, attn_mask=memory(mask, gpu), enable_gqa=True)
    spec = near(y, operands, lambda x: torch.where(mask, x * 0.125, HIDDEN), kernels=3)
    assert isinstance(spec, DecodeSpec if rows == 6 else AttentionSpec)


def test_places_in_memory(gpu: str):
    """A cache of which each request has filled so much: a row of each."""
    operands, places = made(b=2, heads=8, kv=2, rows=1, keys=300), torch.tensor([0, 257])
    c, at = Tensor.arange(300).reshape(1, 300), memory(places.int(), gpu).reshape(2, 1, 1, 1)
    y = Tensor.scaled_dot_product_attention(*of(operands), attn_mask=c <= at, enable_gqa=True)
    seen = torch.arange(300) <= places[:, None, None, None]
    near(y, operands, lambda x: torch.where(seen, x * 0.125, HIDDEN))


def test_one_key_head_and_no_rows():
    """[B, H, D] over [B, S, D] by einsum."""
    q, k, v = normal(2, 40, 64), normal(2, 700, 64, seed=1), normal(2, 700, 64, seed=2)
    a, b, c = (stored(x) for x in (q, k, v))
    y = Tensor.einsum("bhs,bsd->bhd", (Tensor.einsum("bhd,bsd->bhs", a, b) * 0.125).softmax(-1), c)
    near(y.reshape(2, 40, 1, 64), (q[:, :, None], k[:, None], v[:, None]), scaled, kernels=2)
