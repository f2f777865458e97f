"""The pool of a device's memory: labels, the report, the limit, what is given back under pressure."""
from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tinygrad_nv import Device, Tensor, dtypes, memory_report
from tinygrad_nv.errors import DriverError, NVError, OutOfMemoryError
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.runtime.memory_pool import MemoryPool, label_allocations
from tinygrad_nv.runtime.observe.memory_report import LabelUsage, human

pytestmark = pytest.mark.usefixtures("frozen")

KiB = 1 << 10


class KeepingDriver(EmulatedDriver):
    """A device of 1 MiB that keeps what is freed, as CUDA's pools do, and serves no other size from it;
    `others` bytes of it are in use by others."""

    def __init__(self, others: int = 0) -> None:
        super().__init__(check=False)
        self.others, self.spare, self.trims, self.looks = others, [], 0, 0
        self.sizes: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int:
        for address in self.spare:
            if self.sizes[address] == nbytes:
                self.spare.remove(address)
                return address
        if nbytes > self.memory()[0] - self.spare_bytes: raise MemoryError("the device is full")
        address = super().alloc(nbytes)
        self.sizes[address] = nbytes
        return address

    def free(self, address: int) -> None:
        if address not in self.sizes or address in self.spare: raise DriverError(f"{address} is freed")
        self.spare.append(address)

    def memory(self) -> tuple[int, int]:
        return 1024 * KiB - self.others - self.used_bytes + self.spare_bytes, 1024 * KiB

    @property
    def spare_bytes(self) -> int: return sum(self.sizes[address] for address in self.spare)

    def slack_bytes(self) -> int:
        self.looks += 1
        return self.spare_bytes

    def trim(self) -> int:
        self.trims += 1
        before = self.used_bytes
        for address in self.spare: super().free(address)
        self.spare = []
        return before - self.used_bytes


def keeping(limit: int = 1024 * KiB, others: int = 0) -> tuple[MemoryPool, KeepingDriver]:
    driver = KeepingDriver(others)
    return MemoryPool(driver, limit, "GPU"), driver


# **** labels ****

def test_labels():
    pool, _ = keeping()
    plain = pool.alloc(1 * KiB)
    with label_allocations("weights"):
        weights = [pool.alloc(4 * KiB), pool.alloc(2 * KiB)]
        with label_allocations("KV cache"): cache = pool.alloc(16 * KiB)
        more = pool.alloc(8 * KiB)
    with pytest.raises(ZeroDivisionError), label_allocations("weights"): _ = 1 / 0
    pool.free(pool.alloc(32 * KiB))
    pool.free(weights[0])
    assert pool.report().labels == (
        LabelUsage("KV cache", 16 * KiB, 1, 16 * KiB), LabelUsage("weights", 10 * KiB, 2, 14 * KiB),
        LabelUsage("tensors", 1 * KiB, 1, 33 * KiB))
    for address in (plain, weights[1], cache, more): pool.free(address)
    report = pool.report()
    assert [(s.nbytes, s.count, s.peak_bytes) for s in report.labels] == [
        (0, 0, 33 * KiB), (0, 0, 16 * KiB), (0, 0, 14 * KiB)]
    assert (report.held, report.peak, report.largest) == (0, 63 * KiB, ())
    assert report.of("unused") == LabelUsage("unused", 0, 0, 0)


def test_a_label_is_that_of_its_thread_and_context():
    pool, _ = keeping()
    with label_allocations("weights"):
        thread = threading.Thread(target=pool.alloc, args=(4 * KiB,))
        thread.start()
        thread.join()
        contextvars.copy_context().run(pool.alloc, 8 * KiB)
    assert (pool.report().of("tensors").nbytes, pool.report().of("weights").nbytes) == (4 * KiB, 8 * KiB)


def test_memory_keeps_the_label_it_was_made_with():
    pool, _ = keeping()
    with label_allocations("weights"): address = pool.alloc(4 * KiB)
    with label_allocations("KV cache"): pool.free(address)
    assert pool.report().of("weights") == LabelUsage("weights", 0, 0, 4 * KiB)
    assert pool.report().of("KV cache").count == 0


# **** the report ****

