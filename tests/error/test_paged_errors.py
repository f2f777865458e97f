"""What paged_attention and kv_append say of tensors that do not fit; with NV_DEBUG=1, of what is in them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.patterns.append_case import append
from tests.support.patterns.paged_case import case, fetched, near, operands, scales_of
from tinygrad_nv import Tensor, TinyJit, dtypes, explain
from tinygrad_nv.errors import ConfigError, PageError, SpecError
from tinygrad_nv.patterns.decode.paged import paged_attention
from tinygrad_nv.patterns.kv_append.named import kv_append

S8 = dtypes.int8


def attend(change: Callable[[dict[str, Any]], None], **more: Any) -> Tensor:
    """A call after a change of its arguments."""
    made = case([3, 9], heads=4, kv_heads=2, **more)
    names = ("q", "k_pages", "v_pages", "table", "lengths")
    given: dict[str, Any] = dict(zip(names, operands(made, "CPU"), strict=True)) | scales_of(made, "CPU")
    change(given)
    return paged_attention(**given)


def given_as(name: str, value: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    """Another value of an argument."""
    return lambda given: given.update({name: value(given.get(name))})


@pytest.mark.parametrize(("change", "words"), [
    (given_as("q", lambda x: x[:, :, :3]), ("3 query heads over 2 key heads", "a multiple")),
    (given_as("q", lambda x: x.reshape(2, 4, 32)), ("q of shape (2, 4, 32)", "[B, S_q, H, D]")),
    (given_as("q", lambda x: x[..., :16]), ("q of 16 elements a head, keys of 32", "as many for both")),
    (given_as("q", lambda x: x.cast(dtypes.int32)), ("q of s32", "one of f32, bf16, f16", "q.cast")),
    (given_as("v_pages", lambda x: x[:-1]), ("v_pages of shape (9, 8, 2, 32)", "(10, 8, 2, any)")),
    (given_as("v_pages", lambda x: x.cast(dtypes.float16)), ("keys of f32, values of f16", "one dtype")),
    (given_as("k_pages", lambda x: x[..., 0]), ("k_pages of shape (10, 8, 2)", "P, page_size, H_kv, D")),
    (given_as("table", lambda x: x[:1]), ("table of shape (1, 4)", "[B, pages]: (2, any)")),
    (given_as("table", lambda x: x.cast(dtypes.int64)), ("table of s64", "s32", "table.cast(dtypes.int)")),
    (given_as("lengths", lambda x: [3, 9]), ("lengths, a list", "a Tensor [B]")),
    (given_as("lengths", lambda x: x.reshape(2, 1)), ("lengths of shape (2, 1)", "[B]: (2,)")),
    (given_as("lengths", lambda x: x.float()), ("lengths of f32", "s32")),
    (given_as("window", lambda x: 0), ("window=0", "the row's own key: 1")),
    (given_as("window", lambda x: 2.5), ("window=2.5", "the row's own key: 1")),
    (given_as("softcap", lambda x: 0.0), ("softcap=0.0", "above 0")),
    (given_as("scale", lambda x: float("nan")), ("scale=nan", "a finite number")),
    (given_as("k_scale", lambda x: Tensor.ones(10, 2)), ("k_scale with f32", "8 bits, and only then"))])
def test_attention_of_what_does_not_fit(change: Callable[[dict[str, Any]], None], words: tuple[str, ...]):
    with pytest.raises(SpecError) as error: attend(change)
    for word in words: assert word in str(error.value)


@pytest.mark.parametrize(("change", "words"), [
    (given_as("v_scale", lambda x: None), ("no v_scale with s8", "8 bits")),
    (given_as("v_scale", lambda x: x[:3]), ("v_scale of shape (3, 2)", "[P, H_kv]: (10, 2)")),
    (given_as("k_scale", lambda x: x.half()), ("k_scale of f16", "f32"))])
def test_scales_that_do_not_fit(change: Callable[[dict[str, Any]], None], words: tuple[str, ...]):
    with pytest.raises(SpecError) as error: attend(change, kv=S8)
    for word in words: assert word in str(error.value)


@pytest.mark.parametrize(("change", "words"), [
    (given_as("k", lambda x: x[:, :, :1]), ("k of shape (2, 1, 1, 32)", "D]: (any, any, 2, 32)")),
    (given_as("v", lambda x: x[:1]), ("v of shape (1, 1, 2, 32)", "(2, 1, 2, 32)")),
    (given_as("k", lambda x: x.cast(S8)), ("k of s8", "one of f32, bf16, f16")),
    (given_as("sin", lambda x: None), ("cos alone", "cos and sin, or neither")),
    (given_as("sin", lambda x: x[:20]), ("sin of shape (20, 8)", "(24, 8)")),
    (given_as("table", lambda x: x.cat(x, dim=1)), ("cos of 24 places, a table of 48 tokens", "as many")),
    (given_as("q", lambda x: x[:, :, :, :16]), ("q of shape (2, 1, 4, 16)", "(2, 1, any, 32)"))])
def test_append_of_what_does_not_fit(change: Callable[[dict[str, Any]], None], words: tuple[str, ...]):
    given: dict[str, Any] = append([3, 9], half=8, q_heads=4).tensors("CPU")
    change(given)
    with pytest.raises(SpecError) as error: kv_append(**given)
    for word in words: assert word in str(error.value)


def test_q_without_a_rotation():
    given: dict[str, Any] = append([3, 9]).tensors("CPU")
    with pytest.raises(SpecError, match="q without cos and sin"): kv_append(**given, q=given["k"])


def test_a_rotation_wider_than_a_head():
    given: dict[str, Any] = append([3, 9], half=8).tensors("CPU")
    wide = {name: given[name].cat(given[name], given[name], dim=1) for name in ("cos", "sin")}
    with pytest.raises(SpecError, match="cos of 24 pairs"): kv_append(**given | wide)


# **** NV_DEBUG=1 ****

@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NV_DEBUG", "1")


def entry(request: int, number: int, page: int) -> Callable[[Tensor], Tensor]:
    """A table with another entry."""
    def changed(table: Tensor) -> Tensor:
        made = table.numpy().copy()
        made[request, number] = page
        return Tensor(made, device=table.device)
    return changed


def lengths(*numbers: int) -> Callable[[Tensor], Tensor]:
    return lambda x: Tensor(np.array(numbers, np.int32), device=x.device)


@pytest.mark.parametrize(("change", "words"), [
    (given_as("table", entry(1, 1, 10)), ("request 1 has page 10 at entry 1", "tokens 8 to 8 of 9",
                                         "a page from 0 to 9", "correct the block table")),
    (given_as("table", entry(0, 0, -1)), ("request 0 has page -1 at entry 0", "tokens 0 to 2 of 3")),
    (given_as("lengths", lengths(3, 33)), ("request 1 has length 33", "0 to 32: 4 pages of 8 tokens")),
    (given_as("lengths", lengths(-1, 9)), ("request 0 has length -1", "0 to 32"))])
@pytest.mark.usefixtures("debug")
def test_attention_of_pages_that_are_none(change: Callable[[dict[str, Any]], None], words: tuple[str, ...]):
    out = attend(change)
    with pytest.raises(PageError) as error: out.realize()
    for word in ("paged_attention: ", *words): assert word in str(error.value)


@pytest.mark.parametrize(("change", "words"), [
    (given_as("table", entry(1, 1, 8)), ("request 1 has page 8 at entry 1", "0 to 7, or -1: none")),
    (given_as("lengths", lengths(3, 25)), ("request 1 has length 25", "0 to 24"))])
@pytest.mark.usefixtures("debug")
def test_append_to_pages_that_are_none(change: Callable[[dict[str, Any]], None], words: tuple[str, ...]):
    given: dict[str, Any] = append([3, 9]).tensors("EMU")
    change(given)
    pages, _ = kv_append(**given)
    with pytest.raises(PageError) as error: pages.realize()
    for word in ("kv_append: ", *words): assert word in str(error.value)


@pytest.mark.usefixtures("debug")
def test_what_fits_runs_as_without():
    """Entries that no row sees may be anything; the kernels are the same."""
    made = case([0, 3, 30], rows=2, window=4, dtype=dtypes.float16)
    out = paged_attention(*operands(made, "EMU"), window=4)
    assert [kernel.template for kernel in explain(out).kernels] == ["nv_check_pages", "decode"]
    near(made, fetched(out))
    holes: dict[str, Any] = append([3, 9]).tensors("EMU")
    holes["table"] = entry(0, 0, -1)(holes["table"])
    Tensor.realize(*kv_append(**holes))


@pytest.mark.usefixtures("debug")
def test_a_replay_is_checked():
    made = case([3, 9], dtype=dtypes.float16)
    *given, at = operands(made, "EMU")
    step = TinyJit(lambda at: paged_attention(*given, at).realize())
    for _ in range(3): near(made, fetched(step(at)))
    with pytest.raises(PageError, match="request 1 has length 40"): step(lengths(3, 40)(at).realize())


def test_without_it_nothing_is_added():
    made = case([3, 9], dtype=dtypes.float16)
    out = paged_attention(*operands(made, "EMU"))
    assert [kernel.template for kernel in explain(out).kernels] == ["decode"]


def test_another_value(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DEBUG", "yes")
    with pytest.raises(ConfigError, match="NV_DEBUG=yes"): attend(lambda given: None)
