"""Training over emulated GPUs, one a rank, with NCCL between them: the checks that ranks on CPUs run."""
from pathlib import Path

import pytest
import rank_programs

PROGRAM = Path(__file__).parents[2] / "unit" / "dist" / "train_program.py"


@pytest.mark.slow
def test_steps(monkeypatch):
    monkeypatch.setenv("DEV", "EMU")
    made = rank_programs.run(str(PROGRAM), 2, "overlap", "steps", timeout_s=500)
    for rank, each in enumerate(made): assert f"rank {rank} of 2: steps is right" in each.text, each.text
