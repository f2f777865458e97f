"""Page-locked memory belongs to the work that was submitted with it until the host knows that to be done."""
from __future__ import annotations

import numpy as np
import pytest

from tests.support.runtime.order_case import NBYTES, Bench, N
from tinygrad_nv.errors import DriverError
from tinygrad_nv.runtime.driver import Download, HostMemory, Upload


@pytest.fixture
def bench() -> Bench: return Bench()


@pytest.fixture
def host(bench: Bench) -> HostMemory:
    memory = bench.gpu.host(NBYTES)
    memory.view[:] = np.arange(N, dtype="<u4").tobytes()
    return memory


@pytest.mark.parametrize("known", [False, True])
def test_an_upload_owns_its_memory(bench: Bench, host: HostMemory, known: bool):
    bench.gpu.submit(Upload(bench.b, host, 8, 16), bench.s)
    event = bench.event(bench.s)
    if known: bench.gpu.wait_for(event)
    host.view[9] = 77
    said = bench.said()
    assert (said == "") is known
    assert known or said == (
        "host: byte 9 of page-locked memory was written while an upload of 16 bytes in stream 1 owned it: "
        "record an event after the upload, and wait_for it before the memory is written again")
    assert (bench.read(bench.b, words=4) == np.arange(2, 6)).all()


def test_memory_beside_an_upload_is_free(bench: Bench, host: HostMemory):
    bench.gpu.submit(Upload(bench.b, host, 8, 16), bench.s)
    host.view[7] = host.view[24] = 77
    assert bench.said() == ""


@pytest.mark.parametrize("wait", ["synchronize", "wait_for", "stream that waits", "copy_out"])
def test_a_download_is_poison_until_it_is_known(bench: Bench, host: HostMemory, wait: str):
    bench.gpu.submit(bench.move(bench.b, bench.a), bench.s)
    bench.gpu.submit(Download(host, 4, bench.b, 8), bench.s)
    event = bench.event(bench.s)
    words = np.frombuffer(host.view, "<u4")
    assert words[:4].tolist() == [0, 2**32 - 1, 2**32 - 1, 3]
    bench.gpu.synchronize(bench.t)
    assert words[1] == 2**32 - 1
    if wait == "synchronize": bench.gpu.synchronize()
    elif wait == "wait_for": bench.gpu.wait_for(event)
    elif wait == "copy_out": bench.read(bench.c, bench.s)
    else:
        bench.gpu.wait(event, bench.t)
        bench.gpu.synchronize(bench.t)
    assert words[:4].tolist() == [0, 1, 2, 3]
    assert bench.said() == ""


def test_what_comes_after_a_download_sees_it(bench: Bench, host: HostMemory):
    """Twice through the same memory, without a wait in between."""
    for source, target in ((bench.a, bench.b), (bench.c, bench.a)):
        bench.gpu.submit(bench.move(source, bench.c), bench.s)
        bench.gpu.submit(Download(host, 0, source, NBYTES), bench.s)
        bench.gpu.submit(Upload(target, host, 0, NBYTES), bench.s)
    assert bench.said() == ""
    assert (bench.read(bench.b) == np.arange(N) + 1).all()
    assert (np.frombuffer(host.view, "<u4") == np.arange(N) + 1).all()


@pytest.mark.parametrize("written", [False, True])
def test_a_download_over_an_upload(bench: Bench, host: HostMemory, written: bool):
    bench.gpu.submit(Upload(bench.b, host, 0, NBYTES), bench.s)
    if written: host.view[0] = 77
    bench.gpu.submit(Download(host, 0, bench.a, NBYTES), bench.s)
    assert ("byte 0 of page-locked memory was written" in bench.said()) is written
    assert (np.frombuffer(host.view, "<u4") == np.arange(N)).all()


def test_the_later_of_two_downloads_is_poison_still(bench: Bench, host: HostMemory):
    bench.gpu.submit(Download(host, 0, bench.a, 8), bench.s)
    first = bench.event(bench.s)
    bench.gpu.submit(Download(host, 4, bench.a, 8), bench.s)
    bench.gpu.wait_for(first)
    words = np.frombuffer(host.view, "<u4")
    assert words[:3].tolist() == [0, 2**32 - 1, 2**32 - 1]
    assert bench.said() == ""
    assert words[:3].tolist() == [0, 0, 1]


def test_page_locked_memory_is_given_back_early(bench: Bench, host: HostMemory):
    bench.gpu.submit(Upload(bench.b, host, 0, NBYTES), bench.s)
    host.free()
    assert bench.said() == ""
    assert (bench.read(bench.b) == np.arange(N)).all()


def test_unchecked_downloads_are_there_at_once():
    bench = Bench(check=False)
    host = bench.gpu.host(NBYTES)
    bench.gpu.submit(Download(host, 0, bench.a, NBYTES), bench.s)
    assert (np.frombuffer(host.view, "<u4") == np.arange(N)).all()


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("uploads", [False, True])
def test_two_streams_share_page_locked_memory(bench: Bench, host: HostMemory, uploads: bool, ordered: bool):
    bench.gpu.submit(Download(host, 0, bench.a, NBYTES), bench.s)
    if ordered: bench.then(bench.s, bench.t)
    work = Upload(bench.b, host, 252, 4) if uploads else Download(host, 252, bench.b, 4)
    bench.gpu.submit(work, bench.t)
    said = bench.said()
    assert (said == "") is ordered
    assert ordered or "bytes 252 to 255 of page-locked memory, and nothing orders the two" in said


def test_bytes_outside_page_locked_memory(bench: Bench, host: HostMemory):
    with pytest.raises(DriverError, match="bytes 8 to 264 of page-locked memory"):
        bench.gpu.submit(Upload(bench.b, host, 8, NBYTES))
    with pytest.raises(DriverError, match="page-locked memory that is a object"):
        bench.gpu.submit(Download(object(), 0, bench.b, 4))  # type: ignore[arg-type]
