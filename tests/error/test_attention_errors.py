"""What attentions, paged_attention and kv_append say of tensors that do not fit each other, and with
NV_DEBUG=1 of what is in them."""
from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.patterns.append_case import append
from tests.support.patterns.paged_case import case, fetched, near, operands, scales_of
from tinygrad_nv import Context, Tensor, TinyJit, disabled, dtypes, explain
from tinygrad_nv.errors import ConfigError, NVError, PageError, SpecError
from tinygrad_nv.functional import document_attention, paged_attention, scaled_dot_product_attention
from tinygrad_nv.patterns.kv_append.named import kv_append


def refused(words: str, *shapes: tuple[int, ...], mask: Tensor | None = None, **how: Any) -> SpecError:
    """The error of an attention over ones."""
    with pytest.raises(SpecError, match=words) as caught:
        scaled_dot_product_attention(*(Tensor.ones(*shape) for shape in shapes), mask, **how)
    return caught.value


@pytest.mark.parametrize(("words", "change"), [
    (r"q of shape \(4, 9, 16\)", {"q": Tensor.zeros(4, 9, 16)}),
    (r"k of shape \(1, 2, 8, 16\)", {"k": Tensor.zeros(1, 2, 8, 16)}),
    ("k of f16", {"k": Tensor.zeros(1, 2, 9, 16).half()}),
    (r"v of shape \(1, 4, 9, 16\)", {"v": Tensor.zeros(1, 4, 9, 16)}),
    ("4 query heads over 3 key heads", {name: Tensor.zeros(1, 3, 9, 16) for name in "kv"}),
    (r"first of shape \(9,\)", {"first": Tensor.zeros(9).int()}),
    ("end of s64", {"end": Tensor.zeros(1, 9).long()}), ("window=0", {"window": 0}),
    ("scale=nan", {"scale": float("nan")}), ("softcap=-1", {"softcap": -1.0}),
    (r"sinks of shape \(2,\)", {"sinks": Tensor.zeros(2)}),
    ("sinks of f16", {"sinks": Tensor.zeros(4).half()})])
def test_documents(words: str, change: dict[str, Any]):
    """What `document_attention` refuses."""
    keys, bounds = Tensor.zeros(1, 2, 9, 16), Tensor.zeros(1, 9).int()
    q = Tensor.zeros(1, 4, 9, 16)
    given: dict[str, Any] = {"q": q, "k": keys, "v": keys, "first": bounds, "end": bounds}
    with pytest.raises(SpecError, match=words): document_attention(**given | change)


def test_query_heads_that_key_heads_cannot_share():
    keys = (1, 3, 9, 16)
    error = refused("8 query heads over 3 key heads", (1, 8, 4, 16), keys, keys, enable_gqa=True)
    assert "a multiple: each key head serves as many query heads" in error.expected
    assert "reshape of query or key" in error.fix


def test_fewer_key_heads_without_being_asked():
    error = refused("8 query heads and 2 key heads", (1, 8, 4, 16), (1, 2, 9, 16), (1, 2, 9, 16))
    assert error.fix == "pass enable_gqa=True"
    error = refused("8 query heads and 3 key heads", (1, 8, 4, 16), (1, 3, 9, 16), (1, 3, 9, 16))
    assert error.fix == "correct the reshape of query or key"


def test_heads_of_keys_and_values():
    refused("4 heads of keys and 2 of values", (1, 4, 4, 16), (1, 4, 9, 16), (1, 2, 9, 16))


def test_widths():
    error = refused("query heads of 16 elements, key heads of 8", (4, 16), (9, 8), (9, 8))
    assert "only value may have another" in error.fix


def test_keys_and_values():
    refused("9 keys and 7 values", (2, 4, 16), (2, 9, 16), (2, 7, 16))


def test_batches():
    refused(r"batches of \(2,\) and \(3,\) and \(3,\)", (2, 1, 4, 16), (3, 1, 9, 16), (3, 1, 9, 16))


