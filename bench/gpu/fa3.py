"""FlashAttention-3 as a contender: its forward kernel, compiled from its sources by nvcc and called without
torch's extensions, or its package flash_attn_interface where that is installed.

    python3 bench/gpu/fa3.py hopper/ [--cutlass include/] [--out DIR] [--head 64 128 256]

builds a library for each head size, without a GPU, to be carried to one. `gpu.py --fa3 PATH` takes the folder
of them, or builds them where PATH has the sources. Of the kernel's features what the rows do not ask for is
left out (varlen, pages, splits, windows); a group of query heads is not packed into one tile, as the package
may do.
"""
from __future__ import annotations

import argparse
import ctypes
import math
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.gpu.compare import Run
from bench.gpu.parts import NotMeasured, Options
from bench.lib.measure import RESULTS

HEADS = (64, 128, 256)
CACHE = RESULTS / "cache"
WRAPPER = Path(__file__).with_suffix(".cu")
LEFT_OUT = ("VARLEN", "PAGEDKV", "APPENDKV", "LOCAL", "SPLIT", "SOFTCAP", "PACKGQA")
# as its own build has them, and PIC for a library
FLAGS = ("-shared", "-Xcompiler", "-fPIC", "-O3", "-std=c++17", "--use_fast_math", "--expt-relaxed-constexpr",
         "--expt-extended-lambda", "-DNDEBUG", "-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
         "-DCUTLASS_ENABLE_GDC_FOR_SM90", "-DCUTLASS_DEBUG_TRACE_LEVEL=0",
         "-gencode", "arch=compute_90a,code=[sm_90a,compute_90a]")  # PTX: for ptx run
BUILD_S = 1800.0


def command(sources: Path, cutlass: Path, head: int, out: Path) -> list[str]:
    """nvcc's. Raises `NotMeasured` for what is not there."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None: raise NotMeasured("building FlashAttention-3 needs nvcc in PATH")
    for folder, name in ((sources, "flash_fwd_launch_template.h"), (cutlass, "cutlass/cutlass.h")):
        if not (folder / name).exists(): raise NotMeasured(f"no {name} in {folder}")
    return [nvcc, *FLAGS, *(f"-DFLASHATTENTION_DISABLE_{name}" for name in LEFT_OUT), f"-DHEAD_DIM={head}",
            f"-I{sources}", f"-I{cutlass}", "-o", str(out), str(WRAPPER)]


def build(path: Path, cutlass: Path | None, head: int, out: Path = CACHE) -> Path:
    """The library for a head size: there, or made of the sources. Raises `NotMeasured`."""
    name = f"fa3_{head}.so"
    if (found := path / name).exists(): return found
    if not (path / "flash.h").exists():
        raise NotMeasured(f"{path} has neither {name} nor FlashAttention-3's sources")
    library = out / name
    if library.exists() and library.stat().st_mtime >= max(each.stat().st_mtime for each in (
            WRAPPER, *path.glob("*.h"), *path.glob("*.hpp"))): return library
    out.mkdir(parents=True, exist_ok=True)
    line = command(path, cutlass or path.parent / "csrc" / "cutlass" / "include", head, library)
    try: done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=BUILD_S)
    except subprocess.TimeoutExpired: raise NotMeasured(f"nvcc did not end in {BUILD_S:.0f} s") from None
    if done.returncode:
        words = [each for each in done.stderr.splitlines() if "error" in each] or ["no word"]
        raise NotMeasured(f"nvcc does not build FlashAttention-3: {words[0][:300]}")
    return library


@cache
def load_function(library: Path) -> Any:
    """Its function."""
    attend = ctypes.CDLL(str(library)).attend
    attend.argtypes = [*[ctypes.c_void_p] * 6, *[ctypes.c_int] * 5, ctypes.c_float, ctypes.c_int,
                       ctypes.c_void_p]
    return attend


def contender(workload: Any, given: Sequence[dict[str, Any]], options: Options) -> Run:
    """Runs of the kernel, or of the package, on sets of q, k, v and out of [batch, heads, tokens, d]."""
    if options.fa3 is None: return bind_package(workload, given)
    import torch
    if torch.cuda.get_device_capability() != (9, 0): raise NotMeasured("FlashAttention-3 is for Hopper")
    attend = load_function(build(options.fa3, options.cutlass, workload.d))
    lse = torch.empty(workload.batch * workload.heads * workload.tokens, device="cuda")
    semaphore = torch.zeros(4, dtype=torch.int32, device="cuda")
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    sets = [[each[name].data_ptr() for name in ("out", "q", "k", "v")] for each in given]
    kept = [dict(each) for each in given]

    def run(i: int) -> None:
        given[i]["out"] = kept[i]["out"]
        status = attend(*sets[i], lse.data_ptr(), semaphore.data_ptr(), workload.batch, workload.heads,
                        workload.keys, workload.tokens, int(workload.causal), 1 / math.sqrt(workload.d),
                        sm_count, torch.cuda.current_stream().cuda_stream)
        if status: raise RuntimeError(f"FlashAttention-3's kernel: CUDA error {status}")

    return run


def bind_package(workload: Any, given: Sequence[dict[str, Any]]) -> Run:
    """The package's function, which takes [batch, tokens, heads, d]: views of ours. It makes its result."""
    if find_spec("flash_attn_interface") is None:
        raise NotMeasured("flash_attn_interface is not installed, and --fa3 names no sources or libraries")
    from flash_attn_interface import flash_attn_func

    def run(i: int) -> None:
        q, k, v = (given[i][name].transpose(1, 2) for name in "qkv")
        made = flash_attn_func(q, k, v, causal=workload.causal)
        given[i]["out"] = (made[0] if isinstance(made, tuple) else made).transpose(1, 2)

    return run


def main() -> int:
    """Builds."""
    made = argparse.ArgumentParser(description="Builds FlashAttention-3's forward kernel for gpu.py --fa3.")
    made.add_argument("sources", type=Path, help="hopper/ of FlashAttention's sources")
    made.add_argument("--cutlass", type=Path, help="CUTLASS's include/ (default beside it, in csrc/cutlass)")
    made.add_argument("--out", type=Path, default=CACHE, help="(default bench/results/cache)")
    made.add_argument("--head", type=int, nargs="+", choices=HEADS, default=HEADS, help="(default all)")
    options = made.parse_args()
    try:
        for head in options.head: print(build(options.sources, options.cutlass, head, options.out))
    except NotMeasured as why:
        print(why, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__": sys.exit(main())
