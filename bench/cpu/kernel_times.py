"""Kernels for the CPU beside torch: GEMV, products, attention and decode attention, in one interleaved run.

    python bench/cpu/kernel_times.py [--part gemv …] [--dtype float32 …] [--repeat 15] [--only WORDS] [--plot]

Both sides compute the same from operands of the same dtype on as many threads as tinygrad's NUM_CPU_THREADS
says; ours is a TinyJit that is replayed, torch's a call. They take turns; figures are medians of the turns,
the ratio that of each turn's pair. Before it is timed, a result is compared with torch's. Bandwidth of
reading is that of a sum over 256 MB by torch and by a kernel of ours, whichever is faster, measured in the
same turns as the products of few rows, which must reach a part of it.

Threads of torch's OpenMP go on spinning after a call, on the cores that the next one needs, and cores that
have slept take milliseconds to come back: each side begins its turn with a pause, and calls that do not
count.
"""
from __future__ import annotations

import argparse
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tinygrad import Device, Tensor, TinyJit, dtypes
from tinygrad.helpers import Context

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import each, save, spread, table
from tinygrad_nv.cpu.target import host
from tinygrad_nv.functional import scaled_dot_product_attention

DTYPES = {"float32": dtypes.float32, "bfloat16": dtypes.bfloat16, "float16": dtypes.float16}
# what is asked of the ratio to torch, by part
WANTED = {"gemv": 1.0, "gemm": 0.7, "attention": 1.0, "backward": 1.0, "decode": 1.0}
READ_BYTES = 256 << 20
PAUSE_S = 0.01  # libgomp's threads spin for some milliseconds
WARM_S = 0.03   # a virtual core that slept was seen to take 15 ms to come back
Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Something that both compute. `make` gives ours and torch's, both ready to run."""
    part: str
    name: str
    dtype: str
    flops: int
    nbytes: int
    make: Callable[[], tuple[Run, Run]]

    def __str__(self) -> str: return f"{self.part} {self.name} {self.dtype}"


def operand(rng: np.random.Generator, dtype: str, *shape: int) -> tuple[Tensor, torch.Tensor]:
    """The same numbers for both, uniform in [-1, 1]."""
    numbers = rng.random(shape, np.float32) * 2 - 1
    theirs = torch.from_numpy(numbers).to(getattr(torch, dtype))
    return Tensor(numbers).cast(DTYPES[dtype]).realize(), theirs


def capture(fn: Callable[[], Tensor]) -> Run:
    """Ours as a graph that is replayed."""
    jitted = TinyJit(lambda: fn().realize())
    for _ in range(3): jitted()

    def run() -> Tensor:
        out: Tensor = jitted()
        Device[out.device].synchronize()
        return out
    return run


# **** parts ****

def linear(part: str, m: int, n: int, k: int, dtype: str, transposed: bool = True) -> Case:
    """x @ w.T of a weight [n, k], or x @ w of [k, n]."""
    def make() -> tuple[Run, Run]:
        rng = np.random.default_rng(m + n + k)
        x, tx = operand(rng, dtype, m, k)
        w, tw = operand(rng, dtype, *((n, k) if transposed else (k, n)))
        if transposed: return capture(lambda: x @ w.T), lambda: torch.nn.functional.linear(tx, tw)
        return capture(lambda: x @ w), lambda: tx @ tw
    size = DTYPES[dtype].itemsize
    return Case(part, f"{m}x{n}x{k} {'x @ w.T' if transposed else 'x @ w'}", dtype, 2 * m * n * k,
                size * (m * k + n * k + m * n), make)


