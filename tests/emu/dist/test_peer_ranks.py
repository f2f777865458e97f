"""Ranks on emulated GPUs, a process for each: sums by kernels over memory that they share, collectives of
NCCL, and training as ranks on CPUs run it."""
from __future__ import annotations

import pytest

from tests.support.dist import rank_programs

PROGRAM = "dist/peers_program.py"


@pytest.mark.parametrize(("ranks", "how"), [
    (2, "leave"), *(pytest.param(ranks, how, marks=pytest.mark.slow) for ranks, how in (
        (2, "short"), (2, "all"), (4, "all"), (2, "differs"), (2, "nccl"), (2, "settings"), (2, "apart"),
        (2, "unlike")))])
def test_sums(ranks, how, monkeypatch):
    monkeypatch.setenv("DEV", "EMU")
    made = rank_programs.run(PROGRAM, ranks, how, timeout_s=300)
    for rank, each in enumerate(made): assert f"rank {rank} of {ranks}: all right" in each.text, each.text


@pytest.mark.slow
def test_a_rank_that_does_not_come(monkeypatch):
    """All end within NV_DIST_TIMEOUT and some seconds, with the rank and the collective named."""
    monkeypatch.setenv("DEV", "EMU")
    monkeypatch.setenv("NV_DIST_TIMEOUT", "3")
    made = rank_programs.run(PROGRAM, 2, "hangs", timeout_s=60)
    for each in made:
        assert each.code == 75, each.text
        assert "rank 1 has not reached all_reduce #" in each.text, each.text
        assert "of layers.3.down float[16] in 3 s" in each.text, each.text


@pytest.mark.slow
def test_a_rank_that_is_killed(monkeypatch):
    """The other does not wait for it in its kernel."""
    monkeypatch.setenv("DEV", "EMU")
    first, second = rank_programs.run(PROGRAM, 2, "killed", timeout_s=60)
    assert second.code == -9
    assert first.code == 75, first.text
    assert "rank 1 was lost while this rank was in all_reduce #" in first.text, first.text
    assert "of layers.3.down" in first.text, first.text


@pytest.mark.slow
def test_a_step_that_is_kept(monkeypatch, tmp_path):
    """A second start loads the kernel without tracing it; one that has not opened workspaces is told so."""
    monkeypatch.setenv("DEV", "EMU")
    monkeypatch.setenv("NV_CACHE_DIR", str(tmp_path))
    for how in ("first", "second", "late"):
        made = rank_programs.run("dist/kept_steps_program.py", 2, how, timeout_s=60)
        for rank, each in enumerate(made): assert f"rank {rank}: all right" in each.text, each.text


@pytest.mark.parametrize(("ranks", "how"), [(2, "short"), pytest.param(2, "all", marks=pytest.mark.slow),
                                            pytest.param(4, "all", marks=pytest.mark.slow)])
def test_tensors(ranks, how, monkeypatch):
    monkeypatch.setenv("DEV", "EMU")
    monkeypatch.setenv("NV_ALL_REDUCE", "nccl")
    made = rank_programs.run("dist/tensors_program.py", ranks, how, timeout_s=300)
    for rank, each in enumerate(made): assert f"rank {rank} of {ranks}: all right" in each.text, each.text


TRAINING = "dist/train_program.py"
# `memory` counts what the CPU holds
CHECKS = ("overlap", "fully_sharded", "zero_bubble", "steps", "adam", "pipelines", "sequence", "ring",
          "ring_both_ways")


def right(ranks: int, *checks: str) -> None:
    """Runs checks as ranks, which all have to say that each is right."""
    made = rank_programs.run(TRAINING, ranks, *checks, timeout_s=900)
    told = "".join(each.text for each in made)
    for rank in range(ranks):
        for check in checks: assert f"rank {rank} of {ranks}: {check} is right" in told, told


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None: monkeypatch.setenv("DEV", "EMU")


def test_a_pipeline_and_buckets() -> None: right(2, "overlap", "zero_bubble")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all(ranks: int) -> None: right(ranks, *CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_experts(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # tinygrad's float32 kernels for gradients of experts' matrices read rows of no expert, which nothing
    # wrote, and drop them
    monkeypatch.setenv("EMU_CHECK", "0")
    right(ranks, "expert")
