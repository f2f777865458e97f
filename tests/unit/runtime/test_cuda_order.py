"""Streams, graphs, contexts and lives of what CUDADriver makes."""
from __future__ import annotations

import gc
import threading
from dataclasses import replace

import numpy as np
import pytest

from tests.support.runtime.cuda_fake import Fake, installed
from tests.support.runtime.cuda_fake_parts import FakeExec, FakeGraph
from tests.unit.runtime.test_driver import HEAD, N, Numbers
from tinygrad_nv.errors import DriverError, KernelError
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.driver import Copy, Download, Fill, Launch, Upload, Window, pointer

ONE = (1, 1, 1)


# **** streams ****

def test_events_order_streams(numbers: Numbers):
    gpu, stream, event = numbers.gpu, numbers.gpu.stream(), numbers.gpu.event()
    gpu.submit(numbers.add(1))
    gpu.record(event)
    gpu.wait(event, stream)
    gpu.submit(numbers.twice(), stream)
    assert (numbers.read(stream=stream) == 2 * (np.arange(N) + 1)).all()


def test_a_missing_event_is_found(numbers: Numbers):
    gpu, stream = numbers.gpu, numbers.gpu.stream()
    gpu.synchronize()
    gpu.submit(numbers.add(1))
    gpu.submit(numbers.twice(), stream)
    with pytest.raises(KernelError, match="kernel twice"): gpu.synchronize()


def test_an_external_stream(numbers: Numbers):
    """What torch gives is its CUstream as a number; 0 is CUDA's default stream."""
    gpu, event = numbers.gpu, numbers.gpu.event()
    handle = int(gpu.stream().handle)
    for number in (handle, 0):
        theirs = gpu.external_stream(number)
        assert gpu.external_stream(number) is theirs
        gpu.record(event)
        gpu.wait(event, theirs)
        gpu.submit(numbers.add(1), theirs)
        gpu.record(event, theirs)
        gpu.wait(event)
    assert (numbers.read() == np.arange(N) + 2).all()
    assert [each.external for each in gpu.streams] == [False, False, True, True]


def test_time_of_events_that_are_not_there_yet(fake: Fake, gpu: CUDADriver):
    start, end = gpu.event(), gpu.event()
    gpu.record(start)
    gpu.record(end)
    fake.fail("cuEventElapsedTime", "CUDA_ERROR_NOT_READY")
    with pytest.raises(DriverError, match="time is taken from an event that has not come to pass"):
        gpu.ms_between(start, end)


def test_a_stream_of_another_gpu(gpu: CUDADriver):
    other = CUDADriver(1)
    with pytest.raises(DriverError, match="a stream of another device"): gpu.synchronize(other.stream())
    other.close()


# **** graphs ****

def edges(fake: Fake) -> list[list[tuple[int, int, int]]]:
    """For each node of the only graph, its edges: number of the node before, port and type."""
    graph, = (each for each in fake.handles.values() if isinstance(each, FakeGraph))
    return [[(graph.nodes.index(before), *kind) for before, kind in node.before.items()]
            for node in graph.nodes]


def test_edges_are_reduced_and_programmatic_where_they_may_be(fake: Fake, numbers: Numbers):
    gpu = numbers.gpu
    graph, early = gpu.graph(), replace(numbers.twice(), pdl=True)
    nodes = [graph.add(Fill(numbers.address, 0, 4))]
    nodes.append(graph.add(early, nodes))                   # behind a fill: whole
    nodes.append(graph.add(early, nodes))                   # behind a launch: programmatic
    nodes.append(graph.add(numbers.twice(), nodes))         # asks for nothing: whole
    nodes.append(graph.add(early, nodes[:1]))               # behind the fill
    nodes.append(graph.add(early, nodes))                   # behind two: whole
    nodes.append(graph.add(Copy(numbers.address, numbers.address + 128, 4), nodes))
    assert edges(fake) == [[], [(0, 0, 0)], [(1, 1, 1)], [(2, 0, 0)], [(0, 0, 0)], [(3, 0, 0), (4, 0, 0)],
                           [(5, 0, 0)]]
    assert graph.after[5] == (0, 1, 2, 3, 4)


