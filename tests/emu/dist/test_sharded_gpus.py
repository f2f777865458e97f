"""Tensors over several emulated GPUs of one process: reductions across them are NCCL's."""
from __future__ import annotations

import numpy as np
import pytest

from tinygrad_nv import Tensor, TinyJit, dtypes
from tinygrad_nv.dist.collectives.sharding import shard
from tinygrad_nv.dist.transports import nccl
from tinygrad_nv.dist.transports.nccl import CollectiveCall
from tinygrad_nv.errors import DistError
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver

DEVICES = ("EMU", "EMU:1")
numbers = np.random.default_rng(0)
X, W = (numbers.integers(-3, 4, shape).astype(np.float32) for shape in ((4, 8), (8, 4)))


def test_sums_inside_tinyjit(monkeypatch):
    monkeypatch.setenv("NV_ALL_REDUCE", "nccl")
    calls, reduce = list[str](), nccl.reduce

    def counted(outs, ins, op):
        calls.append(op)
        reduce(outs, ins, op)
    monkeypatch.setattr(nccl, "reduce", counted)
    w = Tensor(W, device="CPU").shard(DEVICES).realize()

    @TinyJit
    def step(x: Tensor) -> Tensor: return (x @ w).sum(0).realize()
    for i in range(3):
        x = Tensor(X + i, device="CPU").shard(DEVICES, 0).realize()
        np.testing.assert_array_equal(step(x).numpy(), ((X + i) @ W).sum(0))
    assert calls == ["sum"] * 3


@pytest.mark.slow
def test_a_mesh_and_16_bit_integers(monkeypatch):
    monkeypatch.setenv("NV_ALL_REDUCE", "nccl")
    x = shard(Tensor(X, device="CPU"), DEVICES, (2, 1), {0: 0})
    np.testing.assert_array_equal(x.max(0).numpy(), X.max(0))
    whole = Tensor(X.astype(np.int16), device="CPU").shard(DEVICES, 0)
    np.testing.assert_array_equal(whole.sum(0, dtype=dtypes.int16).numpy(), X.sum(0))


# **** what NCCL says of groups ****

def test_a_group_without_all_devices():
    first, second = (EmulatedDriver() for _ in range(2))
    a, b = nccl.connect_all([first, second], [0, 1])
    order, address = CollectiveCall("all_reduce", 4, dtypes.float32), first.alloc(16)
    with pytest.raises(DistError, match="ncclAllReduce: invalid usage"):
        first.submit(a.call(order, address, address))
    other = second.alloc(16)
    with nccl.grouped(a.nccl, [a, b], "two sizes"):
        first.submit(a.call(order, address, address))
        second.submit(b.call(CollectiveCall("all_reduce", 3, dtypes.float32), other, other))
    with pytest.raises(DistError, match="all_reduce of 4 float and all_reduce of 3 float"): a.check()