def attention(part: str, b: int, h: int, kv: int, s_q: int, s: int, d: int, dtype: str, causal: bool) -> Case:
    """softmax(q kᵀ) v of `h` heads over `kv` key heads; part "backward" is both passes."""
    def make() -> tuple[Run, Run]:
        rng = np.random.default_rng(s + d)
        (q, tq), (k, tk), (v, tv) = (operand(rng, dtype, b, heads, rows, d)
                                     for heads, rows in ((h, s_q), (kv, s), (kv, s)))
        gqa = h != kv
        def ours() -> Tensor: return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)
        def theirs() -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(tq, tk, tv, is_causal=causal,
                                                                    enable_gqa=gqa)
        if part != "backward": return capture(ours), theirs
        grad, tgrad = operand(rng, dtype, b, h, s_q, d)
        for x in (tq, tk, tv): x.requires_grad_()
        def gradients() -> Tensor:
            made = ours().gradient(q, k, v, gradient=grad)
            Tensor.realize(*made)
            return made[0]
        def torch_gradients() -> torch.Tensor:
            return torch.autograd.grad(theirs(), (tq, tk, tv), tgrad)[0]
        return capture(gradients), torch_gradients
    pairs = s_q * s if not causal else s_q * (s_q + 1) // 2
    flops = 4 * b * h * pairs * d * (7 if part == "backward" else 2) // 2
    nbytes = DTYPES[dtype].itemsize * b * d * (2 * h * s_q + 2 * kv * s)
    words = f"B{b} H{h}/{kv} {s_q}x{s} d{d}{' causal' if causal else ''}"
    return Case(part, words, dtype, flops, nbytes, make)


def cases(names: list[str]) -> Iterator[Case]:
    """Everything that is measured, by part."""
    for dtype in names:
        for n, k in ((2048, 2048), (8192, 2048), (2048, 8192), (32000, 2048), (128256, 2048)):
            yield linear("gemv", 1, n, k, dtype)
        yield linear("gemv", 1, 8192, 2048, dtype, transposed=False)
        for m in (4, 16): yield linear("gemv", m, 8192, 2048, dtype)
    for dtype in names:
        for m in (32, 64, 128, 256, 512, 1024, 2048): yield linear("gemm", m, 2048, 2048, dtype)
        for m in (32, 128, 512): yield linear("gemm", m, 8192, 2048, dtype)
        for m in (32, 128, 512): yield linear("gemm", m, 2048, 8192, dtype)
        yield linear("gemm", 512, 2048, 2048, dtype, transposed=False)
    for dtype in names:
        for s, d in ((128, 64), (512, 64), (1024, 64), (4096, 64), (1024, 128)):
            for causal in (False, True): yield attention("attention", 1, 8, 8, s, s, d, dtype, causal)
        yield attention("attention", 1, 32, 8, 1024, 1024, 64, dtype, True)
    for dtype in names:
        for s in (512, 1024): yield attention("backward", 1, 8, 8, s, s, 64, dtype, True)
    for dtype in names:
        for s in (512, 2048, 8192): yield attention("decode", 1, 32, 8, 1, s, 64, dtype, False)


# **** measuring ****

