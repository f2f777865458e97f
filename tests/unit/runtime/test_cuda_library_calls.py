"""Calls of libraries on the CUDA driver: in a stream by its handle, in a graph as what the library put into a
captured stream."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.runtime import cuda_fake
from tinygrad_nv.errors import DistError
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.driver import Copy, Fill
from tinygrad_nv.runtime.library_call import LibraryCall

NUMBERS = np.arange(16, dtype=np.uint8)


def read(gpu: CUDADriver, address: int) -> list[int]:
    out = np.empty_like(NUMBERS)
    gpu.copy_out(memoryview(out), address)
    return out.tolist()


def copied(fake: cuda_fake.Fake, source: int, target: int) -> LibraryCall:
    """A library that copies, by calls of its own."""
    def enqueue(stream: int) -> None:
        assert not fake.cuMemcpyDtoDAsync(target, source, 16, stream)[0]
    return LibraryCall("a copy", ((source, 16),), ((target, 16),), enqueue)


@pytest.fixture
def fake():
    with cuda_fake.installed() as made: yield made


def test_streams_and_graphs(fake):
    gpu = CUDADriver()
    a, b, c = (gpu.alloc(16) for _ in range(3))
    gpu.copy_in(a, memoryview(NUMBERS))
    gpu.submit(copied(fake, a, b))
    assert read(gpu, b) == NUMBERS.tolist()
    graph = gpu.graph()
    first = graph.add(Fill(b, 7, 16))
    second = graph.add(copied(fake, b, c), [first])
    graph.add(Copy(a, c, 16), [second])
    executable = graph.instantiate()
    executable.launch()
    assert read(gpu, a) == [7] * 16
    gpu.copy_in(a, memoryview(NUMBERS))
    executable.update(second, copied(fake, a, c))
    executable.launch()
    assert read(gpu, c) == NUMBERS.tolist()
    assert fake.calls["cuGraphDestroy"] == 2    # what was captured is copied into the graph
    del executable, graph
    gpu.close()


def test_a_library_that_fails_ends_the_capture(fake):
    gpu = CUDADriver()

    def enqueue(stream: int) -> None: raise DistError("no peer")
    with pytest.raises(DistError, match="no peer"): gpu.graph().add(LibraryCall("x", (), (), enqueue))
    assert not fake.captures
    gpu.close()
