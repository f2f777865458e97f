"""The tests of the driver interface on a GPU: those that are not about what only the emulator can find, then
what only hardware has: streams side by side, programmatic launches, access-policy windows, and a peer where
there are two."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.unit.runtime.test_driver import (  # noqa: F401
    N,
    Numbers,
    test_a_capture_forks_and_joins,
    test_a_capture_records_and_does_not_run,
    test_a_stream_runs_in_order,
    test_a_tensor_map_beyond_the_limits,
    test_an_explicit_graph_obeys_its_edges,
    test_an_unloaded_module_is_not_launched,
    test_events_never_recorded,
    test_memory_in_and_out_at_an_offset,
    test_no_such_function,
    test_time_passes,
    test_two_captures_do_not_meet,
    test_updates_change_the_next_launch_only,
    test_updates_that_are_none,
    test_what_a_capture_refuses,
)
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.driver import Copy, Download, Launch, Upload, Window, integer, pointer

pytestmark = pytest.mark.gpu


@pytest.fixture
def gpu() -> Iterator[CUDADriver]:
    gpu = CUDADriver()
    yield gpu
    gpu.close()


@pytest.fixture
def numbers(gpu: CUDADriver) -> Numbers: return Numbers(gpu)


def test_an_event_orders_two_streams(numbers: Numbers):
    gpu, first, second = numbers.gpu, numbers.gpu.stream(), numbers.gpu.stream()
    gpu.synchronize()  # the numbers came by stream 0
    for i in range(200):
        gpu.submit(numbers.add(1), first)
        gpu.record(event := gpu.event(), first)
        gpu.wait(event, second)
        gpu.submit(numbers.twice() if i % 50 == 0 else numbers.add(-1), second)
        gpu.record(event, second)
        gpu.wait(event, first)
    gpu.synchronize()
    want = np.arange(N).astype(np.int64)
    for i in range(200): want = (want + 1) * 2 if i % 50 == 0 else want
    assert (numbers.read() == want.astype(np.uint32)).all()


def test_torch_and_we_share_memory_and_a_stream(numbers: Numbers):
    gpu, stream = numbers.gpu, torch.cuda.Stream()
    with torch.cuda.stream(stream):
        given = torch.arange(N, dtype=torch.int32, device="cuda")
        given += 1
        gpu.submit(numbers.add(5, given.data_ptr()), gpu.external_stream(stream.cuda_stream))
        given *= 3
        assert (given.cpu() == (torch.arange(N) + 6) * 3).all()


def test_torch_captures_what_we_launch(numbers: Numbers):
    given, graph = torch.zeros(N, dtype=torch.int32, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = numbers.gpu.external_stream(torch.cuda.current_stream().cuda_stream)
        numbers.gpu.submit(numbers.add(2, given.data_ptr()), stream)
    for _ in range(3): graph.replay()
    assert (given.cpu() == 6).all()


def test_page_locked_memory_goes_both_ways(numbers: Numbers):
    gpu = numbers.gpu
    host = gpu.host(8 * N)
    np.frombuffer(host.view, np.uint32)[:N] = np.arange(N) * 7
    gpu.submit(Upload(numbers.address, host, 0, 4 * N))
    gpu.submit(numbers.add(1))
    gpu.submit(Download(host, 4 * N, numbers.address, 4 * N))
    gpu.synchronize()
    assert (np.frombuffer(host.view, np.uint32)[N:] == np.arange(N) * 7 + 1).all()
    host.free()


def test_a_window_changes_no_answer(numbers: Numbers):
    gpu = numbers.gpu
    gpu.set_persisting_l2(min(1 << 20, gpu.properties.persisting_l2_limit))
    window = Window(numbers.address, 4 * N)
    gpu.submit(Launch(numbers.kernels["add"], (1, 1, 1), (N, 1, 1), (pointer(numbers.address), integer(3)),
                      window=window))
    gpu.set_persisting_l2(0)
    assert (numbers.read() == np.arange(N) + 3).all()


# lets the next kernel begin at once, and is slow between its wait and its addition
SLOW = """.version 7.8
.target sm_90
.address_size 64
.visible .entry slow(.param .u64 p, .param .u32 value)
{
.reg .u64 %a<4>;
.reg .u32 %r<6>;
.reg .pred %q;
griddepcontrol.launch_dependents;
ld.param.u64 %a1, [p];
ld.param.u32 %r1, [value];
mov.u32 %r2, %tid.x;
mul.wide.u32 %a2, %r2, 4;
add.u64 %a3, %a1, %a2;
griddepcontrol.wait;
mov.u32 %r4, 0;
again:
add.u32 %r4, %r4, 1;
ld.volatile.global.u32 %r3, [%a3];
setp.lt.u32 %q, %r4, 50;
@%q bra again;
add.u32 %r3, %r3, %r1;
st.global.u32 [%a3], %r3;
ret;
}
"""


@pytest.mark.parametrize("how", ["stream", "graph"])
def test_kernels_that_begin_early_wait_for_each_other(numbers: Numbers, how: str):
    """Each adds to what the one before has written, which is on its way while they begin."""
    gpu = numbers.gpu
    if gpu.properties.arch != "sm_90a": pytest.skip("programmatic launches need sm_90")
    slow, count = gpu.load(SLOW.encode()).function("slow"), 100
    works = [Launch(slow, (1, 1, 1), (N, 1, 1), (pointer(numbers.address), integer(i)), pdl=True)
             for i in range(count)]
    if how == "stream":
        for work in works: gpu.submit(work)
    else:
        graph, after = gpu.graph(), []
        for work in works: after = [graph.add(work, after)]
        graph.instantiate().launch()
    assert (numbers.read() == np.arange(N) + count * (count - 1) // 2).all()


def test_memory_of_a_peer():
    if torch.cuda.device_count() < 2: pytest.skip("one GPU")
    one, two = CUDADriver(0), CUDADriver(1)
    source, target = two.alloc(64), one.alloc(64)
    two.copy_in(source, memoryview(bytes(range(64))))
    one.copy_peer(Copy(target, source, 64), two)
    out = bytearray(64)
    one.copy_out(memoryview(out), target)
    assert out == bytes(range(64))
    one.close()
    two.close()
