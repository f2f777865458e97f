"""What DEV=EMU says of work in the wrong order."""
from __future__ import annotations

import pytest

from tests.support.runtime.order_case import NBYTES, Bench, N, kernel, mine
from tinygrad_nv.errors import DriverError, KernelError
from tinygrad_nv.ptx.builder import Kernel
from tinygrad_nv.runtime.driver import Download, Launch, Upload, pointer


@pytest.fixture
def bench() -> Bench: return Bench()


def found(bench: Bench) -> str:
    with pytest.raises(KernelError) as caught: bench.gpu.synchronize()
    assert caught.value.expected == "kernels in which the emulator finds nothing"
    assert caught.value.fix == \
        "correct what is named; EMU_CHECK=0 runs without race, order and initialisation checks"
    return caught.value.found


def test_streams(bench: Bench):
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.gpu.submit(bench.launch("tally", bench.b + 128, threads=32), bench.t)
    assert found(bench) == (
        f"order: kernel tally updates, and kernel move writes, bytes 128 to 255 of the 256 allocated at "
        f"{bench.b:#x}, and nothing orders the two: record an event in stream 1 after kernel move, and let "
        f"stream 2 wait for it before kernel tally")


def test_nodes_of_a_graph(bench: Bench):
    graph = bench.gpu.graph()
    for target, source in ((bench.b, bench.a), (bench.c, bench.b)): graph.add(bench.move(target, source))
    graph.instantiate().launch()
    assert found(bench) == (
        f"order: kernel move (node 0 of a graph) writes, and kernel move (node 1 of a graph) reads, bytes 0 "
        f"to 255 of the 256 allocated at {bench.b:#x}, and nothing orders the two: add an edge from node 0 "
        f"to node 1")


def test_page_locked_memory_in_two_streams(bench: Bench):
    host = bench.gpu.host(NBYTES)
    for stream in (bench.s, bench.t): bench.gpu.submit(Download(host, 0, bench.a, NBYTES), stream)
    assert found(bench) == (
        "order: a download writes, and a download writes, bytes 0 to 255 of page-locked memory, and nothing "
        "orders the two: record an event in stream 1 after a download, and let stream 2 wait for it before a "
        "download")


def test_page_locked_memory_written_too_early(bench: Bench):
    host = bench.gpu.host(NBYTES)
    bench.gpu.submit(Upload(bench.b, host, 0, NBYTES), bench.s)
    host.view[3] = 1
    assert found(bench) == (
        "host: byte 3 of page-locked memory was written while an upload of 256 bytes in stream 1 owned it: "
        "record an event after the upload, and wait_for it before the memory is written again")


def test_page_locked_memory_that_is_not_there(bench: Bench):
    host = bench.gpu.host(NBYTES)
    with pytest.raises(DriverError) as caught: bench.gpu.submit(Upload(bench.b, host, 8, NBYTES))
    assert caught.value.found == "bytes 8 to 264 of page-locked memory"
    assert caught.value.expected == "of its 256"
    with pytest.raises(DriverError) as caught:
        bench.gpu.submit(Download(bytearray(4), 0, bench.b, 4))  # type: ignore[arg-type]
    assert caught.value.found == "page-locked memory that is a bytearray"
    assert caught.value.expected == "what host() of an emulated device gave"


def dependent(bench: Bench, waits: bool) -> Launch:
    """A programmatic launch that reads b and, perhaps, waits afterwards."""
    def write(k: Kernel) -> None:
        k.ld("global", "u32", mine(k, k.pointer("source")).at())
        if waits: k.wait_for_previous_grid()
    function = bench.gpu.load(kernel("dependent", write)).function("dependent")
    return Launch(function, (1, 1, 1), (N, 1, 1), (pointer(bench.b),), pdl=True)


def test_a_programmatic_launch_reads_early(bench: Bench):
    bench.gpu.submit(bench.move(bench.b, bench.a))
    bench.gpu.submit(dependent(bench, waits=True))
    said = found(bench)
    assert said.startswith("kernel dependent: race: line ")
    assert " is not ordered after griddepcontrol.wait: it is written by kernel move, which may " in said
    assert ": ld.global.u32 " in said


def test_a_programmatic_launch_that_does_not_wait(bench: Bench):
    bench.gpu.submit(dependent(bench, waits=False))
    words = "a programmatic launch whose CTAs do not all execute it may end before the kernels ahead"
    assert f"the CTA ends without griddepcontrol.wait: {words}" in found(bench)
