"""Attentions of tensors that do not fit each other: each refused in words, at the call."""
from __future__ import annotations

from typing import Any

import pytest

from tinygrad_nv import Tensor, dtypes
from tinygrad_nv.errors import SpecError
from tinygrad_nv.functional import document_attention, paged_attention, scaled_dot_product_attention


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
