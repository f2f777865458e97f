"""Emulated devices that see each other's memory, through the driver interface: work that waits for other
devices, copies and events between them, all-reduce in captured graphs that are replayed, and what is found.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tinygrad import Device, Tensor
from tinygrad.dtype import dtypes

from tinygrad_nv.errors import DriverError, KernelError
from tinygrad_nv.ptx.emulator import Emulator
from tinygrad_nv.runtime.all_reduce import AllReduceGroup
from tinygrad_nv.runtime.driver import (
    Copy,
    Download,
    Driver,
    Fill,
    Function,
    Launch,
    Upload,
    integer,
    pointer,
)
from tinygrad_nv.runtime.emulated import peers
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.tile.all_reduce.schedules import AllReduceSchedule, Multimem, OneShot, TwoShot
from tinygrad_nv.tile.all_reduce.spec import AllReduceSpec
from tinygrad_nv.tile.all_reduce.workspace import Workspace
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

ADVANCE = """.version 8.0
.target sm_80
.address_size 64
.visible .entry advance(.param .u64 x, .param .u64 out, .param .u64 total) {
    .reg .u64 %x, %out, %total, %at;
    .reg .u32 %thread, %a, %b, %c;
    ld.param.u64 %x, [x];
    ld.param.u64 %out, [out];
    ld.param.u64 %total, [total];
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %at, %thread, 4;
    add.u64 %x, %x, %at;
    add.u64 %out, %out, %at;
    add.u64 %total, %total, %at;
    ld.global.u32 %a, [%x];
    ld.global.u32 %b, [%out];
    ld.global.u32 %c, [%total];
    mad.lo.u32 %c, %c, 31, %b;
    st.global.u32 [%total], %c;
    add.u32 %a, %a, 1;
    st.global.u32 [%x], %a;
    ret;
}
"""
COUNT = 32


def devices(count: int, seed: int = 1) -> list[EmulatedDriver]:
    made = [EmulatedDriver(ordinal=i, seed=seed) for i in range(count)]
    assert all(one.reach(other) for one in made for other in made)
    return made


def words(gpu: Driver, address: int, count: int = COUNT) -> list[int]:
    got = bytearray(4 * count)
    gpu.copy_out(memoryview(got), address)
    return np.frombuffer(got, np.uint32).tolist()


def filled(gpu: Driver, values: np.ndarray) -> int:
    address = gpu.alloc(values.nbytes)
    gpu.copy_in(address, memoryview(values.tobytes()))
    return address


class Ranks:
    """An all-reduce of `COUNT` numbers on each device, captured with a kernel behind it that changes x, and
    hashes each result into `total`."""

    def __init__(self, world: int, kind: type[AllReduceSchedule], seed: int = 1,
                 edit: Callable[[str], str] = str) -> None:
        schedule = kind(ctas=2, threads=32, channels=2, half_bytes=256)
        spec = AllReduceSpec(world, COUNT, dtypes.uint32)
        kernel = TABLE.build(spec, schedule, GPU("sm_90a"))
        self.gpus = devices(world, seed)
        self.group = AllReduceGroup(self.gpus, Workspace(2, 256))
        self.first = np.arange(world * COUNT, dtype=np.uint32).reshape(world, COUNT) ** 2
        self.totals, self.graphs = [], []
        for rank, gpu in enumerate(self.gpus):
            x, out, total = (filled(gpu, each)
                             for each in (self.first[rank], *np.zeros((2, COUNT), np.uint32)))
            functions: list[Function] = [gpu.load(text.encode()).function(name) for text, name in (
                (edit(kernel.ptx), kernel.name), (ADVANCE, "advance"))]
            stream = gpu.stream()
            gpu.begin_capture(stream)
            gpu.submit(Launch(functions[0], kernel.grid, kernel.block,
                              self.group.arguments(spec, schedule, rank, [out], [x])), stream)
            gpu.submit(Launch(functions[1], (1, 1, 1), (COUNT, 1, 1), tuple(map(pointer, (x, out, total)))),
                       stream)
            self.graphs.append((gpu.end_capture(stream).instantiate(), stream))
            self.totals.append(total)
        for gpu in self.gpus: gpu.synchronize()
        self.replays = 0

    def replay(self, count: int) -> None:
        """So many replays on all devices, submitted device by device."""
        for graph, stream in self.graphs:
            for _ in range(count): graph.launch(stream)
        for gpu in self.gpus: gpu.synchronize()
        self.replays += count

    def check(self) -> None:
        """Every result of every replay, on all devices."""
        sums, total = self.first.sum(0, dtype=np.uint32), np.zeros(COUNT, np.uint32)
        for number in range(self.replays):
            total = total * np.uint32(31) + sums + np.uint32(number * len(self.gpus))
        for gpu, address in zip(self.gpus, self.totals, strict=True):
            assert words(gpu, address) == total.tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [OneShot, TwoShot])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_replays_of_captured_graphs(world: int, kind: type[AllReduceSchedule]) -> None:
    for seed in (0, 1):
        ranks = Ranks(world, kind, seed)
        for _ in range(2): ranks.replay(5)
        ranks.check()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OneShot, TwoShot])
@pytest.mark.parametrize("world", [2, 4, 8])
def test_ten_thousand_replays_with_delays(world: int, kind: type[AllReduceSchedule]) -> None:
    ranks = Ranks(world, kind)
    for _ in range(100): ranks.replay(100)
    ranks.check()


@pytest.mark.parametrize(("old", "new"), [("st.release.sys", "st.release.gpu"), (", 1;\n", ", 0;\n")])
def test_bugs_in_replays_are_found(old: str, new: str) -> None:
    """A flag of one GPU's scope; one half, which a GPU that has left writes again."""
    def edit(text: str) -> str:
        at = text.index("and.b32") if new == ", 0;\n" else 0
        assert old in text[at:]
        return text[:at] + text[at:].replace(old, new, 1)
    ranks = Ranks(2, OneShot, 1, edit)
    with pytest.raises(KernelError, match=r"kernel all_reduce_one_shot on GPU \d: race: .* of GPU"):
        ranks.replay(20)


