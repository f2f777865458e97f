"""Predicted times beside published ones, of kernels that others wrote.

    python bench/timing_check.py --fast-cu DIR [--include DIR ...] [--gpu h100] [--plot FILE.png] [--dry]

DIR is a checkout of github.com/pranjalssh/fast.cu: bf16 matmuls of 4096 x 4096 x 4096, from a first wgmma to
one as fast as cuBLAS. Each kernel is compiled to PTX by nvcc (in PATH, or of NVIDIA's wheels, whose headers
need CCCL: `--include`), and its launch predicted (ptx/timing/), as one of many in a row. Nothing runs on
a GPU, and nothing of the repository is kept. Published: TFLOP/s on an H100 SXM (README of fast.cu; A. Gordic,
"Inside NVIDIA GPUs: Anatomy of high performance matmul kernels", 2025). What is FITTED was used to choose
figures in ptx/timing/gpus/h100.toml, and judges nothing. """
from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import numpy as np
from measure import each, save, table

from tinygrad_nv.errors import NVError
from tinygrad_nv.ptx.assemble import find_program
from tinygrad_nv.ptx.emulator import Buffer, Emulator, TensorMap
from tinygrad_nv.ptx.parser import parse
from tinygrad_nv.ptx.timing.gpu import figures
from tinygrad_nv.ptx.timing.model import Timing
from tinygrad_nv.ptx.timing.sequence import repeated

N = 4096
NEWEST_PTX = "9.0"      # nvcc may write a newer version than ptxas knows
FITTED = {2, 10}        # l2_bytes_per_cycle, wgmma_ahead
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


def compiled(source: Path, number: int, include: Sequence[Path]) -> str:
    """The PTX of a kernel. Raises `NVError` where nvcc is not there or fails."""
    nvcc = shutil.which("nvcc") or find_program("nvcc")
    if nvcc is None:
        raise NVError("no nvcc", "nvcc in PATH, or NVIDIA's wheel", "pip install nvidia-cuda-nvcc")
    own = Path(nvcc).resolve().parents[1] / "include"
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder) / "k.cu", Path(folder) / "k.ptx"
        last = "" if number == 2 else ", nullptr"
        file.write_text(f'{HEAD}#include "examples/matmul/matmul_{number}.cuh"\n'
                        f"void go(bf16 *p) {{ runKernel{number}({N}, {N}, {N}, p, p, p{last}); }}\n")
        flags = ["-ptx", "-O3", "-std=c++17", "-DNDEBUG", "-gencode", "arch=compute_90a,code=compute_90a"]
        folders = [f"-I{one}" for one in (source, *include, own)]
        done = subprocess.run([str(nvcc), *flags, *folders, str(file), "-o", str(out)], capture_output=True,
                              text=True, check=False)
        if not out.exists():
            raise NVError(f"nvcc did not compile kernel {number}:\n{done.stderr[-1500:]}",
                          "a checkout of fast.cu", "pass --include with the headers that are missing")
        return re.sub(r"(?m)^\.version .*", f".version {NEWEST_PTX}", out.read_text())


