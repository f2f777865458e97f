"""A kernel on the emulator, to see what it costs.

Protocol: `counters(spec, schedule, arch)` runs a small product twice, which differ in K alone, and gives the
two runs' counters. What is small: as many tiles as a cluster has, two for each CTA in ping-pong, and sums of
`few_steps` and of a few steps more. Splits and stream-K change which CTA does a step, not the step, and are
left out. Operands are zeros; checks are off.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tinygrad_nv.errors import KernelError
from tinygrad_nv.ptx.emulator import Emulator, TensorMap
from tinygrad_nv.ptx.emulator.report import Stats
from tinygrad_nv.tile.gemm.spec import GemmSpec, Operand, sizes
from tinygrad_nv.tile.gemm.templates import build
from tinygrad_nv.tile.gemm.work import columns
from tinygrad_nv.tile.kernel import GemmKernel
from tinygrad_nv.tile.schedule import Schedule

STEPS_MORE = 4


@dataclass(frozen=True)
class Trial:
    """Two runs of `tiles` tiles each, with sums of so many steps."""
    short: Stats
    long: Stats
    steps: tuple[int, int]
    tiles: int


def counters(spec: GemmSpec, schedule: Schedule, arch: str) -> Trial:
    """What the emulator counts of a schedule's kernel."""
    s = replace(schedule, splits=1, stream=False)
    steps = s.depth + 2, s.depth + 2 + STEPS_MORE
    cluster = s.cluster_m * s.cluster_n
    rounds = 2 if s.mode == "pingpong" else 1
    runs = []
    for count in steps:
        small = shrunk(spec, s, count * s.block_k, rounds)
        kernel = build(small, s, arch, cluster)
        runs.append(emulated(kernel, small, arch))
    return Trial(runs[0], runs[1], steps, rounds * cluster)


def shrunk(spec: GemmSpec, s: Schedule, k: int, rounds: int) -> GemmSpec:
    """The same kind of product: one matrix of so much K, and as many rows and columns as a cluster's tiles
    have (`rounds` times), at most those it has. Strides are the same where sums fit between them."""
    m, n = (s.block_n, s.block_m) if s.swap else (s.block_m, columns(spec, s))
    clusters = (s.cluster_n, s.cluster_m) if s.swap else (s.cluster_m, s.cluster_n)
    m, n = min(spec.m, m * clusters[0]), min(spec.n, n * clusters[1])
    if m < spec.m: m = min(spec.m, m * rounds)
    else: n = min(spec.n, n * rounds)
    batch = (1,) * len(spec.batch)
    return replace(spec, m=m, n=n, k=k, batch=batch, a=_longer(spec.a, k), b=_longer(spec.b, k))


def _longer(operand: Operand, k: int) -> Operand:
    """An operand whose rows have room for so much K, with the alignment it had."""
    if operand.k != 1 or operand.mn >= k: return operand
    return replace(operand, mn=operand.mn + -(-(k - operand.mn) // 64) * 64)


# **** the emulator ****

def emulated(kernel: GemmKernel, spec: GemmSpec, arch: str) -> Stats:
    """Counters of one launch with operands of zeros."""
    emu = Emulator(arch, check=False)
    out, *operands = [emu.alloc(np.zeros(-(-nbytes // 16) * 16, np.uint8)) for nbytes in sizes(spec)]
    shared = (kernel.workspace_bytes, 4 * max(kernel.flags, 1)) if kernel.workspace_bytes else ()
    order = [out, *(emu.alloc(np.zeros(size, np.uint8)) for size in shared), *operands]
    maps = []
    for one in kernel.maps:
        dims = tuple(spec.m if i == one.dynamic else extent for i, extent in enumerate(one.dims))
        maps.append(TensorMap.tiled(order[one.pointer].ptr + one.offset_bytes, one.box[::-1], one.swizzle,
                                    dims[::-1], one.strides[::-1], one.dtype))
    rows = [np.uint32(spec.m)] if spec.symbolic else []
    report = emu.launch(kernel.ptx, kernel.grid_for(spec.m), kernel.threads, [*order, *rows, *maps],
                        cluster=kernel.cluster, dynamic_smem=kernel.dynamic_smem)
    if report.findings: raise KernelError(str(report.findings[0]), "a kernel that comes to its end")
    return report.stats
