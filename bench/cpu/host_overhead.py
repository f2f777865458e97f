"""Cost of a step of many kernels on the CPU: a pooled step beside TinyJit's replay, in one run.

    python bench/cpu/host_overhead.py [--kernels 300] [--repeat 500] [--dry]

The device is the emulated driver with every call that reaches a GPU stubbed out (submit, launch and update of
graphs, record and wait of events do nothing), so what is left is Python: ours, and tinygrad's. The driver's
own time comes on top on a GPU, in every row. Times are of the thread's processor (`time.thread_time`), so
that others who use the machine do not count. Each step has three small inputs, a weight for each kernel, and
one output, which is not read. Rows take turns of 20 steps, the first of which finds the processor's caches
full of the others' data:

 pool             GraphPool on numpy arrays: staging, one upload, one graph launch
 pool, Variable   the same with a bound Variable that changes at every step and is an argument of each tenth
                  kernel, or of all: nodes are updated
 TinyJit          tinygrad's TinyJit on the same device (graphs of 32, 64, … kernels, by our NVGraph), given
                  Tensors that are there already; and Tensors made of numpy arrays at every step, as inputs
                  come to a pooled step
 NULL             tinygrad alone: TinyJit on its NULL device, which neither compiles nor launches anything and
                  replays a graph for nothing; and without graphs (JIT=2), launch by launch
"""
from __future__ import annotations

import argparse
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tinygrad import Tensor, TinyJit, UOp, Variable, dtypes
from tinygrad.helpers import JIT, Context

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.lib.measure import each, save, spread, table
from tinygrad_nv import hooks
from tinygrad_nv.graphs import GraphPool, Input
from tinygrad_nv.runtime.device import NVDevice
from tinygrad_nv.runtime.driver import Event, Node, Stream, Work
from tinygrad_nv.runtime.emulated.driver import EmulatedDriver
from tinygrad_nv.runtime.emulated.graph import EmulatedExecutable, EmulatedGraph

TARGET_US = 60.0
TURN = 20           # steps
ROWS, PAGES = 4, 16
INPUTS = {"tokens": Input((), dtypes.int32), "tables": Input((PAGES,), dtypes.int32),
          "lengths": Input((), dtypes.int32)}


class _Executable(EmulatedExecutable):
    """A graph that does nothing."""

    def update(self, node: Node, work: Work) -> None: pass

    def launch(self, stream: Stream | None = None) -> None: self.launches += 1


class _Graph(EmulatedGraph):
    def instantiate(self) -> EmulatedExecutable: return _Executable(self)


class _Driver(EmulatedDriver):
    """The emulated driver, without work."""

    def graph(self) -> EmulatedGraph: return _Graph(self)

    def submit(self, work: Work, stream: Stream | None = None) -> None: pass

    def record(self, event: Event, stream: Stream | None = None) -> None: pass

    def wait_for(self, event: Event) -> None: pass


class STUBDevice(NVDevice):
    """`STUB`: a device of ours over that driver."""

    def __init__(self, device: str) -> None: super().__init__(device, _Driver("sm_90a", check=False))


@functools.cache
def weights_of(device: str, kernels: int) -> list[Tensor]:
    """The weights that all rows of a device share: tinygrad looks through live Tensors when it realizes
    one."""
    return [Tensor(np.ones(8, np.float32), device=device).realize() for _ in range(kernels)]


def step_of(device: str, kernels: int, every: int = 0) -> Callable[..., Tensor]:
    """A step of so many kernels; with `every`, each such kernel takes the Variable `n`."""
    weights = weights_of(device, kernels)
    def step(tokens: Tensor, tables: Tensor, lengths: Tensor, n: UOp | None = None) -> Tensor:
        h = tokens.reshape(-1, 1).cast(dtypes.float32).expand(-1, 8)
        for k, weight in enumerate(weights):
            h = h * weight if k else (h + tables[:, :8] + lengths.reshape(-1, 1)) * weight
            if every and k % every == 0: h = h + n
            h = h.contiguous().realize()
        return h
    return step


def arrays(seed: int) -> dict[str, np.ndarray]:
    """The inputs of a step."""
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 9, (ROWS, *given.shape)).astype(np.int32)
            for name, given in INPUTS.items()}


