"""Sums between ranks that are processes, by kernels over memory of emulated GPUs that they share."""
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
