"""Sums of ranks that are processes, by kernels over the memory of peers, on an emulated GPU each: eager, with
gradients, in a TinyJit's graph and in a graph pool; what NCCL does, and why; a rank that does not come."""
from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial

import numpy as np

from tinygrad_nv import Device, Tensor, TinyJit, dtypes, explain
from tinygrad_nv.dist.collectives.functions import all_gather, all_reduce
from tinygrad_nv.dist.collectives.peer_norm import all_reduce_norm
from tinygrad_nv.dist.group import close, init
from tinygrad_nv.dist.mesh.mesh import collectives_of
from tinygrad_nv.errors import DistError, DriverError
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.runtime.emulated.sharing import Sharing

world = init("shared")
group = world.group()
rank, size = group.rank, group.size
same, near = np.testing.assert_array_equal, partial(np.testing.assert_allclose, rtol=2**-20, atol=2**-20)
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


def separately(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A sum, a residual, and the norm of rows."""
    new = all_reduce(x, group, replicated=True, name="h").contiguous() + residual
    f = new.float()
    return (f * (f.square().mean(-1, keepdim=True) + 0.5).rsqrt()).cast(new.dtype) * weight, new


def normalized() -> None:
    """In one kernel what separate steps do, with gradients, and in a graph."""
    rows = [np.sin(np.arange(48).reshape(3, 16) * (r + 2)).astype(np.float32) for r in range(size)]
    own = [np.cos(np.arange(48)).reshape(3, 16).astype(np.float32), np.arange(16).astype(np.float32) - 3]
    made = []
    for fused in (True, False):
        x, residual, weight = (Tensor(each) for each in (rows[rank], *own))
        made_by = partial(all_reduce_norm, eps=0.5, group=group, name="h") if fused else separately
        both = made_by(x, residual, weight)
        assert both is not None
        if fused: assert [each.template for each in explain(*both).kernels][-1] == "all_reduce_one_shot"
        (both[0] * Tensor(own[0]) + both[1] * 2).sum().backward()
        made.append([each.numpy() for each in (*both, x.grad, residual.grad, weight.grad)])
    for ours, usual in zip(*made, strict=True): near(ours, usual)
    same(made[0][1], made[1][1])
    x, residual, weight = (Tensor(each) for each in (rows[rank], *own))
    both = all_reduce_norm(x, residual, weight, 0.5, group, "h")
    assert both is not None
    assert [str(each.name) for each in collectives_of(*both)] == [f"all_reduce over ranks {group.name} of h"]
    said = ""
    try: both[0].sum().backward()
    except DistError as error: said = error.found
    assert said == "the gradient of one result of all_reduce_norm"

    @TinyJit
    def jit(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        both = all_reduce_norm(x, residual, weight, 0.5, group, "h")
        assert both is not None
        return both[0].realize(), both[1].realize()
    for i in range(4):
        got = jit(*(Tensor(each).realize() for each in (rows[rank] + i, *own)))
        usual = separately(*(Tensor(each) for each in (rows[rank] + i, *own)))
        for ours, each in zip(got, usual, strict=True):
            near(ours.numpy(), each.numpy())
    narrow = Tensor(rows[rank][:, :7]), Tensor(own[0][:, :7]), Tensor(own[1][:7])
    assert all_reduce_norm(*narrow, 0.5, group) is None


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


def killed() -> None:
    """A rank that is lost while the others wait in a kernel."""
    x = Tensor(given[rank]).realize()
    for i in range(3):
        if rank == 1 and i == 2:
            time.sleep(2)   # the others are there
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(x + i, group, name="layers.3.down").realize()


def apart() -> None:
    """A rank that cannot open another's memory: all use NCCL, and have nothing of it left."""
    def refused(self: Sharing, handle: bytes) -> int: raise DriverError("no peer access")
    if rank == 1: Sharing.open_shared = refused
    x = Tensor(given[rank]).realize()
    made = all_reduce(x, group)
    assert explain(made).kernels[-1].reason.startswith(
        f"all_reduce over ranks {group.name}; NCCL: rank 1: no peer access"), explain(made)
    same(made.numpy(), total)
    assert not Device["EMU"].driver.shared


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


def late(self: Sharing, address: int) -> None:
    time.sleep(0.5)
    closes(self, address)


how, closes = sys.argv[1], Sharing.close_shared
if how == "hangs": hangs()
elif how == "killed": killed()
elif how == "apart": apart()
elif how == "norm": normalized()
elif how in ("short", "leave"):
    told()
    jit = TinyJit(lambda x: step(x).realize())
    for i in range(4): same(jit(Tensor(given[rank] + i).realize()).numpy(), wanted(i))
elif how == "differs": differs()
elif how == "unlike":
    driver = Device["EMU"].driver
    own, usual = driver.properties, driver.properties.arch
    if rank == 1: driver.properties = replace(driver.properties, arch="sm_80")
    made = all_reduce(Tensor(given[rank]), group)
    driver.properties = own
    why = explain(made).kernels[-1].reason
    assert f"; NCCL: GPUs that are not alike: sm_80, {usual}" in why, why
    same(made.numpy(), total)
    assert not driver.shared
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
    assert not Device["EMU"].driver.shared
else:
    eager()
    told()
    graphs()
    normalized()
    parted()
    for each in ("one_shot", "two_shot", "nccl"): forced(each)
if how == "leave" and rank == 1: Sharing.close_shared = late    # after rank 0 has closed this rank's memory
close()
# the device is used on, and has nothing of the group left
same((Tensor(given[rank]) + 1).numpy(), given[rank] + 1)
assert not Device["EMU"].driver.shared
print(f"rank {rank} of {size}: all right", flush=True)
