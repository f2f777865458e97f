"""Primitives of training over ranks, and meshes: each gives one device's result (train_program.py,
mesh_program.py have the checks, and run as ranks)."""
from __future__ import annotations

import pytest

from tests.support.dist import rank_programs

QUICK = ("overlap", "fully_sharded", "zero_bubble", "vocabulary")
SLOW = ("steps", "adam", "memory", "pipelines", "sequence", "expert", "ring", "ring_both_ways")


def right(program: str, ranks: int, *checks: str, mpi: bool = False) -> None:
    """Runs checks as ranks, which all have to say that each is right."""
    made = rank_programs.run(program, ranks, *checks, mpi=mpi, timeout_s=500)
    told = "".join(each.text for each in made)
    assert all(each.code == 0 for each in made), told
    for rank in range(ranks):
        for check in checks or ("meshes",): assert f"rank {rank} of {ranks}: {check} " in told, told


def test_two_ranks() -> None: right("dist/train_program.py", 2, *QUICK)


@pytest.mark.slow
def test_two_ranks_all() -> None: right("dist/train_program.py", 2, *SLOW)


@pytest.mark.slow
def test_four_ranks() -> None: right("dist/train_program.py", 4, *QUICK, *SLOW)


def test_two_ranks_over_mpi() -> None: right("dist/train_program.py", 2, *QUICK, "ring", mpi=True)


def test_four_ranks_over_mpi() -> None: right("dist/train_program.py", 4, *QUICK, mpi=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_mpi(ranks: int) -> None: right("dist/train_program.py", ranks, *QUICK, *SLOW, mpi=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_meshes(ranks: int) -> None: right("dist/mesh_program.py", ranks)
