"""fast.cu's matmuls, 4096 x 4096 x 4096 in bf16, as judges of the timing model.

github.com/pranjalssh/fast.cu: from a first wgmma to one as fast as cuBLAS. Published: TFLOP/s on an H100 SXM
(its README; A. Gordic, "Inside NVIDIA GPUs: Anatomy of high performance matmul kernels", 2025). Fitted:
kernels 2 (l2_bytes_per_cycle) and 10 (wgmma_ahead). """
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.timing.judges import Judged, to_ptx
from tinygrad_nv.ptx.emulator import Buffer, Emulator, TensorMap
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.timing.model import Timing

N = 4096
FITTED = {2, 10}
HEAD = """
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>
#include <stdio.h>
#include <cuda_bf16.h>
#include <cuda/barrier>
#include <cassert>
#include <cstring>
#include <string>
#include <vector>
typedef __nv_bfloat16 bf16;
#define CEIL_DIV(M, N) (((M) + (N)-1) / (N))
#define cudaCheck(x) (x)
"""


@dataclass(frozen=True)
class Kernel:
    """One of fast.cu's: its tile, threads, CTAs of a cluster, CTAs of the grid (0: one for each tile),
    stages, rank of its tensor maps, and the published TFLOP/s."""
    number: int
    tile: tuple[int, int]
    threads: int
    cluster: int
    ctas: int
    stages: int
    rank: int
    published: float


LADDER = (Kernel(2, (64, 64), 128, 1, 0, 0, 2, 317), Kernel(3, (128, 128), 128, 1, 0, 1, 2, 423),
          Kernel(4, (128, 128), 256, 1, 0, 5, 2, 498), Kernel(5, (128, 256), 384, 1, 0, 3, 2, 610),
          Kernel(6, (128, 256), 384, 1, 128, 3, 2, 660), Kernel(7, (128, 256), 384, 1, 128, 3, 5, 704),
          Kernel(8, (128, 256), 384, 2, 128, 3, 3, 734), Kernel(9, (128, 256), 384, 2, 128, 3, 3, 747),
          Kernel(10, (128, 256), 384, 2, 128, 3, 3, 758))


def compile_kernel(source: Path, number: int, include: Sequence[Path], n: int = N) -> str:
    """The PTX of a kernel for n x n x n."""
    last = "" if number == 2 else ", nullptr"
    return to_ptx(f'{HEAD}#include "examples/matmul/matmul_{number}.cuh"\n'
                  f"void go(bf16 *p) {{ runKernel{number}({n}, {n}, {n}, p, p, p{last}); }}\n",
                  (source, *include))


def box(buffer: Buffer, rows: int, rank: int, n: int) -> TensorMap:
    """A tensor map of rows of 64, as the kernel's host code makes it."""
    if rank == 2: return TensorMap.of_tiles(buffer, (rows, 64), "128B", (n, n), dtype="bf16")
    strides = (128, 2 * n) if rank == 3 else (128 * n, 128 * n, 128, 2 * n)
    ones = (1,) * (rank - 2)
    dims = (*(1,) * (rank - 3), n // 64, n, 64)
    return TensorMap.of_tiles(buffer.ptr, (*ones, rows, 64), "128B", dims, strides, "bf16")


def predict(text: str, kernel: Kernel, gpu: str, n: int = N) -> Timing:
    """A kernel's launch, of operands in the emulator's memory."""
    emu = Emulator("sm_90a", check=False)
    a, b, c = (emu.alloc(np.zeros((n, n), np.uint16)) for _ in range(3))
    (rows, columns), stages = kernel.tile, kernel.stages
    maps = box(a, rows, kernel.rank, n), box(b, columns, kernel.rank, n)
    shared = 2 * 64 * (rows + columns) * stages + (2 * rows * columns + 1024 if kernel.number >= 10 else 0)
    arguments: list[object] = [n, n, n, c]
    if kernel.number <= 5:      # they lie in memory
        arguments += [emu.alloc(np.frombuffer(one.encode(), np.uint8)) for one in maps]
        arguments += [0] * (kernel.number == 3)
    elif kernel.number < 10: arguments += maps
    else:
        lies = (n // 64, n, 64), (128, 2 * n)
        out = TensorMap.of_tiles(c.ptr, (rows // 64, columns, 64), "none", *lies, "bf16")
        arguments = [n, n, n, out, *maps]
    entry = [name for name in parse(text).functions if f"matmulKernel{kernel.number}" in name][-1]
    grid = kernel.ctas or (n // rows) * (n // columns)
    shared += 1024 if stages else 0  # alignment and barriers
    found = emu.launch(text, grid, kernel.threads, arguments, entry, kernel.cluster, shared,
                       timing=gpu).timing
    assert found is not None
    return found


def judge(source: Path, include: Sequence[Path]) -> Iterator[Judged]:
    """Each kernel of the ladder."""
    for kernel in LADDER:
        timing = predict(compile_kernel(source, kernel.number, include), kernel, "h100")
        yield Judged("fast.cu", f"fast.cu {kernel.number}", kernel.published,
                     2 * N**3 / timing.seconds / 1e12, kernel.number in FITTED)
