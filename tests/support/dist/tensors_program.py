"""Collectives of Tensors on an emulated GPU, run as several ranks: eager, with gradients, in a TinyJit's
graph and in a graph pool; and what explain() tells."""
from __future__ import annotations

import sys

import numpy as np

from tinygrad_nv import Tensor, TinyJit, dtypes, explain
from tinygrad_nv.dist.collectives.device import split
from tinygrad_nv.dist.collectives.functions import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    recv,
    reduce_scatter,
    send,
    shift,
)
from tinygrad_nv.dist.group import close, init
from tinygrad_nv.errors import DistError
from tinygrad_nv.graphs import GraphPool, Input

world = init("shared")
group = world.group()
rank, size = group.rank, group.size
given = [(np.arange(16).reshape(4, 4) * (r + 1) + r).astype(np.float32) for r in range(size)]
total = sum(given)
weight = (np.arange(16).reshape(4, 4) % 3).astype(np.float32)
x, w = Tensor(given[rank]).realize(), Tensor(weight).realize()
same = np.testing.assert_array_equal


def eager() -> None:
    """Every kind."""
    same(all_reduce(x, group).numpy(), total)
    same(all_reduce(x, group, "max", wire=dtypes.float16).numpy(), np.maximum.reduce(given))
    same(all_gather(x, group, 1).numpy(), np.concatenate(given, 1))
    same(reduce_scatter(x, group).numpy(), np.split(total, size)[rank])
    mine = [np.split(each, size)[rank] for each in given]
    same(all_to_all(x, group, 0, 1).numpy(), np.concatenate(mine, 1))
    same(broadcast(x, group, size - 1).numpy(), given[-1])
    if rank == 0: send(x, group, 1, "state").realize()
    if rank == 1:
        came = recv((4, 4), dtypes.float32, group, 0, "state")
        assert came.device == "EMU", came.device
        same(came.numpy(), given[0])
    for by in (1, -1, size + 1): same(shift(x, group, by).numpy(), given[(rank - by) % size])


def gradients() -> None:
    """Those of the sum of all ranks' losses."""
    leaf = Tensor(given[rank])
    (all_reduce(leaf * 2, group) * x).sum().backward()
    same(leaf.grad.numpy(), 2 * total)
    mine = [np.split(each, size)[rank] for each in given]
    for fn, times, exact in (
            (lambda t: all_gather(t, group), np.concatenate(given), size * given[rank]),
            (lambda t: reduce_scatter(t, group), mine[rank],
             np.concatenate([np.split(each, size)[r] for r, each in enumerate(given)])),
            (lambda t: all_to_all(t, group), given[rank], np.concatenate(mine)),
            (lambda t: shift(t, group), given[rank], given[(rank + 1) % size]),
            (lambda t: broadcast(t, group, size - 1), given[rank], total * (rank == size - 1))):
        sent = Tensor(weight)
        (fn(sent) * Tensor(times)).sum().backward()
        same(sent.grad.numpy(), exact)


def step(x: Tensor) -> Tensor:
    """A collective, and a matmul that does not need it."""
    return all_reduce(x @ w, group, name="layer 0") + (x * 2).contiguous()


def wanted(more: int) -> np.ndarray:
    return sum((each + more) @ weight for each in given) + (given[rank] + more) * 2


def explained() -> None:
    """What is beside it, and how long it is predicted to take."""
    record, = (each for each in explain(step(x)).kernels if each.template == "all_reduce")
    assert "of layer 0; NCCL: NV_ALL_REDUCE=nccl; beside it: E_" in record.reason, record.reason
    assert record.predicted_s is not None
    assert record.predicted_s > 1e-6


def jitted() -> None:
    """A TinyJit: one graph."""
    made = TinyJit(lambda x: step(x).realize())
    for i in range(4): same(made(Tensor(given[rank] + i).realize()).numpy(), wanted(i))
    assert [call.src[0].arg for call in made.captured.linear.src] == ["graph"], made.captured.linear


def pooled() -> None:
    """A graph pool: captured, replayed with other inputs."""
    pool = GraphPool(step, {"x": Input((4,), dtypes.float32, 0)}, sizes=[4])
    for i in range(3): same(pool(x=Tensor(given[rank] + i)).numpy(), wanted(i))
    counts = pool.buckets[4].counts
    assert (counts.hits, counts.eager) == (2, 0), counts
    world.check()


def parted() -> None:
    """A group for each half, from the connections of all."""
    half = world.group([r for r in range(size) if r % 2 == rank % 2])
    if half.size > 1:
        split(group, half, "EMU")
        same(all_reduce(x, half).numpy(), sum(given[r] for r in half.members))


def different() -> None:
    """Ranks that differ say so, and do not wait for each other."""
    said = ""
    try: all_reduce(x if rank else x[:2], group, name="last").numpy()
    except DistError as error: said = str(error)
    assert f"rank {rank} calls all_reduce of last, {16 if rank else 8} float" in said, said


explained()
jitted()
if sys.argv[1] == "all":
    for each in (eager, gradients, pooled, parted): each()
different()
close()
print(f"rank {rank} of {size}: all right")
