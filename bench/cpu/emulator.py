"""The emulated GPU's speed on one core: warp-instructions a second, and whole launches, checks on and off.

    python bench/cpu/emulator.py [--repeat 5]

The kernels are Triton's, from the emulator's tests, at sizes of their own; Triton's compilation is not part
of any time. A launch is timed end to end on a new machine: memory allocated and copied, PTX parsed and
lowered, the grid run, results copied back. The interpreter itself is compiled once, before. "M/s": millions
of warp-instructions a second of running alone. Checks on and off take turns. Results are compared with the
reference in every repetition.
"""
from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from numpy.random import default_rng

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import save, spread, table

CASES = "tests.support.ptx.triton"
ARCHS = {80: "sm_80", 90: "sm_90a"}
# seconds asked for with checks on and off
WANTED = {"GEMM 256x256x256 bf16, TMA, wgmma": (2.0, 1.0), "attention B1 H2 S256 D64, TMA, wgmma": (6.0, 3.0)}


def workloads() -> dict[str, Any]:
    """Cases by title."""
    case, points, sums, products, maps, attention = (import_module(f"{CASES}_{name}") for name in (
        "case", "pointwise", "reductions", "matmul", "tma", "attention"))
    brain = maps.BF16
    made = [
        ("GEMM 256x256x256 bf16, TMA, wgmma", maps.device_kernel,
         maps.gemm(256, 256, 256, (128, 128, 64), brain, brain, "NT", host=False), 90),
        ("attention B1 H2 S256 D64, TMA, wgmma", attention.tma_kernel,
         attention.forward(2, 256, 64, (64, 64), brain, False, "host"), 90),
        ("GEMM 256x256x256 bf16, cp.async, mma", products.gemm_kernel,
         products.gemm(256, 256, 256, (128, 128, 32), brain), 80),
        ("attention B1 H2 S256 D64, cp.async, mma", attention.forward_kernel,
         attention.forward(2, 256, 64, (64, 64), brain, False), 80),
        ("softmax, 7 rows of 4000", sums.softmax_kernel, sums.softmax(points.torch.float32, 4000, 4096), 90),
        ("sort, 4 rows of 64", sums.sort_kernel, sums.sort(points.torch.int32), 90)]
    return {title: case.Case(title, *rest, {"num_stages": 3}) for title, *rest in made}


def once(case: Any, problem: Any, check: bool) -> tuple[float, float, int]:
    """One launch on a new machine: seconds end to end, seconds of running, warp-instructions."""
    from tinygrad_nv.ptx.emulator import Emulator
    solve: Callable[..., Any] = import_module(f"{CASES}_case").solve
    begun = time.perf_counter()
    done = solve(Emulator(arch=ARCHS[case.arch], check=check, seed=0), case, problem)
    whole = time.perf_counter() - begun
    assert not done.report.findings, done.report.findings
    assert not done.wrong(), done.wrong()
    return whole, done.report.seconds, done.report.stats.warp_instructions


def measure(case: Any, repeat: int) -> dict[str, Any]:
    """Checks on and off in turn, after one launch of each that is not counted."""
    runs: dict[str, list[tuple[float, float, int]]] = {"on": [], "off": []}
    problem = case.make(default_rng(0))
    for turn in range(repeat + 1):
        for checks, done in runs.items():
            result = once(case, problem, checks == "on")
            if turn: done.append(result)
    return {checks: {"seconds": [r[0] for r in done], "run_seconds": [r[1] for r in done],
                     "warp_instructions": done[0][2]} for checks, done in runs.items()}


def row(title: str, result: dict[str, Any]) -> list[str]:
    """A row of the table."""
    cells = [title, f"{result['on']['warp_instructions'] / 1e3:.0f}"]
    for number, checks in enumerate(("on", "off")):
        done = result[checks]
        rates = [done["warp_instructions"] / s / 1e6 for s in done["run_seconds"]]
        wanted = f"{WANTED[title][number]:.0f}" if title in WANTED else ""
        cells += [f"{median(rates):.2f}", f"{median(done['seconds']):.3f}", spread(done["seconds"]), wanted]
    return cells


def main() -> None:
    """Measures every workload and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5, help="launches of each workload (default 5)")
    arguments = parser.parse_args()
    if hasattr(os, "sched_setaffinity"): os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    results = {title: measure(case, arguments.repeat) for title, case in workloads().items()}
    header = ["", "k warp-instr"]
    for checks in ("on", "off"): header += [f"M/s, checks {checks}", "s", "spread", "wanted ≤"]
    print(table(header, [row(title, result) for title, result in results.items()]))
    save(f"emulator-{platform.machine()}", {"cores": 1, "repeat": arguments.repeat, "results": results})


if __name__ == "__main__": main()
