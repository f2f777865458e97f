"""DEV=EMU, checks on: kv_append by a kernel of ours, to the bit, in every byte of the pages."""
from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tinygrad.uop.ops import Ops, UOp

from tests.support.graphs.pool_case import device
from tests.support.patterns.append_case import NONE, Append, append, infinite, run, same, wanted
from tests.support.patterns.paged_case import fetched
from tinygrad_nv import Tensor, TinyJit, dtypes, explain
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.patterns import rewriting
from tinygrad_nv.patterns.decode.paged import paged_attention
from tinygrad_nv.patterns.kv_append.named import kv_append
from tinygrad_nv.runtime.device import NVDevice

F32, F16, BF16, S8 = dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int8
E4M3, E5M2 = dtypes.fp8e4m3, dtypes.fp8e5m2
ALL = {"half": 8, "q_heads": 4}


def kernels(case: Append, gpu: NVDevice) -> list[str | None]:
    """Whose the kernels of a call are."""
    made = kv_append(**case.tensors(gpu.device), interleaved=case.interleaved)
    return [kernel.template for kernel in explain(*made).kernels]


def checked(case: Append, gpu: NVDevice) -> None:
    assert kernels(case, gpu) == ["kv_append"]
    same(run(case, gpu.device), wanted(case))
    gpu.synchronize()


# **** what is written ****

@pytest.mark.sampled(4)
@pytest.mark.parametrize("more", [
    {}, {"half": 16}, ALL, {**ALL, "interleaved": True}, {"d": 24, "d_v": 40}, {"d": 20, "half": 4},
    {"d": 6}, {"half": 3},
    {**ALL, "d": 128, "heads": 3, "angles": F16}], ids=str)
def test_one_row(gpu: NVDevice, more: dict[str, Any]):
    checked(append([0, 1, 7, 8, 9, 24], **more), gpu)


@pytest.mark.parametrize("rows", [2, 5, 17])
def test_several_rows(hopper: NVDevice, rows: int):
    """Rows before the first token of a request are padding."""
    checked(append([0, 1, 16, 17, 24], rows=rows, **ALL), hopper)


@pytest.mark.parametrize("size", [8, 16, 32, 64, 128, 256])
def test_page_sizes(hopper: NVDevice, size: int):
    checked(append([size - 1, size, size + 1], rows=2, size=size, pages=2, heads=1, half=16), hopper)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("dtype", "kv"), [(F32, F32), (BF16, BF16), (F32, F16), (F16, S8), (BF16, E4M3),
                                           (F32, S8), (F16, E5M2)], ids=str)
