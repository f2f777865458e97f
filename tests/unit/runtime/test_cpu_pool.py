"""The threads of the CPU: every part of every launch once, in the order of launches, also with slow
threads."""
from __future__ import annotations

import ctypes
import functools
import os
import resource
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tinygrad import Context, Device, Tensor, TinyJit
from tinygrad.device import TinyELF
from tinygrad.runtime import ops_cpu

import tinygrad_nv
from tinygrad_nv.runtime.cpu import device as cpu_device
from tinygrad_nv.runtime.cpu import pool as cpu_pool
from tinygrad_nv.runtime.cpu.pool import ALONE, HEAD, ThreadPool, pool

# one more for each launch that ran the part, some after a while
COUNT = """void count(long *words, long slow, int core_id) {
  for (long i = 0; i < slow * (core_id % 3); i++) __asm__ volatile("");
  words[core_id] += 1; }"""
# each part sums what all parts of the launch before have written
MIX = """void mix(long *out, const long *in, long parts, int core_id) {
  long sum = core_id;
  for (long i = 0; i < parts; i++) sum += in[i];
  out[core_id] = sum % 1000003; }"""
# part 0 ends when another has begun, which ends a good while later
LATE = """void late(long *words, long sleep, int core_id) {
  if (core_id == 0) { while (!__atomic_load_n(words, __ATOMIC_ACQUIRE)) ((int(*)(void))sleep)(); return; }
  __atomic_store_n(words, 1, __ATOMIC_RELEASE);
  for (int i = 0; i < 3000; i++) ((int(*)(void))sleep)();
  words[1] = 1; }"""
# one more for each launch that ran the part, which is interrupted now and then
TURNS = """void turns(long *words, long sleep, int core_id) {
  long before = words[core_id];
  if (core_id % 2) for (int i = 0; i < 20; i++) ((int(*)(void))sleep)();
  words[core_id] = before + 1; }"""
NAPS = """void naps(long *naps, long *sleep, int core_id) {
  if (core_id == 0) { while (__atomic_load_n(naps, __ATOMIC_ACQUIRE) < 7) ((int(*)(void))sleep)(); return; }
  __atomic_fetch_add(naps, 1, __ATOMIC_RELEASE); }"""


@functools.cache
def program(source: str, name: str):
    device = Device["CPU"]
    return device.runtime(TinyELF(device.renderer.compiler.compile_cached(source), name,
                                  device.renderer.target, ()))


def row(source: str, name: str, parts: int, *words: int) -> list[int]:
    """A launch; core_id is the last argument."""
    return [program(source, name).addr, parts, len(words), len(words) + 1, *words, 0]


def table(*rows: list[int]) -> np.ndarray:
    width = max(map(len, rows))
    return np.array([[*one, *[0] * (width - len(one))] for one in rows], np.uint64)


@functools.cache
def three() -> ThreadPool:
    """More threads than most machines of tests have to spare: they must sleep and be slow, and be right."""
    return ThreadPool(3)


@pytest.mark.parametrize("parts", [2, 3, 8, 100])
def test_every_part_runs_once_in_every_launch(parts: int):
    words = np.zeros(parts, np.int64)
    for slow in (0, 300):
        words[:] = 0
        rows = [row(COUNT, "count", parts, words.ctypes.data, slow)] * 40
        for _ in range(5): three().run(table(*rows), True)
        np.testing.assert_array_equal(words, np.full(parts, 200))


def test_a_launch_sees_all_of_the_one_before():
    parts, launches = 6, 60
    words = np.zeros((launches + 1, parts), np.int64)
    words[0] = np.arange(parts)
    for _ in range(20):
        words[1:] = -1
        rows = [row(MIX, "mix", parts, words[i + 1].ctypes.data, words[i].ctypes.data, parts)
                for i in range(launches)]
        # some of one part between, of as many words
        for i in (7, 8, 30): rows[i][1:4] = [1, ALONE, 4]
        expected = words[0].copy()
        three().run(table(*rows), True)
        for i in range(launches):
            single = i in (7, 8, 30)
            after = (np.arange(parts) + expected.sum()) % 1000003
            if single: after[1:] = -1
            np.testing.assert_array_equal(words[i + 1], after)
            expected = words[i + 1]