def test_a_rank_that_launches_nothing_is_waited_for_in_vain() -> None:
    ranks = Ranks(2, OneShot)
    ranks.graphs[0][0].launch(ranks.graphs[0][1])
    polls = r"on GPU 0: deadlock: .* polls 4 bytes at 0x.* of GPU 0, which hold 0"
    with pytest.raises(KernelError, match=polls): ranks.gpus[0].synchronize()


# **** copies and events ****

def test_events_order_devices() -> None:
    """GPU 1's kernel reads what GPU 0 wrote before the event; without the wait it is a race."""
    for waits in (True, False):
        first, second = devices(2)
        source, target = first.alloc(64), second.alloc(64)
        event = first.event()
        first.submit(Fill(source, 3, 64))
        first.record(event)
        if waits: second.wait(event)
        copy = second.load(ADVANCE.encode()).function("advance")
        second.submit(Fill(target, 0, 64))
        second.submit(Launch(copy, (1, 1, 1), (16, 1, 1), tuple(map(pointer, (source, source, target)))))
        if waits:
            second.synchronize()
            assert words(first, source, 16) == [0x03030304] * 16
        else:
            with pytest.raises(KernelError, match="race"):  # noqa: PT012  which of the two comes later has it
                first.synchronize()
                second.synchronize()


def test_an_event_of_an_earlier_flush() -> None:
    first, second = devices(2)
    source = first.alloc(64)
    event = first.event()
    first.submit(Fill(source, 1, 64))
    first.record(event)
    first.synchronize()
    second.wait(event)
    second.synchronize()
    assert words(first, source, 16) == [0x01010101] * 16


def test_copies_between_peers() -> None:
    """Behind what the source's stream 0 holds, before what comes to it later."""
    first, second = devices(2)
    source, target = first.alloc(128), second.alloc(128)
    first.submit(Fill(source, 1, 128))
    second.copy_peer(Copy(target, source, 128), first)
    first.submit(Fill(source, 2, 128))
    assert words(second, target) == [0x01010101] * 32
    assert words(first, source) == [0x02020202] * 32


def test_copies_from_a_device_that_is_no_peer() -> None:
    """Kernels of the target cannot read there; copies can, before the memory is given back."""
    _, second = devices(2)
    other = EmulatedDriver(ordinal=2)
    source, target = other.alloc(128), second.alloc(128)
    other.submit(Fill(source, 1, 128))
    second.copy_peer(Copy(target, source, 128), other)
    other.free(source)
    assert words(second, target) == [0x01010101] * 32


