"""Training over emulated GPUs, one a rank, with NCCL between them: the checks that ranks on CPUs run."""
from __future__ import annotations

import pytest

from tests.support.dist import rank_programs

PROGRAM = "dist/train_program.py"
# `memory` counts what the CPU holds
CHECKS = ("overlap", "fully_sharded", "zero_bubble", "steps", "adam", "pipelines", "sequence", "ring",
          "ring_both_ways")


def right(ranks: int, *checks: str) -> None:
    """Runs checks as ranks, which all have to say that each is right."""
    made = rank_programs.run(PROGRAM, ranks, *checks, timeout_s=900)
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
