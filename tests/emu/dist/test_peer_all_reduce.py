"""Sums of tensors over several emulated GPUs of one process, by kernels over the memory of peers: the numbers
of NCCL, eager, in a TinyJit and in a graph pool, whatever turns the GPUs take; what is NCCL's, and why."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tinygrad.device import Device

from tinygrad_nv import Tensor, TinyJit, dtypes, explain, memory_report
from tinygrad_nv.dist.collectives.sharding import shard
from tinygrad_nv.dist.transports import nccl
from tinygrad_nv.errors import DriverError
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.runtime.driver import Fill, Upload
from tinygrad_nv.runtime.together import Peers
from tinygrad_nv.tile.all_reduce.workspace import Workspace

EVERY = ("EMU:20", "EMU:21", "EMU:22", "EMU:23")   # peers from now on: not those of other tests
TWO = EVERY[:2]
numbers = np.random.default_rng(0)
X, W = (numbers.integers(-3, 4, shape).astype(np.float32) for shape in ((4, 8), (8, 4)))


@pytest.fixture(autouse=True)
def no_nccl(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What NCCL was asked for."""
    asked, reduce = list[str](), nccl.reduce

    def told(outs, ins, op):
        asked.append(op)
        reduce(outs, ins, op)
    monkeypatch.setattr(nccl, "reduce", told)
    return asked


@pytest.fixture
def seeds() -> Iterator[None]:
    """The seed of the first device is as it was."""
    emulator = Device[EVERY[0]].driver.emulator
    before = emulator.seed
    yield
    emulator.seed = before


def summed(rows: np.ndarray, devices: tuple[str, ...], dtype=dtypes.float32) -> Tensor:
    """The sum of a row of each device."""
    return Tensor(rows, device="CPU").cast(dtype).shard(devices, 0).sum(0, dtype=dtype)


@pytest.mark.parametrize(("kind", "count"), [
    ("two_shot", 4), *(pytest.param(*each, marks=pytest.mark.slow)
                       for each in (("one_shot", 2), ("one_shot", 4), ("two_shot", 2)))])
def test_whole_numbers(kind, count, no_nccl, monkeypatch):
    """To the bit on every device, also where rows end within 16 bytes."""
    monkeypatch.setenv("NV_ALL_REDUCE", kind)
    for dtype, columns in ((dtypes.bfloat16, 37), (dtypes.int32, 64)):
        rows = numbers.integers(-9, 10, (count, columns)).astype(np.int32)
        made = summed(rows, EVERY[:count], dtype).realize()
        assert len({bytes(part.as_memoryview()) for part in made.uop.base.buffer.bufs}) == 1
        np.testing.assert_array_equal(made.cast(dtypes.int32).numpy(), rows.sum(0))
    assert no_nccl == []


def test_sharded_matmul_in_tinyjit(no_nccl):
    w = Tensor(W, device="CPU").shard(TWO, 0).realize()

    @TinyJit
    def step(x: Tensor) -> Tensor: return ((x @ w) * 2).realize()
    for i in range(5):
        x = Tensor(X + i, device="CPU").shard(TWO, 1).realize()
        np.testing.assert_array_equal(step(x).numpy(), (X + i) @ W * 2)
    assert no_nccl == []


@pytest.mark.parametrize("seed", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, "late"))])
def test_turns_by_seed(seed, seeds):
    """Some GPUs stand still now and then; several sums follow one another before the host waits."""
    Device[EVERY[0]].driver.emulator.seed = seed
    rows = numbers.integers(-9, 10, (2, 300)).astype(np.float32)
    made = summed(rows, TWO)
    for _ in range(3): made = summed(np.zeros_like(rows), TWO) + made.contiguous()
    np.testing.assert_array_equal(made.numpy(), rows.sum(0))


def test_a_graph_pool(no_nccl):
    """Steps are captured; what is on several devices runs between graphs."""
    w = Tensor(W, device="CPU").shard(TWO, 0).realize()

    def step(x: Tensor) -> Tensor: return ((x + 1).shard(TWO, 1) @ w).to(EVERY[0]) + 0.5
    pool = GraphPool(step, {"x": Input((8,), dtypes.float32)}, sizes=[4], device=EVERY[0])
    for i in range(4):
        np.testing.assert_array_equal(pool(x=X + i).numpy(), (X + i + 1) @ W + 0.5)
    assert no_nccl == []


