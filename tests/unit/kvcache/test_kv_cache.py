"""`KVCache` in a loop of one's own: attention over its pages is attention over lists of keys and values."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tinygrad import Tensor, TinyJit, dtypes

from tests.support.kvcache.kv_cache_case import HEADS, D, Loop, cache
from tinygrad_nv.kvcache.cache import KVCache, Step
from tinygrad_nv.kvcache.kind import CacheKind
from tinygrad_nv.tile.expression import short

PROMPT = list(range(1, 20))


@pytest.fixture(autouse=True)
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation ends with a look at every page."""
    monkeypatch.setenv("NV_DEBUG", "1")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.float16, dtypes.bfloat16, dtypes.int8,
                                   dtypes.fp8e4m3, dtypes.fp8e5m2], ids=short)
def test_requests_share_fork_leave_and_return(dtype: Any):
    loop = Loop(cache(dtype, host_pages=8, layers=2 if dtype == dtypes.float32 else 1))
    a = loop.open(PROMPT)
    loop.append([a], [PROMPT])
    b = loop.open(PROMPT)
    assert len(b) == 16
    loop.append([b], [PROMPT[16:]])
    fork = loop.fork(b)
    loop.append([a, b, fork], [[50], [51], [52]])
    b.offload()
    loop.append([a, fork], [[60], [61]])
    b.prefetch()
    loop.append([a, b, fork], [[50], [51], [52]])
    a.release()
    loop.append([b, fork], [[53], [54]])
    stats = loop.cache.stats()
    assert (stats.copies, stats.hits) == (1, 16)
    assert (stats.offloads, stats.restores) == (3, 1)   # two of the pages were still there when it came back


def test_a_window():
    loop = Loop(cache(window=11, layers=1))
    a = loop.open(PROMPT)
    loop.append([a], [PROMPT])
    for token in range(20): loop.append([a], [[token]])
    assert len(a.table.unpruned_pages) == 3
    a.prune(29)
    assert len(a.table.unpruned_pages) == 2
    loop.append([a], [[3]])


@pytest.mark.slow
def test_pages_of_others_that_were_evicted_and_come_back():
    loop = Loop(cache(pages=6, host_pages=6, B=2, layers=1))
    for first in (1, 100):
        a = loop.open(prompt := list(range(first, first + 40)))
        loop.append([a], [prompt])
        a.release()
    for first in (1, 100):
        b = loop.open(list(range(first, first + 40)))
        assert len(b) == 32
        loop.append([b], [list(range(first + 32, first + 40))])
        b.release()
    assert loop.cache.stats().restores > 0


def test_a_draft_that_is_refused():
    loop = Loop(cache())
    a = loop.open(PROMPT)
    loop.append([a], [PROMPT])
    loop.append([a], [[7, 8, 9]])
    loop.truncate(a, len(PROMPT) + 1)
    loop.append([a], [[4, 5, 6]])


def test_keys_and_queries_are_rotated():
    """As they are by kv_append: here by 90°, which makes of (x, y) (−y, x)."""
    made = cache(layers=1)
    with made.open() as request:
        x = np.random.default_rng(1).standard_normal((1, 5, HEADS, D)).astype(np.float32)
        step = made.append([request], [[1, 2, 3, 4, 5]])
        cos, sin = Tensor.zeros(64, D // 2).contiguous(), Tensor.ones(64, D // 2).contiguous()
        q = step.write(0, Tensor(x), Tensor(x), q=Tensor(x), cos=cos, sin=sin)
        turned = np.concatenate([-x[..., D // 2:], x[..., :D // 2]], -1)
        assert q is not None
        assert np.array_equal(q.numpy(), turned)
        keys = made.pages(0).keys.numpy()[request.table.pages[0], :5]
        assert np.array_equal(keys, turned[0])
    assert made.requests == []


def test_writes_that_were_not_realized_are_not_lost():
    made = cache(layers=1)
    request = made.open()
    x = np.random.default_rng(1).standard_normal((3, 1, 1, HEADS, D)).astype(np.float32)
    for i in range(3):
        made.append([request], [[i]]).write(0, Tensor(x[i]), Tensor(x[i]))
    fork = request.fork()
    made.append([fork], [[9]])
    keys = made.pages(0).keys.numpy()
    for each in (request, fork): assert np.array_equal(keys[each.table.pages[0], :3], x[:, 0, 0])


def test_a_step_in_a_jit_is_the_same():
    """Block tables and lengths are its inputs; pages are written in place by every replay."""
    outs = []
    for jit in (False, True):
        made = cache(layers=1)
        request = made.open(PROMPT)
        def decode(table: Tensor, lengths: Tensor, x: Tensor, made: KVCache = made) -> Tensor:
            step = Step(made, 1, table, lengths)
            step.write(0, x, x)
            return step.attend(0, x).realize()
        run = TinyJit(decode) if jit else decode
        random = np.random.default_rng(2)
        for token in range(12):
            step = made.append([request], [[token]])
            x = Tensor(random.standard_normal((1, 1, HEADS, D)).astype(np.float32)).realize()
            out = run(step.table, step.lengths, x).numpy()
        outs.append(out)
    assert np.array_equal(*outs)


def test_scales_by_layer_and_head():
    scales = np.array([[0.02, 0.03], [0.04, 0.05]])
    made = cache(dtypes.int8, k_scale=scales, v_scale=0.01)
    for layer in range(2):
        assert np.allclose(made.pages(layer).k_scale.numpy()[5], scales[layer])
        assert np.allclose(made.pages(layer).v_scale.numpy(), 0.01)


def test_types_of_caches():
    one = KVCache["B", 2, "S_max", "D", dtypes.bfloat16]
    assert one == CacheKind.of(("B", 2, "S_max", "D", dtypes.bfloat16), KVCache)
    assert one != KVCache["B", 2, "S_max", "D", dtypes.float16]
    assert len({one, KVCache["N", 2, "S_max", "D", dtypes.bfloat16]}) == 2
    assert str(one) == "KVCache['B', 2, 'S_max', 'D', bf16]"
    assert one.bind_extents({"B": 3, "S_max": 100, "D": 64}) == (3, 2, 100, 64)
    assert KVCache["N", "N", 8, "N", dtypes.float32].bind_extents({"N": 4}) == (4, 4, 8, 4)


def test_a_request_ends_once():
    made = cache(layers=1)
    request = made.open(PROMPT)
    request.release()
    request.release()
    assert made.stats().free == made.stats().total
    made.close()