def box(buffer: Buffer, rows: int, rank: int) -> TensorMap:
    """A tensor map of rows of 64, as the kernel's host code makes it."""
    if rank == 2: return TensorMap.tiled(buffer, (rows, 64), "128B", (N, N), dtype="bf16")
    strides = (128, 2 * N) if rank == 3 else (128 * N, 128 * N, 128, 2 * N)
    ones = (1,) * (rank - 2)
    dims = (*(1,) * (rank - 3), N // 64, N, 64)
    return TensorMap.tiled(buffer.ptr, (*ones, rows, 64), "128B", dims, strides, "bf16")


def predicted(text: str, kernel: Kernel, gpu: str) -> Timing:
    """A kernel's launch, of operands in the emulator's memory."""
    emu = Emulator("sm_90a", check=False)
    a, b, c = (emu.alloc(np.zeros((N, N), np.uint16)) for _ in range(3))
    (rows, columns), stages = kernel.tile, kernel.stages
    maps = box(a, rows, kernel.rank), box(b, columns, kernel.rank)
    shared = 2 * 64 * (rows + columns) * stages + (2 * rows * columns + 1024 if kernel.number >= 10 else 0)
    arguments: list[object] = [N, N, N, c]
    if kernel.number <= 5:      # they lie in memory
        arguments += [emu.alloc(np.frombuffer(one.encode(), np.uint8)) for one in maps]
        arguments += [0] * (kernel.number == 3)
    elif kernel.number < 10: arguments += maps
    else:
        lies = (N // 64, N, 64), (128, 2 * N)
        out = TensorMap.tiled(c.ptr, (rows // 64, columns, 64), "none", *lies, "bf16")
        arguments = [N, N, N, out, *maps]
    entry = [name for name in parse(text).functions if f"matmulKernel{kernel.number}" in name][-1]
    grid = kernel.ctas or (N // rows) * (N // columns)
    shared += 1024 if stages else 0  # alignment and barriers
    found = emu.launch(text, grid, kernel.threads, arguments, entry, kernel.cluster, shared,
                       timing=gpu).timing
    assert found is not None
    return found


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's."""
    first, second = (np.argsort(np.argsort(values)) for values in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


def rows_of(found: Sequence[tuple[Kernel, float]]) -> Iterator[tuple[str, ...]]:
    """The table."""
    for kernel, tflops in found:
        yield (f"fast.cu {kernel.number}" + (" (fitted)" if kernel.number in FITTED else ""),
               f"{kernel.published:.0f}", f"{tflops:.0f}", f"{tflops / kernel.published - 1:+.1%}")


def plotted(found: Sequence[tuple[Kernel, float]], file: Path) -> None:
    """Predicted against published, on logarithmic axes."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(5, 5))
    for fitted, marker in ((False, "o"), (True, "x")):
        some = [(kernel.published, tflops) for kernel, tflops in found if (kernel.number in FITTED) == fitted]
        axes.loglog(*zip(*some, strict=True), marker, label="fitted" if fitted else "judged")
    ends = [200, 1000]
    axes.plot(ends, ends, color="grey", linewidth=0.8)
    axes.set(xlabel="published, TFLOP/s", ylabel="predicted, TFLOP/s", title="fast.cu, bf16 4096, H100")
    axes.legend()
    figure.savefig(file, dpi=120, bbox_inches="tight")


def main() -> int:
    """Compiles, predicts, compares."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--fast-cu", type=Path, required=True, metavar="DIR", help="a checkout of fast.cu")
    parser.add_argument("--include", type=Path, action="append", default=[], metavar="DIR",
                        help="further headers, such as CCCL's")
    parser.add_argument("--gpu", default="h100", help="figures of ptx/timing/gpus (default h100)")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw predicted against published")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    found = []
    for kernel in each(LADDER):
        timing = predicted(compiled(args.fast_cu, kernel.number, args.include), kernel, args.gpu)
        found.append((kernel, 2 * N**3 / repeated(timing, figures(args.gpu)) / 1e12))
    judged = [(kernel, tflops) for kernel, tflops in found if kernel.number not in FITTED]
    errors = [abs(tflops / kernel.published - 1) for kernel, tflops in judged]
    order = rank_correlation([tflops for _, tflops in found], [kernel.published for kernel, _ in found])
    print(table(("TFLOP/s", "published", "predicted", "error"), list(rows_of(found))))
    print(f"judged, not fitted: mean error {mean(errors):.1%}, worst {max(errors):.1%}; rank correlation of "
          f"all {order:.3f}")
    if args.plot: plotted(found, args.plot)
    kernels = {kernel.number: [kernel.published, tflops] for kernel, tflops in found}
    record = {"gpu": args.gpu, "kernels": kernels, "fitted": sorted(FITTED), "mape": mean(errors),
              "worst": max(errors), "rank": order}
    if not args.dry: save("timing_check", record)
    return 0


if __name__ == "__main__": raise SystemExit(main())
