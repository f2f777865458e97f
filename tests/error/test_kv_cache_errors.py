"""What `KVCache` and `PagePool` say of types, extents, tensors and requests that do not fit."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tinygrad_nv.errors import NVError, PageError, SpecError
from tinygrad_nv.kvcache.cache import KVCache
from tinygrad_nv.kvcache.pool import PagePool

BF16 = dtypes.bfloat16
WRITTEN = 'KVCache["B", "H", "S_max", "D", dtypes.bfloat16]'


def says(call: Callable[[], object], kind: type[NVError], *words: str) -> None:
    """Asserts the words of what a call raises."""
    with pytest.raises(kind) as error: call()
    assert [word for word in words if word not in str(error.value)] == [], error.value


def made(dtype: Any = dtypes.float32, **more: Any) -> KVCache:
    extents = {"B": 2, "H": 2, "S_max": 24, "D": 32}
    return KVCache["B", "H", "S_max", "D", dtype](**extents | {"page_size": 8} | more)


# **** types ****

@pytest.mark.parametrize(("words", "said"), [
    (("B", "H", "D", BF16), ("KVCache[…] with 4 arguments", "four extents and a dtype", WRITTEN)),
    ("B", ("KVCache[…] with 1 arguments",)),
    (("B", 0, "S", "D", BF16), ("KVCache[…] with 0 for its key heads", "a name, or a whole number")),
    (("B", "H", "S max", "D", BF16), ("with 'S max' for its tokens of a request",)),
    (("B", "H", "S", 2.5, BF16), ("with 2.5 for its elements of a head",)),
    (("B", "H", "S", True, BF16), ("with True for its elements",)),
    (("B", "H", "S", "D", dtypes.int32), ("KVCache[…] of s32", "one of f32, bf16, f16, e4m3, e5m2, s8")),
    (("B", "H", "S", "D", "bf16"), ("KVCache[…] of 'bf16'", WRITTEN))])
def test_words_that_are_no_type(words: Any, said: tuple[str, ...]):
    says(lambda: KVCache[words], SpecError, *said)


@pytest.mark.parametrize(("given", "said"), [
    ({"B": 2, "S_max": 9, "D": 32}, ("KVCache['B', 'H', 'S_max', 'D', bf16] without H",
                                     "its number of key heads", "give H=…")),
    ({"B": 2, "H": 2, "S_max": 9, "D": 32, "T": 1}, ("with T=1", "extents by their names: B, H, S_max, D")),
    ({"B": 0, "H": 2, "S_max": 9, "D": 32}, ("with B=0", "a whole number, at least 1")),
    ({"B": 2, "H": 2.0, "S_max": 9, "D": 32}, ("with H=2.0", "a whole number"))])
def test_extents_that_do_not_fit_the_type(given: dict[str, Any], said: tuple[str, ...]):
    says(lambda: KVCache["B", "H", "S_max", "D", BF16](**given), SpecError, *said)


@pytest.mark.parametrize(("dtype", "more", "said"), [
    (dtypes.int8, {}, ("KVCache['B', 'H', 'S_max', 'D', s8] without k_scale", "k_scale=the largest key")),
    (dtypes.int8, {"k_scale": 0.1}, ("without v_scale",)),
    (dtypes.float32, {"v_scale": 0.1}, ("v_scale with f32", "8-bit dtypes only")),
    (dtypes.int8, {"k_scale": [1, 2, 3], "v_scale": 1}, ("k_scale of shape (3,)", "[H]: (2,)", "(1, 2)")),
    (dtypes.int8, {"k_scale": 0.0, "v_scale": 1}, ("k_scale=0.0", "numbers above 0")),
    (dtypes.int8, {"k_scale": 1, "v_scale": [1, np.nan]}, ("v_scale=[1, nan]", "above 0")),
    (dtypes.float32, {"layers": 0}, ("layers=0", "at least 1"))])
def test_what_a_cache_cannot_have(dtype: Any, more: dict[str, Any], said: tuple[str, ...]):
    says(lambda: made(dtype, **more), SpecError, *said)


@pytest.mark.parametrize(("more", "said"), [
    ({"pages": 0}, ("a pool with pages=0", "a whole number, at least 1")),
    ({"pages": 4, "page_size": 2.0}, ("page_size=2.0",)), ({"pages": 4, "host_pages": -1}, ("at least 0",)),
    ({"pages": 4, "windows": (None, 0)}, ("window=0",))])
def test_what_a_pool_cannot_have(more: dict[str, Any], said: tuple[str, ...]):
    says(lambda: PagePool(**more), PageError, *said)


# **** requests ****

def test_requests_beyond_the_last():
    cache = made()
    a, _ = cache.open([1]), cache.open([2])
    words = ("3 requests in KVCache[", "at most 2 at a time", "release one")
    says(lambda: cache.open([3]), PageError, *words)
    says(a.fork, PageError, *words)


def test_tokens_that_cannot_be_appended():
    cache = made()
    a, b, gone = cache.open(), made().open(), made().open()
    gone.release()
    says(lambda: cache.append([a], [[1], [2]]), PageError, "tokens of 2 requests for 1", "as many")
    says(lambda: cache.append([], []), PageError, "at least one")
    says(lambda: cache.append([b], [[1]]), PageError, "request 0 is not one of this cache", "cache.open")
    says(lambda: cache.append([a, a], [[1], [2]]), PageError, "is twice", "append its tokens at once")
    says(lambda: cache.append([a], [[]]), PageError, "0 new tokens", "at least one")
    c = cache.open()
    says(lambda: cache.append([a, c], [[1], [2, 3]]), PageError, "1, 2 new tokens", "as many of each request")
    says(lambda: cache.append([a], [[1] * 25]), PageError, "request 0 of 25 tokens", "at most 24 in KVCache[")
    assert (len(a), cache.stats().in_use) == (0, 0)


def test_pages_that_are_not_there():
    cache = made(pages=3)
    a, b = cache.open(), cache.open()
    says(lambda: cache.append([a, b], [[1] * 9, [2] * 9]), PageError,
         "no pages for 9 tokens more of each of 2 requests: 2 are missing, 1 left of 3", "release a request")
    assert cache.stats().in_use == 0
    cache.append([a], [[1] * 9])


def test_pages_of_the_host_that_are_not_there():
    cache = made(host_pages=1)
    a = cache.open()
    cache.append([a], [[1] * 9])
    says(a.offload, PageError, "out of host pages for a request of 2: 1 left of 1", "more host_pages")
    away = made(pages=2, host_pages=2)
    a, b = away.open(), away.open()
    away.append([a], [[1] * 9])
    a.offload()
    away.append([b], [[2] * 9])
    says(a.prefetch, PageError, "no pages for an offloaded request: 2 are missing, 0 left of 2")


def test_tokens_that_rows_to_come_see():
    a = (cache := made()).open()
    cache.append([a], [[1] * 9])
    says(lambda: a.prune(3), PageError, "tokens before 3 pruned of 9",
         "before 0: the next token attends to all", "window=…")
    b = (cache := made(window=4)).open()
    cache.append([b], [[1] * 9])
    says(lambda: b.prune(7), PageError, "at most those before 6: the next token attends to 4 keys")
    says(lambda: b.truncate(10), PageError, "9 tokens truncated to 10", "0 to 9")
    for _ in range(8): cache.append([b], [[1]])
    says(lambda: b.truncate(8), PageError, "a sequence truncated to 8 tokens, whose first 8 were pruned")


# **** tensors ****

@pytest.mark.parametrize(("change", "said"), [
    ({"k": (1, 2, 3, 32)}, ("k of shape (1, 2, 3, 32)", "[N, T, H, D]: (1, 2, 2, 32)")),
    ({"v": (1, 1, 2, 32)}, ("v of shape (1, 1, 2, 32)", "(1, 2, 2, 32)")),
    ({"q": (1, 2, 4, 16)}, ("q of shape (1, 2, 4, 16)", "[N, T, heads, D]: (1, 2, any, 32)")),
    ({"q": (1, 2, 3, 32)}, ("3 query heads over 2 key heads",)),
    ({"layer": 1}, ("layer 1", "0 to 0")), ({"layer": "0"}, ("layer '0'",))])
def test_tensors_that_do_not_fit(change: dict[str, Any], said: tuple[str, ...]):
    cache = made()
    step = cache.append([cache.open()], [[1, 2]])
    given = {"k": (1, 2, 2, 32), "v": (1, 2, 2, 32), "q": (1, 2, 4, 32), "layer": 0} | change
    def call() -> None:
        step.write(given["layer"], Tensor.ones(*given["k"]), Tensor.ones(*given["v"]))
        step.attend(given["layer"], Tensor.ones(*given["q"]))
    says(call, SpecError, *said)


def test_keys_of_integers():
    cache = made()
    step = cache.append([cache.open()], [[1]])
    x = Tensor.ones(1, 1, 2, 32, dtype=dtypes.int32)
    says(lambda: step.write(0, x, x), SpecError, "k of s32", "one of f32, bf16, f16")
