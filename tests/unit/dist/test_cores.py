"""The cores of a host, shared by its ranks."""
from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.dist.dist_case import close, opened, ranks_of, together
from tinygrad_nv.dist import cores
from tinygrad_nv.dist.cores import CoreShare, neighbours, share


@pytest.mark.parametrize(("count", "threads", "ranks", "shares"), [
    (8, 8, 2, [((0, 1, 2, 3), 4), ((4, 5, 6, 7), 4)]),
    (5, 5, 2, [((0, 1), 2), ((2, 3, 4), 3)]),
    (2, 2, 4, [((0,), 1), ((1,), 1), ((0,), 1), ((1,), 1)]),
    (8, 4, 2, [((0, 1, 2, 3), 2), ((4, 5, 6, 7), 2)]),      # a quota
    (8, 1, 2, [((0, 1, 2, 3), 1), ((4, 5, 6, 7), 1)]),
    (0, 6, 2, [((), 3), ((), 3)])])                         # no masks
def test_shares(count: int, threads: int, ranks: int, shares: list[tuple[tuple[int, ...], int]]):
    found = [share(range(count), threads, rank, ranks) for rank in range(ranks)]
    assert found == [CoreShare(*each) for each in shares]


def test_threads_of_one_core_stay_together(tmp_path: Path):
    """As Linux numbers 2 sockets of 2 cores with 2 threads each."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 4 // 2}\n")
        (folder / "core_id").write_text(f"{core % 2}\n")
    assert neighbours(range(8), tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert neighbours([3, 1, 2], tmp_path / "none") == [1, 2, 3]


def test_variables_that_are_set_stay():
    assert CoreShare((0,), 3).environment({}) == {"NUM_CPU_THREADS": "3", "OMP_NUM_THREADS": "3"}
    assert CoreShare((0,), 3).environment({"NUM_CPU_THREADS": "8"}) == {"OMP_NUM_THREADS": "3"}


def test_a_mask_is_put_back():
    before = cores.mask()
    with cores.bind_cores(before[:1]): assert cores.mask() == before[:1]
    assert cores.mask() == before


@pytest.mark.skipif(len(cores.mask()) < 2, reason="needs two cores")
@pytest.mark.parametrize("bound", [False, True])
def test_ranks_of_another_launcher_take_their_shares(bound: bool, monkeypatch: pytest.MonkeyPatch):
    """Those that the launcher has bound to different cores keep these."""
    limits: list[int] = []
    monkeypatch.setattr(cores, "limit", limits.append)
    stores, every = opened(ranks_of(2)), cores.mask()

    def take(rank: int) -> tuple[CoreShare, tuple[int, ...]]:
        if bound: os.sched_setaffinity(0, every[rank:rank + 1])
        return cores.take(stores[rank]), cores.mask()

    found = together([lambda rank=rank: take(rank) for rank in range(2)])
    close(stores)
    assert [part.cores for part, _ in found] == [mask for _, mask in found]
    assert sorted(core for _, mask in found for core in mask) == sorted(every[:2] if bound else every)
    assert len(limits) == (0 if bound else 2)
    assert cores.mask() == every, "of this thread"
