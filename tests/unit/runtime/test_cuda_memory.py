"""Memory of CUDADriver: the pool and its order, page-locked memory, the ring for pageable bytes, peers."""
from __future__ import annotations

import gc
from contextlib import nullcontext

import numpy as np
import pytest

from tests.support.runtime.cuda_fake import Fake
from tests.unit.runtime.test_driver import N, Numbers
from tinygrad_nv.errors import DriverError, KernelError
from tinygrad_nv.runtime.cuda import memory as cuda_memory
from tinygrad_nv.runtime.cuda.driver import CUDADriver
from tinygrad_nv.runtime.cuda.memory import Staging, StreamOrderedPool
from tinygrad_nv.runtime.driver import Copy, Download, Fill, Upload

RING = 1024


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of 1 KiB, in pieces of a quarter."""
    monkeypatch.setattr(cuda_memory, "RING_BYTES", RING)
    monkeypatch.setattr(cuda_memory, "PIECE_BYTES", RING // 4)


def read(gpu: CUDADriver, address: int, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    gpu.copy_out(memoryview(out), address)
    return bytes(out)


# **** the pool ****

def test_memory_is_tried_again_when_the_pool_has_given_back(fake: Fake, gpu: CUDADriver):
    fake.fail("cuMemAllocFromPoolAsync", "CUDA_ERROR_OUT_OF_MEMORY")
    gpu.free(gpu.alloc(100))
    assert fake.calls["cuMemPoolTrimTo"] == 1


def test_memory_that_is_not_there(fake: Fake, gpu: CUDADriver):
    held = gpu.alloc(1 << 20)
    with pytest.raises(MemoryError, match="1099511627776 bytes asked for, 1048576 in use of the 85899345920 "
                                          "that the emulated sm_90a device has; 85898297344 bytes are free"):
        gpu.alloc(1 << 40)
    gpu.free(held)
    assert (gpu.used_bytes, gpu.memory()) == (0, (80 << 30, 80 << 30))


def test_what_the_pool_keeps(gpu: CUDADriver):
    total = 80 << 30
    first, second = gpu.alloc(3000), gpu.alloc(500)
    gpu.free(first)
    assert (gpu.used_bytes, gpu.slack_bytes(), gpu.memory()) == (500, 3000, (total - 500, total))
    assert gpu.trim() == 3000
    assert (gpu.used_bytes, gpu.slack_bytes(), gpu.memory()) == (500, 0, (total - 500, total))
    gpu.free(second)


def test_memory_fails_otherwise(fake: Fake, gpu: CUDADriver):
    fake.fail("cuMemAllocFromPoolAsync", "CUDA_ERROR_NOT_SUPPORTED")
    with pytest.raises(DriverError, match="allocating 8 bytes: CUDA_ERROR_NOT_SUPPORTED"): gpu.alloc(8)
    assert gpu.used_bytes == 0


def test_memory_is_freed_after_the_work_of_every_stream(fake: Fake, numbers: Numbers,
                                                        monkeypatch: pytest.MonkeyPatch):
    gpu, stream = numbers.gpu, numbers.gpu.stream()
    first, second = gpu.alloc(8), gpu.alloc(8)
    gpu.synchronize()
    gpu.submit(numbers.twice(), stream)
    gpu.free(first)
    gpu.submit(numbers.twice(), stream)
    with monkeypatch.context() as patch:
        patch.setattr(StreamOrderedPool, "_after", lambda self, stream: None)
        with pytest.raises(AssertionError, match="memory is freed before work"): gpu.free(second)
    fake.complaints.clear()
    gpu.pool.sizes[second] = 8


@pytest.mark.parametrize("kind", ["launch", "fill", "upload", "bytes", "graph", "peer"])
def test_every_kind_of_work_is_waited_for(fake: Fake, numbers: Numbers, kind: str):
    """The fake finds memory that is freed before work of some stream is done."""
    gpu, stream, host = numbers.gpu, numbers.gpu.stream(), numbers.gpu.host(8)
    graph, other, address = gpu.graph(), CUDADriver(1), gpu.alloc(8)
    graph.add(Fill(address, 0, 8))
    ready, theirs = graph.instantiate(), other.alloc(8)
    other.copy_in(theirs, memoryview(bytes(8)))
    gpu.synchronize()
    if kind == "launch": gpu.submit(numbers.twice(), stream)
    elif kind == "fill": gpu.submit(Fill(address, 0, 8), stream)
    elif kind == "upload": gpu.submit(Upload(address, host, 0, 8), stream)
    elif kind == "bytes": gpu.copy_in(address, memoryview(bytes(8)), stream)
    elif kind == "graph": ready.launch(stream)
    else: gpu.copy_peer(Copy(address, theirs, 8), other, stream)
    other.free(theirs)
    gpu.free(address)
    other.close()


def test_a_stream_in_capture_is_left_alone(fake: Fake, gpu: CUDADriver):
    """An event recorded there would take our stream of frees into their capture."""
    handle = int(gpu.stream().handle)
    theirs = gpu.external_stream(handle)
    address = gpu.alloc(8)
    theirs.busy = True
    fake.capturing.add(handle)
    gpu.free(address)
    assert theirs.busy
    fake.capturing.clear()
    gpu.free(gpu.alloc(8))
    assert not theirs.busy


def test_what_goes_while_a_library_captures_does_not_end_its_capture(fake: Fake, gpu: CUDADriver,
                                                                     monkeypatch: pytest.MonkeyPatch):
    """A collection of cycles in the midst of torch's capture waited for our streams."""
    theirs, host, other = gpu.stream(), gpu.host(64), gpu.host(64)
    gpu.submit(Upload(gpu.alloc(64), host, 0, 64))
    fake.capturing.add(int(theirs.handle))
    del host
    gc.collect()
    assert fake.complaints == []
    assert fake.calls["cuMemFreeHost"] == 1
    monkeypatch.setattr(gpu, "_beside_captures", nullcontext)
    with pytest.raises(AssertionError, match="while a stream is captured"): other.free()
    fake.complaints.clear()
    fake.capturing.clear()


