"""DEV=EMU, checks on: paged_attention by kernels of ours, against float64; what its bits depend on."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.graphs.pool_case import device
from tests.support.patterns.paged_case import (
    FAR,
    Case,
    alone,
    attention,
    case,
    fetched,
    near,
    operands,
    permuted,
)
from tinygrad_nv import Tensor, TinyJit, dtypes, explain
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.patterns.decode.paged import paged_attention
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.tile.decode.spec import DecodeSpec

F16, BF16, S8, E4M3, E5M2 = dtypes.float16, dtypes.bfloat16, dtypes.int8, dtypes.fp8e4m3, dtypes.fp8e5m2
TEMPLATES = ["decode", "combine"]
LONG = {"size": 128, "pages": 12, "d": 64, "dtype": F16}  # up to two splits; of int8 one


@pytest.fixture(scope="module")
def ampere() -> NVDevice:
    """One device for what does not depend on the architecture."""
    return device(arch="sm_80")


def run(made: Case, gpu: NVDevice, kernels: int = 1) -> torch.Tensor:
    """The result, by so many kernels and none of tinygrad's."""
    out = attention(made, gpu.device)
    found = explain(out).kernels
    assert [kernel.template for kernel in found] == TEMPLATES[:kernels], [kernel.name for kernel in found]
    got = fetched(out)
    gpu.synchronize()
    return got


