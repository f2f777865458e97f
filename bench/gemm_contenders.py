"""Who multiplies: ours, torch (cuBLAS), Triton, and tinygrad alone, over buffers that take turns.

Protocol: a contender is made for a spec and a list of buffer sets (torch storages by name) and gives
`run(i)`, which puts one product on set `i` into torch's current stream. All compute x @ w.T of bfloat16 with
sums in float32. tinygrad measures itself in a process of its own, in which this package is not imported
(`tinygrad_alone`).
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from gemm_cuda import Loaded

from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.schedule import Schedule
from tinygrad_nv.tile.spec import GemmSpec
from tinygrad_nv.tile.templates import build

Buffers = Sequence[dict[str, torch.Tensor]]
Run = Callable[[int], None]
TRITON_TILES = {"sm_90a": (("descriptors", (128, 256, 64), 8, 3), ("descriptors", (128, 128, 64), 8, 4),
                           ("pointers", (64, 64, 64), 4, 4), ("pointers", (16, 64, 128), 4, 4)),
                "sm_80": (("pointers", (128, 256, 32), 8, 3), ("pointers", (128, 128, 32), 4, 4),
                          ("pointers", (64, 64, 64), 4, 4), ("pointers", (16, 64, 128), 4, 4))}


def ours(spec: GemmSpec, buffers: Buffers, arch: str) -> tuple[Run, Schedule]:
    """Our kernel, by the cost model's schedule."""
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = choose(spec, arch, sm_count)
    assert schedule is not None
    loaded = Loaded(build(spec, schedule, arch, sm_count), arch)
    bound = [loaded.bound(spec, given) for given in buffers]
    return lambda i: bound[i].launch(), schedule


def cublas(spec: GemmSpec, buffers: Buffers) -> Run:
    """torch's matmul into the same storage."""
    sets = [(each["a"].view(spec.m, spec.k), each["b"].view(spec.n, spec.k).T,
             each["out"].view(spec.m, spec.n)) for each in buffers]

    def run(i: int) -> None:
        a, b, out = sets[i]
        torch.mm(a, b, out=out)

    return run


def triton_runs(spec: GemmSpec, buffers: Buffers, arch: str) -> dict[str, Run]:
    """Triton's kernel with each of a few tiles, as its own tuner would try; by what the tile is."""
    from gemm_peers import KERNELS, Peer, blocks, constants
    from triton.tools.tensor_descriptor import TensorDescriptor
    runs: dict[str, Run] = {}
    for kind, tile, warps, stages in TRITON_TILES["sm_90a" if arch == "sm_90a" else "sm_80"]:
        if tile[0] > 2 * max(spec.m, 16) or spec.k % tile[2]: continue
        peer = Peer(kind, tile, warps, stages, "K")
        kernel, fixed = KERNELS[kind], constants(peer)
        grid = (-(-spec.m // tile[0]) * -(-spec.n // tile[1]),)
        sets = [[each["a"].view(spec.m, spec.k), each["b"].view(spec.n, spec.k),
                 each["out"].view(spec.m, spec.n)] for each in buffers]
        if peer.descriptors:
            sets = [[TensorDescriptor.from_tensor(tensor, list(box))
                     for tensor, box in zip(each, blocks(peer), strict=True)] for each in sets]
        else:
            fixed |= {"stride_am": spec.k, "stride_bn": spec.k, "stride_cm": spec.n}

        fixed |= {"M": spec.m, "N": spec.n, "K": spec.k, "num_warps": warps, "num_stages": stages}
        runs[f"{peer}, {'x'.join(map(str, tile))}"] = partial(_launch_triton, kernel[grid], sets, fixed)
    return runs


def _launch_triton(kernel: Any, sets: Sequence[Sequence[Any]], fixed: dict[str, Any], i: int) -> None:
    a, b, c = sets[i]
    kernel(a=a, b=b, c=c, **fixed)


ALONE = """
import json, sys, time
from tinygrad import Device, Tensor, TinyJit, dtypes
m, n, k, seconds = *map(int, sys.argv[1:4]), float(sys.argv[4])
def uniform(*shape): return Tensor.uniform(*shape, low=-1, high=1).cast(dtypes.bfloat16).realize()
sets = [(uniform(m, k), uniform(n, k)) for _ in range(2)]
step = TinyJit(lambda a, b: (a @ b.T).realize())
for i in range(6): step(*sets[i % 2])
Device.default.synchronize()
times = []
while sum(times) < seconds:
    begun = time.perf_counter()
    for i in range(10): step(*sets[i % 2])
    Device.default.synchronize()
    times.append(time.perf_counter() - begun)
print(json.dumps([each / 10 for each in times]))
"""


def tinygrad_alone(m: int, n: int, k: int, seconds: float) -> list[float]:
    """Seconds of products by tinygrad's own kernels, in batches of ten, in a process of its own; empty where
    it fails."""
    command = [sys.executable, "-c", ALONE, str(m), str(n), str(k), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env={**os.environ, "DEV": "CUDA"})
    return list(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else []
