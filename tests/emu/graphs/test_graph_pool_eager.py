"""What a graph pool does with steps that are no graph, and with devices that have none: it says why, and the
results are right. The ring of page-locked memory."""
from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from tinygrad.engine import realize
from tinygrad.helpers import Context
from tinygrad.uop.ops import Ops

from tests.support.graphs.pool_case import Paged, batch, device, eager, pool_of, same
from tinygrad_nv import Tensor, UOp, Variable, dtypes, hooks
from tinygrad_nv.errors import KernelError
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Fill, Window

pytestmark = pytest.mark.usefixtures("frozen")

ROWS = {"x": Input((4,), dtypes.float32)}
X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture(scope="module")
def emu() -> NVDevice: return device()


def calls(pool: GraphPool, wanted: Any, times: int = 3) -> None:
    """Calls with other rows each time, checked against numpy."""
    for k in range(times):
        np.testing.assert_array_equal(pool(x=X + k).numpy(), wanted(X + k))
        np.testing.assert_array_equal(pool(x=X[:1] + k).numpy(), wanted(X[:1] + k))


def reasons(pool: GraphPool) -> set[str]:
    assert all(bucket.eager for bucket in pool.stats().buckets)
    return {reason for bucket in pool.stats().buckets for reason in bucket.reasons}


# **** steps that are no graph ****

def test_a_custom_function(emu: NVDevice):
    def triple(ctx: Any, call: UOp, ast: UOp) -> list[Any]:
        out, source = (u.buffer.ensure_allocated() for u in realize.resolve_params(call, ctx.input_uops))
        values = np.frombuffer(source.as_memoryview(), np.float32) * 3
        out.allocator._copyin(out._buf, memoryview(values).cast("B"))
        return []
    def step(x: Tensor) -> Tensor:
        out = UOp.invalids(*x.shape, device=x.device, dtype=x.dtype)
        body = UOp(Ops.CUSTOM_FUNCTION, arg="pool_triple:x")
        source = (x + 1).realize().contiguous()
        return Tensor(out.after(body.call(out, source.uop))) * 2 + x.sum(1, keepdim=True)
    hooks.add_custom_function("pool_triple", triple, lambda call: ((0,), (1,)))
    try:
        pool = GraphPool(step, ROWS, (1, 4), emu.device)
        calls(pool, lambda x: (x + 1) * 6 + x.sum(1, keepdims=True))
    finally: hooks.remove_custom_function("pool_triple")
    (reason,) = reasons(pool)
    assert reason.startswith("a graph cannot hold the custom function pool_triple:x of ")
    assert [(b.captures, b.builds) for b in pool.stats().buckets] == [(1, 1), (1, 1)]


def test_a_copy_to_another_device(emu: NVDevice):
    def step(x: Tensor) -> Tensor: return (x + 1).to("CPU").contiguous().to(x.device) * 2
    pool = GraphPool(step, ROWS, (1, 4), emu.device)
    calls(pool, lambda x: (x + 1) * 2)
    (reason,) = reasons(pool)
    assert f"a graph cannot hold a copy between CPU and {emu.device} and 1 more of " in reason


def test_data_from_the_host(emu: NVDevice):
    """What the step takes from numpy is copied at every call, as it is at the first."""
    def step(x: Tensor) -> Tensor: return x + Tensor(np.arange(4, dtype=np.float32), device=x.device)
    pool = GraphPool(step, ROWS, (1, 4), emu.device)
    calls(pool, lambda x: x + np.arange(4))
    (reason,) = reasons(pool)
    assert "a graph cannot hold a copy between" in reason


def test_a_step_that_reads_data(emu: NVDevice):
    def step(x: Tensor) -> Tensor: return x * float(x.max().item())
    pool = GraphPool(step, ROWS, (1, 4), emu.device)
    calls(pool, lambda x: x * x.max())
    (reason,) = reasons(pool)
    assert reason.startswith("the step cannot be captured: cannot access tensor data during JIT capture")


