"""The driver interface on the emulator: memory, launches, and what streams, events and graphs promise."""
from __future__ import annotations

import struct

import numpy as np
import pytest

from tinygrad_nv.errors import DriverError, NVError, PTXError
from tinygrad_nv.ptx.emulator import TensorMap
from tinygrad_nv.runtime.driver import (
    Copy,
    Fill,
    Launch,
    Node,
    Stream,
    TensorMapSpec,
    integer,
    pack,
    pointer,
    real,
)
from tinygrad_nv.runtime.emulated.driver import ARCHITECTURES, EmulatedDriver

N = 64
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
ADD = HEAD + """.visible .entry add(.param .u64 p, .param .u32 value)
{
.reg .u64 %a<4>;
.reg .u32 %r<4>;
ld.param.u64 %a1, [p];
ld.param.u32 %r1, [value];
mov.u32 %r2, %tid.x;
mul.wide.u32 %a2, %r2, 4;
add.u64 %a3, %a1, %a2;
ld.global.u32 %r3, [%a3];
add.u32 %r3, %r3, %r1;
st.global.u32 [%a3], %r3;
ret;
}
.visible .entry twice(.param .u64 p)
{
.reg .u64 %a<4>;
.reg .u32 %r<4>;
ld.param.u64 %a1, [p];
mov.u32 %r2, %tid.x;
mul.wide.u32 %a2, %r2, 4;
add.u64 %a3, %a1, %a2;
ld.global.u32 %r3, [%a3];
shl.b32 %r3, %r3, 1;
st.global.u32 [%a3], %r3;
ret;
}
"""


@pytest.fixture
def gpu() -> EmulatedDriver: return EmulatedDriver()


class Numbers:
    """N unsigned integers on the device and the two kernels that change them."""

    def __init__(self, gpu: EmulatedDriver) -> None:
        self.gpu, module = gpu, gpu.load(ADD.encode())
        self.address = gpu.alloc(4 * N)
        self.kernels = {name: module.function(name) for name in ("add", "twice")}
        self.write(np.arange(N))

    def write(self, values: np.ndarray) -> None:
        self.gpu.copy_in(self.address, memoryview(values.astype("<u4")))

    def read(self, address: int | None = None, stream: Stream | None = None) -> np.ndarray:
        out = np.zeros(N, np.uint32)
        self.gpu.copy_out(memoryview(out).cast("B"), address or self.address, stream)
        return out

    def add(self, value: int, address: int | None = None) -> Launch:
        return self.launch("add", pointer(address or self.address), integer(value))

    def twice(self) -> Launch: return self.launch("twice", pointer(self.address))

    def launch(self, name: str, *args: bytes) -> Launch:
        return Launch(self.kernels[name], (1, 1, 1), (N, 1, 1), args)


@pytest.fixture
def numbers(gpu: EmulatedDriver) -> Numbers: return Numbers(gpu)


# **** arguments ****

def test_arguments_are_laid_out_as_a_parameter_block():
    block = pack([integer(-2), pointer(5), real(0.5, 2), bytes(range(128)), real(1.5, 8)])
    assert struct.unpack_from("<iQ", block[:4] + block[8:16]) == (-2, 5)
    assert struct.unpack_from("<e", block, 16) == (0.5,)
    assert block[64:192] == bytes(range(128))
    assert struct.unpack_from("<d", block, 192) == (1.5,)
    assert len(block) == 200


@pytest.mark.parametrize(("value", "nbytes", "made"),
                         [(-1, 1, b"\xff"), (257, 1, b"\1"), (-1, 8, b"\xff" * 8)])
def test_integers_wrap(value: int, nbytes: int, made: bytes): assert integer(value, nbytes) == made


# **** memory ****

def test_memory_in_and_out_at_an_offset(gpu: EmulatedDriver):
    address = gpu.alloc(16)
    assert address % 256 == 0
    gpu.copy_in(address, memoryview(bytes(range(16))))
    gpu.submit(Copy(address + 8, address + 1, 4))
    gpu.submit(Fill(address + 14, 200, 2))
    out = bytearray(16)
    gpu.copy_out(memoryview(out), address)
    assert out == bytes([0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 12, 13, 200, 200])


def test_memory_of_another_device(gpu: EmulatedDriver):
    other = EmulatedDriver("sm_80")
    source, target = other.alloc(8), gpu.alloc(8)
    other.copy_in(source, memoryview(b"12345678"))
    gpu.copy_peer(Copy(target + 4, source + 2, 4), other)
    out = bytearray(4)
    gpu.copy_out(memoryview(out), target + 4)
    assert out == b"3456"