@pytest.mark.parametrize("half", [0, 8])
def test_kinds(hopper: NVDevice, dtype: dtypes, kv: dtypes, half: int):
    checked(append([0, 9, 24], rows=2, dtype=dtype, kv=kv, half=half, q_heads=half // 4), hopper)


@pytest.mark.parametrize("kv", [E4M3, E5M2], ids=str)
def test_what_is_too_large_is_the_largest_number(hopper: NVDevice, kv: dtypes):
    checked(infinite(kv), hopper)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_generated(hopper: NVDevice, data: st.DataObject):
    size, pages, d = data.draw(st.sampled_from([8, 16])), data.draw(st.integers(1, 3)), data.draw(
        st.sampled_from([16, 64, 96]))
    half = data.draw(st.sampled_from([0, 4, 8]))
    checked(append(data.draw(st.lists(st.integers(0, size * pages), min_size=1, max_size=3)),
                   rows=data.draw(st.integers(1, 9)), heads=data.draw(st.integers(1, 9)), d=d, size=size,
                   pages=pages, kv=data.draw(st.sampled_from([F16, S8, E4M3, E5M2])), half=half,
                   q_heads=data.draw(st.integers(0, 9)) if half else 0, interleaved=data.draw(st.booleans()),
                   seed=data.draw(st.integers(0, 99))), hopper)


# **** padding ****

def test_what_has_no_page_writes_nothing(gpu: NVDevice):
    """Beyond the table, or with an entry that is no page. q is rotated all the same."""
    case = append([9, 9, 9, 30, 40], rows=2, **ALL)
    table = case.given["table"].clone()
    table[0, 1], table[1, 1], table[2, 1] = NONE, len(case.given["k_pages"]), 1 << 30
    case = replace(case, given=case.given | {"table": table})
    expected = wanted(case)
    changed = (expected["k_pages"] != case.given["k_pages"]).any(-1).any(-1)
    assert changed.sum() == 3  # the first rows of the first three: tokens 7
    same(run(case, gpu.device), expected)
    gpu.synchronize()


# **** where rows lie ****

def test_rows_are_read_in_a_projection(hopper: NVDevice):
    case = append([3, 24], rows=2, **ALL)
    x = case.tensors(hopper.device)
    parts = [x[name].reshape(2, 2, -1) for name in ("q", "k", "v")]
    wide = parts[0].cat(*parts[1:], dim=-1).contiguous().realize()
    ends = np.cumsum([0, *(int(part.shape[-1]) for part in parts)])
    for name, start, end in zip(("q", "k", "v"), ends, ends[1:], strict=False):
        x[name] = wide[:, :, int(start):int(end)].reshape(x[name].shape)
    made = kv_append(**x)
    assert [kernel.template for kernel in explain(*made).kernels] == ["kv_append"]
    Tensor.realize(*made)
    same({name: fetched(each) for name, each in zip(("k_pages", "v_pages", "q"), made, strict=True)},
         wanted(case))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axis", [1, 2, 3])
def test_rows_that_lie_backwards_are_copied(hopper: NVDevice, axis: int):
    case = append([3, 24], rows=2, **ALL)
    turned = replace(case, given=case.given | {name: case.given[name].flip(axis) for name in ("q", "k", "v")})
    x = turned.tensors(hopper.device)
    for name in ("q", "k", "v"): x[name] = x[name].flip(axis)
    made = kv_append(**x)
    assert "kv_append" in [kernel.template for kernel in explain(*made).kernels]
    same({name: fetched(each) for name, each in zip(("k_pages", "v_pages", "q"), made, strict=True)},
         wanted(case))


def test_rows_of_one_element_are_copied(hopper: NVDevice):
    case = append([3, 24], rows=2)
    x, shape = case.tensors(hopper.device), tuple(case.given["k"].shape)
    one = case.given["k"][:1, :1, :1, :1]
    x["k"] = x["k"][:1, :1, :1, :1].contiguous().realize().expand(shape)
    made = kv_append(**x)
    same({name: fetched(each) for name, each in zip(("k_pages", "v_pages"), made, strict=True)},
         wanted(replace(case, given=case.given | {"k": one.expand(shape)})))


# **** what a kernel of ours does not take ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize(("arch", "more", "words"), [
    ("sm_80", {"kv": E4M3}, "8-bit floats: conversions begin with sm_89, this is sm_80"),
    ("sm_80", {"kv": E5M2}, "8-bit floats: conversions begin with sm_89, this is sm_80")], ids=str)
def test_falls_back_with_a_reason(arch: str, more: dict[str, Any], words: str):
    opened = device(arch=arch)
    case = append([0, 9, 16], **more)
    lowered = explain(*kv_append(**case.tensors(opened.device)))
    assert all(kernel.template != "kv_append" for kernel in lowered.kernels)
    assert words in str(lowered)
    found, expected = run(case, opened.device), wanted(case)
    # tinygrad rounds to e4m3 in two steps, and has no subnormals of it
    for name, x in expected.items():
        torch.testing.assert_close(found[name].float(), x.float(), rtol=2.0**-3, atol=2.0**-6)