def test_state_that_is_bound_anew(emu: NVDevice):
    """A replay would go on with the first one's: TinyJit does."""
    class Step:
        def __init__(self) -> None: self.total = Tensor.zeros(4, device=emu.device).contiguous().realize()

        def __call__(self, x: Tensor) -> Tensor:
            self.total = (self.total + x.sum(0)).contiguous().realize()
            return x + self.total
    step = Step()
    pool = GraphPool(step, ROWS, (1, 4), emu.device)
    total = np.zeros(4, np.float32)
    for k in range(3):
        for x in (X + k, X[:1] + k):
            total += x.sum(0)
            np.testing.assert_array_equal(pool(x=x).numpy(), x + total)
    assert reasons(pool) == {"the step keeps a Tensor that it computes from its inputs, or creates and "
                             "then changes, which a replay would not rebind"}
    ahead = GraphPool(step := Step(), ROWS, (1, 4), emu.device)
    ahead.capture()
    np.testing.assert_array_equal(step.total.numpy(), np.zeros(4))  # it ran, with all rows masked
    np.testing.assert_array_equal(ahead(x=X).numpy(), X + X.sum(0))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("keep", [lambda x: x, lambda x: x.reshape(-1), lambda x: x[:, 1:3], lambda x: x * 2,
                                  lambda x: (x * 2).realize()])
def test_what_is_kept_of_inputs_is_not_overwritten(emu: NVDevice, keep: Any):
    """The next call's rows come where these were."""
    class Step:
        kept: Tensor | None = None

        def __call__(self, x: Tensor) -> Tensor:
            self.kept = keep(x)
            return x + 1
    step, without = Step(), Step()
    pool = GraphPool(step, ROWS, (1, 3), emu.device)
    for k in range(4):
        without(Tensor(X + k, device=emu.device).realize())
        pool(x=X + k)
        kept, wanted = step.kept, without.kept
        assert kept is not None
        assert wanted is not None
        for other in (X, X[:1]): np.testing.assert_array_equal(pool(x=other).numpy(), other + 1)
        np.testing.assert_array_equal(kept.numpy(), wanted.numpy())
    (reason,) = reasons(pool)
    assert reason.startswith("the step keeps a Tensor that it computes from its inputs")


def test_a_step_that_keeps_what_it_returns(emu: NVDevice):
    kept: list[Tensor] = []
    def step(x: Tensor) -> Tensor:
        kept[:] = [x * 2]
        return kept[0]
    pool = GraphPool(step, ROWS, (1, 3), emu.device)
    for k in range(3):
        np.testing.assert_array_equal(pool(x=X + k).numpy(), (X + k) * 2)
        last = kept[0]
        pool(x=X[:1])
        np.testing.assert_array_equal(last.numpy(), (X + k) * 2)


@pytest.mark.parametrize("early", [False, True])
def test_a_table_that_the_step_keeps(emu: NVDevice, early: bool):
    """It is computed once, and is no part of the graph; sizes captured later read it."""
    tables: dict[int, Tensor] = {}
    weight = Tensor(np.arange(4, dtype=np.float32), device=emu.device).realize()
    def step(x: Tensor) -> Tensor:
        if not tables: tables[0] = ((Tensor.arange(4) + 1) * weight).realize()
        return x * tables[0]
    pool = GraphPool(step, ROWS, (1, 4), emu.device)
    if early: pool.capture()
    calls(pool, lambda x: x * (np.arange(4) + 1) * np.arange(4))
    assert [bucket.reasons for bucket in pool.stats().buckets] == [(), ()]
    assert [len(bucket.graph.calls) for bucket in pool.buckets.values()] == [1, 1]


def test_state_that_the_step_makes_when_it_first_runs(emu: NVDevice):
    """The first call runs as it is written; graphs are made when the state is there, and change it."""
    class Step:
        total: Tensor | None = None

        def __call__(self, x: Tensor) -> Tensor:
            if self.total is None: self.total = Tensor.zeros(4, device=emu.device).contiguous().realize()
            self.total.assign(self.total + 1)
            return x + self.total
    pool = GraphPool(Step(), ROWS, (1, 4), emu.device)
    for k in range(1, 7):
        x = X if k % 3 else X[:1]
        np.testing.assert_array_equal(pool(x=x).numpy(), x + k)
    assert [bucket.eager for bucket in pool.stats().buckets] == [0, 1]
    assert [bucket.builds for bucket in pool.stats().buckets] == [1, 1]
    ahead = GraphPool(Step(), ROWS, (1, 4), emu.device)
    ahead.capture()
    assert [bucket.builds for bucket in ahead.stats().buckets] == [1, 1]
    np.testing.assert_array_equal(ahead(x=X).numpy(), X + 2)


