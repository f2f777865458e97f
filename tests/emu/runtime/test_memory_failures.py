"""DEV=EMU, and DEV=CUDA on the fake driver: memory that runs out at each allocation in turn, and shortages
of the driver. What happens is an `OutOfMemoryError`, nothing is held afterwards, and the same program
runs."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.graphs.pool_case import INPUTS, Paged, batch
from tests.support.patterns.on_emu import (
    emu,  # noqa: F401
    equal,
)
from tests.support.runtime.cuda_fake import Fake
from tests.support.runtime.failing_memory import every_allocation, failing
from tests.support.runtime.on_cuda import cuda
from tinygrad_nv import Device, Tensor, TinyJit, dtypes, memory_report
from tinygrad_nv.errors import OutOfMemoryError
from tinygrad_nv.graphs import GraphPool
from tinygrad_nv.patterns.program import Output, call
from tinygrad_nv.runtime.memory_pool import label_allocations
from tinygrad_nv.tile.gemm.dense import dense
from tinygrad_nv.tile.gemm.schedules import Mma
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

pytestmark = pytest.mark.usefixtures("frozen")
X = np.arange(96, dtype=np.float32).reshape(8, 12) % 7


def eager() -> np.ndarray:
    x, w = Tensor(X).realize(), Tensor(X.T.copy()).realize()
    y = (x @ w).relu().contiguous().realize()
    return ((y - y.max(0)).contiguous() + x.sum()).numpy()


def captured() -> np.ndarray:
    """Runs, captures, and replays with other inputs."""
    jit = TinyJit(lambda x: ((x @ x.T).relu().contiguous().softmax().contiguous() + x.sum()).realize())
    return np.stack([jit(Tensor(X + i).realize()).numpy() for i in range(4)])


def split_product() -> np.ndarray:
    """A kernel with a workspace and flags."""
    spec = dense(16, 16, 128, "f16")
    kernel = TABLE.build(spec, Mma().block(16, 16).k(32).warps(1, 1).stages(2).split(2), GPU("sm_80"))
    assert kernel.workspace_bytes
    assert kernel.flags
    a, b = (Tensor(np.resize(X, (16, 128)) + i).cast(dtypes.half).contiguous().realize() for i in range(2))
    return Tensor(call(kernel, "EMU", [Output((16, 16), dtypes.half)], [a.uop, b.uop])[0]).numpy()


def trained() -> np.ndarray:
    """Two steps of gradient descent."""
    w = Tensor(X.T.copy()).realize()
    for _ in range(2):
        (gradient,) = (Tensor(X) @ w).square().mean().gradient(w)
        w.assign(w - gradient * 1e-3).realize()
    return w.numpy()


def pooled() -> np.ndarray:
    """A step captured and replayed, with inputs in page-locked memory."""
    pool = GraphPool(Paged("EMU"), INPUTS, (2,))
    try: return np.concatenate([pool(**batch(rows, rows))["mixed"].numpy() for rows in (1, 2)])
    finally: pool.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("program", "least"),
                         [(eager, 6), (captured, 9), (split_product, 7), (trained, 4)])
def test_every_allocation_of_a_program(program, least: int):
    assert every_allocation(program) >= least


@pytest.mark.slow
def test_every_allocation_of_a_graph_pool():
    """On the device, and of page-locked memory."""
    assert every_allocation(pooled, again=False) >= 7


def test_one_refusal_is_survived():
    """The pool tries again when it has given back what it could."""
    wanted = captured()
    with failing(Device["EMU"].driver, 0, lasting=False) as count: captured()
    for n in range(1, count.made + 1):
        with failing(Device["EMU"].driver, n, lasting=False) as count:
            np.testing.assert_array_equal(captured(), wanted)
        assert count.refused == 1


def test_page_locked_memory():
    pool = Device["EMU"].pool
    pool.host(64).free()
    with failing(pool.driver, 1), label_allocations("graphs"), pytest.raises(OutOfMemoryError) as caught:
        pool.host(64)
    assert (caught.value.asked, caught.value.label, caught.value.report) == (64, "graphs", None)
    pool.host(64).free()


# **** the harness finds what it is for ****

def test_a_leak_is_found():
    left: list[Tensor] = []
    def leaky() -> np.ndarray:
        first = Tensor(X).realize()
        try: return (first + 1).numpy()
        except OutOfMemoryError:
            left.append(first)
            raise
    with pytest.raises(AssertionError, match="allocation 2"): every_allocation(leaky)


def test_a_finalizer_that_raises_is_found():
    class Half:
        def __init__(self) -> None: self.tensor = Tensor(X).realize()
        def __del__(self) -> None: del self.tensor
    def halves() -> np.ndarray: return Half().tensor.numpy()
    with pytest.raises(AssertionError, match="no attribute 'tensor'"): every_allocation(halves)


def test_a_failure_without_an_error_is_found():
    def silent() -> np.ndarray:
        try: return Tensor(X).realize().numpy()
        except OutOfMemoryError: return X
    with pytest.raises(AssertionError, match="allocation 1 was refused, and no error was raised"):
        every_allocation(silent)


FULL = "CUDA_ERROR_OUT_OF_MEMORY"


@pytest.fixture
def fake() -> Iterator[Fake]:
    with cuda("PTX") as made: yield made


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
