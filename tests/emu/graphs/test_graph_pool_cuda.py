"""Graph pools on DEV=CUDA, over the fake of NVIDIA's driver library: what they ask of the driver is right,
and is all given back."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.graphs.pool_case import Paged, batch, eager, pool_of, same
from tests.support.runtime.cuda_fake import Fake
from tests.support.runtime.on_cuda import cuda
from tinygrad_nv import Device, Tensor, Variable, dtypes
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.runtime.cuda.graph import CUDAExecutable


@pytest.fixture
def fake() -> Iterator[Fake]:
    """One GPU; the block it is opened in looks for what is left on it."""
    with cuda("PTX") as made: yield made


@pytest.mark.slow
def test_rows_variables_and_eviction(fake: Fake):
    plain, pooled = Paged("CUDA"), Paged("CUDA")
    pool = pool_of(pooled, device="CUDA")
    pool.capture()
    for rows in (3, 1, 4, 2):
        given = batch(rows, rows)
        wanted = eager(plain, given, pool._size_of[rows], "CUDA")
        same(pool(**given), wanted)
        there = {name: Tensor(value).realize() for name, value in given.items()}
        same(pool(**there), wanted)
        np.testing.assert_array_equal(pooled.cache.numpy(), plain.cache.numpy())
    assert isinstance(pool.buckets[4].graph.executable.executable, CUDAExecutable)
    assert sum(b.updates + b.eager for b in pool.stats().buckets) == 0
    pool._evict_all()
    assert Device["CUDA"].pool.report().of("graphs").nbytes == pool.stats().input_bytes
    same(pool(**given), eager(plain, given, 2, "CUDA"))
    pool.close()
    assert Device["CUDA"].pool.report().of("graphs").nbytes == pool.stats().input_bytes


def test_variables_update_nodes(fake: Fake):
    def step(x: Tensor, n: Variable) -> Tensor: return (x[:, :n].sum(1) + n).contiguous()
    pool = GraphPool(step, {"x": Input((8,), dtypes.float32)}, (2,), "CUDA")
    x, n = np.arange(16, dtype=np.float32).reshape(2, 8), Variable("n", 1, 8)
    for value in (3, 3, 8, 1):
        np.testing.assert_array_equal(pool(x=x, n=n.bind(value)).numpy(), x[:, :value].sum(1) + value)
    assert pool.stats().buckets[0].updates == 3


def test_staging_is_not_written_under_the_gpu(fake: Fake):
    pool = GraphPool(lambda x: x * 2, {"x": Input((4,), dtypes.float32)}, (4,), "CUDA")
    for k in range(6):
        found = pool(x=np.full((3, 4), k, np.float32))
    np.testing.assert_array_equal(found.numpy(), np.full((3, 4), 10, np.float32))