def test_random_numbers(emu: NVDevice):
    """Other ones in every call, as without a pool, though their counter is not there before the first."""
    def drawn(draw: Any) -> list[np.ndarray]:
        Tensor.manual_seed(0)
        return [draw(x=X).numpy() for _ in range(4)]
    wanted = drawn(lambda x: Tensor(x, device=emu.device) + Tensor.rand(*x.shape, device=emu.device))
    pool = GraphPool(lambda x: x + Tensor.rand(*x.shape, device=emu.device), ROWS, (3,), emu.device)
    np.testing.assert_array_equal(drawn(pool), wanted)
    assert pool.stats().buckets[0].builds == 1


def test_weights_that_are_not_computed_yet(emu: NVDevice):
    """They are computed at the capture, and are no part of the graph."""
    weight = Tensor(np.arange(4, dtype=np.float32), device=emu.device).realize() * 3
    pool = GraphPool(lambda x: x * weight, ROWS, (1, 4), emu.device)
    calls(pool, lambda x: x * np.arange(4) * 3)
    assert [len(bucket.graph.calls) for bucket in pool.buckets.values()] == [1, 1]


def test_a_cache_that_nothing_was_written_to(emu: NVDevice):
    """Its memory is its own, though it was not allocated when the step was captured."""
    last = Tensor.empty(4, device=emu.device)
    def step(x: Tensor) -> Tensor:
        last.assign(x.sum(0)).realize()
        return ((x + 1).realize() * 2).realize() + 1
    pool = GraphPool(step, ROWS, (1, 4), emu.device)
    for k in range(3):
        pool(x=X + k)
        memory = pool.arena.intermediates
        emu.driver.submit(Fill(memory._buf, 0xff, memory.nbytes))
        np.testing.assert_array_equal(last.numpy(), (X + k).sum(0))


def test_an_assignment_that_the_step_does_not_realize(emu: NVDevice):
    total = Tensor.zeros(4, device=emu.device).contiguous().realize()
    def step(x: Tensor) -> Tensor:
        total.assign(total + x.sum(0))
        return x + 1
    pool = GraphPool(step, ROWS, (4,), emu.device)
    for k in (1, 2, 3):
        pool(x=X)
        np.testing.assert_array_equal(total.numpy(), X.sum(0) * k)


def test_assigned_between_calls(emu: NVDevice):
    """Weights that are assigned to stay the graph's, realized or not."""
    weight = Tensor.ones(4, device=emu.device).contiguous().realize()
    pool = GraphPool(lambda x: x * weight, ROWS, (4,), emu.device)
    for k in (1, 2, 3):
        weight.assign(Tensor.full((4,), k, dtype=dtypes.float32, device=emu.device).contiguous())
        if k == 2: weight.realize()
        np.testing.assert_array_equal(pool(x=X).numpy(), X * k)
    assert pool.stats().buckets[0].captures == 1


def test_views_of_weights_come_and_go(emu: NVDevice):
    weight = Tensor(np.arange(4, dtype=np.float32), device=emu.device).realize()
    view = weight.reshape(2, 2)
    pool = GraphPool(lambda x: x * weight, ROWS, (4,), emu.device)
    pool(x=X)
    assert len(pool.buckets[4].compiled.state) == 2
    del view
    for _ in range(2): np.testing.assert_array_equal(pool(x=X).numpy(), X * np.arange(4))
    assert len(pool.buckets[4].compiled.state) == 1
    assert pool.buckets[4].compiled.is_unchanged()