def test_parts_of_one_tensor(hopper: NVDevice):
    """Keys and values of all layers in one: written in place, by tinygrad, with nothing beside them."""
    case = append([1, 9, 17], **ALL)
    x = case.tensors(hopper.device)
    cache = Tensor.stack(x["v_pages"], x["k_pages"], x["v_pages"]).contiguous().realize()
    before = fetched(cache)
    made = kv_append(**x | {"k_pages": cache[1], "v_pages": cache[2]})
    assert "k_pages are no storage of their own" in str(explain(*made))
    Tensor.realize(*made)
    after, expected = fetched(cache), wanted(case)
    same({"before": after[0], "k": after[1], "v": after[2]},
         {"before": before[0], "k": expected["k_pages"], "v": expected["v_pages"]})
    hopper.synchronize()


# **** order ****

def decode(x: dict[str, Tensor]) -> Tensor:
    """An append, and the attention that sees it."""
    *_, q = kv_append(**x)
    return paged_attention(q, x["k_pages"], x["v_pages"], x["table"], x["lengths"])


@pytest.mark.sampled(1)
def test_the_attention_that_follows_sees_what_is_written(gpu: NVDevice):
    case = append([1, 9, 24], **ALL)
    x = case.tensors(gpu.device)
    out = decode(x)
    assert [kernel.template for kernel in explain(out).kernels] == ["kv_append", "decode"]
    got = fetched(out)
    expected = wanted(case)
    same({name: fetched(x[name]) for name in ("k_pages", "v_pages")},
         {name: expected[name] for name in ("k_pages", "v_pages")})
    again = case.tensors(gpu.device) | {name: Tensor(expected[name].numpy(), device=gpu.device).realize()
                                        for name in ("k_pages", "v_pages")}
    q = Tensor(expected["q"].numpy(), device=gpu.device).realize()
    plain = paged_attention(q, again["k_pages"], again["v_pages"], again["table"], again["lengths"])
    same({"out": got}, {"out": fetched(plain)})
    gpu.synchronize()


def test_appends_one_after_another(hopper: NVDevice):
    """Two of them in one graph, and an attention between them that sees the first alone."""
    first, second = append([8, 1], seed=1, **ALL), append([9, 2], seed=1, **ALL)
    second = replace(second, given=second.given | {"k": first.given["v"], "v": first.given["k"]})
    x = first.tensors(hopper.device)
    early = decode(x)
    y = second.tensors(hopper.device) | {name: x[name] for name in ("k_pages", "v_pages")}
    late = decode(y)
    Tensor.realize(early, late)
    alone = fetched(decode(first.tensors(hopper.device)))
    same({"out": fetched(early)}, {"out": alone})
    middle = wanted(first)
    second = replace(second, given=second.given | {name: middle[name] for name in ("k_pages", "v_pages")})
    same({name: fetched(x[name]) for name in ("k_pages", "v_pages")},
         {name: each for name, each in wanted(second).items() if name != "q"})
    hopper.synchronize()


def test_a_page_is_copied_after_an_append(hopper: NVDevice):
    """In the same graph."""
    case = append([9, 1], **ALL)
    x = case.tensors(hopper.device)
    kv_append(**x)
    page = int(case.given["table"][0, 0])
    spare = min({*range(8)} - {*case.given["table"].reshape(-1).tolist()})
    x["k_pages"][spare:spare + 1] = x["k_pages"][page:page + 1]
    expected = wanted(case)
    expected["k_pages"][spare] = expected["k_pages"][page]
    same({name: fetched(x[name]) for name in ("k_pages", "v_pages")},
         {name: expected[name] for name in ("k_pages", "v_pages")})
    hopper.synchronize()


