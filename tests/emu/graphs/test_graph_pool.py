"""Graph pools on the emulator: every size and every number of rows give what the step gives, bit for bit."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.graphs.pool_case import (
    INPUTS,
    PAD_TOKEN,
    PAGE,
    SCRAP,
    Paged,
    batch,
    eager,
    pool_of,
    same,
)
from tinygrad_nv import Device, Tensor, Variable, dtypes
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Fill
from tinygrad_nv.runtime.emulated.graph import EmulatedExecutable

pytestmark = pytest.mark.usefixtures("frozen")


def pages(step: Paged) -> np.ndarray: return step.cache.numpy()


def poison(pool: GraphPool) -> None:
    """NaN in all that the graphs share."""
    opened = Device[pool.device]
    assert isinstance(opened, NVDevice)
    for memory in (pool.arena.intermediates, pool.arena.outputs):
        if memory is not None: opened.driver.submit(Fill(memory._buf, 0xff, memory.nbytes))


@pytest.mark.sampled(1)
def test_every_size_and_number_of_rows(gpu: NVDevice):
    plain, pooled = Paged(gpu.device), Paged(gpu.device)
    pool = pool_of(pooled, device=gpu.device)
    for rows in (1, 2, 3, 4, 3, 2, 1):  # each size captured, and each replayed
        given = batch(rows, rows)
        wanted = eager(plain, given, pool._size_of[rows], gpu.device)
        same(pool(**given), wanted)
        np.testing.assert_array_equal(pages(pooled), pages(plain))
    stats = pool.stats()
    assert [(b.captures, b.rows, b.padding) for b in stats.buckets] == [(1, 2, 0), (1, 4, 0), (1, 10, 2)]
    assert stats.padding_waste == 2 / 18
    assert sum(b.eager + b.updates + b.evictions for b in stats.buckets) == 0


def test_padding_stays_in_padding(gpu: NVDevice):
    """What padding rows read is NaN, and so is the scrap page: live rows do not change by a bit, and of the
    cache only their slots and the scrap page do."""
    clean, dirty = Paged(gpu.device), Paged(gpu.device)
    embedding, cache = dirty.embedding.numpy().copy(), pages(dirty).copy()
    embedding[PAD_TOKEN] = np.nan
    cache[SCRAP] = np.nan
    dirty.embedding.assign(Tensor(embedding, device=gpu.device)).realize()
    dirty.cache.assign(Tensor(cache, device=gpu.device)).realize()
    pools = [pool_of(step, (4,), device=gpu.device) for step in (clean, dirty)]
    for rows in (3, 1, 2):
        given = batch(rows, rows + 10)
        before = pages(dirty).copy()
        found, wanted = ({name: out.numpy() for name, out in pool(**given).items()}
                         for pool in reversed(pools))
        for name in wanted: np.testing.assert_array_equal(found[name], wanted[name])
        changed = {(page, slot) for page, slot in np.argwhere((pages(dirty) != before).any(-1))
                   if page != SCRAP}
        slots = {(table[length // PAGE], length % PAGE)
                 for table, length in zip(given["tables"], given["lengths"], strict=True)}
        assert changed <= slots
        assert np.isnan(pages(dirty)[SCRAP]).any()
        np.testing.assert_array_equal(pages(dirty)[:SCRAP], pages(clean)[:SCRAP])


@pytest.mark.slow
def test_padding_that_is_not_masked_shows(hopper: NVDevice):
    """The check above can fail: with a pad that is a live page, padding writes there."""
    inputs = {**INPUTS, "tables": Input((2,), dtypes.int32, 3)}
    step = Paged(hopper.device)
    before = pages(step).copy()
    GraphPool(step, inputs, (4,), hopper.device)(**batch(1))
    assert (pages(step)[3] != before[3]).any()


@pytest.mark.slow
@pytest.mark.sampled(1)
def test_nothing_is_carried_over_in_the_arena(gpu: NVDevice):
    plain, pooled = Paged(gpu.device), Paged(gpu.device)
    pool = pool_of(pooled, device=gpu.device)
    pool.capture()
    for rows in (4, 1, 3, 2, 4, 2, 1):
        poison(pool)
        given = batch(rows, rows)
        same(pool(**given), eager(plain, given, pool._size_of[rows], gpu.device))
        np.testing.assert_array_equal(pages(pooled), pages(plain))


def test_state_in_the_arena_shows(hopper: NVDevice):
    """The check above can fail: poison in the cache itself gets into results."""
    step = Paged(hopper.device)
    pool = pool_of(step, (2,), device=hopper.device)
    given = batch(2)
    pool(**given)
    memory = step.cache.uop.buffer
    hopper.driver.submit(Fill(memory._buf, 0xff, memory.nbytes))
    assert np.isnan(pool(**given)["mixed"].numpy()).any()


def wide(x: Tensor) -> Tensor:
    """Keeps rows × 1 KiB and rows × 2 KiB at once."""
    a = (x.reshape(-1, 1).expand(-1, 256) + Tensor.arange(256)).contiguous()
    b = (a.reshape(-1, 256, 1).expand(-1, 256, 2) * 2).contiguous()
    return (a + b.sum(-1)).sum(1)


def wanted_of_wide(x: np.ndarray) -> np.ndarray: return 5 * (x[:, None] + np.arange(256)).sum(1)


WIDE = {"x": Input((), dtypes.int32)}


def test_one_arena_for_all(hopper: NVDevice):
    pool = GraphPool(wide, WIDE, (1, 2, 4), hopper.device)
    before = hopper.pool.report().of("graphs").nbytes
    pool.capture()
    stats = pool.stats()
    assert [bucket.arena_bytes for bucket in stats.buckets] == [3 << 10, 6 << 10, 12 << 10]
    assert [bucket.output_bytes for bucket in stats.buckets] == [256, 256, 256]
    assert [bucket.builds for bucket in stats.buckets] == [1, 1, 1]  # the largest first: nothing built twice
    assert hopper.pool.report().of("graphs").nbytes - before == (12 << 10) + 256


def test_a_larger_size_makes_the_arena_grow(hopper: NVDevice):
    pool, sizes = GraphPool(wide, WIDE, (1, 2, 4), hopper.device), []
    for rows in (1, 4, 1, 2, 4):
        x = np.arange(rows, dtype=np.int32)
        np.testing.assert_array_equal(pool(x=x).numpy(), wanted_of_wide(x))
        sizes.append(pool.stats().arena_bytes)
    assert sizes == [3 << 10] + [12 << 10] * 4
    # size 1 is instantiated again over the grown arena, and not compiled again
    assert [(b.captures, b.builds, b.hits) for b in pool.stats().buckets] == [(1, 2, 0), (1, 1, 0), (1, 1, 1)]


def test_results_are_read_where_larger_outputs_lie(hopper: NVDevice):
    """After a larger size grew the outputs, a smaller one's are in other memory than before."""
    def twice(x: Tensor) -> Tensor: return (x.reshape(-1, 1).expand(-1, 256) * 2).contiguous()
    pool = GraphPool(twice, WIDE, (1, 4), hopper.device)
    for call, rows in enumerate((1, 4, 1)):
        x = np.arange(rows, dtype=np.int32) + call
        np.testing.assert_array_equal(pool(x=x).numpy(), np.repeat(2 * x[:, None], 256, 1))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 99)), min_size=1, max_size=6))
