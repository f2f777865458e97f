"""How long a kernel of the tile language takes to build, and to call again, beside Triton's compiler.

    python bench/language_build.py [--repeat 3] [--json]

Protocol: "reading" runs the user's function into the Tile IR, "writing" makes PTX of it, both in seconds of
this process's CPU; "ptxas" and "triton" are seconds on the clock. Triton's is `triton.compile` with an empty
cache, its own ptxas included. Everything is imported, and one kernel of each side built, before; each
repetition has an extent that none had. Blocks, warps and stages are the same on both sides. "first" is
reading and writing of a process's first kernel, where each kind of instruction is checked for the first time.
"cached call" is a call for which all of it is there: microseconds of Python until the result is in tinygrad's
graph, beside those of `a @ b` in tinygrad. Medians.
"""
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import attention_peers
import gemm_peers
from attention_peers import Flash
from compile_time import empty_caches
from gemm_peers import Peer
from kernels_language import matmul
from measure import table
from tinygrad import Tensor, dtypes

from tinygrad_nv.language.kernels import Kernel
from tinygrad_nv.ptx.assemble import assemble
from tinygrad_nv.stdlib import attention
from tinygrad_nv.tile.language.gpu import build
from tinygrad_nv.tile.language.program import written
from tinygrad_nv.tile.language.schedule import TileSchedule
from tinygrad_nv.tile.template import GPU

RESULTS = Path(__file__).parent / "results" / "language_build.json"
FRESH = count(1024, 128)
MOST, SHARE = 50e-3, 0.5        # seconds of reading and writing; of Triton's time
CALLS = 200


@dataclass(frozen=True)
class Case:
    """A kernel with a schedule, and Triton's of the same blocks. `given(extent)`: its arguments."""
    name: str
    arch: str
    kernel: Kernel
    schedule: TileSchedule
    given: Callable[[int], tuple[Any, ...]]
    constants: dict[str, Any]
    triton: Callable[[], Any]

    def __str__(self) -> str: return f"{self.name} {self.arch}"


def empty(*shape: int, dtype: Any = dtypes.bfloat16) -> Tensor:
    """A Tensor that is never realized."""
    return Tensor.empty(*shape, dtype=dtype, device="CPU")


def cases() -> list[Case]:
    """Matmul, and attention forward and backward, where the same blocks fit both sides."""
    made = []
    for arch, block, warps, stages, kind in (("sm_80", (128, 128, 32), 4, 4, "pointers"),
                                             ("sm_90a", (128, 256, 64), 8, 3, "descriptors")):
        peer = Peer(kind, block, warps, stages)
        own = TileSchedule(block=block[:2], k=block[2], warps=warps, stages=stages)
        made.append(Case("matmul", arch, matmul, own, _two, {}, partial(gemm_peers.compiled, peer, arch)))
        for name, kernel, given, flash in (
                ("flash forward", attention.forward, _three, Flash("forward", 64, (128, 64), 8, 3)),
                ("flash gradient of k, v", attention.gradient_kv, _six, Flash("dk, dv", 64, (64, 64), 4, 2))):
            own = TileSchedule(block=flash.block, warps=flash.warps, stages=flash.stages)
            made.append(Case(name, arch, kernel, own, given, {"causal": False, "scale": 0.125},
                             partial(attention_peers.compiled, flash, arch)))
    return made


def _two(n: int) -> tuple[Tensor, ...]: return empty(n, n), empty(n, n)


def _three(n: int) -> tuple[Tensor, ...]: return (empty(1, 4, n, 64),) * 3


def _six(n: int) -> tuple[Tensor, ...]:
    return (*((empty(1, 4, n, 64),) * 4), *((empty(1, 4, n, dtype=dtypes.float32),) * 2))


def ours(case: Case) -> dict[str, float]:
    """Seconds of each step, for an extent that none had before."""
    kernel = case.kernel.with_schedule(case.schedule)
    bound = kernel.bind(case.given(next(FRESH)), case.constants, case.schedule)
    begun = time.process_time()
    program = written(kernel.fn, bound.arguments, bound.parameters, case.schedule, None, bound.result)
    read = time.process_time()
    text = build(program, case.schedule, GPU(case.arch)).ptx
    wrote = time.process_time()
    clock = time.perf_counter()
    assemble(text, case.arch)
    return {"reading": read - begun, "writing": wrote - read, "ptxas": time.perf_counter() - clock}


def theirs(case: Case) -> float:
    """Seconds of Triton's compiler."""
    begun = time.perf_counter()
    case.triton()
    return time.perf_counter() - begun


def first(number: int) -> float:
    """Seconds of reading and writing of a process's first kernel."""
    code = (f"import language_build as b; made = b.ours(b.cases()[{number}]); "
            "print(made['reading'] + made['writing'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=Path(__file__).parent)
    return float(done.stdout.split()[-1])


def calls() -> dict[str, float]:
    """Microseconds of calls whose kernels are there."""
    a, q = empty(128, 128).realize(), empty(1, 2, 128, 64).realize()
    made = {"matmul": lambda: matmul(a, a), "a @ b in tinygrad": lambda: a @ a,
            "flash forward": lambda: attention.forward(q, q, q, causal=False, scale=0.125)}
    return {name: _call(fn) for name, fn in made.items()}


def _call(fn: Callable[[], Any]) -> float:
    fn()
    taken = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        fn()
        taken.append(time.perf_counter() - begun)
    return median(taken) * 1e6


def measured(number: int, case: Case, repeat: int) -> dict[str, Any]:
    """Both sides in turn, after one of each that does not count."""
    runs, others = list[dict[str, float]](), list[float]()
    for turn in range(repeat + 1):
        with empty_caches(): own, other = ours(case), theirs(case)
        if turn: runs, others = [*runs, own], [*others, other]
    made = {name: median(run[name] for run in runs) for name in runs[0]}
    whole = sum(made.values())
    return {**made, "first": first(number), "triton": median(others), "ratio": whole / median(others)}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help=f"writes {RESULTS.name}, too")
    given = parser.parse_args()
    results = {str(case): measured(i, case, given.repeat) for i, case in enumerate(cases())}
    names = ("reading", "writing", "first", "ptxas", "triton")
    rows = [[title, *(f"{1e3 * each[name]:.0f}" for name in names), f"{each['ratio']:.2f}"]
            for title, each in results.items()]
    print(table(["ms", *names, "ratio"], rows))
    print(f"wanted: reading and writing at most {1e3 * MOST:.0f} ms, a ratio of at most {SHARE}")
    taken = calls()
    print(table(["cached call", "µs"], [[name, f"{each:.0f}"] for name, each in taken.items()]))
    if given.json:
        RESULTS.write_text(json.dumps({"kernels": results, "calls_us": taken}, indent=1) + "\n")


if __name__ == "__main__": main()