def test_debug_shows_the_graph(emu: NVDevice, capsys: pytest.CaptureFixture[str]):
    pool = GraphPool(lambda x: ((x + 1).realize() * 2).realize() + x, ROWS, (4,), emu.device)
    pool(x=X)
    with Context(DEBUG=2): np.testing.assert_array_equal(pool(x=X).numpy(), (X + 1) * 2 + X)
    assert "batched 3" in capsys.readouterr().out


def test_values_that_a_debugged_call_gave_its_nodes_are_changed_back(emu: NVDevice):
    pool = GraphPool(lambda x, n: (x + n).realize() * 2, ROWS, (4,), emu.device)
    n = Variable("n", 0, 9)
    for value, debug in ((3, 0), (5, 2), (3, 0), (3, 0)):
        with Context(DEBUG=debug): found = pool(x=X, n=n.bind(value)).numpy()
        np.testing.assert_array_equal(found, (X + value) * 2)


@pytest.mark.parametrize("value", [0, 2])
def test_jit_turns_graphs_off(emu: NVDevice, value: int):
    pool = GraphPool(lambda x: (x + 1).realize() * 2, ROWS, (1, 4), emu.device)
    with Context(JIT=value): calls(pool, lambda x: (x + 1) * 2)
    assert reasons(pool) == {f"JIT={value} turns graphs off"}
    assert [len(bucket.replay.src) for bucket in pool.buckets.values()] == [2, 2]


def test_another_window_of_l2_means_another_graph(emu: NVDevice, monkeypatch: pytest.MonkeyPatch):
    weight = Tensor.ones(4, device=emu.device).contiguous().realize()
    pool = GraphPool(lambda x: (x * weight).realize() + 1, ROWS, (4,), emu.device)
    pool(x=X)
    emu.driver.set_persisting_l2(1 << 20)
    monkeypatch.setattr(emu, "window", Window(weight.uop.buffer._buf, 16))
    for _ in range(2): np.testing.assert_array_equal(pool(x=X).numpy(), X + 1)
    graph = pool.buckets[4].graph
    assert [work.window for work in graph.executable.executable.works] == [emu.window] * 2
    assert pool.stats().buckets[0].builds == 2


# **** devices ****

@pytest.mark.sampled(1)
@pytest.mark.parametrize("graphs", [True, False])
def test_the_cpu(graphs: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NV_CPU_GRAPH", str(int(graphs)))
    plain, pooled = Paged("CPU"), Paged("CPU")
    pool = pool_of(pooled, device="CPU")
    for rows in (1, 3, 2, 4, 3):
        given = batch(rows, rows)
        same(pool(**given), eager(plain, given, pool._size_of[rows], "CPU"))
        there = {name: Tensor(value, device="CPU").realize() for name, value in given.items()}
        same(pool(**there), eager(plain, given, pool._size_of[rows], "CPU"))
    found = {reason for bucket in pool.stats().buckets for reason in bucket.reasons}
    assert found == (set() if graphs and os.uname().sysname == "Linux" else {"CPU has no graphs"})


# **** page-locked memory ****

def test_page_locked_memory_is_written_when_the_device_has_read_it(emu: NVDevice,
                                                                   monkeypatch: pytest.MonkeyPatch):
    waits: list[Any] = []
    wait_for = emu.driver.wait_for
    monkeypatch.setattr(emu.driver, "wait_for", lambda event: (waits.append(event), wait_for(event)))
    pool = GraphPool(lambda x: x * 2, ROWS, (4,), emu.device)
    found = []
    for k in range(6):
        pool(x=X + k)
        found.append(len(waits))
    assert found == [0, 0, 1, 2, 3, 4]  # the third call needs the first one's
    emu.synchronize()


def test_a_ring_without_waits_is_found(emu: NVDevice, monkeypatch: pytest.MonkeyPatch):
    pool = GraphPool(lambda x: x * 2, ROWS, (4,), emu.device)
    for k in range(2): pool(x=X + k)
    emu.synchronize()
    monkeypatch.setattr(emu.driver, "wait_for", lambda event: None)
    for k in range(3): pool(x=X + k + 5)
    with pytest.raises(KernelError, match="page-locked memory was written"): emu.synchronize()
    monkeypatch.undo()
    emu.synchronize()
    np.testing.assert_array_equal(pool(x=X).numpy(), X * 2)