def test_memory_that_is_freed_while_work_is_kept() -> None:
    first, second = devices(2)
    kept, given = first.alloc(256), first.alloc(256)
    first.submit(Fill(given, 1, 256))
    first.submit(Copy(kept, given, 256))
    free = first.memory()[0]
    first.free(given)
    assert first.memory()[0] == free + 256
    with pytest.raises(DriverError, match="is freed"): first.free(given)
    assert words(first, kept, 64) == [0x01010101] * 64
    second.synchronize()


def test_uploads_and_downloads_of_peers() -> None:
    first, second = devices(2)
    memory, address = first.host(64), first.alloc(64)
    memory.view[:] = bytes(range(64))
    first.submit(Upload(address, memory, 0, 64))
    back = first.host(64)
    first.submit(Download(back, 0, address, 64))
    second.synchronize()
    first.synchronize()
    assert bytes(back.view) == bytes(range(64))


def test_an_argument_is_taken_when_it_is_submitted() -> None:
    """Bytes of a copy from the host may change after the call."""
    first, _ = devices(2)
    address, data = first.alloc(4), bytearray(b"abcd")
    first.copy_in(address, memoryview(data))
    data[:] = b"wxyz"
    assert words(first, address, 1) == [int.from_bytes(b"abcd", "little")]
    assert integer(1) == b"\1\0\0\0"


# **** which devices ****

def test_devices_that_cannot_be_peers() -> None:
    one = EmulatedDriver()
    assert one.reach(one)
    assert not one.reach(EmulatedDriver())
    assert not one.reach(EmulatedDriver("sm_80", ordinal=1))
    with pytest.raises(DriverError, match="device 0 of 2 cannot address device 1's memory"):
        AllReduceGroup([one, EmulatedDriver()])


def test_devices_of_tinygrad_have_the_ordinals_of_their_names() -> None:
    names = ("EMU:6", "EMU:7")
    first, second = (Device[name].driver for name in names)
    assert (first.emulator.ordinal, second.emulator.ordinal) == (6, 7)
    assert first.reach(second)
    x = Tensor(np.arange(24, dtype=np.int32).reshape(4, 6), device="CPU").shard(names, axis=0)
    assert (x + 1).sum(0).numpy().tolist() == (np.arange(24).reshape(4, 6) + 1).sum(0).tolist()


# **** arguments ****

def test_arguments_of_another_group_are_refused() -> None:
    spec, schedule = AllReduceSpec(2, COUNT, dtypes.uint32), OneShot(ctas=2, threads=32)
    group = AllReduceGroup(devices(2))

    def refused(words: str, spec: AllReduceSpec = spec, schedule: AllReduceSchedule = schedule, rank: int = 0,
                inputs: int = 1, multicast: int = 0) -> None:
        with pytest.raises(DriverError, match=words):
            group.arguments(spec, schedule, rank, [256], [256] * inputs, multicast)
    refused("a kernel for 3 GPUs in a group of 2", AllReduceSpec(3, COUNT, dtypes.uint32))
    refused(r"a kernel for Workspace\(channels=2, half_bytes=256\) over Workspace\(channels=64",
            schedule=OneShot(ctas=2, threads=32, channels=2, half_bytes=256))
    refused("rank 2", rank=2)
    refused("1 results and 2 inputs of 32 u32 over 2 GPUs", inputs=2)
    refused("all_reduce_one_shot with a multicast object", multicast=256)
    refused("all_reduce_multimem without a multicast object", schedule=Multimem(ctas=2, threads=32))
    assert group.arguments(spec, schedule, 1, [256], [512])[-1] == integer(1)


def test_asking_for_an_event_does_what_was_kept() -> None:
    """A host that polls an event, as with CUDA, finds that it comes to pass."""
    first, _ = devices(2)
    source, event = first.alloc(64), first.event()
    first.submit(Fill(source, 1, 64))
    first.record(event)
    assert first.peers.kept
    assert first.has_passed(event)
    assert not first.peers.kept


def test_no_two_flushes_take_turns_alike() -> None:
    """Also where the seed of the first device is divisible by four, by which no GPU stands still."""
    first, _ = devices(2, seed=0)
    seeds = []

    class Seen(peers.Peers):
        def __init__(self, gpus: Sequence[Emulator], seed: int = 0) -> None:
            seeds.append(seed)
            super().__init__(gpus, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peers, "Peers", Seen)
        for _ in range(4):
            first.submit(Fill(first.alloc(64), 1, 64))
            first.synchronize()
    assert len(set(seeds)) == 4
    assert any(seed % 4 for seed in seeds)
