"""What tinygrad has one of, each thread has: a connection to the cache on disk, a capture, the right to a
device. Threads that each run programs, capture, train and serve, in fresh processes."""
from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tinygrad import Context, Device, TinyJit, helpers
from tinygrad.engine import jit, realize, worker
from tinygrad.runtime.ops_python import PythonDevice

from tests.support import SUPPORT
from tests.support.hooks import deadly
from tinygrad_nv import Tensor, explain, hooks
from tinygrad_nv.hooks import threads as hook_threads
from tinygrad_nv.patterns import program


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(helpers, "CACHEDB", str(tmp_path / "cache.db"))
    monkeypatch.setattr(helpers, "_db_connection", None)
    monkeypatch.setattr(helpers, "_db_tables", set())


def in_thread(fn: Callable[[], Any]) -> Any:
    """What fn returns or raises in a thread of its own."""
    found: list[Any] = []
    def run() -> None:
        try: found.append(fn())
        except BaseException as error: found.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException): raise found[0]
    return found[0]


def free() -> bool:
    """Whether this thread may lower."""
    if got := hook_threads.LOWERING.acquire(timeout=0.1): hook_threads.LOWERING.release()
    return got


def test_another_thread_compiles_after_the_main_one():
    size = 1237  # of no kernel before
    assert (Tensor.ones(size).contiguous() + 1).sum().item() == 2 * size
    assert in_thread(lambda: (Tensor.ones(size + 2).contiguous() * 3).sum().item()) == 3 * (size + 2)
    assert (Tensor.ones(size + 4).contiguous() - 1).sum().item() == 0


def test_threads_see_what_others_put_there():
    helpers.diskcache_put("between", "main", 1)
    assert in_thread(lambda: helpers.diskcache_get("between", "main")) == 1
    in_thread(lambda: helpers.diskcache_put("between", "other", 2))
    assert helpers.diskcache_get("between", "other") == 2


def test_threads_write_at_the_same_time():
    def write(k: int) -> None:
        for i in range(20): helpers.diskcache_put("beside", f"{k} {i}", k * i)
    threads = [threading.Thread(target=write, args=(k,)) for k in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert all(helpers.diskcache_get("beside", f"{k} {i}") == k * i for k in range(4) for i in range(20))


def test_put_back_tinygrad_has_one_connection_for_the_thread_that_opened_it():
    helpers.diskcache_put("own", "key", 1)
    hooks.remove_threads()
    try:
        with pytest.raises(sqlite3.ProgrammingError):
            in_thread(lambda: helpers.diskcache_get("own", "key"))
    finally: hooks.install_threads()
    assert in_thread(lambda: helpers.diskcache_get("own", "key")) == 1


# **** the right to a device ****

def test_a_thread_that_generates_code_takes_the_device_from_itself_alone():
    with Context(ALLOW_DEVICE_USAGE=0):
        assert in_thread(lambda: (Tensor.ones(5).contiguous() + 1).tolist()) == [2] * 5
        with pytest.raises(AssertionError, match="disallowed"): Device["CPU"]
    assert Device["CPU"].device == "CPU"


def test_overlapping_uses_of_one_decorator_give_each_thread_its_own_back():
    inside, done = threading.Event(), threading.Event()

    @Context(ALLOW_DEVICE_USAGE=0)
    def generate(first: bool) -> None:
        if first: inside.set()
        assert not first or done.wait(10)
        with pytest.raises(AssertionError, match="disallowed"): Device["CPU"]

    def one() -> str:
        with Context(ALLOW_DEVICE_USAGE=0):
            generate(True)
            with pytest.raises(AssertionError, match="disallowed"): Device["CPU"]
        return Device["CPU"].device
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(in_thread(one)))
    thread.start()
    assert inside.wait(10)
    generate(False)
    assert Device["CPU"].device == "CPU"
    done.set()
    thread.join()
    assert found == ["CPU"]


# **** captures ****

def test_a_capture_takes_what_its_own_thread_schedules():
    seen: list[list[int]] = []

    @TinyJit
    def step(x: Tensor) -> Tensor:
        seen.append(in_thread(lambda: (Tensor.full((3,), len(seen)).contiguous() + 1).tolist()))
        return (x * 2).realize()
    for turn in range(3): assert step(Tensor([turn, 7]).realize()).tolist() == [2 * turn, 14]
    assert seen == [[1] * 3, [2] * 3]


def test_a_capture_goes_on_while_another_thread_schedules_beside_its_own():
    """As explain() does: what is scheduled meanwhile belongs to the capture all the same."""
    def beside(inside: threading.Event, done: threading.Event) -> None:
        with Context(CAPTURING=0):
            inside.set()
            done.wait(10)

    @TinyJit
    def step(x: Tensor) -> Tensor:
        inside, done = threading.Event(), threading.Event()
        thread = threading.Thread(target=beside, args=(inside, done))
        thread.start()
        assert inside.wait(10)
        made = (x * 2).realize()
        done.set()
        thread.join()
        return made
    for turn in range(3): assert step(Tensor([turn, 7]).realize()).tolist() == [2 * turn, 14]