@pytest.mark.slow
def test_nccl_gives_the_same(no_nccl, monkeypatch):
    rows = numbers.standard_normal((2, 100)).astype(np.float32)
    ours = summed(rows, TWO, dtypes.bfloat16).float().numpy()
    assert no_nccl == []
    monkeypatch.setenv("NV_ALL_REDUCE", "nccl")
    np.testing.assert_array_equal(summed(rows, TWO, dtypes.bfloat16).float().numpy(), ours)
    assert no_nccl == ["sum"]


@pytest.mark.slow
def test_groups_of_a_mesh_sum_apart(no_nccl):
    x = shard(Tensor(X, device="CPU"), EVERY, (2, 2), {0: 0, 1: 1})
    np.testing.assert_array_equal(x.sum(0).numpy(), X.sum(0))
    assert no_nccl == []
    made = explain(shard(Tensor(X, device="CPU"), EVERY, (2, 2), {0: 0, 1: 1}).sum(0))
    assert [each.device for each in made.kernels if each.template == "all_reduce_one_shot"] == list(EVERY)


# **** why ****

def why(x: Tensor) -> str:
    """What explain() tells of the reduction over devices of x."""
    found = [each for each in explain(x).kernels if "all" in each.name and "reduce" in each.name]
    assert found
    return found[0].reason


def test_explain_says_which_and_why(monkeypatch):
    rows = np.zeros((2, 64), np.float32)
    assert why(summed(rows, TWO)) == ("64 f32 over 2 GPUs: all_reduce_one_shot 1 CTA, 512 threads, "
                                      "64 channels of 2 x 65536 bytes")
    whole = Tensor.empty(2, 1 << 25, device="CPU").shard(TWO, 0)
    assert why(whole.sum(0)) == "NCCL: faster for 134217728 bytes over 2 GPUs"
    assert why(Tensor(rows, device="CPU").shard(TWO, 0).max(0)) == \
        "NCCL: the kernels of peer memory sum, and this is a max"
    assert why(summed(rows, TWO, dtypes.int8)).startswith(
        "NCCL: an all-reduce of s8, and the kernels of peer memory are for bf16, f16, f32,")
    monkeypatch.setenv("NV_ALL_REDUCE", "two_shot")
    assert why(whole.sum(0)).startswith("33554432 f32 over 2 GPUs: all_reduce_two_shot 64 CTAs,")
    assert why(whole.sum(0)).endswith(", NV_ALL_REDUCE=two_shot")
    monkeypatch.setenv("NV_ALL_REDUCE", "nccl")
    assert why(summed(rows, TWO)) == "NCCL: NV_ALL_REDUCE=nccl"
    monkeypatch.setattr(type(Device[EVERY[0]].driver), "reach", lambda self, other: False)
    monkeypatch.setenv("NV_ALL_REDUCE", "auto")
    assert why(summed(rows, TWO)) == "NCCL: EMU:20 cannot address EMU:21's memory"


# **** launches ****

def test_launches_are_submitted_together(monkeypatch):
    """What was kept of a call that failed between devices is not submitted with the next."""
    first, second = (Device[name] for name in TWO)
    address, peers, given = first.pool.alloc(64), Peers((TWO,)), list[object]()
    other = second.pool.alloc(64)
    monkeypatch.setattr(type(first.driver), "submit", lambda self, work, stream=None: given.append(work))
    assert peers.launch(first, [Fill(address, 1, 64)], None, True) is None
    assert peers.launch(first, [Fill(address, 2, 64)], None, False) is None
    assert given == []
    assert peers.launch(second, [Fill(other, 3, 64)], None, False) is None
    assert given == [Fill(address, 2, 64), Fill(other, 3, 64)]
    with pytest.raises(DriverError, match="that EMU:20,EMU:21 run together, on EMU:23"):
        peers.arguments("EMU:23")
    first.pool.free(address)
    second.pool.free(other)


def test_workspaces_go_with_their_device():
    names = ("EMU:28", "EMU:29")
    summed(np.ones((2, 8), np.float32), names).realize()
    assert [memory_report(name).of("all-reduce").nbytes for name in names] == [Workspace().nbytes + 16] * 2
    Device[names[0]].finalize()
    assert [memory_report(name).of("all-reduce").nbytes for name in names] == [0, 0]


def test_page_locked_memory_is_given_back_when_work_is_done():
    """Work of peers is kept: what reads the memory is done before it goes."""
    first, second = (Device[name].driver for name in TWO)
    assert first.reach(second)
    memory, address = first.host(64), first.alloc(64)
    memory.view[:] = bytes(range(64))
    first.submit(Upload(address, memory, 0, 64))
    memory.free()
    first.copy_out(memoryview(got := bytearray(64)), address)
    assert got == bytes(range(64))
    first.free(address)