def test_a_copy_of_what_was_never_written_stays_so(numbers: Numbers):
    fresh = numbers.gpu.alloc(4 * N)
    numbers.gpu.submit(Copy(numbers.address, fresh, 4 * N))
    numbers.gpu.submit(numbers.add(1))
    with pytest.raises(DriverError, match="uninitialized"): numbers.gpu.synchronize()


@pytest.mark.parametrize(("nbytes", "offset"), [(9, 0), (8, 1), (1, 8), (1, -1)])
def test_bytes_outside_an_allocation(gpu: EmulatedDriver, nbytes: int, offset: int):
    address = gpu.alloc(8)
    with pytest.raises(DriverError, match=f"a fill of {nbytes} bytes at"):
        gpu.submit(Fill(address + offset, 0, nbytes))


def test_memory_is_freed_once(gpu: EmulatedDriver):
    address = gpu.alloc(8)
    gpu.free(address)
    with pytest.raises(DriverError, match="is freed"): gpu.free(address)
    with pytest.raises(DriverError, match="a fill"): gpu.submit(Fill(address, 0, 8))
    assert gpu.used_bytes == 0


def test_memory_ends(gpu: EmulatedDriver):
    with pytest.raises(MemoryError, match="0 in use of the 85899345920"): gpu.alloc(1 << 40)
    with pytest.raises(DriverError, match="an allocation of 0 bytes"): gpu.alloc(0)


# **** code ****

def test_functions_and_their_attributes(gpu: EmulatedDriver):
    text = HEAD + (".visible .entry k()\n.maxntid 64, 2\n{\n.shared .align 4 .b8 s[100];\n.local .b8 l[20];\n"
                   ".reg .u64 %a<2>;\nmov.u64 %a1, s;\nmov.u64 %a1, l;\nret;\n}\n")
    attributes = gpu.load(text.encode()).function("k").attributes
    assert (attributes.static_smem, attributes.local_bytes, attributes.max_threads) == (100, 32, 128)


def test_no_such_function(gpu: EmulatedDriver):
    with pytest.raises(DriverError, match="no kernel 'sub'") as caught: gpu.load(ADD.encode()).function("sub")
    assert caught.value.expected == "one of: add, twice"


def test_machine_code_is_refused(gpu: EmulatedDriver):
    with pytest.raises(DriverError, match="the module is a cubin"): gpu.load(b"\x7fELF...")


def test_an_unloaded_module_is_not_launched(gpu: EmulatedDriver):
    module = gpu.load(ADD.encode())
    work = Launch(module.function("twice"), (1, 1, 1), (1, 1, 1), (pointer(gpu.alloc(4)),))
    module.unload()
    with pytest.raises(DriverError, match="kernel twice is launched"): gpu.submit(work)


def test_arguments_that_do_not_fit(numbers: Numbers):
    with pytest.raises(PTXError, match="1 arguments for the 2 parameters of add"):
        numbers.gpu.submit(numbers.launch("add", pointer(numbers.address)))
    with pytest.raises(PTXError, match="argument 1"):
        numbers.gpu.submit(numbers.launch("add", pointer(numbers.address), pointer(1)))