def test_what_is_stored_already():
    """What a kernel has written in place, but not another part of the same storage."""
    pages = Tensor.empty(4, 2, 3, device="CPU").uop
    done = pages.after(UOp(Ops.CUSTOM_FUNCTION, arg="writes").call(pages))
    for target, value in ((pages, done), (pages[1:2], done[1:2]), (pages.reshape(8, 3), done.reshape(8, 3))):
        assert rewriting._value_in_place(target, value) is value
    for target, value in ((pages[1:2], done[0:1]), (pages.reshape(2, 4, 3), done.reshape(2, 4, 3).flip(0)),
                          (Tensor.empty(4, 2, 3, device="CPU").uop, done)):
        assert rewriting._value_in_place(target, value) is None


def stepped(case: Append, lengths: list[int]) -> Append:
    """The same requests at other lengths, with all of their pages in the table."""
    full = append([24] * len(lengths), **ALL)
    return replace(case, lengths=lengths, given=case.given | {"table": full.given["table"]})


STEPS = ([1, 8, 16], [2, 9, 17], [3, 10, 18], [4, 0, 19])


@pytest.mark.sampled(1)
def test_a_captured_step(gpu: NVDevice):
    case = stepped(append([24, 24, 24], **ALL), STEPS[0])
    x = case.tensors(gpu.device)
    lengths = x.pop("lengths")
    step = TinyJit(lambda at: decode(x | {"lengths": at}).realize())
    for at in STEPS:
        case = replace(case, lengths=at)
        lengths = Tensor(np.array(at, np.int32), device=gpu.device).realize()
        got = fetched(step(lengths))
        expected = wanted(case)
        case = replace(case, given=case.given | {name: expected[name] for name in ("k_pages", "v_pages")})
        same({name: fetched(x[name]) for name in ("k_pages", "v_pages")},
             {name: expected[name] for name in ("k_pages", "v_pages")})
        same({"out": got}, {"out": fetched(decode(case.tensors(gpu.device)))})
    gpu.synchronize()


@pytest.mark.slow
def test_a_graph_pool_with_padding(hopper: NVDevice):
    """Padding rows have length 0 and write nothing, whatever their tables are."""
    case = stepped(append([24, 24, 24], **ALL), STEPS[0])
    x = case.tensors(hopper.device)
    rows = {name: x.pop(name) for name in ("k", "v", "q")}

    def step(which: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
        mine = {name: each[which].contiguous() for name, each in rows.items()}
        return decode(x | mine | {"table": tables, "lengths": lengths})
    pool = GraphPool(step, {"which": Input((), dtypes.int32, 0), "tables": Input((3,), dtypes.int32, 0),
                            "lengths": Input((), dtypes.int32, 0)}, (2, 4), hopper.device)
    for at, live in zip(STEPS, ([0, 1, 2], [2], [1, 0], [2, 0, 1]), strict=True):
        taken = replace(case, lengths=[at[b] for b in live], given=case.given | {
            name: case.given[name][live] for name in ("k", "v", "q", "table")})
        got = fetched(pool(which=np.array(live, np.int32), tables=taken.given["table"].numpy(),
                           lengths=np.array(taken.lengths, np.int32)))
        same({"out": got}, {"out": fetched(decode(taken.tensors(hopper.device)))})
        expected = wanted(taken)
        case = replace(case, given=case.given | {name: expected[name] for name in ("k_pages", "v_pages")})
        same({name: fetched(x[name]) for name in ("k_pages", "v_pages")},
             {name: expected[name] for name in ("k_pages", "v_pages")})
    assert sum(bucket.eager for bucket in pool.stats().buckets) == 0


def test_tokens_right_behind_the_last_page_are_not_written(gpu: NVDevice):
    """Where the table's next entry is another request's."""
    case = append([25, 3, 26], rows=2, **ALL)
    same(run(case, gpu.device), wanted(case))


def test_the_comparison_can_fail(hopper: NVDevice):
    case = append([9, 3], **ALL)
    with pytest.raises(AssertionError, match="bytes of k_pages differ"):
        same(run(replace(case, lengths=[9, 2]), hopper.device), wanted(case))