def test_a_captured_stream_begins_early_too(fake: Fake, numbers: Numbers):
    gpu, stream = numbers.gpu, numbers.gpu.stream()
    gpu.begin_capture(stream)
    for work in (numbers.twice(), replace(numbers.twice(), pdl=True)): gpu.submit(work, stream)
    graph = gpu.end_capture(stream)
    assert edges(fake) == [[], [(0, 1, 1)]]
    del graph


def test_every_kind_of_node_runs_and_is_updated(numbers: Numbers):
    gpu, host = numbers.gpu, numbers.gpu.host(16)
    gpu.synchronize()
    other = gpu.alloc(4 * N)
    host.view[:] = bytes(range(16))
    graph, at = gpu.graph(), numbers.address
    works = [Fill(other, 7, 4 * N), Upload(at, host, 0, 8), numbers.add(1), Copy(other, at, 16),
             Download(host, 8, other, 8)]
    nodes = []
    for work in works: nodes.append(graph.add(work, nodes))
    ready = graph.instantiate()
    ready.launch()
    gpu.synchronize()
    assert bytes(host.view) == bytes([*range(8), 1, 1, 2, 3, 5, 5, 6, 7])
    for node, work in zip(nodes, (Fill(other, 9, 4 * N), Upload(at, host, 8, 8), numbers.add(2),
                                  Copy(other + 4, at, 16), Download(host, 0, other, 8)), strict=True):
        ready.update(node, work)
    ready.launch()
    gpu.synchronize()
    assert bytes(host.view[:8]) == bytes([9, 9, 9, 9, 3, 1, 2, 3])


def test_an_executable_holds_what_it_uses(fake: Fake, numbers: Numbers):
    gpu, graph = numbers.gpu, numbers.gpu.graph()
    first, second = gpu.host(8), gpu.host(8)
    node = graph.add(Upload(numbers.address, first, 0, 8))
    ready = graph.instantiate()
    del graph
    ready.update(node, Upload(numbers.address, second, 0, 8))
    del first, second
    assert fake.calls["cuMemFreeHost"] == 0  # the graph's own node has the first
    del ready
    assert fake.calls["cuMemFreeHost"] == 2


