"""Collectives of Tensors on emulated GPUs, a process for each."""
from __future__ import annotations

from pathlib import Path

import pytest
import rank_programs


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tensors(ranks, monkeypatch):
    monkeypatch.setenv("DEV", "EMU")
    made = rank_programs.run(str(Path(__file__).with_name("tensors_program.py")), ranks, timeout_s=300)
    for rank, each in enumerate(made): assert f"rank {rank} of {ranks}: all right" in each.text, each.text
