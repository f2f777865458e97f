"""A step with a sum of ranks by a kernel over the memory of peers, kept on disk: what test_peer_ranks.py
starts twice. With "late" the workspaces are not opened before the kept step is loaded."""
from __future__ import annotations

import sys

import numpy as np

from tinygrad_nv import Device, Tensor, explain
from tinygrad_nv.dist.collectives.device import prepare
from tinygrad_nv.dist.collectives.functions import all_reduce
from tinygrad_nv.dist.group import close, init
from tinygrad_nv.engine.worker.captured_step import CapturedStep
from tinygrad_nv.engine.worker.step_store import StepStore, name_buffers
from tinygrad_nv.errors import DistError

world = init("shared")
group = world.group()
device = Device.canonicalize("EMU")
given = Tensor(np.arange(16, dtype=np.float32) + world.rank).realize()
out = Tensor.zeros(16).contiguous().realize()
if sys.argv[1] != "late": prepare(group, device)
store = StepStore.open((world.rank,), device, lambda: name_buffers(given=given, out=out))
assert store is not None
kept = "sum" in store.steps
assert kept == (sys.argv[1] != "first")
if not kept: assert explain(all_reduce(given, group)).kernels[0].template == "all_reduce_one_shot"
step = CapturedStep(lambda: out.assign(all_reduce(given, group)).realize(), lambda: [out], device, store,
                    "sum")
said = ""
try:
    for _ in range(3): step()
except DistError as error: said = error.found
if sys.argv[1] == "late":
    assert said == "an all_reduce over the memory of peers, which group 0-1/1 has not opened on EMU", said
else:
    assert not said, said
    np.testing.assert_array_equal(out.numpy(), 2 * np.arange(16) + 1)
store.save()
print(f"rank {world.rank}: all right", flush=True)
close()