def test_figures_of_a_report():
    pool, driver = keeping(800 * KiB, others=100 * KiB)
    pool.free(pool.alloc(64 * KiB))
    held = [pool.alloc(n * KiB) for n in (1, 9, 3, 7, 5, 8, 2)]
    report = pool.report()
    assert (report.device, report.held, report.kept, report.outside) == ("GPU", 35 * KiB, 64 * KiB, 100 * KiB)
    assert (report.free, report.total, report.limit) == (825 * KiB, 1024 * KiB, 800 * KiB)
    largest = [(one.nbytes // KiB, one.number) for one in report.largest]
    assert largest == [(9, 3), (8, 7), (7, 5), (5, 6), (3, 4)]
    assert report.held + report.kept + report.outside + report.free == report.total
    for address in held: pool.free(address)
    assert driver.used_bytes == 99 * KiB


def test_a_report_as_text():
    pool, _ = keeping(others=3 * KiB)
    with label_allocations("weights"): _ = [pool.alloc(300 * KiB), pool.alloc(1536)]
    with label_allocations("KV cache"): pool.free(pool.alloc(12))
    assert str(pool.report()) == """\
GPU: 301.50 KiB held of at most 1.00 MiB, of 1.00 MiB
                             now  count        peak
  weights             301.50 KiB      2  301.50 KiB
  KV cache                   0 B      0        12 B
  held                301.50 KiB      2  301.51 KiB
  kept by the driver        12 B
  outside this pool     3.00 KiB
  free                719.49 KiB
largest allocations
  weights  300.00 KiB  no. 1
  weights    1.50 KiB  no. 2"""


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (1 << 20, "1.00 MiB"),
    (80 << 30, "80.00 GiB"), (3 << 40, "3.00 TiB"), (1 << 62, "4194304.00 TiB")])
def test_units(nbytes: int, text: str): assert human(nbytes) == text


def test_a_report_of_a_device_by_name():
    assert memory_report("EMU") == Device["EMU"].pool.report()
    before = memory_report("CPU")
    tensor = Tensor.zeros(1000, dtype=dtypes.uint8, device="CPU").contiguous().realize()
    report = memory_report("CPU")
    assert (report.held - before.held, report.total, report.labels) == (1000, 0, ())
    assert "held by tensors; a breakdown is known on devices of tinygrad_nv" in str(report)
    del tensor


# **** the limit ****

def test_the_limit():
    pool, _ = keeping(100 * KiB)
    address = pool.alloc(100 * KiB)
    with pytest.raises(OutOfMemoryError): pool.alloc(1)
    pool.free(address)
    assert pool.alloc(100 * KiB)
    assert (pool.live_bytes, pool.report().labels[0].count) == (100 * KiB, 1)


@pytest.mark.parametrize(("part", "limit"), [(1, 1024), (1.0, 1024), (0.5, 512), (0.9, 921)])
def test_a_part_of_the_device(part: float, limit: int):
    pool, driver = keeping()
    pool.total = driver.memory()[1]
    pool.use_at_most(part)
    assert pool.limit // KiB == limit


def test_what_the_driver_keeps_counts():
    """The limit is on all that a process holds, what is kept for it included. Sizes that never come again go
    back; here nothing that is kept can be used, so one allocation may go over."""
    pool, driver = keeping(100 * KiB)
    for nbytes in range(256, 50 * KiB, 256):
        pool.free(pool.alloc(nbytes))
        assert driver.used_bytes <= 100 * KiB + nbytes
    assert driver.trims


def test_what_is_used_again_is_kept():
    """Much of the limit is freed and had again; nothing is trimmed, and the driver is seldom asked."""
    pool, driver = keeping(90 * KiB)
    rest = pool.alloc(20 * KiB)
    for _ in range(1000): pool.free(pool.alloc(40 * KiB))
    assert driver.trims == 0
    assert driver.looks < 1001
    pool.free(rest)


# **** under pressure ****

def test_what_is_kept_is_given_back_first():
    pool, driver = keeping()
    for nbytes in (600 * KiB, 700 * KiB): pool.free(pool.alloc(nbytes))
    assert driver.trims == 1
    assert driver.used_bytes == 700 * KiB


