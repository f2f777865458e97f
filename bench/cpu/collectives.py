"""Collectives between two processes of this machine, beside plain mpi4py: bandwidth, and what a call costs.

    mpiexec -n 2 python3 bench/cpu/collectives.py                  # MPI, beside mpi4py
    tinygrad-nv launch -n 2 bench/cpu/collectives.py               # shared memory, alone

Calls are interleaved: one of each contender in turn, many times; medians, and the ratio's quartiles. "graph"
is a call in a replayed TinyJit: the time of a graph of 64 calls that depend on each other, over 64. Rank 0
prints a table and writes bench/results/collectives.json, under the name of the transport.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("NUM_CPU_THREADS", "1")

import numpy as np
from tinygrad import Tensor, TinyJit, dtypes

sys.path.insert(0, str(Path(__file__).parents[2]))

from tinygrad_nv.dist.collectives.functions import all_reduce
from tinygrad_nv.dist.group import Group, World, close, init

RESULTS = Path(__file__).parents[1] / "results" / "collectives.json"
SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20)     # bytes
CALLS = 64      # of a graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each size (default 2)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    world = init()
    rows = [row(world, world.group(), size, arguments.seconds) for size in SIZES]
    if world.rank == 0: report(world.transport, rows, arguments.out)
    close()


def row(world: World, group: Group, size: int, seconds: float) -> dict[str, Any]:
    """All contenders for float32 of so many bytes."""
    count = size // 4
    own, out = np.ones(count, np.float32), np.zeros(count, np.float32)
    contenders: dict[str, Callable[[], None]] = {
        "group": lambda: group.run("all_reduce", out, own, count, dtypes.float32)}
    if world.transport == "mpi":
        from mpi4py import MPI
        contenders["mpi4py"] = lambda: MPI.COMM_WORLD.Allreduce(own, out)
    contenders["graph"] = graph(group, count)
    word, met = np.zeros(1, np.int32), np.zeros(1, np.int32)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for rounds in range(agree_rounds(group, contenders, seconds)):
        for name, fn in list(contenders.items())[::1 - 2 * (rounds % 2)]:   # each is first as often
            # ranks begin together: else the first contender waits for the later rank
            group.run("all_reduce", met, word, 1, dtypes.int32, "min")
            begun = time.perf_counter()
            fn()
            took = time.perf_counter() - begun
            if rounds >= 3: times[name].append(took / (CALLS if name == "graph" else 1))
    found: dict[str, Any] = {name: statistics.median(each) * 1e6 for name, each in times.items()}
    if "mpi4py" in times:
        ratios = [theirs / ours for ours, theirs in zip(times["group"], times["mpi4py"], strict=True)]
        found["ratio"] = found["mpi4py"] / found["group"]
        found["quartiles"] = statistics.quantiles(ratios, n=4)
    return {"bytes": size, "rounds": len(times["group"]), **found}


def graph(group: Group, count: int) -> Callable[[], None]:
    """A replay of CALLS calls, each of the result of the one before."""
    given = Tensor(np.zeros(count, np.float32)).realize()

    @TinyJit
    def step(x: Tensor) -> Tensor:
        for i in range(CALLS): x = all_reduce(x, group, name=str(i))
        return x.realize()
    for _ in range(3): step(given)

    def replay() -> None: step(given)
    return replay


def agree_rounds(group: Group, contenders: dict[str, Callable[[], None]], seconds: float) -> int:
    """How many rounds all ranks do."""
    begun = time.perf_counter()
    for fn in contenders.values(): fn()
    mine = np.array([max(10, min(2000, seconds / max(time.perf_counter() - begun, 1e-6)))], np.int32)
    out = np.zeros(1, np.int32)
    group.run("all_reduce", out, mine, 1, dtypes.int32, "min")
    return int(out[0])


def report(transport: str, rows: list[dict[str, Any]], out: Path) -> None:
    """A table on stdout, and the results beside those of the other transport."""
    names = [name for name in ("group", "mpi4py", "graph") if name in rows[0]]
    heads = "".join(f"{name + ' us':>12}" for name in names)
    print(f"{'bytes':>10}{heads}{'GB/s':>8}  mpi4py / group")
    for each in rows:
        ratio = "" if "ratio" not in each else \
            f"{each['ratio']:.2f} ({each['quartiles'][0]:.2f} to {each['quartiles'][2]:.2f})"
        print(f"{each['bytes']:10}" + "".join(f"{each[name]:12.1f}" for name in names)
              + f"{each['bytes'] / each['group'] / 1e3:8.2f}  {ratio}")
    found = json.loads(out.read_text()) if out.is_file() else {}
    found[transport] = {"load": os.getloadavg()[0], "cores": os.cpu_count(), "rows": rows}
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__": main()
