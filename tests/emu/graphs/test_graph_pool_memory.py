"""Graph pools that run out of memory, are limited, or are interrupted: nothing leaks, all goes on."""
from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.graphs.pool_case import device
from tinygrad_nv import Tensor, Variable, dtypes
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.graphs.bucket import Bucket
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import HostMemory
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver, EmulatedHostMemory
from tinygrad_nv.runtime.emulated.graph import EmulatedExecutable, EmulatedGraph

pytestmark = pytest.mark.usefixtures("frozen")

NODE_BYTES = 1 << 10    # what a node of a graph takes on the device below
WIDE = {"x": Input((), dtypes.int32)}


class _Executable(EmulatedExecutable):
    def __init__(self, graph: EmulatedGraph) -> None:
        super().__init__(graph)
        self.owner, self.nbytes = graph.device, NODE_BYTES * len(self.works)
        if self.owner.used_bytes + self.nbytes > self.owner.properties.memory_bytes:
            self.nbytes = 0
            raise MemoryError("no memory for a graph")
        self.owner.used_bytes += self.nbytes

    def __del__(self) -> None: self.owner.used_bytes -= self.nbytes


class _Graph(EmulatedGraph):
    def instantiate(self) -> EmulatedExecutable: return _Executable(self)


class Trapped(EmulatedDriver):
    """Graphs take memory, and after `left` calls of those that can fail the next `times` raise `error`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.left, self.times, self.error, self.hosts = 1 << 60, 1, RuntimeError, 0

    def arm(self, left: int, error: type[BaseException], times: int = 1) -> None:
        """Sets the trap."""
        self.left, self.times, self.error = left, times, error

    def disarm(self) -> bool:
        """Takes it away; whether it was never reached."""
        untouched, self.left = self.left >= 0, 1 << 60
        return untouched

    def trip(self) -> None:
        """Counts; raises when it is time."""
        self.left -= 1
        if -self.times <= self.left < 0: raise self.error("injected")

    def alloc(self, nbytes: int) -> int:
        self.trip()
        return super().alloc(nbytes)

    def host(self, nbytes: int) -> HostMemory:
        self.trip()
        memory, driver = super().host(nbytes), self
        assert isinstance(memory, EmulatedHostMemory)
        driver.hosts += 1
        free = memory.free
        def counted() -> None:
            driver.hosts -= 1
            free()
        memory.free = counted
        return memory

    def graph(self) -> EmulatedGraph:
        self.trip()
        return _Graph(self)


class Interrupted(Trapped):
    """Everything can fail, before it is done and after."""

    def submit(self, work: Any, stream: Any = None) -> None:
        self.trip()
        super().submit(work, stream)
        self.trip()

    def record(self, event: Any, stream: Any = None) -> None:
        self.trip()
        super().record(event, stream)
        self.trip()

    def wait_for(self, event: Any) -> None:
        self.trip()
        super().wait_for(event)


@pytest.fixture(scope="module")
def trapped() -> NVDevice: return device(Trapped)


@pytest.fixture(scope="module")
def interrupted() -> NVDevice: return device(Interrupted)


@contextmanager
def nothing_left(opened: NVDevice) -> Iterator[None]:
    """What is allocated inside is given back by the end."""
    gc.collect()
    before = opened.driver.used_bytes, opened.driver.hosts
    yield
    gc.collect()
    opened.driver.disarm()
    opened.driver.synchronize()
    assert (opened.driver.used_bytes, opened.driver.hosts) == before


def wide(x: Tensor) -> Tensor:
    """Two intermediates of rows × 1 KiB and rows × 2 KiB, three kernels."""
    a = (x.reshape(-1, 1).expand(-1, 256) + Tensor.arange(256)).contiguous()
    b = (a.reshape(-1, 256, 1).expand(-1, 256, 2) * 2).contiguous()
    return (a + b.sum(-1)).sum(1)


def check(pool: GraphPool, rows: int) -> None:
    """One call, checked."""
    x = np.arange(rows, dtype=np.int32) + rows
    np.testing.assert_array_equal(pool(x=x).numpy(), 5 * (x[:, None] + np.arange(256)).sum(1))


# **** a limit ****

def test_the_least_recently_used_graph_goes(trapped: NVDevice):
    with nothing_left(trapped):
        pool = GraphPool(wide, WIDE, (1, 2, 4), trapped.device)
        pool.capture()
        graphs = [bucket.graph_bytes for bucket in pool.stats().buckets]
        assert all(nbytes and nbytes % NODE_BYTES == 0 for nbytes in graphs)
        held = pool.stats().arena_bytes + pool.stats().output_bytes
        pool = GraphPool(wide, WIDE, (1, 2, 4), trapped.device, limit_bytes=held + sum(graphs) - 1)
        for rows in (4, 1, 2): check(pool, rows)            # 4 is the oldest, and goes for 2
        assert [b.evictions for b in pool.stats().buckets] == [0, 0, 1]
        assert pool.stats().graph_bytes == graphs[0] + graphs[1]
        check(pool, 1)
        check(pool, 4)                                      # now 2 is the oldest
        assert [b.evictions for b in pool.stats().buckets] == [0, 1, 1]
        for rows in (1, 2, 3, 4, 1): check(pool, rows)
        assert [b.captures for b in pool.stats().buckets] == [1, 1, 1]  # never compiled again
        assert sum(b.eager for b in pool.stats().buckets) == 0
        del pool


def test_evicted_graphs_are_given_back(trapped: NVDevice):
    with nothing_left(trapped):
        pool = GraphPool(wide, WIDE, (1, 2), trapped.device)
        pool.capture()
        executables = [weakref.ref(bucket.graph.executable.executable) for bucket in pool.buckets.values()]
        used = trapped.driver.used_bytes
        held = pool.stats()
        pool._evict_all()
        assert [ref() for ref in executables] == [None, None]
        assert trapped.driver.used_bytes == used - held.graph_bytes - held.arena_bytes - held.output_bytes
        for rows in (1, 2): check(pool, rows)
        del pool


def test_the_arena_shrinks_to_stay_within_a_limit(trapped: NVDevice):
    pool = GraphPool(wide, WIDE, (1, 4), trapped.device)
    pool.capture()
    one, four = pool.stats().buckets
    alone = four.arena_bytes + four.output_bytes + four.graph_bytes
    del pool
    with nothing_left(trapped):
        pool = GraphPool(wide, WIDE, (1, 4), trapped.device, limit_bytes=alone)
        check(pool, 4)
        check(pool, 1)      # the graph of 4 goes; then there is room in the arena as it is
        assert pool.stats().arena_bytes in (one.arena_bytes, four.arena_bytes)
        check(pool, 4)
        check(pool, 1)
        stats = pool.stats()
        assert stats.arena_bytes + stats.output_bytes + stats.graph_bytes <= alone
        del pool


def test_a_size_that_no_limit_allows_is_eager(trapped: NVDevice):
    with nothing_left(trapped):
        pool = GraphPool(wide, WIDE, (1, 4), trapped.device, limit_bytes=9 << 10)
        for rows in (1, 4, 3, 1): check(pool, rows)
        small, large = pool.stats().buckets
        assert (small.eager, small.hits, large.eager) == (0, 1, 2)
        assert large.reasons == ("12.25 KiB are needed for arena, outputs and graph, and the pool's limit is "
                                 "9.00 KiB",)
        del pool


def test_a_graph_that_turns_out_too_large_is_given_back(trapped: NVDevice):
    """What a graph takes is known when it is there."""
    with nothing_left(trapped):
        pool = GraphPool(wide, WIDE, (1,), trapped.device, limit_bytes=(3 << 10) + 256 + NODE_BYTES)
        used = trapped.driver.used_bytes
        check(pool, 1)
        assert pool.stats().buckets[0].eager == 1
        assert "limit is" in pool.stats().buckets[0].reasons[0]
        assert pool.stats().graph_bytes == 0
        assert trapped.driver.used_bytes - used <= (3 << 10) + 256
        del pool


def test_a_device_that_is_full_asks_the_pool(trapped: NVDevice, monkeypatch: pytest.MonkeyPatch):
    with nothing_left(trapped):
        pool = GraphPool(wide, WIDE, (1, 2), trapped.device)
        pool.capture()
        small = replace(trapped.driver.properties, memory_bytes=trapped.driver.used_bytes + (64 << 10))
        monkeypatch.setattr(trapped.driver, "properties", small)
        tensor = Tensor.empty((64 << 10) + 1024, dtype=dtypes.uint8, device=trapped.device)
        tensor.uop.buffer.ensure_allocated()  # there is room only without graphs and arena
        assert pool.stats().graph_bytes == pool.stats().arena_bytes == 0
        assert [b.evictions for b in pool.stats().buckets] == [1, 1]
        del tensor
        for rows in (1, 2): check(pool, rows)
        del pool


# **** memory that is not there ****

class Counting:
    """Adds rows, which are 0 where they are padding, to a total; returns them with the total before. Keeps a
    table from its first run on."""

    def __init__(self, device: str) -> None:
        self.total = Tensor.zeros(4, dtype=dtypes.int32, device=device).contiguous().realize()
        self.table: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.table is None: self.table = (Tensor.arange(4) + 1).cast(dtypes.int32).contiguous().realize()
        before = (x + self.total).contiguous().realize()
        self.total.assign(self.total + x.sum(0)).realize()
        return before, x * self.table


ROWS = {"x": Input((4,), dtypes.int32)}
GIVEN = np.arange(12, dtype=np.int32).reshape(3, 4)


def check_total(pool: GraphPool, total: int, given: np.ndarray = GIVEN) -> None:
    """One call, when so many have been made on the same rows."""
    before, times = pool(x=given)
    np.testing.assert_array_equal(before.numpy(), given + total * GIVEN.sum(0))
    np.testing.assert_array_equal(times.numpy(), given * [1, 2, 3, 4])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("times", "outcomes"), [(1, {"graph", "refused"}), (1 << 30, {"graph", "refused"}),
                                                 (4, {"graph", "refused", "eager"})])
def test_memory_that_is_refused_at_every_allocation(trapped: NVDevice, times: int, outcomes: set[str]):
    """Once, for good, and for long enough that there is no graph."""
    driver, kinds = trapped.driver, set[str]()
    for k in range(200):
        with nothing_left(trapped):
            step, pool, calls = Counting(trapped.device), None, 0
            driver.arm(k, MemoryError, times)
            try:
                pool = GraphPool(step, ROWS, (1, 4), trapped.device)
                check_total(pool, 0)
                calls = 1
                kinds.add("eager" if pool.stats().buckets[1].eager else "graph")
            except MemoryError: kinds.add("refused")
            done = driver.disarm()
            if pool is None: pool = GraphPool(step, ROWS, (1, 4), trapped.device)
            check_total(pool, calls)
            check_total(pool, calls + 1, GIVEN[:1])
            del pool, step
        if done: break
    assert k > 5
    assert kinds == outcomes


def test_no_memory_for_the_arena_means_eager(trapped: NVDevice):
    """Both attempts fail: the second after everything else was evicted."""
    with nothing_left(trapped):
        pool = GraphPool(wide, WIDE, (1, 4), trapped.device)
        check(pool, 1)
        refused, alloc = [], Trapped.alloc
        def no_arena(self: Trapped, nbytes: int) -> int:
            if nbytes == 12 << 10:
                refused.append(nbytes)
                raise MemoryError("full")
            return alloc(self, nbytes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trapped, "alloc", no_arena)
            check(pool, 4)
            check(pool, 4)
        assert refused
        large = pool.stats().buckets[1]
        assert (large.eager, large.builds) == (2, 0)
        assert "out of memory" in large.reasons[0]
        check(pool, 1)
        pool.capture((4,))  # tried again when asked
        check(pool, 4)
        assert pool.stats().buckets[1].hits == 1
        del pool


def test_memory_is_asked_for_again_now_and_then(trapped: NVDevice):
    with nothing_left(trapped):
        pool, tried = GraphPool(wide, WIDE, (1,), trapped.device), []
        build = Bucket.build
        def refuse(self: Bucket, arena: Any) -> None:
            tried.append(self.counts.eager)
            if self.counts.eager < 40: raise MemoryError("full")
            build(self, arena)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bucket, "build", refuse)
            for _ in range(60): check(pool, 1)
        assert tried == [0, 0, 16, 16, 48]
        assert pool.stats().buckets[0].eager == 48
        del pool


# **** interruptions ****

def test_interrupted_anywhere(interrupted: NVDevice):
    driver = interrupted.driver
    for k in range(300):
        error = (KeyboardInterrupt, RuntimeError)[k % 2]
        with nothing_left(interrupted):
            step = Counting(interrupted.device)
            pool = GraphPool(step, ROWS, (4,), interrupted.device)
            driver.arm(k, error)
            raised = False
            try:
                for _ in range(3): pool(x=GIVEN)
            except error: raised = True
            driver.disarm()
            step.total.assign(Tensor.zeros(4, dtype=dtypes.int32, device=interrupted.device)).realize()
            for calls in range(2): check_total(pool, calls)
            del pool, step
        if not raised: break
    assert k > 10


def test_interrupted_while_nodes_are_updated(interrupted: NVDevice, monkeypatch: pytest.MonkeyPatch):
    def step(x: Tensor, n: Variable) -> Tensor: return ((x + n).realize() * n).realize() + n
    pool = GraphPool(step, {"x": Input((4,), dtypes.int32)}, (2,), interrupted.device)
    x, n = np.arange(8, dtype=np.int32).reshape(2, 4), Variable("n", 0, 99)
    def check_n(value: int) -> None:
        np.testing.assert_array_equal(pool(x=x, n=n.bind(value)).numpy(), (x + value) * value + value)
    for value in (3, 5): check_n(value)
    update, left = EmulatedExecutable.update, 0
    def interrupts(self: EmulatedExecutable, *args: Any) -> None:
        nonlocal left
        update(self, *args)
        left -= 1
        if left == 0: raise KeyboardInterrupt
    monkeypatch.setattr(EmulatedExecutable, "update", interrupts)
    for after in (1, 2):
        check_n(5)
        left = after
        with pytest.raises(KeyboardInterrupt): check_n(7)
        check_n(5)  # what the nodes were before: one of them already is not
        check_n(7)
    pool.close()


def test_a_step_that_fails_while_it_is_captured(interrupted: NVDevice):
    """What it assigned and did not run is forgotten; what it keeps is there."""
    state = Tensor.zeros(2, 4, device=interrupted.device).contiguous().realize()
    kept: dict[str, Tensor] = {}
    fails = True
    def step(x: Tensor) -> Tensor:
        if not kept: kept["table"] = (Tensor.arange(4) * 2).cast(dtypes.float32).contiguous().realize()
        state.assign(x + kept["table"])
        if fails: raise ValueError("in the step")
        return state + 1
    x = np.ones((2, 4), np.float32)
    pool = GraphPool(step, {"x": Input((4,), dtypes.float32)}, (2,), interrupted.device)
    for _ in range(2):
        with pytest.raises(ValueError, match="in the step"): pool(x=x)
        np.testing.assert_array_equal(state.numpy(), np.zeros((2, 4)))
    np.testing.assert_array_equal(kept["table"].numpy(), [0, 2, 4, 6])
    fails = False
    for k in (1, 2):
        np.testing.assert_array_equal(pool(x=x * k).numpy(), x * k + [[0, 2, 4, 6]] + 1)
    assert pool.stats().buckets[0].reasons == ()
    pool.close()
