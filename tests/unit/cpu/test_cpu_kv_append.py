"""kv_append on the CPU, in pages and in contiguous caches, to the bit, and in the steps of LLaMA."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad import dtypes
from tinygrad.dtype import DType

from tests.support.patterns.append_case import Append, append, fetched, infinite, run, same, stored, wanted
from tests.support.patterns.paged_case import numbers
from tinygrad_nv import Tensor, Variable, explain
from tinygrad_nv.cpu.isa import PORTABLE, why_not
from tinygrad_nv.cpu.target import host
from tinygrad_nv.errors import SpecError
from tinygrad_nv.models.config import ModelConfig
from tinygrad_nv.models.dense import DenseKVCache
from tinygrad_nv.models.llama import Llama
from tinygrad_nv.models.rope import RopeConfig
from tinygrad_nv.patterns.kv_append.named import kv_append
from tinygrad_nv.runtime.cpu.program import load
from tinygrad_nv.tile.templates import TABLE

F32, F16, BF16, S8 = dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int8
E4M3, E5M2 = dtypes.fp8e4m3, dtypes.fp8e5m2
ALL = {"half": 8, "q_heads": 4}


def checked(case: Append) -> None:
    """One kernel, and every byte."""
    made = kv_append(**case.tensors("CPU"), interleaved=case.interleaved)
    assert [kernel.template for kernel in explain(*made).kernels] == ["kv_append"]
    same(run(case, "CPU"), wanted(case))


# **** pages ****

@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", [
    {}, {"half": 16}, {"half": 8, "q_heads": 9, "heads": 1}, {**ALL, "interleaved": True},
    {"d": 24, "d_v": 40}, {"d": 6, "half": 3},
    {**ALL, "d": 50, "half": 11, "heads": 3, "angles": F16, "interleaved": True}], ids=str)
def test_one_row(more: dict[str, Any]):
    """Rows whose page is none write nothing."""
    checked(append([0, 1, 7, 8, 9, 24, 25, 40], **more))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "kv"), [(F32, F32), (BF16, BF16), (F32, F16), (F16, S8), (BF16, E4M3),
                                           (F32, E5M2)], ids=str)
def test_kinds(dtype: DType, kv: DType):
    checked(append([0, 9, 24], rows=5, dtype=dtype, kv=kv, **ALL))


@pytest.mark.parametrize("kv", [E4M3, E5M2], ids=str)
def test_what_is_too_large_is_the_largest_number(kv: DType):
    checked(infinite(kv))


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(st.data())
def test_generated(data: st.DataObject):
    size, pages, d = data.draw(st.sampled_from([8, 16])), data.draw(st.integers(1, 3)), data.draw(
        st.integers(8, 70))
    half = data.draw(st.sampled_from([0, 1, 4]))
    checked(append(data.draw(st.lists(st.integers(0, size * pages), min_size=1, max_size=3)),
                   rows=data.draw(st.integers(1, 9)), heads=data.draw(st.integers(1, 9)), d=d, size=size,
                   pages=pages, kv=data.draw(st.sampled_from([F16, S8, E4M3, E5M2])), half=half,
                   q_heads=data.draw(st.integers(0, 9)) if half else 0, interleaved=data.draw(st.booleans()),
                   seed=data.draw(st.integers(0, 99))))


@pytest.mark.parametrize("level", ["portable", "avx2"])
def test_levels(level: str, monkeypatch: pytest.MonkeyPatch):
    """Without FMA products are rounded before they are added."""
    if why_not(level): return
    monkeypatch.setenv("NV_CPU_ISA", level)
    case = append([0, 9, 24], rows=2, dtype=F32, **ALL, interleaved=True)
    found, expected = run(case, "CPU"), wanted(case)
    if level == "avx2": same(found, expected)
    for name, x in expected.items(): torch.testing.assert_close(found[name], x, rtol=1e-6, atol=1e-6)


def test_parts_are_worth_a_thread():
    def parts(rows: int) -> int:
        case = append([64], rows=rows, size=8, pages=8, heads=8, d=128, dtype=F32)
        (kernel,) = explain(*kv_append(**case.tensors("CPU"))).kernels
        return TABLE.choose(kernel.spec, replace(host(), threads=4, isa=PORTABLE)).parts
    assert (parts(1), parts(64)) == (1, 4)


def test_pages_that_are_not_stored_are_not_written():
    """An entry of the table beyond the last page is like none."""
    case = append([16], dtype=F32, pages=2)
    spec = explain(*kv_append(**case.tensors("CPU"))).kernels[0].spec
    page, names = int(case.given["table"][0, 1]), ("k_pages", "v_pages", "k", "v", "table")
    for there, written in ((page, False), (page + 1, True)):
        arrays = [case.given[name].numpy().copy() for name in names]
        made = TABLE.build(replace(spec, stored=there), TABLE.choose(spec, host()), host())
        load(made)(*arrays, np.array([16], np.int32))
        for name, x in zip(names[:2], arrays, strict=False):
            assert (x != case.given[name].numpy()).any() == written


# **** contiguous caches ****

@pytest.mark.sampled(3)
@pytest.mark.parametrize("device", ["CPU", "EMU"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_a_contiguous_cache(device: str, dtype: DType):
    """Rows stand in it by request and head; the rotation is rounded as `rotate` of tensors is, and the body
    says the same."""
    heads, rows, d, capacity, lengths = 2, 3, 32, 20, [3, 20, 2]
    random = torch.Generator().manual_seed(0)
    cache = [numbers(random, (3, heads, capacity, d), dtype) for _ in range(2)]
    k, v, q = (numbers(random, (3, rows, n, d), dtype) for n in (heads, heads, 4))
    turns = torch.rand((capacity, 16), generator=random) * 7
    cos, sin = turns.cos().to(k.dtype), turns.sin().to(k.dtype)
    given = [stored(x, dtype, device) for x in (*cache, k, v)]
    more = {name: stored(x, dtype, device) for name, x in (("cos", cos), ("sin", sin), ("q", q))}
    at = Tensor(np.array(lengths, np.int32), device=device).realize()
    made = kv_append(*given, None, at, **more, rounded=True)
    assert [kernel.template for kernel in explain(*made).kernels] == ["kv_append"]
    Tensor.realize(*made)

    def turned(x: torch.Tensor, place: int) -> torch.Tensor:
        a, b, c, s = x[:, :16], x[:, 16:], cos[place], sin[place]
        return torch.cat([a * c - b * s, b * c + a * s], -1)
    expected = {"k": cache[0].clone(), "v": cache[1].clone(), "q": q.clone()}
    for b, length in enumerate(lengths):
        for t in range(rows):
            place = length - rows + t
            expected["q"][b, t] = turned(q[b, t], max(place, 0))
            if place < 0: continue
            expected["k"][b, :, place], expected["v"][b, :, place] = turned(k[b, t], place), v[b, t]
    same({name: fetched(x) for name, x in zip(("k", "v", "q"), made, strict=True)}, expected)


@pytest.mark.slow
def test_the_body_of_a_contiguous_cache(monkeypatch: pytest.MonkeyPatch):
    def written() -> list[torch.Tensor]:
        random = torch.Generator().manual_seed(0)
        shapes = ((2, 2, 9, 8), (2, 2, 9, 8), (2, 3, 2, 8), (2, 3, 2, 8), (9, 2), (9, 2), (2, 3, 4, 8))
        x = [stored(numbers(random, shape, F32), F32, "CPU") for shape in shapes]
        at = Tensor(np.array([9, 2], np.int32), device="CPU").realize()
        made = kv_append(*x[:4], None, at, cos=x[4], sin=x[5], q=x[6], rounded=True)
        Tensor.realize(*made)
        return [fetched(each) for each in made]
    ours = written()
    monkeypatch.setenv("NV_CPU", "0")
    for x, y in zip(written(), ours, strict=True): torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_refusals():
    x = append([3], heads=8, dtype=F16, **ALL).tensors("CPU")
    with pytest.raises(SpecError, match="a cache of 5 requests, rows of 1"): kv_append(**x | {"table": None})
    with pytest.raises(SpecError, match="cos of f32"): kv_append(**x, rounded=True)


# **** the step of a model ****

def network(dtype: DType) -> tuple[Llama, DenseKVCache]:
    rope = RopeConfig("default", 10000.0, 16, 64)
    config = ModelConfig("LlamaForCausalLM", 64, 64, 96, 2, 4, 2, 16, 64, (rope,) * 2, windows=(None, 6))
    model = Llama(config, dtype, "CPU")
    return model, DenseKVCache.create(config, 64, dtype, device="CPU")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("rows", [1, 16])
def test_eight_kernels_a_layer(dtype: DType, rows: int):
    """Besides the embedding and the lengths, the last norm and the head."""
    model, cache = network(dtype)
    tokens = Tensor.empty(1, rows, dtype=dtypes.int32, device="CPU").realize()
    logits = model.step(tokens, Variable("start", 0, 64 - rows).bind(5), cache)
    made = [kernel.template for kernel in explain(logits).kernels]
    assert made.count("kv_append") == 2
    assert len(made) <= 2 * 8 + (5 if rows > 1 else 4)


def test_steps_do_not_change_the_tensors_of_a_cache():
    model, cache = network(F32)
    before = [x.uop for x in cache.tensors]
    model.step(Tensor.empty(1, 1, dtype=dtypes.int32, device="CPU"), 3, cache)
    assert [x.uop for x in cache.tensors] == before