def test_sizes_in_any_order(kept: tuple[Paged, Paged, GraphPool], calls: list[tuple[int, int]]):
    plain, pooled, pool = kept
    for rows, seed in calls:
        poison(pool)
        rows_given = batch(rows, seed)
        same(pool(**rows_given), eager(plain, rows_given, pool._size_of[rows], pool.device))
    np.testing.assert_array_equal(pages(pooled), pages(plain))


@pytest.fixture(scope="module")
def kept(hopper: NVDevice) -> tuple[Paged, Paged, GraphPool]:
    """A step with its pool, and the same step without, that see the same calls."""
    plain, pooled = Paged(hopper.device), Paged(hopper.device)
    return plain, pooled, pool_of(pooled, device=hopper.device)


def test_a_steady_step_is_an_upload_and_a_launch(hopper: NVDevice, monkeypatch: pytest.MonkeyPatch):
    pool = pool_of(Paged(hopper.device), device=hopper.device)
    for _ in range(2): pool(**batch(3))
    done: list[str] = []
    submit, launch = hopper.driver.submit, EmulatedExecutable.launch
    monkeypatch.setattr(hopper.driver, "submit",
                        lambda work, stream=None: (done.append(type(work).__name__), submit(work, stream)))
    monkeypatch.setattr(hopper.driver, "alloc", lambda nbytes: done.append("alloc"))
    monkeypatch.setattr(EmulatedExecutable, "update", lambda *a: done.append("update"))
    graph = pool.buckets[4].graph
    assert graph is not None
    graph.executable.launch = lambda stream=None: (done.append("graph"), launch(
        graph.executable.executable, stream))
    for seed in range(3): pool(**batch(3, seed))
    assert done == ["Upload", "graph"] * 3


