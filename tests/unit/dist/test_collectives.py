"""Collectives between processes, by shared memory and by MPI: every kind, dtype and axis, gradients, replays
of graphs, and ranks that do not do the same."""
from __future__ import annotations

import time

import pytest
import rank_programs


@pytest.mark.parametrize("mpi", [False, True], ids=["shared", "mpi"])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_collectives(ranks: int, mpi: bool) -> None:
    made = rank_programs.run("collectives_program.py", ranks, mpi=mpi)
    told = "".join(each.text for each in made)
    over = "mpi" if mpi else "shared"
    assert all(each.code == 0 for each in made), told
    for rank in range(ranks): assert f"rank {rank} of {ranks}: all right over {over}" in told, told


@pytest.mark.parametrize(("how", "words"), [
    ("count", "rank 0 calls all_reduce #1 of layers.3.down, 64 float, rank 1 calls all_reduce #1"),
    ("kind", "rank 0 calls all_reduce #1 of layers.3.down, 64 float, rank 1 calls all_gather"),
    ("dtype", "64 int"),
    ("lost", "rank 1 is lost: its process ended without closing the store"),
    ("late", "rank 1 did not come to all_reduce #1 of layers.3.down, 64 float within 1 s")])
def test_ranks_that_differ(how: str, words: str) -> None:
    begun = time.monotonic()
    made = rank_programs.run("collectives_program.py", 2, how)
    assert words in made[0].text, made
    assert made[0].code == 3, made
    if how not in ("late", "lost"): assert made[1].code == 3, made
    assert time.monotonic() - begun < 30