def test_explain_leaves_schedules_cached(monkeypatch):
    """Also two of them at a time: it turns the cache off while no other thread explains."""
    own, seen = program.collect_misses, list[bool]()

    def hear() -> Any:
        seen.append(in_thread(free))
        assert helpers.SCACHE.value == 0
        return own()
    monkeypatch.setattr(program, "collect_misses", hear)
    explain(Tensor([1.0, 2]) + 1)
    assert seen == [False]
    assert helpers.SCACHE.value == 1


# **** devices ****

def test_two_threads_open_a_device_once():
    opened: list[str] = []
    begun = threading.Event()

    class SlowDevice(PythonDevice):
        def __init__(self, device: str) -> None:
            opened.append(device)
            begun.set()
            second.join(0.2)  # the other thread reaches the lock
            super().__init__(device)
    hooks.add_device("SLOW", SlowDevice)
    try:
        found: list[Any] = []
        second = threading.Thread(target=lambda: begun.wait(10) and found.append(Device["SLOW"]))
        second.start()
        device = Device["SLOW"]
        second.join()
        assert opened == ["SLOW"]
        assert found == [device]
    finally: hooks.remove_device("SLOW")


def test_put_back_tinygrad_has_its_own_state():
    ours = realize.capturing
    hooks.remove_threads()
    try:
        assert type(realize.capturing) is list
        assert realize.capturing is jit.capturing is not ours
        settings = (helpers.ALLOW_DEVICE_USAGE, helpers.CAPTURING)
        assert {type(each) for each in settings} == {helpers.ContextVar}
        assert helpers.ALLOW_DEVICE_USAGE.value == 1
        made = Context(ALLOW_DEVICE_USAGE=0)
        assert made._recreate_cm() is made
        assert Device["CPU"].device == "CPU"
    finally: hooks.install_threads()


# **** on and off ****

def test_overlapping_blocks_of_disabled_leave_what_was_before():
    """The first to begin is the first to end."""
    inside, done = threading.Event(), threading.Event()

    def first() -> None:
        with hooks.disabled():
            inside.set()
            done.wait(10)
    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(10)
    with hooks.disabled():
        done.set()
        thread.join()
        assert not hooks.enabled()
    assert hooks.enabled()


# **** forks ****

def test_a_fork_waits_for_programs_that_other_threads_make_and_has_a_connection_of_its_own():
    helpers.diskcache_put("forks", "parent", 1)
    inside, done = threading.Event(), list[bool]()

    def make() -> None:
        with hook_threads.LOWERING:
            inside.set()
            time.sleep(0.2)
            done.append(True)
    thread = threading.Thread(target=make)
    thread.start()
    assert inside.wait(10)
    if not (child := os.fork()):
        ended = 1
        try:
            assert done
            assert helpers._db_connection is None
            assert hook_threads.LOWERING.acquire(timeout=5)
            assert helpers.diskcache_get("forks", "parent") == 1
            helpers.diskcache_put("forks", "child", 2)
            ended = 0
        finally: os._exit(ended)
    assert os.waitpid(child, 0)[1] == 0
    thread.join()
    assert in_thread(free)
    assert helpers.diskcache_get("forks", "child") == 2


SCRIPT = SUPPORT / "hooks" / "threads_script.py"
ROOT = SCRIPT.parents[3]


def ran(*arguments: object, **env: object) -> None:
    """The script in a process of its own ends well, and says nothing."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in env.items()}}
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], env=environment, timeout=300,
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, ""), done.stderr[-4000:]


@pytest.mark.slow
def test_eight_programs_from_an_empty_cache_and_then_a_full_one(tmp_path):
    for _ in range(2): ran("programs", DEV="CPU", CACHEDB=tmp_path / "cache.db")


def test_programs_gradients_captures_and_an_engine_side_by_side(tiny, tmp_path):
    ran("mixed", tiny, DEV="CPU", CACHEDB=tmp_path / "cache.db")


@pytest.mark.slow
def test_programs_gradients_and_captures_side_by_side_on_the_emulator(tmp_path):
    ran("mixed", DEV="EMU", CACHEDB=tmp_path / "cache.db")


# **** processes that compile ****

@pytest.fixture
def workers(monkeypatch):
    """A pool of two processes, which other tests do not have."""
    monkeypatch.setattr(worker, "worker_pool", None)
    monkeypatch.setattr(worker.PARALLEL, "value", 2)
    found = realize.get_worker_pool()
    yield found
    worker.terminate_worker_pool()


def test_a_process_that_is_killed_loses_no_kernel(workers):
    """One while it works, then one that is idle, and has the lock of the queue."""
    tasks = [(number, deadly.KILLS if number == 5 else deadly.HERE) for number in range(9)]
    assert sorted(workers.imap_unordered(deadly.work, iter(tasks[:4]))) == [(i, True) for i in range(4)]
    assert worker.worker_pool is not None
    found = dict(workers.imap_unordered(deadly.work, iter(tasks)))
    assert [*sorted(found)] == [*range(9)]
    assert not found[5], "what killed a process is computed here"
    assert worker.worker_pool is None, "the pool is given up"
    assert dict(workers.imap_unordered(deadly.work, tasks[:2])) == {0: True, 1: True}
    for each in worker.worker_pool._pool:
        each.kill()
        each.join()
    assert sorted(dict(workers.imap_unordered(deadly.work, tasks[:3]))) == [0, 1, 2]
    with pytest.raises(ValueError, match="7"): list(workers.imap_unordered(deadly.work, [(7, deadly.RAISES)]))