def checked(made: Case, gpu: NVDevice, kernels: int = 1) -> torch.Tensor:
    got = run(made, gpu, kernels)
    near(made, got)
    return got


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Bit for bit."""
    assert a.dtype == b.dtype
    assert torch.equal(a.view(torch.int16), b.view(torch.int16))


# **** results ****

@pytest.mark.sampled(2)
@pytest.mark.parametrize("rows", [1, 4, 8])
def test_lengths_around_pages(gpu: NVDevice, rows: int):
    checked(case([0, 1, 15, 16, 17, 64], rows=rows, heads=4, kv_heads=2, size=16, dtype=F16), gpu)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [8, 32, 64, 128, 256])
def test_page_sizes(ampere: NVDevice, size: int):
    checked(case([0, size - 1, size + 1], heads=4, size=size, pages=2, dtype=BF16), ampere)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv", [S8, E4M3, E5M2])
def test_quantised(gpu: NVDevice, kv: dtypes):
    checked(case([0, 1, 17, 40], rows=2, heads=4, kv_heads=2, size=16, dtype=BF16, kv=kv), gpu)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", [{"window": 5}, {"softcap": 0.5}, {"scale": 2.0, "window": 1}], ids=str)
def test_scores(ampere: NVDevice, more: dict[str, Any]):
    checked(case([0, 1, 9, 32], rows=3, dtype=F16, d=48, d_v=16, **more), ampere)


@pytest.mark.sampled(1)
def test_splits(gpu: NVDevice):
    checked(case([0, 700, 1536], heads=4, kv_heads=1, **LONG), gpu, kernels=2)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.data())
def test_generated(ampere: NVDevice, data: st.DataObject):
    size, pages = data.draw(st.sampled_from([8, 16, 64])), data.draw(st.integers(1, 4))
    kv_heads = data.draw(st.integers(1, 3))
    checked(case(data.draw(st.lists(st.integers(0, size * pages), min_size=1, max_size=4)),
                 rows=data.draw(st.integers(1, 8)), heads=kv_heads * data.draw(st.integers(1, 5)),
                 kv_heads=kv_heads, d=16 * data.draw(st.integers(1, 6)), size=size, pages=pages,
                 dtype=data.draw(st.sampled_from([F16, BF16])), seed=data.draw(st.integers(0, 99)),
                 window=data.draw(st.none() | st.integers(1, 40))), ampere)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows", [9, 16, 37])
def test_many_rows_are_blocks_of_requests(ampere: NVDevice, rows: int):
    made = case([0, 5, 33, 64], rows=rows, heads=4, kv_heads=2, size=16, dtype=F16)
    out = attention(made, ampere.device)
    (note,) = [kernel.reason for kernel in explain(out).kernels if kernel.template == "decode"]
    assert f"{-(-rows // 8)} blocks of" in note
    near(made, fetched(out))
    ampere.synchronize()


# **** what is read where it lies ****

def test_heads_of_a_projection_and_one_tensor_of_keys_and_values(ampere: NVDevice):
    made = case([3, 30, 64], rows=2, heads=4, kv_heads=2, size=16, dtype=F16)
    q, k, v, table, lengths = operands(made, ampere.device)
    both = Tensor.stack(k, v, dim=1).contiguous().realize()
    wide = q.reshape(3, 2, 128).cat(q.reshape(3, 2, 128), dim=-1).contiguous().realize()
    mine = wide[:, :, 128:].reshape(3, 2, 4, 32)
    out = paged_attention(mine, both[:, 0], both[:, 1], table, lengths)
    assert [kernel.template for kernel in explain(out).kernels] == ["decode"]
    same(fetched(out), run(made, ampere))


def test_result_in_place(ampere: NVDevice):
    """What is assigned is written by the last kernel, without a copy."""
    made = case([700], heads=4, **LONG)
    out = Tensor.zeros(1, 1, 4, 64, dtype=F16, device=ampere.device).contiguous().realize()
    out.assign(attention(made, ampere.device))
    assert [kernel.template for kernel in explain(out).kernels] == TEMPLATES
    near(made, fetched(out))


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_pages_that_lie_backwards_are_copied(ampere: NVDevice, axis: int):
    made = case([3, 30], heads=4, kv_heads=2, size=16, dtype=F16)
    q, *kv, table, lengths = operands(replace(made, k=made.k.flip(axis), v=made.v.flip(axis)), ampere.device)
    near(made, fetched(paged_attention(q, *(x.flip(axis) for x in kv), table, lengths)))
    ampere.synchronize()


def test_keys_of_one_element(ampere: NVDevice):
    """Stride 0 along d: no kernel of ours, and no reading beyond the element."""
    made = case([3, 30], heads=4, kv_heads=2, size=16, dtype=F16)
    one = torch.full_like(made.k[:1, :1, :1, :1], 0.5)
    q, _, v, table, lengths = operands(made, ampere.device)
    k = Tensor(one.numpy(), device=ampere.device).realize().expand(tuple(made.k.shape))
    near(replace(made, k=one.expand(made.k.shape)), fetched(paged_attention(q, k, v, table, lengths)))
    ampere.synchronize()


# **** bits ****

@pytest.mark.sampled(1)
def test_permuted_pages_change_no_bit(gpu: NVDevice):
    made = case([0, 9, 700, 1536], rows=2, heads=4, **LONG)
    wanted = run(made, gpu, kernels=2)
    for seed in range(3): same(run(permuted(made, seed), gpu, kernels=2), wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kv", [None, S8])
def test_batch_sizes_change_no_bit(ampere: NVDevice, kv: dtypes | None):
    made, kernels = case([700, 0, 1536, 3], rows=2, heads=4, kv=kv, **LONG), 2 if kv is None else 1
    together = run(made, ampere, kernels=kernels)
    for b in range(4): same(run(alone(made, b), ampere, kernels=kernels), together[b:b + 1])


# **** one capture, any length ****

@pytest.mark.sampled(1)
def test_a_captured_step_serves_any_length(gpu: NVDevice):
    first = case([1, 2, 3], rows=2, heads=4, **LONG)
    tensors = operands(first, gpu.device)
    step = TinyJit(lambda: attention(first, gpu.device, tensors).realize())
    for seed, lengths in enumerate(([1, 2, 3], [9, 0, 128], [1536, 129, 500], [127, 1, 1536])):
        made = case(lengths, rows=2, heads=4, seed=seed, **LONG)
        for tensor, value in zip(tensors, operands(made, gpu.device), strict=True):
            tensor.assign(value).realize()
        near(made, fetched(step()))
    gpu.synchronize()


def test_a_graph_pool_serves_any_length(ampere: NVDevice):
    made = case([700, 9, 64], heads=2, size=16, pages=48, d=32, dtype=F16)
    q, k, v, *_ = operands(made, ampere.device)
    queries = q.reshape(3, 64).realize()

    def step(which: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        return paged_attention(queries[which].reshape(-1, 1, 2, 32), k, v, tables, lengths)
    inputs = {"which": Input((), dtypes.int32, 0), "tables": Input((48,), dtypes.int32, FAR),
              "lengths": Input((), dtypes.int32, 0)}
    pool = GraphPool(step, inputs, (1, 2, 4), ampere.device)
    wanted = fetched(attention(made, ampere.device))
    for rows in ([0, 1, 2], [2], [1, 0], [0, 0, 1, 2], [2, 1]):
        out = pool(which=np.array(rows, np.int32), tables=made.table[rows].numpy(),
                   lengths=np.array([made.lengths[b] for b in rows], np.int32))
        same(fetched(out), wanted[rows])
    assert sum(bucket.eager for bucket in pool.stats().buckets) == 0


# **** what is left to the body ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize(("more", "words"), [
    ({"size": 12}, "pages of 12 tokens, not one of 8, 16"), ({"d": 20}, "d=20 is not a multiple of 16"),
    ({"dtype": dtypes.float32}, "q of f32, a result of f32")], ids=str)
def test_falls_back_with_a_reason(ampere: NVDevice, more: dict[str, Any], words: str):
    made = case([3, 16], **{"dtype": F16, "pages": 2, **more})
    out = attention(made, ampere.device)
    lowered = explain(out)
    assert all(kernel.template != "decode" for kernel in lowered.kernels)
    assert words in str(lowered)
    near(made, fetched(out))


def test_switched_off(ampere: NVDevice, monkeypatch: pytest.MonkeyPatch):
    made = case([3, 20], dtype=F16)
    monkeypatch.setenv("NV_ATTENTION", "0")
    out = attention(made, ampere.device)
    assert all(kernel.template != "decode" for kernel in explain(out).kernels)
    near(made, fetched(out))


def test_a_spec_is_told(ampere: NVDevice):
    made = replace(case([3], heads=4, dtype=F16), softcap=3.0)
    (kernel,) = explain(attention(made, ampere.device)).kernels
    assert isinstance(kernel.spec, DecodeSpec)
    assert kernel.spec.group == 4
    assert "decode 1x1x≤32, 4 heads of 1, d 32, f16, pages of 8" in kernel.reason


def test_the_comparison_can_fail(ampere: NVDevice):
    made = case([9, 17], dtype=F16)
    q, k, v, table, _ = operands(made, ampere.device)
    less = Tensor(np.array([8, 16], np.int32), device=ampere.device)
    got = fetched(paged_attention(q, k, v, table, less))
    with pytest.raises(AssertionError, match="above the bound"): near(made, got)