# **** page-locked memory ****

def test_page_locked_memory_goes_both_ways(fake: Fake, gpu: CUDADriver):
    host, address = gpu.host(64), gpu.alloc(64)
    host.view[:] = bytes(range(64))
    gpu.submit(Upload(address, host, 8, 16))
    gpu.submit(Fill(address + 4, 200, 2))
    gpu.submit(Download(host, 40, address, 16))
    gpu.synchronize()
    assert bytes(host.view[40:56]) == bytes([8, 9, 10, 11, 200, 200, *range(14, 24)])
    host.free()
    assert host.view.nbytes == 0
    assert fake.calls["cuMemFreeHost"] == 1
    host.free()
    assert fake.calls["cuMemFreeHost"] == 1


@pytest.mark.slow
def test_page_locked_memory_that_is_let_go_of(fake: Fake, gpu: CUDADriver):
    stream, host, address = gpu.stream(), gpu.host(64), gpu.alloc(64)
    host.view[:] = bytes(64)
    gpu.submit(Upload(address, host, 0, 64), stream)
    del host
    gc.collect()
    assert fake.calls["cuMemFreeHost"] == 1
    # the copy was waited for
    assert not any(each.issued > each.done for each in fake.devices[0].streams)


def test_page_locked_memory_that_cannot_be(fake: Fake, gpu: CUDADriver):
    fake.fail("cuMemHostAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(MemoryError, match="4096 bytes of page-locked memory asked for"): gpu.host(4096)
    with pytest.raises(DriverError, match="an allocation of 0 bytes"): gpu.host(0)
    host = gpu.host(16)
    with pytest.raises(DriverError, match="9 bytes at 8 of page-locked memory"):
        gpu.submit(Upload(0, host, 8, 9))


# **** bytes of the host ****

def test_bytes_of_every_size(ring: None, gpu: CUDADriver):
    address = gpu.alloc(4 * RING)
    for size in (1, 255, 256, 257, 700, RING, RING + 1, 3 * RING + 77):
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        source = data.copy()
        gpu.copy_in(address, memoryview(source))
        source[:] = 0  # taken when copy_in returned
        assert read(gpu, address, size) == data.tobytes()
    gpu.copy_in(address, memoryview(b""))


def test_a_copy_waits_for_the_ring_alone(ring: None, fake: Fake, gpu: CUDADriver):
    streams, address = [gpu.stream() for _ in range(3)], gpu.alloc(8 * RING)
    before = fake.calls["cuStreamSynchronize"]
    for i in range(40):
        data = bytes([i]) * 200
        gpu.copy_in(address + 200 * i, memoryview(data), streams[i % 3])
        assert (fake.calls["cuEventSynchronize"] > 0) == (i >= 5)
    assert fake.calls["cuStreamSynchronize"] == before
    gpu.synchronize()
    assert read(gpu, address, 8000) == b"".join(bytes([i]) * 200 for i in range(40))


def test_a_round_that_ends_before_the_last_one_did(ring: None, gpu: CUDADriver):
    """The fifth piece of the first round, at 800, is in flight when the second round ends at 790: it is
    waited for, and with it all that comes before the third round."""
    address, at = gpu.alloc(2 * RING + 256), 0
    for i, size in enumerate((200, 200, 200, 200, 200, 200, 200, 200, 190, 256)):
        gpu.copy_in(address + at, memoryview(bytes([i]) * size))
        at += size
    gpu.synchronize()
    assert read(gpu, address + 1000, 200) == bytes([5]) * 200


def test_pieces_in_flight_are_counted(fake: Fake, gpu: CUDADriver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_memory, "MOST_PIECES", 3)
    address = gpu.alloc(64)
    for i in range(10): gpu.copy_in(address + i, memoryview(bytes([i])))
    assert fake.calls["cuEventSynchronize"] == 7
    assert read(gpu, address, 10) == bytes(range(10))


def test_a_ring_that_is_not_waited_for(ring: None, gpu: CUDADriver, monkeypatch: pytest.MonkeyPatch):
    """The other half of the tests above: what they would find."""
    address = gpu.alloc(RING)
    monkeypatch.setattr(Staging, "_wait", lambda self: self.spare.append(self.pieces.popleft()[2]))

    def fill() -> None:
        for i in range(9): gpu.copy_in(address, memoryview(bytes([i]) * 200))
        gpu.synchronize()

    with pytest.raises(KernelError, match="page-locked memory was written while"): fill()


def test_a_view_of_other_elements(gpu: CUDADriver):
    address = gpu.alloc(16)
    gpu.copy_in(address, memoryview(np.arange(4, dtype=np.float32)))
    assert read(gpu, address, 16) == np.arange(4, dtype=np.float32).tobytes()


# **** other GPUs ****

def test_copies_from_another_gpu(fake: Fake, gpu: CUDADriver):
    other = CUDADriver(1)
    source, target = other.alloc(8), gpu.alloc(8)
    other.copy_in(source, memoryview(b"12345678"))
    gpu.copy_peer(Copy(target + 4, source + 2, 4), other)
    assert read(gpu, target + 4, 4) == b"3456"
    # what comes to stream 0 there runs after the copy
    theirs, ours = (fake.handles[int(each.streams[0].handle)] for each in (other, gpu))
    assert theirs.seen[ours] == ours.issued
    assert fake.devices[0].reached == [fake.devices[1]]
    other.close()


def test_reach_is_asked_for_once(fake: Fake, gpu: CUDADriver):
    other = CUDADriver(1)
    assert [gpu.reach(other) for _ in range(3)] == [True] * 3
    assert gpu.reach(gpu)
    assert fake.calls["cuCtxEnablePeerAccess"] == fake.calls["cuMemPoolSetAccess"] == 1
    assert fake.get(other.pool.handle, object).shared == [0]
    again = CUDADriver(1)   # its context has access, its pool has not
    assert gpu.reach(again)
    assert fake.get(again.pool.handle, object).shared == [0]
    again.close()
    other.close()


def test_gpus_that_cannot_reach_each_other(fake: Fake, gpu: CUDADriver):
    fake.peers, other = False, CUDADriver(1)
    assert not gpu.reach(other)
    assert fake.calls["cuMemPoolSetAccess"] == 0
    source, target = other.alloc(8), gpu.alloc(8)
    other.copy_in(source, memoryview(b"12345678"))
    gpu.copy_peer(Copy(target, source, 8), other)
    assert read(gpu, target, 8) == b"12345678"
    other.close()


def test_peers_are_of_one_kind(gpu: CUDADriver):
    from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
    with pytest.raises(DriverError, match="a copy from a EmulatedDriver"):
        gpu.copy_peer(Copy(0, 0, 1), EmulatedDriver())
    assert not gpu.reach(EmulatedDriver())


# **** L2 ****

def test_l2_that_is_set_aside(fake: Fake, gpu: CUDADriver):
    gpu.set_persisting_l2(1 << 20)
    assert (fake.devices[0].persisting, fake.devices[0].resets) == (1 << 20, 0)
    gpu.set_persisting_l2(0)
    assert (fake.devices[0].persisting, fake.devices[0].resets) == (0, 1)
    with pytest.raises(DriverError, match="of L2 to set aside"): gpu.set_persisting_l2(1 << 40)


def test_numbers_are_where_they_were(numbers: Numbers):
    numbers.gpu.submit(numbers.add(3))
    assert (numbers.read() == np.arange(N) + 3).all()


# **** memory of other processes ****

def test_memory_that_processes_share(fake: Fake, gpu: CUDADriver):
    """Closed by name, or with the driver; opened memory is never freed, and shared memory is no pool's."""
    other = CUDADriver(1)
    address, handle = gpu.share(4096)
    assert len(handle) == 64
    gpu.submit(Fill(address, 7, 4096))
    assert read(gpu, address, 4) == b"\x07" * 4
    there = other.open_shared(handle)
    assert fake.opened == {there: (0, address)}
    other.close_shared(there)
    gpu.close_shared(address)
    assert (fake.calls["cuMemFree"], fake.calls["cuIpcCloseMemHandle"]) == (1, 1)
    for one in (address, there):
        with pytest.raises(DriverError, match=f"address {one:#x} is closed"): gpu.close_shared(one)
    other.open_shared(gpu.share(256)[1])
    other.close()
    gpu.close()
    assert fake.opened == {}
    assert "memory" not in fake.left()


def test_memory_that_cannot_be_shared_is_freed(fake: Fake, gpu: CUDADriver):
    fake.fail("cuIpcGetMemHandle", "CUDA_ERROR_NOT_SUPPORTED")
    with pytest.raises(DriverError, match="CUDA_ERROR_NOT_SUPPORTED"): gpu.share(4096)
    assert fake.calls["cuMemFree"] == 1


def test_memory_of_a_gpu_that_cannot_be_reached(fake: Fake, gpu: CUDADriver):
    other, (address, handle) = CUDADriver(1), gpu.share(64)
    fake.peers = False
    with pytest.raises(DriverError, match="opening memory of another process: CUDA_ERROR_PEER_ACCESS_UNS"):
        other.open_shared(handle)
    gpu.close_shared(address)
    other.close()
