"""Collectives of Tensors on emulated GPUs, a process for each."""
from __future__ import annotations

import pytest

from tests.support.dist import rank_programs


@pytest.mark.parametrize(("ranks", "how"), [(2, "short"), pytest.param(2, "all", marks=pytest.mark.slow),
                                            pytest.param(4, "all", marks=pytest.mark.slow)])
def test_tensors(ranks, how, monkeypatch):
    monkeypatch.setenv("DEV", "EMU")
    monkeypatch.setenv("NV_ALL_REDUCE", "nccl")
    made = rank_programs.run("dist/tensors_program.py", ranks, how, timeout_s=300)
    for rank, each in enumerate(made): assert f"rank {rank} of {ranks}: all right" in each.text, each.text
