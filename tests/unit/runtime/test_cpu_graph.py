"""Captured graphs on the CPU: the same bits as launching one by one, whatever changes between replays. A
forked child has none of its parent's threads; its graphs must run all the same. Large buffers of the CPU
begin at huge pages and are otherwise as tinygrad's."""
from __future__ import annotations

import mmap
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tinygrad import Context, Device, GlobalCounters, Tensor, TinyJit, Variable
from tinygrad.device import Buffer
from tinygrad.dtype import dtypes
from tinygrad.engine.realize import get_graph_runtime
from tinygrad.runtime import ops_cpu

import tinygrad_nv
from tinygrad_nv.runtime.cpu import device as cpu_device
from tinygrad_nv.runtime.cpu.device import PAGE
from tinygrad_nv.runtime.cpu.graph import CPUGraph
from tinygrad_nv.runtime.cpu.pool import HEAD, LENGTHS, pool


def integers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(np.float32)


def on_cpu(x: np.ndarray) -> Tensor: return Tensor(x, device="CPU").realize()


def calls_of(jit) -> int:
    """Launches from Python that one replay makes."""
    return len(jit.captured.linear.src)


def test_a_chain_of_kernels_is_one_launch_and_exact():
    w = integers(64, 64, seed=1)
    weight = on_cpu(w)

    @TinyJit
    def chain(x: Tensor) -> Tensor:
        for _ in range(3): x = ((x @ weight) / 16).floor().contiguous()
        return x.realize()

    for i in range(5):
        x = integers(64, 64, seed=i)
        expected = x
        for _ in range(3): expected = np.floor(expected @ w / 16)
        np.testing.assert_array_equal(chain(on_cpu(x)).numpy(), expected)
    assert calls_of(chain) == 1


def test_parallel_launches_give_the_bits_of_serial_ones():
    """A matmul of 512³ is split for core_id; the second product reads what both threads of the first
    wrote."""
    a, b = np.random.default_rng(0).standard_normal((2, 512, 512)).astype(np.float32)

    def product(x: Tensor, y: Tensor) -> Tensor: return ((x @ y).contiguous() @ y).contiguous().realize()
    one_by_one = product(on_cpu(a), on_cpu(b)).numpy()
    jit = TinyJit(product)
    for _ in range(6): replayed = jit(on_cpu(a), on_cpu(b))
    np.testing.assert_array_equal(replayed.numpy(), one_by_one)
    graphs = [get_graph_runtime(call.src[0]) for call in jit.captured.linear.src]
    assert [graph.parallel for graph in graphs] == [True]


def test_parallel_launches_are_fenced_on_both_sides():
    """A slow serial sum, a parallel addition that reads it, a serial sum of samples of all parts.

    Without the barrier before the addition, or without the one after it, 20 to 29 of 30 replays are wrong,
    since what a thread finds too early is the value of the replay before.
    """
    zeros = on_cpu(np.zeros((8, 1 << 18), np.float32))
    totals = [on_cpu(np.full(1 << 20, i * 2.0 ** -20, np.float32)) for i in range(4)]  # summing to i
    with Context(NUM_CPU_THREADS=2, SPLIT_REDUCEOP=0):  # a sum split in two would be parallel

        @TinyJit
        def fenced(x: Tensor, y: Tensor) -> Tensor:
            return (y + x.sum().contiguous()).contiguous()[:, ::4096].sum().realize()
        results = [fenced(totals[i % 4], zeros).item() for i in range(30)]
    assert results == [8 * 64 * (i % 4) for i in range(30)]
    graph, = (get_graph_runtime(call.src[0]) for call in fenced.captured.linear.src)
    assert graph.table[:, 1].tolist() == [1, 2, 1], "parts of each launch"


def test_parallel_launches_reach_every_part():
    """Row r of the table says how many parts; each must run exactly once, also with more parts than
    threads."""
    x = on_cpu(np.zeros((8, 1 << 18), np.float32))

    @TinyJit
    def add(x: Tensor) -> Tensor: return (x.assign(x + 1) + 0).contiguous().realize()
    for i in range(7): np.testing.assert_array_equal(add(x).numpy(), np.full((8, 1 << 18), i + 1, np.float32))


def test_variables_change_between_replays():
    data = integers(1, 32)
    source = on_cpu(data)
    n = Variable("n", 1, 32)

    @TinyJit
    def total(x: Tensor, count) -> Tensor: return (x[:, :count].contiguous().sum() * 2).contiguous().realize()
    for i in (3, 32, 1, 17, 5): assert total(source, n.bind(i)).item() == 2 * data[0, :i].sum()


def test_kernels_with_more_arguments_than_each_call_length():
    for count in (*(length + 1 for length in LENGTHS[:3]), 40):
        arrays = [integers(4, seed=i) for i in range(count)]
        tensors = [on_cpu(a) for a in arrays]

        @TinyJit
        def fused(*xs: Tensor) -> Tensor:
            out = xs[0]
            for x in xs[1:]: out = out + x
            return ((out + 1).contiguous() * 2).contiguous().realize()
        for _ in range(4): result = fused(*tensors)
        np.testing.assert_array_equal(result.numpy(), (np.sum(arrays, 0) + 1) * 2)


def test_an_input_seen_through_a_view_is_not_captured():
    @TinyJit
    def double(x: Tensor) -> Tensor: return ((x[1:3] * 2).contiguous() + 1).contiguous().realize()
    for seed in range(4):
        data = integers(4, 16, seed=seed)
        np.testing.assert_array_equal(double(on_cpu(data)).numpy(), data[1:3] * 2 + 1)