def test_what_an_executable_cannot_change(numbers: Numbers):
    graph, plain = numbers.gpu.graph(), replace(numbers.twice(), grid=(2, 1, 1))
    node = graph.add(plain)
    ready = graph.instantiate()
    for what, change in {"cluster": {"cluster": (2, 1, 1)}, "pdl": {"pdl": True},
                         "window": {"window": Window(numbers.address, 256)}}.items():
        with pytest.raises(DriverError, match=f"node 0 is updated with {what}="):
            ready.update(node, replace(plain, **change))
    two = replace(plain, cluster=(2, 1, 1))
    pair = numbers.gpu.graph()
    pair.add(two)
    with pytest.raises(DriverError, match=r"grid=\(3, 1, 1\) is not a multiple of cluster=\(2, 1, 1\)"):
        pair.instantiate().update(node, replace(two, grid=(3, 1, 1)))
    ready.update(node, replace(plain, grid=ONE, block=(N // 2, 1, 1)))
    ready.launch()
    assert (numbers.read() == np.arange(N) * np.where(np.arange(N) < N // 2, 2, 1)).all()


def test_updates_that_the_driver_refuses(fake: Fake, numbers: Numbers):
    graph = numbers.gpu.graph()
    node = graph.add(Fill(numbers.address, 0, 4))
    ready = graph.instantiate()
    fake.fail("cuGraphExecMemsetNodeSetParams", "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(DriverError, match="updating node 0: CUDA_ERROR_INVALID_VALUE"):
        ready.update(node, Fill(numbers.address, 0, 8))
    assert ready.works == [Fill(numbers.address, 0, 4)]


@pytest.mark.parametrize("function", ["cuGraphKernelNodeSetAttribute", "cuGraphAddDependencies"])
def test_a_node_that_is_refused_leaves_nothing(fake: Fake, numbers: Numbers, function: str):
    graph = numbers.gpu.graph()
    first = graph.add(numbers.add(3))
    fake.fail(function, "CUDA_ERROR_INVALID_VALUE")
    paired = replace(numbers.twice(), grid=(2, 1, 1), cluster=(2, 1, 1))
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"): graph.add(paired, [first])
    graph.add(numbers.twice(), [first])
    assert edges(fake) == [[], [(0, 0, 0)]]
    graph.instantiate().launch()
    assert (numbers.read() == 2 * (np.arange(N) + 3)).all()


def test_work_that_no_node_can_be(numbers: Numbers):
    graph = numbers.gpu.graph()
    for words, work in {"a copy of 0 bytes in a graph": Copy(0, 0, 0), "a fill of 0 bytes": Fill(0, 0, 0),
                        "a copy of 2147483648 bytes in a graph": Copy(0, 0, 2**31)}.items():
        with pytest.raises(DriverError, match=words): graph.add(work)
    assert graph.works == []


def test_a_graph_goes_with_its_nodes(fake: Fake, numbers: Numbers):
    graph = numbers.gpu.graph()
    graph.add(numbers.twice())
    ready = graph.instantiate()
    del graph
    assert {"FakeGraph", "FakeNode", "FakeExec"} <= set(fake.left())  # updates name the graph's nodes
    del ready
    assert not {"FakeGraph", "FakeNode", "FakeExec"} & set(fake.left())


def test_a_graph_that_cannot_be_instantiated(fake: Fake, gpu: CUDADriver):
    fake.fail("cuGraphInstantiate", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError, match="instantiating a graph of 0 nodes: CUDA_ERROR_OUT_OF_MEMORY"):
        gpu.graph().instantiate()
    assert not any(isinstance(each, FakeExec) for each in fake.handles.values())


def test_work_that_the_driver_refuses(fake: Fake, numbers: Numbers):
    gpu, ready = numbers.gpu, numbers.gpu.graph().instantiate()
    for function, words, use in (
            ("cuGraphLaunch", "launching a graph", ready.launch),
            ("cuLaunchKernelEx", "launching kernel twice", lambda: gpu.submit(numbers.twice())),
            ("cuMemsetD8Async", "a fill of 4 bytes at 0x100", lambda: gpu.submit(Fill(256, 0, 4))),
            ("cuMemcpyDtoDAsync", "a copy of 4 bytes at 0x100", lambda: gpu.submit(Copy(256, 512, 4))),
            ("cuStreamCreate", "cuStreamCreate", gpu.stream), ("cuEventCreate", "cuEventCreate", gpu.event),
            ("cuGraphCreate", "cuGraphCreate", gpu.graph)):
        fake.fail(function, "CUDA_ERROR_NOT_PERMITTED")
        with pytest.raises(DriverError, match=f"^{words}.*: CUDA_ERROR_NOT_PERMITTED"): use()
    gpu.synchronize()


# **** what goes wrong on the device ****

def test_a_kernel_out_of_bounds_loses_the_context(fake: Fake, numbers: Numbers):
    gpu, event, host = numbers.gpu, numbers.gpu.event(), numbers.gpu.host(16)
    gpu.submit(numbers.add(1, numbers.address + 4))
    words = (r"CUDA_ERROR_ILLEGAL_ADDRESS \(words for 700\), found while waiting for the device: a kernel "
             "read or wrote memory that is not")
    with pytest.raises(KernelError, match=words) as caught: gpu.synchronize()
    assert "the context is lost" in caught.value.found
    assert "DEV=EMU" in caught.value.fix
    assert "out-of-bounds" in fake.findings[0]
    for again in (lambda: gpu.submit(numbers.twice()), numbers.read, lambda: gpu.alloc(8)):
        with pytest.raises(KernelError, match="CUDA_ERROR_ILLEGAL_ADDRESS"): again()
    # what Python lets go of now is not given back, and makes no noise
    before = fake.calls.total()
    host.free()
    gpu.free(numbers.address)
    del event
    gc.collect()
    assert fake.calls.total() == before
    gpu.close()
    fake.handles.clear()
    fake.devices[0].memory.clear()


# **** contexts ****

def test_every_thread_and_every_gpu(fake: Fake, gpu: CUDADriver):
    """Four threads with a GPU each, two for each GPU, and the main thread with both."""
    other, done = CUDADriver(1), []

    def work(driver: CUDADriver, value: int) -> None:
        numbers, stream = Numbers(driver), driver.stream()
        driver.synchronize()
        for _ in range(5): driver.submit(numbers.add(value), stream)
        done.append((numbers.read(stream=stream) == np.arange(N) + 5 * value).all())
        del numbers

    for i in range(4):
        thread = threading.Thread(target=work, args=((gpu, other)[i % 2], i))
        thread.start()
        thread.join()
    work(gpu, 9)
    work(other, 11)
    assert done == [True] * 6
    other.close()


def test_the_context_that_was_current_is_current_again(fake: Fake, gpu: CUDADriver):
    other = CUDADriver(1)
    here = lambda: int(fake._called("cuCtxGetCurrent", type(fake)._cuCtxGetCurrent)[1])  # noqa: E731
    assert here() == fake.devices[0].context
    numbers = Numbers(other)
    other.submit(numbers.twice())
    with pytest.raises(DriverError): other.submit(replace(numbers.twice(), block=(2000, 1, 1)))
    graph = other.graph()
    graph.add(numbers.twice())
    graph.instantiate().launch()
    assert here() == fake.devices[0].context
    found = []

    def elsewhere() -> None:
        numbers.read()
        found.append(here())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [0]  # CUDA takes a thread without a context for one of GPU 0
    other.close()


# **** lives ****

def test_nothing_is_left_by_garbage(fake: Fake, numbers: Numbers):
    gpu, before = numbers.gpu, fake.left()
    event, module, host = gpu.event(), gpu.load(HEAD.encode()), gpu.host(8)
    assert fake.left() != before
    del event, module, host
    gc.collect()
    assert fake.left() == before


def test_close_takes_all(fake: Fake):
    gpu = CUDADriver()
    numbers, host, event = Numbers(gpu), gpu.host(64), gpu.event()
    graph = gpu.graph()
    graph.add(numbers.twice())
    ready = graph.instantiate()
    ready.launch()
    gpu.close()
    gpu.close()
    assert fake.left() == {}
    with pytest.raises(DriverError, match=r"GPU 0 is used after close\(\)"): gpu.alloc(8)
    with pytest.raises(DriverError, match=r"GPU 0 is used after close\(\)"): ready.launch()
    del host, event, graph, ready
    gc.collect()


def test_two_drivers_of_one_gpu(fake: Fake, numbers: Numbers):
    again = CUDADriver()
    assert again.reach(numbers.gpu)
    numbers.gpu.synchronize()
    again.copy_in(numbers.address, memoryview(bytes(4 * N)))
    again.synchronize()
    again.close()
    assert (numbers.read() == 0).all()


def test_a_function_that_the_library_does_not_have(fake: Fake, gpu: CUDADriver):
    fake.absent.add("cuMemPoolTrimTo")
    with pytest.raises(DriverError, match='cuMemPoolTrimTo: Function "cuMemPoolTrimTo" not found') as caught:
        gpu.trim()
    assert "this one supports CUDA 13.0" in caught.value.expected


def test_the_fake_finds_what_is_used_after_it_was_destroyed():
    with installed() as fake:
        gpu = CUDADriver()
        stream = gpu.stream()
        fake.cuStreamDestroy(stream.handle)
        work = Launch(Numbers(gpu).kernels["twice"], ONE, ONE, (pointer(0),))
        with pytest.raises(AssertionError, match="used after it was destroyed"): gpu.submit(work, stream)
        used = f"FakeStream {int(stream.handle):#x} is used after it was destroyed"
        assert fake.complaints == [f"cuLaunchKernelEx: {used}"]
        fake.complaints.clear()
