"""Collectives between processes, by shared memory and by MPI: every kind, dtype and axis, gradients, replays
of graphs, and ranks that do not do the same."""
from __future__ import annotations

import time

import pytest

from tests.support.dist import rank_programs
from tinygrad_nv.dist.processes import ENDED


@pytest.mark.parametrize(("ranks", "mpi", "more"), [
    (2, False, ()), (2, True, ("few",)), (4, True, ("few",)),
    *(pytest.param(ranks, mpi, (), marks=pytest.mark.slow) for ranks in (2, 3, 4) for mpi in (False, True))])
def test_collectives(ranks: int, mpi: bool, more: tuple[str, ...]) -> None:
    made = rank_programs.run("dist/collectives_program.py", ranks, *more, mpi=mpi)
    told = "".join(each.text for each in made)
    over = "mpi" if mpi else "shared"
    assert all(each.code == 0 for each in made), told
    for rank in range(ranks): assert f"rank {rank} of {ranks}: all right over {over}" in told, told


BOTH = ("all_reduce #1 of layers.3.down float[64]", "rank 0 calls", "rank 1 calls")


@pytest.mark.parametrize(("how", "words"), [
    ("kind", (*BOTH, "rank 1 calls all_gather #1")),
    pytest.param("count", (*BOTH, "float[32]"), marks=pytest.mark.slow),
    pytest.param("dtype", (*BOTH, "int[64]"), marks=pytest.mark.slow),
    ("lost", ("rank 1 was lost", "its process ended without closing the store")),
    pytest.param("left", ("rank 1 ended while this rank was in all_reduce #1 of layers.3.down float[64]",),
                 marks=pytest.mark.slow),
    pytest.param("late", ("rank 1 did not come to all_reduce #1 of layers.3.down float[64] within 1 s",),
                 marks=pytest.mark.slow)])
def test_ranks_that_differ(how: str, words: tuple[str, ...]) -> None:
    begun = time.monotonic()
    made = rank_programs.run("dist/collectives_program.py", 2, how)
    assert [word for word in words if word not in made[0].text] == [], made
    assert made[0].code != 0, made
    if how not in ("late", "lost", "left"): assert made[1].code != 0, made
    assert time.monotonic() - begun < 30 * rank_programs.SLOWER


def test_a_message_of_another_shape() -> None:
    made = rank_programs.run("dist/collectives_program.py", 2, "message")
    assert made[1].code == 3, made
    assert "rank 1 calls recv #1 of a tensor float[32], rank 0 calls send #1 of a tensor float[64]" in \
        made[1].text, made


def test_a_rank_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NV_DIST_TIMEOUT", "2")
    begun = time.monotonic()
    made = rank_programs.run("dist/collectives_program.py", 2, "hang")
    assert time.monotonic() - begun < 30 * rank_programs.SLOWER
    for each in made:
        assert each.code == ENDED, made
        assert "rank 1 has not reached all_reduce #1 of layers.3.down float[64] in 2 s" in each.text, made
