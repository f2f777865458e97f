"""DEV=CUDA on the fake of NVIDIA's driver library: what the driver keeps, memory that runs out at each
allocation, and shortages of the driver itself."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.patterns.on_emu import equal
from tests.support.runtime.cuda_fake import Fake
from tests.support.runtime.failing_memory import every_allocation
from tests.support.runtime.on_cuda import cuda
from tinygrad_nv import Device, Tensor, TinyJit, memory_report
from tinygrad_nv.errors import OutOfMemoryError

pytestmark = pytest.mark.usefixtures("frozen")

X = np.arange(96, dtype=np.float32).reshape(8, 12) % 7
FULL = "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.fixture
def fake() -> Iterator[Fake]:
    with cuda("PTX") as made: yield made


def captured() -> np.ndarray:
    """Runs, captures, and replays with other inputs."""
    jit = TinyJit(lambda x: ((x @ x.T).relu().contiguous().softmax().contiguous() + x.sum()).realize())
    return np.stack([jit(Tensor(X + i).realize()).numpy() for i in range(4)])


def test_every_allocation(fake: Fake):
    assert every_allocation(captured, "CUDA") >= 9


def test_what_is_freed_is_kept_by_the_driver(fake: Fake):
    pool = Device["CUDA"].pool
    pool.free(pool.alloc(3 << 20))
    pool.driver.synchronize()
    report = memory_report("CUDA")
    assert (report.held, report.kept, report.outside) == (0, 3 << 20, 0)
    assert pool.driver.trim() == 3 << 20
    assert memory_report("CUDA").kept == 0


def test_what_is_kept_counts_against_the_limit(fake: Fake):
    pool = Device["CUDA"].pool
    pool.free(pool.alloc(3 << 20))
    pool.limit = 2 << 20
    address = pool.alloc(1 << 20)
    assert pool.driver.slack_bytes() == 0
    pool.free(address)
    assert pool.driver.slack_bytes() == 1 << 20


def doubled() -> Tensor: return (Tensor(X) * 2).contiguous().realize()


def test_no_memory_for_code(fake: Fake):
    name = "cuModuleLoadDataEx"
    fake.fail(name, FULL)
    equal(doubled(), X * 2)
    assert fake.calls["cuMemPoolTrimTo"] == 1
    fake.fail(name, FULL, times=2)
    with pytest.raises(OutOfMemoryError, match="out of memory on CUDA: none for kernel E_") as caught:
        (Tensor(X) * 3).contiguous().realize()
    assert f"driver:   loading a module: {FULL}" in caught.value.found
    equal((Tensor(X) * 4).contiguous().realize(), X * 4)


def test_no_memory_for_a_graph(fake: Fake):
    name = "cuGraphInstantiate"
    wanted = captured()
    fake.fail(name, FULL)
    np.testing.assert_array_equal(captured(), wanted)
    fake.fail(name, FULL, times=2)
    with pytest.raises(OutOfMemoryError, match="out of memory on CUDA: none for a graph"): captured()
    np.testing.assert_array_equal(captured(), wanted)


def test_no_page_locked_memory_for_copies(fake: Fake):
    fake.fail("cuMemHostAlloc", FULL)
    with pytest.raises(OutOfMemoryError, match="out of page-locked memory: 384 B asked for tensors"):
        Tensor(X).realize()
    equal(doubled(), X * 2)