def test_a_slow_part_leaves_the_others_to_who_is_free():
    """Part 0 ends when all others are done, which takes another thread; it gives its core away meanwhile."""
    naps = np.zeros(1, np.int64)
    sleep = int(three().control[cpu_pool.YIELD])
    for _ in range(10):
        naps[0] = 0
        three().run(table(row(NAPS, "naps", 8, naps.ctypes.data, sleep)), True)
        assert naps[0] == 7


def test_a_launch_ends_when_all_parts_have():
    words = np.zeros(2, np.int64)
    sleep = int(three().control[cpu_pool.YIELD])
    for _ in range(5):
        words[:] = 0
        three().run(table(row(LATE, "late", 2, words.ctypes.data, sleep)), True)
        assert words.tolist() == [1, 1]


def test_one_thread_runs_all_parts_in_order():
    words = np.zeros(4, np.int64)
    pool(1).run(table(row(COUNT, "count", 4, words.ctypes.data, 0)), True)
    np.testing.assert_array_equal(words, np.ones(4))
    pool(1).run(np.zeros((0, HEAD), np.uint64), parallel=True)


def test_there_are_no_more_threads_than_cores():
    assert pool(1000).threads == pool(1000 + 1).threads <= len(os.sched_getaffinity(0))
    assert pool(1000) is pool(1001)


def test_threads_that_wait_cost_nothing():
    three().run(table(*[row(COUNT, "count", 8, np.zeros(8, np.int64).ctypes.data, 0)] * 100), True)
    time.sleep(0.05)
    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime
    before = used()
    time.sleep(0.3)
    assert used() - before < 0.03


def test_several_threads_launch_at_once():
    """Each Python thread has words of its own; all share the pool."""
    mine = [np.zeros(8, np.int64) for _ in range(4)]
    sleep = int(three().control[cpu_pool.YIELD])
    rows = {id(words): table(*[row(TURNS, "turns", 8, words.ctypes.data, sleep)] * 10) for words in mine}

    def launch(words: np.ndarray) -> None:
        for i in range(20): three().run(rows[id(words)], i % 5 > 0)
    threads = [threading.Thread(target=launch, args=(words,)) for words in mine]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    for words in mine: np.testing.assert_array_equal(words, np.full(8, 200))


def test_a_thread_may_be_the_first_to_launch():
    """tinygrad's disk cache serves the thread that opened it alone."""
    Device["CPU"].renderer.compiler.compile_cached(COUNT)
    made: list[ThreadPool] = []
    thread = threading.Thread(target=lambda: made.append(ThreadPool(2)))
    thread.start()
    thread.join()
    words = np.zeros(3, np.int64)
    made[0].run(table(row(COUNT, "count", 3, words.ctypes.data, 0)), True)
    assert words.tolist() == [1, 1, 1]


# **** launches that no graph has ****

@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts each run of the pool has, in order."""
    seen: list[int] = []
    theirs = ThreadPool.run_at

    def run_at(self: ThreadPool, address: int, rows: int, stride: int, parallel: bool) -> None:
        words = np.ctypeslib.as_array((ctypes.c_uint64 * (rows * stride)).from_address(address))
        seen.extend(int(parts) for parts in words.reshape(rows, stride)[:, 1])
        theirs(self, address, rows, stride, parallel)
    monkeypatch.setattr(ThreadPool, "run_at", run_at)
    return seen


def big(seed: int) -> Tensor:
    numbers = np.random.default_rng(seed).integers(-8, 8, (512, 512)).astype(np.float32)
    return Tensor(numbers, device="CPU").realize()


def test_parts_of_a_launch_run_on_the_pool(launched: list[int]):
    """tinygrad's own kernel, an addition it splits in two for its threads."""
    a, b = big(0), big(1)
    with Context(NUM_CPU_THREADS=2): out = (a + b).contiguous().realize()
    assert launched == [2]
    np.testing.assert_array_equal(out.numpy(), a.numpy() + b.numpy())