def test_graphs_from_several_threads_take_turns():
    a = integers(128, 128)
    jits = [TinyJit(lambda x: ((x @ x).contiguous() + 1).contiguous().realize()) for _ in range(2)]
    inputs = [on_cpu(a + i) for i in range(2)]
    for jit, x in zip(jits, inputs, strict=True):
        for _ in range(3): jit(x)
    results: list[np.ndarray] = [np.zeros(0)] * 2

    def replay(i: int) -> None:
        for _ in range(50): jits[i].captured([inputs[i].uop.base], {})
        results[i] = jits[i].captured.ret.numpy()
    threads = [threading.Thread(target=replay, args=(i,)) for i in range(2)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    for i in range(2): np.testing.assert_array_equal(results[i], (a + i) @ (a + i) + 1)


def test_disabled_is_tinygrads_own_launching(monkeypatch: pytest.MonkeyPatch):
    assert Device["CPU"].graph is CPUGraph
    with tinygrad_nv.disabled(): assert Device["CPU"].graph is None
    monkeypatch.setenv("NV_CPU_GRAPH", "0")
    assert Device["CPU"].graph is None


def test_one_thread_runs_all_parts():
    table = np.zeros((0, HEAD), np.uint64)
    pool(1).run(table, parallel=True)
    with Context(NUM_CPU_THREADS=1):
        x = on_cpu(integers(512, 512))
        jit = TinyJit(lambda x: ((x @ x).contiguous() + 1).contiguous().realize())
        for _ in range(3): out = jit(x)
        np.testing.assert_array_equal(out.numpy(), x.numpy() @ x.numpy() + 1)


def test_a_replay_counts_its_work():
    jit = TinyJit(lambda x: ((x @ x).contiguous() + 1).contiguous().realize())
    x = on_cpu(integers(64, 64))
    for _ in range(3): jit(x)
    GlobalCounters.reset()
    jit(x)
    assert GlobalCounters.global_ops >= 2 * 64 ** 3


SCRIPT = """
import os, signal
from tinygrad_nv import Tensor, TinyJit
from tinygrad.engine.realize import get_graph_runtime
jit = TinyJit(lambda x: ((x @ x).contiguous() + 1).contiguous().realize())
x = Tensor.ones(512, 512, device="CPU").contiguous().realize()
for _ in range(4): jit(x)
assert get_graph_runtime(jit.captured.linear.src[0].src[0]).parallel
if (child := os.fork()) == 0:
    signal.alarm(20)
    os._exit(0 if jit(x).numpy()[3, 5] == 513 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), jit(x).numpy()[3, 5])
"""


def test_a_child_replays_with_threads_of_its_own():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("0 513.0\n", "")


def buffer(nbytes: int) -> Buffer:
    """Newly allocated: none that was freed before, of the same size, and kept."""
    Device["CPU"].allocator.free_cache()
    return Buffer("CPU", nbytes, dtypes.uint8).allocate()


def write(made: Buffer, data: np.ndarray) -> None: made.as_memoryview(force_zero_copy=True)[:] = data.data


def asked(address: int) -> bool:
    """Whether the mapping around an address is private and asks for huge pages."""
    inside, text = False, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and ":" not in words[0]:
            first, last = (int(word, 16) for word in words[0].split("-"))
            inside, text = first <= address < last, words[1]
        elif inside and words[0] == "VmFlags:": return text == "rw-p" and "hg" in words
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.parametrize("nbytes", [PAGE, PAGE + 1, 5 * PAGE - 8])
def test_a_large_buffer_asks_for_huge_pages(nbytes: int):
    made = buffer(nbytes)
    address = made._buf.va_addr
    assert address % PAGE == 0
    assert asked(address)
    assert asked(address + nbytes - 1)
    assert made._buf.size == nbytes
    data = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    write(made, data)
    np.testing.assert_array_equal(np.frombuffer(made.as_memoryview(), np.uint8), data)


def test_a_small_buffer_and_an_external_one_are_tinygrads():
    assert not asked(buffer(PAGE - 1)._buf.va_addr)
    theirs = mmap.mmap(-1, 2 * PAGE)
    address = np.frombuffer(theirs, np.uint8).ctypes.data
    shown = Tensor.from_blob(address, (2 * PAGE,), dtype=dtypes.uint8, device="CPU")
    assert shown.uop.base.realized.get_buf("CPU").va_addr == address


def test_disabled_is_tinygrads_own_memory():
    with tinygrad_nv.disabled(): assert not asked(buffer(7 * PAGE)._buf.va_addr)


def test_where_there_are_no_huge_pages_memory_is_private_all_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # advice that no kernel knows, as one without huge pages
    with pytest.raises(OSError, match="Invalid argument"): mmap.mmap(-1, PAGE).madvise(-1)
    made = buffer(3 * PAGE)
    assert not asked(made._buf.va_addr)
    write(made, np.full(3 * PAGE, 7, np.uint8))
    assert bytes(made.as_memoryview()[-3:]) == b"\7\7\7"


def test_the_class_of_allocators_is_put_back():
    ours = ops_cpu.CPUAllocator
    tinygrad_nv.hooks.remove_cpu()
    try: assert ops_cpu.CPUAllocator is ours.__mro__[1] is not ours
    finally: cpu_device.install()