def test_rows_that_are_on_the_device_are_copied_there(hopper: NVDevice, monkeypatch: pytest.MonkeyPatch):
    plain, pooled = Paged(hopper.device), Paged(hopper.device)
    pool = pool_of(pooled, device=hopper.device)
    for rows in (2, 3):
        host = batch(rows, rows)
        there = {name: Tensor(value, device=hopper.device).realize() for name, value in host.items()}
        wanted = eager(plain, host, pool._size_of[rows], hopper.device)
        same(pool(**there), wanted)
        same(pool(**{**host, "tokens": there["tokens"]}), wanted)
        same(pool(**{**host, "tokens": (there["tokens"] * 2 - there["tokens"])}), wanted)


def test_a_result_is_the_next_input(hopper: NVDevice):
    plain, pooled = Paged(hopper.device), Paged(hopper.device)
    pool = pool_of(pooled, device=hopper.device)
    given = batch(3)
    wanted, found = dict(given), dict(given)
    for _ in range(3):
        wanted["tokens"] = eager(plain, wanted, 4, hopper.device)["next"]
        found["tokens"] = pool(**found)["next"]
    np.testing.assert_array_equal(found["tokens"].numpy(), wanted["tokens"])


def test_variables_are_parameters(hopper: NVDevice):
    weight = Tensor(np.arange(8, dtype=np.float32), device=hopper.device).realize()
    def step(x: Tensor, n: Variable) -> Tensor: return (x * weight + n).contiguous() * 2
    pool = GraphPool(step, {"x": Input((8,), dtypes.float32)}, (1, 2), hopper.device)
    n = Variable("n", 0, 9)
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    for value in (3, 3, 4, 9, 9):
        np.testing.assert_array_equal(pool(x=x, n=n.bind(value)).numpy(),
                                      (x * np.arange(8, dtype=np.float32) + value) * 2)
    assert pool.stats().buckets[1].updates == 3  # for 3, which the graph was not built with, for 4 and for 9


def test_variables_in_what_is_returned(hopper: NVDevice):
    """tinygrad leaves such a Tensor as it is when it is realized, so that it seemed to be kept."""
    def step(x: Tensor, n: Variable) -> Tensor: return (x * 2).contiguous() + n
    pool = GraphPool(step, {"x": Input((8,), dtypes.float32)}, (2,), hopper.device)
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    for value in (3, 4):
        found = pool(x=x, n=Variable("n", 0, 9).bind(value)).numpy()
        np.testing.assert_array_equal(found, x * 2 + value)
    assert pool.stats().buckets[0].reasons == ()
    assert len(pool.buckets[2].graph.calls) == 2


def test_variables_are_extents(hopper: NVDevice):
    def step(x: Tensor, n: Variable) -> Tensor: return x[:, :n].sum(1).contiguous()
    pool = GraphPool(step, {"x": Input((8,), dtypes.float32)}, (2,), hopper.device)
    pool.capture(n=Variable("n", 1, 8).bind(1))
    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    for value in (1, 8, 3):
        found = pool(x=x, n=Variable("n", 1, 8).bind(value)).numpy()
        np.testing.assert_array_equal(found, x[:, :value].sum(1))


def test_results_of_every_kind(hopper: NVDevice):
    """Inputs, state, views, one Tensor twice, constants: each result has memory of its own."""
    state = Tensor(np.arange(4, dtype=np.float32).reshape(2, 2), device=hopper.device).realize()
    def step(x: Tensor) -> tuple[Tensor, ...]:
        y = (x + 1).contiguous()
        return x, state, y, y, y[:, :1], y.permute(0, 1), Tensor.arange(2)
    pool = GraphPool(step, {"x": Input((2,), dtypes.float32)}, (2,), hopper.device)
    for k in range(3):
        x = np.full((2, 2), k, np.float32)
        found = [out.numpy() for out in pool(x=x)]
        wanted = (x, state.numpy(), x + 1, x + 1, (x + 1)[:, :1], x + 1, np.arange(2))
        for out, each in zip(found, wanted, strict=True): np.testing.assert_array_equal(out, each)
    with pytest.raises(AssertionError): np.testing.assert_array_equal(found[0], x + 5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dtype", "pad"), [(dtypes.bfloat16, 1.5), (dtypes.float16, float("nan")),
                                            (dtypes.bool, 1), (dtypes.int64, -1), (dtypes.uint8, 255)])
def test_pads_of_every_type(hopper: NVDevice, dtype, pad: float):
    seen: list[Tensor] = []
    def step(x: Tensor) -> Tensor:
        seen[:] = [x]
        return x.cast(dtypes.float32) + 0
    pool = GraphPool(step, {"x": Input((3,), dtype, pad)}, (4,), hopper.device)
    given = Tensor.ones(1, 3, device=hopper.device).cast(dtype).contiguous().realize()
    assert (pool(x=given).numpy() == 1).all()
    filled = seen[0].cast(dtypes.float32).numpy()
    np.testing.assert_array_equal(filled[1:], np.full((3, 3), pad, np.float32))
