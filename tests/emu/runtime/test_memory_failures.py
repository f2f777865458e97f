"""DEV=EMU: memory that runs out at each allocation in turn. What happens is an `OutOfMemoryError`, nothing is
held afterwards, and the same program runs."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.graphs.pool_case import INPUTS, Paged, batch
from tests.support.patterns.on_emu import emu  # noqa: F401
from tests.support.runtime.failing_memory import every_allocation, failing
from tinygrad_nv import Device, Tensor, TinyJit, dtypes
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