@functools.cache
def readers() -> tuple[Run, ...]:
    """Ways of reading 256 MB."""
    theirs = torch.ones(READ_BYTES // 4)
    x, w = Tensor.ones(1, 4096).contiguous().realize(), Tensor.ones(READ_BYTES // 4 // 4096, 4096)
    w = w.contiguous().realize()
    return theirs.sum, capture(lambda: x @ w.T)


def time_call(run: Run) -> float:
    """Seconds of a call."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def time_rested(run: Run, times: int) -> float:
    """Seconds of a call, of several one after the other, where no other thread spins and all cores are
    awake."""
    time.sleep(PAUSE_S)
    begun = time.perf_counter()
    while time.perf_counter() - begun < WARM_S: run()
    return time_call(lambda: [run() for _ in range(times)]) / times


def agree(ours: Run, theirs: Run, dtype: str) -> float:
    """The largest difference of both results, in units of the largest number, which must be small."""
    a, b = ours().float().numpy(), theirs().detach().float().numpy()
    worst = float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
    limit = 2e-5 if dtype == "float32" else 2e-2
    if not worst <= limit: raise SystemExit(f"results differ by {worst:.1e} of the largest, not {limit:.0e}")
    return worst


def measure(case: Case, repeat: int) -> dict[str, Any]:
    """One case: both sides in turns."""
    with Context(DEBUG=0): ours, theirs = case.make()
    worst = agree(ours, theirs, case.dtype)
    # small ones are done several times a turn, about 2 ms
    times = max(1, math.ceil(2e-3 / max(time_call(theirs), 1e-7)))
    runs: dict[str, list[float]] = {"ours": [], "torch": [], "read": []}
    def several(run: Run) -> float: return time_rested(run, times)
    for _ in range(repeat):
        runs["ours"].append(several(ours))
        runs["torch"].append(several(theirs))
        if case.part == "gemv": runs["read"].append(min(time_rested(run, 1) for run in readers()))
    ratios = [b / a for a, b in zip(runs["ours"], runs["torch"], strict=True)]
    return {"part": case.part, "name": case.name, "dtype": case.dtype, "flops": case.flops,
            "bytes": case.nbytes, "error": worst, "ratio": median(ratios), "ratios": ratios, "seconds": runs}


def row(done: dict[str, Any]) -> list[str]:
    """A line of the table."""
    ours, theirs = (median(done["seconds"][side]) for side in ("ours", "torch"))
    memory = done["part"] in ("gemv", "decode")
    unit = done["bytes"] if memory else done["flops"]
    share = ""
    if done["seconds"]["read"]:
        share = f"{done['bytes'] / ours / (READ_BYTES / median(done['seconds']['read'])):.2f}"
    met = done["ratio"] >= WANTED[done["part"]]
    return [f"{done['part']} {done['name']}", done["dtype"], f"{ours * 1e3:.3f}", f"{unit / ours / 1e9:.1f}",
            f"{unit / theirs / 1e9:.1f}", "GB/s" if memory else "GFLOP/s", f"{done['ratio']:.2f}",
            spread(done["ratios"]), share, "" if met else f"< {WANTED[done['part']]}"]


HEADER = ["", "dtype", "ms", "ours", "torch", "", "ratio", "spread", "of read", ""]


def plot(results: list[dict[str, Any]], path: Any) -> None:
    """The ratio of each case, a panel a part."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    parts = list(dict.fromkeys(done["part"] for done in results))
    figure, axes = pyplot.subplots(1, len(parts), figsize=(4 * len(parts), 5), layout="constrained",
                                   squeeze=False)
    for ax, part in zip(axes[0], parts, strict=True):
        mine = [done for done in results if done["part"] == part]
        names = [f"{done['name']} {done['dtype']}" for done in mine]
        ax.barh(names, [done["ratio"] for done in mine], color="#2a6f97")
        ax.axvline(WANTED[part], color="#bcb8b1")
        ax.invert_yaxis()
        ax.tick_params(labelsize=6)
        ax.set_title(f"{part}: torch's time / ours")
    figure.savefig(path, dpi=150)


def main() -> None:
    """Measures, prints and keeps the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", nargs="+", choices=list(WANTED), default=list(WANTED))
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--repeat", type=int, default=15, help="turns of each side (default 15)")
    parser.add_argument("--only", default="", help="cases whose words hold this text")
    parser.add_argument("--plot", action="store_true", help="draw the ratios as well")
    arguments = parser.parse_args()
    here = host()
    torch.set_num_threads(here.threads)
    wanted = [case for case in cases(arguments.dtype) if case.part in arguments.part
              and arguments.only in str(case)]
    results = [measure(case, arguments.repeat) for case in each(wanted)]
    print(f"{here.isa}, {here.threads} threads, torch {torch.__version__}")
    print(table(HEADER, [row(done) for done in results]))
    whole = not arguments.only and set(arguments.part) == set(WANTED)
    if not whole: return
    path = save("cpu_kernels", {"isa": str(here.isa), "threads": here.threads, "torch": torch.__version__,
                                "results": results})
    if arguments.plot: plot(results, path.with_suffix(".png"))


if __name__ == "__main__": main()
