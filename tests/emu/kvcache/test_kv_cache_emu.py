"""`KVCache` on the emulated GPU: kernels of ours, and copies of pages by its driver."""
from __future__ import annotations

import pytest
from tinygrad import dtypes
from tinygrad.dtype import DType

from tests.support.kvcache.kv_cache_case import Loop, cache
from tinygrad_nv.tile.expression import short

PROMPT = list(range(1, 12))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.int8], ids=short)
def test_requests_fork_leave_and_return(dtype: DType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_DEBUG", "1")
    loop = Loop(cache(dtype, device="EMU", layers=1, S_max=32, pages=6, host_pages=6))
    a = loop.open(PROMPT)
    for start in (0, 8): loop.append([a], [PROMPT[start:start + 8]])
    fork = loop.fork(a)
    loop.append([a, fork], [[20], [21]])
    a.offload()
    other = loop.open(list(range(40, 80)))
    loop.append([other], [list(range(40, 48))])
    other.release()
    loop.append([a, fork], [[22], [23]])
    stats = loop.cache.stats()
    assert (stats.copies, stats.offloads, stats.restores) == (1, 2, 1)
    loop.cache.close()