def pool_step(kernels: int, every: int = 0) -> Callable[[int], None]:
    """A pooled step."""
    pool = GraphPool(step_of("STUB", kernels, every), INPUTS, (ROWS,), "STUB")
    given, n = [arrays(seed) for seed in range(4)], Variable("n", 0, 1023)
    def run(k: int) -> None:
        if every: pool(**given[k % 4], n=n.bind(k % 1024))
        else: pool(**given[k % 4])
    for k in range(3): run(k)
    (stats,) = pool.stats().buckets
    graph = pool.buckets[ROWS].graph
    assert graph is not None
    assert len(graph.calls) == kernels
    assert bool(stats.updates) == bool(every)
    return run


def replay_step(device: str, kernels: int, fresh: bool = False, graphs: bool = True) -> Callable[[int], None]:
    """TinyJit's replay of the same step."""
    jit: Any = TinyJit(step_of(device, kernels))
    given = [arrays(seed) for seed in range(4)]
    def make_inputs(k: int) -> dict[str, Tensor]:
        return {name: Tensor(value, device=device).realize() for name, value in given[k % 4].items()}
    ready = [make_inputs(k) for k in range(4)]
    def run(k: int) -> None: jit(**(make_inputs(k) if fresh else ready[k % 4]))
    with Context(JIT=JIT.value if graphs else 2):
        for k in range(3): run(k)
    return run


def time_rows(rows: Sequence[tuple[str, Callable[[int], None]]], repeat: int) -> dict[str, list[float]]:
    """Microseconds of each row's steps, which take turns."""
    spent: dict[str, list[float]] = {name: [] for name, _ in rows}
    gc.collect()
    for turn in range(0, repeat, TURN):
        for name, run in rows:
            for k in range(turn, turn + TURN):
                begun = time.thread_time()
                run(k)
                spent[name].append((time.thread_time() - begun) * 1e6)
    return spent


def main() -> None:
    """Makes all rows, times them, and writes the result."""
    parser = argparse.ArgumentParser(description=" ".join((__doc__ or "").split("\n\n")[0].split()))
    parser.add_argument("--kernels", type=int, default=300, help="of a step (default 300)")
    parser.add_argument("--repeat", type=int, default=500, help="steps of each row (default 500)")
    parser.add_argument("--dry", action="store_true", help="print only")
    args = parser.parse_args()
    hooks.add_device("STUB", STUBDevice)
    made: list[tuple[str, Callable[[], Callable[[int], None]]]] = [
        ("pool", lambda: pool_step(args.kernels)),
        ("pool, Variable in every tenth kernel", lambda: pool_step(args.kernels, 10)),
        ("pool, Variable in every kernel", lambda: pool_step(args.kernels, 1)),
        ("TinyJit, Tensors that are there", lambda: replay_step("STUB", args.kernels)),
        ("TinyJit, Tensors made of arrays", lambda: replay_step("STUB", args.kernels, fresh=True)),
        ("NULL, TinyJit, Tensors that are there", lambda: replay_step("NULL", args.kernels)),
        ("NULL, TinyJit, Tensors made of arrays", lambda: replay_step("NULL", args.kernels, fresh=True)),
        ("NULL, no graphs, Tensors that are there", lambda: replay_step("NULL", args.kernels, graphs=False)),
    ]
    runs = dict(made)
    rows = [(name, runs[name]()) for name in each([name for name, _ in made])]
    time_rows(rows, 20)
    spent = time_rows(rows, args.repeat)
    pool = median(spent["pool"])
    print(table((f"{args.kernels} kernels, µs a step", "median", "10% … 90%", "min … max", "× pool"),
                [(name, f"{median(us):.1f}", " … ".join(f"{np.percentile(us, p):.1f}" for p in (10, 90)),
                  spread(us), f"{median(us) / pool:.1f}") for name, us in spent.items()]))
    print(f"pool: {pool:.1f} µs, wanted at most {TARGET_US:.0f} µs for 300 kernels")
    record = {"kernels": args.kernels, "repeat": args.repeat, "target_us": TARGET_US, "load": os.getloadavg(),
              "us": {name: {"median": median(us), "p10": float(np.percentile(us, 10)),
                            "p90": float(np.percentile(us, 90)), "min": min(us), "max": max(us)}
                     for name, us in spent.items()}}
    if not args.dry: save("host_overhead", record)


if __name__ == "__main__": main()
