"""Sums of ranks that are processes, by kernels over the memory of peers, on an emulated GPU each: eager, with
gradients, in a TinyJit's graph and in a graph pool; what NCCL does, and why; a rank that does not come."""
from __future__ import annotations

import os
import sys
import time

import numpy as np

from tinygrad_nv import Tensor, TinyJit, dtypes, explain
from tinygrad_nv.dist.collectives.functions import all_gather, all_reduce
from tinygrad_nv.dist.group import close, init
from tinygrad_nv.errors import DistError
from tinygrad_nv.graphs import GraphPool, Input

world = init("shared")
group = world.group()
rank, size = group.rank, group.size
same = np.testing.assert_array_equal
given = [(np.arange(16).reshape(4, 4) * (r + 1) + r).astype(np.float32) for r in range(size)]
weight = (np.arange(16).reshape(4, 4) % 3).astype(np.float32)
total = sum(given)
w = Tensor(weight).realize()


def eager() -> None:
    """Several, one after another, between collectives of NCCL."""
    x = Tensor(given[rank]).realize()
    for i in range(3): same(all_reduce(x + i, group).numpy(), total + i * size)
    same(all_reduce(x, group, "max").numpy(), np.maximum.reduce(given))
    same(all_gather(x, group, 1).numpy(), np.concatenate(given, 1))
    many = [np.arange(3001) % (r + 7) for r in range(size)]
    for dtype in (dtypes.bfloat16, dtypes.int32):
        made = all_reduce(Tensor(many[rank]).cast(dtype), group)
        same(made.cast(dtypes.int32).numpy(), sum(many))
    leaf = Tensor(given[rank])
    (all_reduce(leaf * 2, group) * x).sum().backward()
    same(leaf.grad.numpy(), 2 * total)


def step(x: Tensor) -> Tensor:
    """Two of them that need nothing of each other, and a matmul."""
    sums = all_reduce(x @ w, group, name="one") + all_reduce(x * 2, group, name="other")
    return sums + (x * 3).contiguous()


def wanted(more: int) -> np.ndarray:
    every = [each + more for each in given]
    return sum(each @ weight + each * 2 for each in every) + every[rank] * 3


def graphs() -> None:
    jit = TinyJit(lambda x: step(x).realize())
    pool = GraphPool(step, {"x": Input((4,), dtypes.float32)}, sizes=[4])
    for i in range(5):
        if i == rank + 1: time.sleep(0.2)   # the others wait
        same(jit(Tensor(given[rank] + i).realize()).numpy(), wanted(i))
        same(pool(x=given[rank] + i).numpy(), wanted(i))


def told() -> None:
    """By explain()."""
    x = Tensor(given[rank]).realize()
    made = explain(all_reduce(x, group, name="layer 0"))
    assert [each.template for each in made.kernels] == ["all_reduce_one_shot"], made
    assert made.kernels[0].reason.startswith(
        f"all_reduce over ranks {group.name} of layer 0: 16 f32 over {size} GPUs: all_reduce_one_shot"), made
    assert "; beside it: nothing" in made.kernels[0].reason, made
    most = explain(all_reduce(x, group, "max")).kernels[0].reason
    assert "; NCCL: the kernels of peer memory sum, and this is a max" in most, most


def forced(setting: str) -> None:
    """The same of every setting."""
    os.environ["NV_ALL_REDUCE"] = setting
    x = Tensor(given[rank] + 0.5).realize()
    same(all_reduce(x, group).numpy(), total + 0.5 * size)


def hangs() -> None:
    """A rank that does not come to a sum."""
    x = Tensor(given[rank]).realize()
    for i in range(3):
        if rank == 1 and i == 2: time.sleep(60)
        all_reduce(x + i, group, name="layers.3.down").realize()


def differs() -> None:
    """Ranks that sum other shapes."""
    x, said = Tensor(given[rank].reshape(-1)[:8 + rank]).contiguous(), ""
    try: all_reduce(x, group, name="h").realize()
    except DistError as error: said = error.found
    assert f"calls all_reduce of h, {8 + rank} float, rank" in said, said


def parted() -> None:
    """Groups of some ranks have workspaces of their own."""
    half = world.group([r for r in range(size) if r % 2 == rank % 2])
    x = Tensor(given[rank]).realize()
    for _ in range(2):
        same(all_reduce(x, half).numpy(), sum(given[r] for r in half.members))
        same(all_reduce(x, group).numpy(), total)


how = sys.argv[1]
if how == "hangs": hangs()
elif how == "short":
    told()
    jit = TinyJit(lambda x: step(x).realize())
    for i in range(4): same(jit(Tensor(given[rank] + i).realize()).numpy(), wanted(i))
elif how == "differs": differs()
elif how == "nccl":
    os.environ["NV_ALL_REDUCE"] = "nccl"
    same(all_reduce(Tensor(given[rank]), group).numpy(), total)
    assert "; NCCL: NV_ALL_REDUCE=nccl" in explain(all_reduce(Tensor(given[rank]), group)).kernels[-1].reason
elif how == "settings":
    os.environ["NV_ALL_REDUCE"] = ("auto", "nccl")[rank % 2]
    said = ""
    try: all_reduce(Tensor(given[rank]), group)
    except DistError as error: said = error.found
    assert said == "NV_ALL_REDUCE is auto on rank 0, nccl on rank 1"
else:
    eager()
    told()
    graphs()
    parted()
    for each in ("one_shot", "two_shot", "nccl"): forced(each)
print(f"rank {rank} of {size}: all right", flush=True)
close()
