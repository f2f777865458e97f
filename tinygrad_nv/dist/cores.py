"""The cores of a host, shared by the ranks that run on it.

Protocol: a launcher gives each local rank its `share` of its own cores, as the affinity mask and as
NUM_CPU_THREADS and OMP_NUM_THREADS. Ranks that another program started call `take(store)`: if all ranks of a
host have the same mask, they share it; if masks differ, that program has bound the ranks already. A variable
that the user set stays as it is.
"""
from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tinygrad_nv.dist.store import Store
from tinygrad_nv.runtime.cpu.available import available

VARIABLES = ("NUM_CPU_THREADS", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class CoreShare:
    """Cores by number (none where the system has no masks), and threads to compute with."""
    cores: tuple[int, ...]
    threads: int

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables for the threads, but those that are set."""
        return {name: str(self.threads) for name in VARIABLES if not environ.get(name)}


def mask() -> tuple[int, ...]:
    """The cores that this thread may run on."""
    return tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()


def neighbours(cores: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Cores by socket and physical core: both threads of one stand side by side."""
    def place(core: int) -> tuple[int, int, int]:
        folder = root / f"cpu{core}" / "topology"
        try: return (int((folder / "physical_package_id").read_text()),
                     int((folder / "core_id").read_text()), core)
        except (OSError, ValueError): return 0, core, core
    return sorted(cores, key=place)


def share(cores: Sequence[int], threads: int, local_rank: int, local_world_size: int) -> CoreShare:
    """The part of one rank: neighbouring cores, as many as the others have or one more; where a quota leaves
    fewer threads than cores, its part of these. More ranks than cores take turns on them."""
    n = len(cores)
    first, end = n * local_rank // local_world_size, n * (local_rank + 1) // local_world_size
    if 0 < n < local_world_size: first, end = local_rank % n, local_rank % n + 1
    own, fair = tuple(cores[first:end]), max(1, threads // local_world_size)
    return CoreShare(own, len(own) if threads == n else min(fair, len(own) or fair))


def of_host(local_rank: int, local_world_size: int) -> CoreShare:
    """The share of a rank in what this process has."""
    return share(neighbours(mask()), available().threads, local_rank, local_world_size)


@contextmanager
def bind_cores(cores: tuple[int, ...]) -> Iterator[None]:
    """Processes and threads that this thread starts inside may run on these cores."""
    before = mask()
    if cores and before: os.sched_setaffinity(0, cores)
    try: yield
    finally:
        if cores and before: os.sched_setaffinity(0, before)


def take(store: Store) -> CoreShare:
    """Takes this rank's share, in effect for threads that are started from now on. All ranks call it."""
    ranks, own = store.ranks, mask()
    facts = json.dumps([socket.gethostname(), ranks.local_rank, own]).encode()
    every = [json.loads(each) for each in store.all_gather("cores", facts)]
    here = [each for each in every if each[0] == socket.gethostname()]
    if any(tuple(each[2]) != own for each in here): return CoreShare(own, available().threads)
    place = sorted(each[1] for each in here).index(ranks.local_rank)
    found = share(neighbours(own), available().threads, place, len(here))
    if found.cores: os.sched_setaffinity(0, found.cores)
    limit(found.threads)
    return found


def give_back(cores: tuple[int, ...]) -> None:
    """Has this thread run on these cores again, and kernels of this process on as many as they had."""
    if cores: os.sched_setaffinity(0, cores)
    if "tinygrad.helpers" in sys.modules:
        from tinygrad_nv.runtime.cpu import threads as of_kernels
        of_kernels.unlimit()


def limit(threads: int) -> None:
    """The number of threads for kernels of this process, unless the user set it."""
    if "tinygrad.helpers" in sys.modules:
        from tinygrad_nv.runtime.cpu import threads as of_kernels
        of_kernels.limit(threads)
    else: os.environ.setdefault("NUM_CPU_THREADS", str(threads))     # read when tinygrad is imported