def test_a_product_of_ours_runs_on_the_pool(launched: list[int]):
    a, x = big(0).cat(big(1), big(2), big(3)).realize(), big(4)[:1].contiguous().realize()
    launched.clear()
    with Context(NUM_CPU_THREADS=2): out = (x @ a.T).contiguous().realize()
    assert len(launched) == 1
    assert launched[0] > 1
    np.testing.assert_array_equal(out.numpy()[0], a.numpy() @ x.numpy()[0])


def test_without_graphs_captured_launches_run_on_the_pool(launched: list[int],
                                                          monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU_GRAPH", "0")
    a, b = big(0), big(1)
    with Context(NUM_CPU_THREADS=2):
        jit = TinyJit(lambda x, y: ((x + y).contiguous() * 2).contiguous().realize())
        for _ in range(4): out = jit(a, b)
    assert launched == [2, 2] * 4
    np.testing.assert_array_equal(out.numpy(), (a.numpy() + b.numpy()) * 2)


def test_disabled_is_tinygrads_own_call(launched: list[int]):
    a, b = big(0), big(1)
    with Context(NUM_CPU_THREADS=2), tinygrad_nv.disabled():
        out = (a + b).contiguous().realize()
    assert launched == []
    np.testing.assert_array_equal(out.numpy(), a.numpy() + b.numpy())


def test_variables_and_seconds_of_a_launch():
    """core_id stands among the variables, here after one: `vals` has nothing in its place."""
    source = "void scale(long *out, int n, int core_id) { out[core_id] = n * 10 + core_id; }"
    out = Tensor.zeros(4, dtype="long", device="CPU").contiguous().realize()
    device = Device["CPU"]
    binary = device.renderer.compiler.compile_cached(source)
    made = device.runtime(TinyELF(binary, "scale", device.renderer.target, (("out", 0, None), ("n", 1, None),
                                                                            ("core_id", 2, None))))
    seconds = made(out.uop.base.realized.get_buf("CPU"), global_size=(4, 1, 1), vals=(-3, None), wait=True)
    assert out.tolist() == [-30, -29, -28, -27]
    assert 0 < seconds < 5


def test_the_class_of_programs_is_put_back():
    ours = ops_cpu.CPUProgram
    tinygrad_nv.hooks.remove_cpu()
    try: assert ops_cpu.CPUProgram in ours.__mro__[1:]
    finally: cpu_device.install()
    assert ops_cpu.CPUProgram.__name__ == "CPUProgram"


# **** fewer cores than it seems ****

SCRIPT = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from tinygrad_nv import Tensor, TinyJit
x = Tensor.ones(512, 512, device="CPU").contiguous().realize()
jit = TinyJit(lambda x: (((x + x).contiguous() @ x).contiguous() + 1).contiguous().realize())
for _ in range(5): out = jit(x)
print(out.numpy()[3, 5])
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("threads", ["2", "8"])
def test_one_core_and_any_number_of_threads(threads: str):
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60,
                          check=False, env={**os.environ, "NUM_CPU_THREADS": threads})
    assert (done.stdout, done.stderr) == ("1025.0\n", "")
    assert time.monotonic() - begun < 40


@pytest.mark.slow
def test_programs_of_queues_are_made_when_a_queue_is_used():
    """Opening the device generates and compiles nothing; tinygrad's queues work all the same."""
    script = """
from tinygrad import Device
from tinygrad_nv import Tensor
from tinygrad_nv.runtime.cpu import clang
compiled, theirs = [], clang.ToolchainCompiler.compile
clang.ToolchainCompiler.compile = lambda self, source: compiled.append(source) or theirs(self, source)
device = Device["CPU"]
assert not compiled and all("deferred" in vars(program) for program in device.prgs.values())
assert (Tensor([1.0, 2.0]) + 1).tolist() == [2.0, 3.0]
print(len(compiled), sum("deferred" not in vars(program) for program in device.prgs.values()))
"""
    for queues in "01":
        env = {**os.environ, "DEV": "CPU", "HCQ2": queues, "CCACHE": "0", "PARALLEL": "0"}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True,
                              check=False)
        assert done.returncode == 0, done.stderr
        compiled, used = map(int, done.stdout.split())
        assert bool(used) is (queues == "1")
        assert compiled >= 1 + used if used else compiled == 1
