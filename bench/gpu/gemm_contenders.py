"""The contenders of matmuls: ours, torch (cuBLAS), Triton, torch.compile, and tinygrad alone, over buffers in
turns.

Protocol: a contender is made for a shape and sets of torch storages by name, and gives `run(i)`, which puts
one product on set `i` into torch's current stream. All compute in the operands' type
with sums in float32. tinygrad
measures itself in a process of its own, in which this package is not imported (`tinygrad_alone`).
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from bench.gpu.launch import GemmLauncher, bind_sets, device
from bench.gpu.parts import NotMeasured, Options, Run, about, alone, contender
from tinygrad_nv.tile.choose import choose
from tinygrad_nv.tile.gemm.cost import predict
from tinygrad_nv.tile.template import GPU
from tinygrad_nv.tile.templates import TABLE

Buffers = Sequence[dict[str, Any]]
TRITON_TILES = {"sm_90a": (("descriptors", (128, 256, 64), 8, 3), ("descriptors", (128, 128, 64), 8, 4),
                           ("pointers", (64, 64, 64), 4, 4), ("pointers", (16, 64, 128), 4, 4)),
                "sm_80": (("pointers", (128, 256, 32), 8, 3), ("pointers", (128, 128, 32), 4, 4),
                          ("pointers", (64, 64, 64), 4, 4), ("pointers", (16, 64, 128), 4, 4))}


@contender("gemm", "ours")
def ours(shape: Any, buffers: Buffers, options: Options) -> Run:
    """Our kernel, by the cost model's schedule."""
    return bind_default(shape.spec, buffers)


def bind_default(spec: Any, buffers: Buffers) -> Run:
    """The kernel of a spec, by the default schedule."""
    gpu = device()
    arch, sm_count = gpu.properties.arch, gpu.properties.sm_count
    if (schedule := choose(spec, GPU(arch, sm_count))) is None:
        raise NotMeasured(TABLE.why_not(spec, GPU(arch, sm_count)))
    launcher = GemmLauncher(gpu, TABLE.build(spec, schedule, GPU(arch, sm_count, gpu.clusters)))
    return bind_sets(gpu, partial(launcher.bind_launch, spec), buffers)


@about("gemm")
def describe_schedule(shape: Any) -> dict[str, Any]:
    """The schedule that `ours` takes, and the seconds that the cost model predicts."""
    arch, sm_count = device().properties.arch, device().properties.sm_count
    schedule = choose(shape.spec, GPU(arch, sm_count))
    assert schedule is not None
    return {"schedule": str(schedule), "predicted_s": predict(shape.spec, schedule, arch).seconds}


def silu_gate_up(a: Any, b: Any, n: int) -> Any:
    """silu(a @ gate.T) * (a @ up.T), as a program of torch has it."""
    import torch
    both = a @ b
    return torch.nn.functional.silu(both[:, :n]) * both[:, n:]


@contender("gemm", "torch")
def cublas(shape: Any, buffers: Buffers, options: Options) -> Run:
    """torch's matmul into the same storage; what follows it as kernels of torch's own. Of fp8
    _scaled_mm, whose sums are promoted to float32 as ours are (use_fast_accum=False)."""
    import torch
    if shape.blocks: raise NotMeasured("its block scales lie in layouts of their own")
    one = torch.ones((), device=buffers[0]["a"].device)
    sets = [(each["a"].view(shape.m, shape.k), each["b"].view(shape.columns, shape.k).T,
             each["out"].view(shape.m, shape.n)) for each in buffers]

    def run(i: int) -> None:
        a, b, out = sets[i]
        if shape.gated: out.copy_(silu_gate_up(a, b, shape.n))
        elif shape.fp8: torch._scaled_mm(a, b, one, one, out_dtype=out.dtype, use_fast_accum=False, out=out)
        else: torch.mm(a, b, out=out)

    return run


@contender("gemm", "torch.compile")
def torch_compiled(shape: Any, buffers: Buffers, options: Options) -> Run:
    """Compiles a matmul with what follows it by torch's compiler."""
    import torch
    if not shape.gated: raise NotMeasured("a product alone is cuBLAS's there too")
    sets = [(each["a"].view(shape.m, shape.k), each["b"].view(shape.columns, shape.k).T,
             each["out"].view(shape.m, shape.n)) for each in buffers]

    def step(a: Any, b: Any, out: Any) -> None: out.copy_(silu_gate_up(a, b, shape.n))

    made = torch.compile(step, dynamic=False)
    made(*sets[0])
    return lambda i: made(*sets[i])