def test_a_vector():
    error = refused(r"a query of shape \(16,\)", (16,), (9, 16), (9, 16))
    assert error.expected == "at least [S, D]"


def test_integers():
    with pytest.raises(SpecError, match="a key of s32"):
        scaled_dot_product_attention(Tensor.ones(4, 16), Tensor.ones(9, 16).int(), Tensor.ones(9, 16))


SHAPES = (2, 4, 16), (2, 9, 16), (2, 9, 16)


def test_masks():
    error = refused(r"a mask of \(4, 8\)", *SHAPES, mask=Tensor.ones(4, 8))
    assert error.expected == "[..., 4, 9], or 1 where it is broadcast"
    error = refused("a mask of s32", *SHAPES, mask=Tensor.ones(4, 9, dtype=dtypes.int32))
    assert error.fix == "attn_mask.bool()"
    error = refused("is_causal=True with an attn_mask", *SHAPES, mask=Tensor.ones(4, 9), is_causal=True)
    assert error.fix == "hide columns in the mask"


@pytest.mark.parametrize(("how", "words"), [
    ({"dropout_p": 1.5}, "dropout_p=1.5"), ({"softcap": 0.0}, "softcap=0.0"),
    ({"softcap": -3.0}, "softcap=-3.0"), ({"scale": float("nan")}, "scale=nan"), ({"window": 0}, "window=0"),
    ({"window": 2.5}, "window=2.5")])
def test_numbers(how: dict[str, float], words: str): refused(words, *SHAPES, **how)


def test_what_only_kernels_of_ours_have_for_a_mask_that_enlarges_the_result():
    error = refused("scale, softcap, window or sinks", *SHAPES, mask=Tensor.ones(3, 1, 4, 9), softcap=2.0)
    assert "expand query" in error.fix


def test_tensors_of_several_devices():
    here, there = (Tensor.empty(1, 2, 9, 16, device=device) for device in ("CPU", "CPU:1"))
    mask = Tensor.empty(9, 9, dtype=dtypes.bool, device="CPU:1")
    for given in ((here, here, there), (here, here, here, mask)):
        with pytest.raises(SpecError, match="tensors on CPU and CPU:1"): scaled_dot_product_attention(*given)
    tables = Tensor.empty(1, 2, dtype=dtypes.int32), Tensor.empty(1, dtype=dtypes.int32, device="CPU:1")
    with pytest.raises(SpecError, match="one device for all"): paged_attention(here, here, here, *tables)


# **** the Tensor method, on a device with kernels of ours ****

def on_emu(*shape: int) -> Tensor: return Tensor.empty(*shape, dtype=dtypes.bfloat16, device="EMU")


def test_the_method_refuses_in_words_what_tinygrad_cannot_do_either():
    k = on_emu(1, 3, 9, 16)
    with pytest.raises(SpecError, match="8 query heads over 3 key heads"):
        on_emu(1, 8, 4, 16).scaled_dot_product_attention(k, k, enable_gqa=True)
    with pytest.raises(SpecError, match="8 query heads and 2 key heads"):
        on_emu(1, 8, 4, 16).scaled_dot_product_attention(on_emu(1, 2, 9, 16), on_emu(1, 2, 9, 16))
    with pytest.raises(RuntimeError, match="cannot set attn_mask"):
        on_emu(4, 16).scaled_dot_product_attention(on_emu(9, 16), on_emu(9, 16), on_emu(4, 9), is_causal=True)


def test_the_method_allows_what_tinygrad_does():
    k, v = on_emu(1, 4, 9, 16), on_emu(1, 2, 9, 16)
    assert on_emu(1, 8, 4, 16).scaled_dot_product_attention(k, v, enable_gqa=True).shape == (1, 8, 4, 16)
    mask = Tensor.empty(4, 9, dtype=dtypes.int32, device="EMU")
    assert on_emu(4, 16).scaled_dot_product_attention(on_emu(9, 16), on_emu(9, 16), mask).shape == (4, 16)