def test_pdl_and_clusters_need_hopper():
    gpu = EmulatedDriver("sm_89")
    twice = gpu.load(ADD.encode()).function("twice")
    args = (pointer(gpu.alloc(4)),)
    with pytest.raises(DriverError, match="programmatic dependent launch on sm_89"):
        gpu.submit(Launch(twice, (1, 1, 1), (1, 1, 1), args, pdl=True))
    with pytest.raises(PTXError, match=r"cluster=\(2, 1, 1\) on sm_89"):
        gpu.submit(Launch(twice, (2, 1, 1), (1, 1, 1), args, cluster=(2, 1, 1)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_properties(arch: str):
    properties = EmulatedDriver(arch).properties
    assert properties.arch == arch
    assert properties.shared_static_limit == 49152
    # CUDA C++ Programming Guide, technical specifications: KiB that a CTA may have
    assert properties.shared_limit == {"sm_80": 163, "sm_89": 99, "sm_90a": 227}[arch] * 1024
    assert properties.sm_count == {"sm_80": 108, "sm_89": 142, "sm_90a": 132}[arch]


def test_no_such_device():
    with pytest.raises(DriverError, match="no emulated device 'sm_75'"): EmulatedDriver("sm_75")


# **** order ****

def test_a_stream_runs_in_order(numbers: Numbers):
    stream = numbers.gpu.stream()
    numbers.gpu.synchronize()
    for work in (numbers.add(3), numbers.twice(), numbers.add(1)): numbers.gpu.submit(work, stream)
    assert (numbers.read(stream=stream) == (np.arange(N) + 3) * 2 + 1).all()


def test_findings_come_when_their_stream_is_waited_for(numbers: Numbers):
    gpu, stream = numbers.gpu, numbers.gpu.stream()
    event, other = gpu.event(), gpu.alloc(4 * N)
    gpu.synchronize()
    gpu.submit(numbers.add(1, numbers.address + 4), stream)  # the last thread is out of bounds
    gpu.record(event, stream)
    gpu.synchronize(gpu.stream())
    numbers.read(other)
    with pytest.raises(DriverError, match="kernel add: out-of-bounds: line 13") as caught: gpu.wait_for(event)
    assert "\n    13: ld.global.u32 %r3, [%a3];\n" in caught.value.found
    assert "EMU_CHECK=0" in caught.value.fix
    gpu.synchronize()  # told once


def test_unchecked_launches_still_have_bounds():
    numbers = Numbers(EmulatedDriver(check=False))
    fresh = numbers.gpu.alloc(4 * N)
    numbers.gpu.submit(numbers.add(1, fresh))
    numbers.gpu.synchronize()
    numbers.gpu.submit(numbers.add(1, fresh + 4))
    with pytest.raises(DriverError, match="out-of-bounds"): numbers.gpu.synchronize()


def test_time_passes(numbers: Numbers):
    gpu, (start, end) = numbers.gpu, (numbers.gpu.event(), numbers.gpu.event())
    gpu.record(start)
    gpu.submit(numbers.twice())
    gpu.record(end)
    gpu.wait_for(end)
    assert 0 < gpu.ms_between(start, end) < 10_000
    assert gpu.ms_between(end, start) == -gpu.ms_between(start, end)


def test_events_never_recorded(gpu: EmulatedDriver):
    event = gpu.event()
    for use in (lambda: gpu.wait(event), lambda: gpu.wait_for(event), lambda: gpu.ms_between(event, event)):
        with pytest.raises(DriverError, match="an event that was never recorded"): use()


def test_streams_belong_to_their_device(gpu: EmulatedDriver):
    with pytest.raises(DriverError, match="a stream of another device"):
        gpu.synchronize(EmulatedDriver().streams[0])


# **** graphs ****

def test_an_explicit_graph_obeys_its_edges(numbers: Numbers):
    graph = numbers.gpu.graph()
    first = graph.add(numbers.add(3))
    second = graph.add(numbers.twice(), [first])
    graph.add(numbers.add(1), [first, second])
    executable = graph.instantiate()
    for _ in range(2): executable.launch()
    once = (np.arange(N) + 3) * 2 + 1
    assert (numbers.read() == (once + 3) * 2 + 1).all()


def test_a_missing_edge_shows():
    numbers = Numbers(EmulatedDriver(check=False))
    graph = numbers.gpu.graph()
    first = graph.add(numbers.add(3))
    graph.add(numbers.twice())  # should follow the addition
    graph.add(numbers.add(1), [first])
    graph.instantiate().launch()
    assert (numbers.read() != (np.arange(N) + 3) * 2 + 1).any()


def test_updates_change_the_next_launch_only(numbers: Numbers):
    graph, other = numbers.gpu.graph(), numbers.gpu.alloc(4 * N)
    add = graph.add(numbers.add(3))
    copy = graph.add(Copy(other, numbers.address, 4 * N), [add])
    one, two = graph.instantiate(), graph.instantiate()
    one.update(add, numbers.add(5))
    one.launch()
    two.launch()
    assert (numbers.read(other) == np.arange(N) + 8).all()
    one.update(copy, Copy(other, numbers.address + 4, 4 * N - 4))
    one.launch()
    assert (numbers.read(other)[:N - 1] == np.arange(1, N) + 13).all()


def test_updates_that_are_none(numbers: Numbers):
    graph = numbers.gpu.graph()
    node = graph.add(numbers.add(3))
    executable = graph.instantiate()
    with pytest.raises(DriverError, match="node 0 is updated with kernel twice"):
        executable.update(node, numbers.twice())
    with pytest.raises(DriverError, match="node 0 is updated with a Fill"):
        executable.update(node, Fill(0, 0, 1))
    with pytest.raises(DriverError, match="no node 1"): executable.update(Node(1), numbers.add(3))
    with pytest.raises(DriverError, match="an edge from node 7"): graph.add(numbers.twice(), [Node(7)])


def test_a_capture_records_and_does_not_run(numbers: Numbers):
    gpu, stream = numbers.gpu, numbers.gpu.stream()
    gpu.begin_capture(stream)
    for work in (numbers.add(3), numbers.twice(), numbers.add(1)): gpu.submit(work, stream)
    executable = gpu.end_capture(stream).instantiate()
    assert (numbers.read() == np.arange(N)).all()
    executable.launch(stream)
    assert (numbers.read(stream=stream) == (np.arange(N) + 3) * 2 + 1).all()


def test_a_capture_forks_and_joins(numbers: Numbers):
    gpu, (a, b), (fork, join) = numbers.gpu, [numbers.gpu.stream() for _ in "ab"], \
        [numbers.gpu.event() for _ in "fj"]
    gpu.begin_capture(a)
    gpu.submit(numbers.add(3), a)
    gpu.record(fork, a)
    gpu.wait(fork, b)
    gpu.submit(numbers.twice(), b)
    gpu.record(join, b)
    gpu.wait(join, a)
    gpu.submit(numbers.add(1), a)
    graph = gpu.end_capture(a)
    assert graph.after == [(), (0,), (0, 1)]
    graph.instantiate().launch()
    assert (numbers.read() == (np.arange(N) + 3) * 2 + 1).all()
    gpu.submit(numbers.add(1), b)  # runs again at once
    assert (numbers.read(stream=b) == (np.arange(N) + 3) * 2 + 2).all()


def test_what_a_capture_refuses(numbers: Numbers):
    gpu, (a, b) = numbers.gpu, [numbers.gpu.stream() for _ in "ab"]
    outside, inside, executable = gpu.event(), gpu.event(), gpu.graph().instantiate()
    gpu.record(outside, b)
    with pytest.raises(DriverError, match="stream 0 is captured"): gpu.begin_capture(gpu.streams[0])
    with pytest.raises(DriverError, match="capture ends in stream 1"): gpu.end_capture(a)
    gpu.begin_capture(a)
    gpu.record(inside, a)
    for words, use in {
        "begins twice": lambda: gpu.begin_capture(a),
        "a copy from the host in stream 1": lambda: gpu.copy_in(numbers.address, memoryview(b"1"), a),
        "synchronisation in stream 1": lambda: gpu.synchronize(),
        "a graph is launched into a stream that is captured": lambda: executable.launch(a),
        "waits for an event from outside": lambda: gpu.wait(outside, a),
        "the host waits for an event of a capture": lambda: gpu.wait_for(inside),
        "time is taken from an event of a capture": lambda: gpu.ms_between(outside, inside),
        "stream 0 is captured": lambda: gpu.wait(inside),
    }.items():
        with pytest.raises(DriverError, match=words): use()
    gpu.wait(inside, b)
    gpu.submit(numbers.add(1), b)
    with pytest.raises(DriverError, match="ends with work in stream 2 that nothing waits for"):
        gpu.end_capture(a)
    with pytest.raises(DriverError, match="a capture that has ended"): gpu.wait(inside, b)
    gpu.synchronize()
    assert (numbers.read() == np.arange(N)).all()


def test_two_captures_do_not_meet(gpu: EmulatedDriver):
    (a, b), event = (gpu.stream(), gpu.stream()), gpu.event()
    gpu.begin_capture(a)
    gpu.begin_capture(b)
    gpu.record(event, a)
    with pytest.raises(DriverError, match="stream 2 of one capture waits for an event of another"):
        gpu.wait(event, b)


# **** tensor maps ****

def test_a_tensor_map_is_given_innermost_first(gpu: EmulatedDriver):
    address = gpu.alloc(64 * 128 * 2)
    made = gpu.tensor_map(TensorMapSpec("bf16", address, (128, 64), (256,), (64, 32), swizzle="128B"))
    assert len(made) == 128
    assert made == TensorMap.of_tiles(address, (32, 64), "128B", (64, 128), (256,), "bf16").encode()
    # dimensions and box as the hardware's bytes have them: less one, innermost first
    assert struct.unpack_from("<II", made, 0x20) == (127, 63)
    assert (made[0x37], made[0x38]) == (63, 31)


def test_a_tensor_map_beyond_the_limits(gpu: EmulatedDriver):
    with pytest.raises(NVError, match="257"):
        gpu.tensor_map(TensorMapSpec("u8", gpu.alloc(1024), (512,), (), (257,)))