@contender("gemm", "Triton")
def triton(shape: Any, buffers: Buffers, options: Options) -> Run:
    """The quickest of a few tiles, as its own tuner would try."""
    from bench.gpu.turns import Bursts
    if shape.gated or shape.fp8: raise NotMeasured("its tutorial has no such product")
    runs = triton_runs(shape, buffers, device().properties.arch)
    if not runs: raise NotMeasured("no tile for this product")
    trials = {name: min(Bursts(run, len(buffers)).eager(10) for _ in range(3)) for name, run in runs.items()}
    return runs[min(trials, key=lambda name: trials[name])]


def triton_runs(shape: Any, buffers: Buffers, arch: str) -> dict[str, Run]:
    """Triton's kernel with each of a few tiles, by what the tile is."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from bench.lib.gemm_peers import KERNELS, Peer, blocks, constants
    runs: dict[str, Run] = {}
    for kind, tile, warps, stages in TRITON_TILES["sm_90a" if arch == "sm_90a" else "sm_80"]:
        if tile[0] > 2 * max(shape.m, 16) or shape.k % tile[2]: continue
        peer = Peer(kind, tile, warps, stages, "K")
        kernel, fixed = KERNELS[kind], constants(peer)
        grid = (-(-shape.m // tile[0]) * -(-shape.n // tile[1]),)
        sets = [[each["a"].view(shape.m, shape.k), each["b"].view(shape.n, shape.k),
                 each["out"].view(shape.m, shape.n)] for each in buffers]
        if peer.descriptors:
            sets = [[TensorDescriptor.from_tensor(tensor, list(box))
                     for tensor, box in zip(each, blocks(peer), strict=True)] for each in sets]
        else:
            fixed |= {"stride_am": shape.k, "stride_bn": shape.k, "stride_cm": shape.n}
        fixed |= {"M": shape.m, "N": shape.n, "K": shape.k, "num_warps": warps, "num_stages": stages}
        runs[f"{peer}, {'x'.join(map(str, tile))}"] = partial(_launch_triton, kernel[grid], sets, fixed)
    return runs


def _launch_triton(kernel: Any, sets: Sequence[Sequence[Any]], fixed: dict[str, Any], i: int) -> None:
    a, b, c = sets[i]
    kernel(a=a, b=b, c=c, **fixed)


ALONE = """
import json, sys, time
from tinygrad import Device, Tensor, TinyJit, dtypes
m, n, k, gated, seconds = *map(int, sys.argv[1:5]), float(sys.argv[5])
def uniform(*shape): return Tensor.uniform(*shape, low=-1, high=1).cast(dtypes.bfloat16).realize()
sets = [(uniform(m, k), uniform(n * (1 + gated), k)) for _ in range(2)]
def product(a, b):
    both = a @ b.T
    return (both[:, :n].silu() * both[:, n:] if gated else both).realize()
step = TinyJit(product)
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


@alone("gemm", "tinygrad")
def tinygrad_alone(shape: Any, seconds: float) -> list[float]:
    """Seconds of products by tinygrad's own kernels, in batches of ten, in a process of its own. Some twelve
    seconds each, so not of all products."""
    if shape.fp8: raise NotMeasured("its kernels have no fp8 operands")
    if shape.m not in (1, 4096) or "70B" in shape.name: raise NotMeasured("left out, to save time")
    sizes = map(str, (shape.m, shape.n, shape.k, int(shape.gated), seconds))
    return measure_alone([sys.executable, "-c", ALONE, *sizes], 30 + 10 * seconds)


def measure_alone(command: list[str], limit_s: float) -> list[float]:
    """Returns the last line that a process prints, on CUDA. Raises `NotMeasured` with its last words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s,
                              env={**os.environ, "DEV": "CUDA"})
    except subprocess.TimeoutExpired: raise NotMeasured(f"no end in {limit_s:.0f} s") from None
    if done.returncode: raise NotMeasured((done.stderr.strip().splitlines() or ["no word"])[-1][:200])
    return [float(f"{each:.5g}") for each in json.loads(done.stdout.splitlines()[-1])]