def test_a_mask_of_python_s_numbers():
    """It has no dtype of its own."""
    q, mask = on_emu(1, 2, 9, 16), Tensor.empty(9, 9, dtype=dtypes.bool, device="EMU").where(0, -float("inf"))
    assert q.scaled_dot_product_attention(q, q, mask).shape == q.shape


KEYS = (2, 9, 16), (2, 9, 16)
PLAIN = (ArithmeticError, AttributeError, IndexError, RuntimeError, ValueError)


def zeros(*shape: int, dtype=dtypes.float32, device: str = "CPU") -> Tensor:
    return Tensor.zeros(*shape, dtype=dtype, device=device).contiguous()


def attended(*shapes: tuple[int, ...], mask: Tensor | None = None, **how: object) -> Callable[[], Tensor]:
    return lambda: Tensor.scaled_dot_product_attention(*(zeros(*shape) for shape in shapes), mask, **how)


CASES = {
    "heads": attended((1, 8, 4, 16), (1, 2, 9, 16), (1, 2, 9, 16)),
    "heads of a group": attended((1, 31, 16, 64), (1, 8, 16, 64), (1, 8, 16, 64), enable_gqa=True),
    "heads of keys and values": attended((1, 4, 4, 16), (1, 4, 9, 16), (1, 2, 9, 16)),
    "widths": attended((4, 16), (9, 8), (9, 8)),
    "keys and values": attended((2, 4, 16), (2, 9, 16), (2, 7, 16)),
    "batches": attended((2, 1, 4, 16), (3, 1, 9, 16), (3, 1, 9, 16)),
    "a vector of keys": attended((4, 16), (16,), (9, 16)),
    "a vector of values": attended((4, 16), (9, 16), (16,)),
    "a number": attended((), *KEYS),
    "no heads": attended((2, 4, 4, 16), (2, 0, 9, 16), (2, 0, 9, 16), enable_gqa=True),
    "a mask of another shape": attended((2, 4, 16), *KEYS, mask=zeros(4, 8)),
    "a mask of another batch": attended((2, 4, 16), *KEYS, mask=zeros(3, 4, 9)),
    "a mask and is_causal": attended((2, 4, 16), *KEYS, mask=zeros(4, 9), is_causal=True),
    "a mask elsewhere": attended((2, 4, 16), *KEYS, mask=zeros(4, 9, device="CPU:1")),
    "keys elsewhere": lambda: zeros(2, 4, 16).scaled_dot_product_attention(
        zeros(2, 9, 16, device="CPU:1"), zeros(2, 9, 16)),
    "no tensor": lambda: zeros(2, 4, 16).scaled_dot_product_attention(3, zeros(2, 9, 16)),
    "dropout": attended((2, 4, 16), *KEYS, dropout_p=1.5),
}


@pytest.mark.parametrize("name", CASES)
def test_what_tinygrad_raises_catches_what_we_raise(name):
    with Context(TRAINING=1):
        with disabled(), pytest.raises(PLAIN) as plain: CASES[name]().realize()
        with pytest.raises(plain.type): CASES[name]().realize()


def test_the_words_are_ours():
    with pytest.raises(IndexError, match="8 query heads and 2 key heads") as caught: CASES["heads"]()
    error = caught.value
    assert isinstance(error, SpecError)
    assert isinstance(error, NVError)
    assert (type(error).__name__, error.fix) == ("SpecError", "pass enable_gqa=True")
    with pytest.raises(RuntimeError, match="query heads of 16 elements, key heads of 8"): CASES["widths"]()


def test_it_travels_between_processes():
    with pytest.raises(IndexError) as caught: CASES["heads"]()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))


def test_a_matmul_of_several_devices_is_refused_by_tinygrad():
    for how in (disabled, lambda: Context(NOOPT=0)):
        with how(), pytest.raises(RuntimeError, match="all buffers must be on the same device"):
            (Tensor.rand(16, 32).realize() @ Tensor.rand(32, 8, device="CPU:1").realize()).realize()


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