def test_garbage_is_collected_first():
    class Loop:
        def __init__(self) -> None: self.own, self.address = self, pool.alloc(700 * KiB)
        def __del__(self) -> None: pool.free(self.address)
    pool, _ = keeping()
    with without_collection():
        gone = weakref.ref(Loop())
        assert gone() is not None
        pool.alloc(600 * KiB)
        assert gone() is None


def test_those_who_can_do_without_are_asked():
    pool, _ = keeping(1000 * KiB)
    asked = []
    def reclaim(nbytes: int) -> None:
        asked.append(nbytes)
        if spare: pool.free(spare.pop())
    stop = [pool.on_pressure(reclaim), pool.on_pressure(reclaim)]
    spare = [pool.alloc(300 * KiB), pool.alloc(300 * KiB)]
    pool.alloc(350 * KiB)
    assert asked == []
    pool.alloc(300 * KiB)
    assert asked == [300 * KiB], "the second is not asked where the first was enough"
    with pytest.raises(OutOfMemoryError): pool.alloc(700 * KiB)
    assert asked[1:] == [700 * KiB] * 2
    for each in (*stop, *stop): each()
    with pytest.raises(OutOfMemoryError): pool.alloc(700 * KiB)
    assert len(asked) == 3


def test_a_failure_leaves_all_as_it_was():
    pool, driver = keeping()
    pool.alloc(400 * KiB)
    before = pool.report()
    for label in ("weights", "tensors"):
        with pytest.raises(OutOfMemoryError), label_allocations(label): pool.alloc(700 * KiB)
    assert pool.report() == before
    assert driver.used_bytes == 400 * KiB


@contextmanager
def without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try: yield
    finally: gc.enable()


def test_a_failure_holds_nothing_once_it_is_dealt_with():
    """What the frames on its way held goes at once, not when garbage is collected."""
    pool, _ = keeping()
    class Held: pass
    def program() -> None:
        held = Held()
        seen.append(weakref.ref(held))
        pool.alloc(2048 * KiB)
    seen: list[weakref.ref] = []
    with without_collection():
        with contextlib.suppress(OutOfMemoryError): program()
        assert seen[0]() is None


def test_what_the_driver_takes_by_itself():
    """Code and graphs: tried again when there is room, and no accounting of ours."""
    pool, driver = keeping()
    pool.free(pool.alloc(300 * KiB))
    def load() -> str:
        tried.append(driver.slack_bytes())
        if driver.slack_bytes(): raise MemoryError("no room for code")
        return "loaded"
    tried: list[int] = []
    assert pool.retry_relieved(load, "kernel k") == "loaded"
    assert tried == [300 * KiB, 0]
    assert pool.live_bytes == 0
    def never() -> None: raise MemoryError("no room for code")
    with pytest.raises(OutOfMemoryError) as caught: pool.retry_relieved(never, "kernel k")
    assert (caught.value.asked, caught.value.label) == (0, "kernel k")
    with pytest.raises(ZeroDivisionError): pool.retry_relieved(lambda: 1 // 0, "kernel k")


def test_other_errors_are_left_alone():
    pool, _ = keeping()
    with pytest.raises(DriverError, match="an allocation of 0 bytes"): pool.alloc(0)
    with pytest.raises(DriverError, match="is freed"): pool.free(12345)
    address = pool.alloc(8)
    pool.free(address)
    with pytest.raises(DriverError, match="is freed"): pool.free(address)
    assert pool.live_bytes == 0


# **** tinygrad's face ****

def test_a_device_takes_and_gives_back_through_its_pool():
    device = NVDevice("EMU:8", EmulatedDriver())
    address = device.allocator.alloc(64)
    assert (device.pool.live_bytes, device.driver.used_bytes) == (64, 64)
    device.allocator.free(address, 64)
    assert (device.pool.live_bytes, device.driver.used_bytes) == (0, 0), "nothing is kept above the driver"


def test_the_error_reaches_the_user_as_it_is():
    device = NVDevice("EMU:8", EmulatedDriver())
    device.pool.limit = 100
    with pytest.raises(OutOfMemoryError) as caught, label_allocations("weights"): device.allocator.alloc(101)
    assert isinstance(caught.value, NVError)
    assert isinstance(caught.value, MemoryError)
    assert (caught.value.asked, caught.value.label) == (101, "weights")
    assert caught.value.report == device.pool.report()
