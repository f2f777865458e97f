"""The part "all_reduce" of bench/gpu/run.py on emulated GPUs: its rows are those of the committed results,
and it finds kernels that sum wrongly."""
from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gpu import all_reduce as gpu_all_reduce

BENCH = Path(__file__).parents[3] / "bench"
OPTIONS = Namespace(emulate=True, arch="sm_90a", seed=1, only="")
ROWS = ("all_reduce_one_shot_2_10007_float_0", "all_reduce_two_shot_2_16384_bf16_4096")


def row(name: str) -> dict[str, object]: return gpu_all_reduce.open_worker(OPTIONS)(name, 10.0)


def test_rows_are_those_of_the_results() -> None:
    results = json.loads((BENCH / "results" / "all_reduce_h100-80gb-hbm3.json").read_text())
    assert sorted(gpu_all_reduce.cases()) == sorted(each["case"] for each in results["rows"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_kernels_are_right(name: str) -> None:
    assert row(name) == {"status": "emulated", "why": "as it must be"}


def test_wrong_sums_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    build = gpu_all_reduce.TABLE.build

    def built(*args):
        made = build(*args)
        assert "add.f32" in made.ptx
        return replace(made, ptx=made.ptx.replace("add.f32", "sub.f32"))
    monkeypatch.setattr(gpu_all_reduce.TABLE, "build", built)
    assert row(ROWS[0])["why"] == "x + 0: sums differ"


def test_a_replay_that_differs_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are right when they are asked for, and spoiled by the time that a graph compares them."""
    differ = gpu_all_reduce.Ranks.differ
    monkeypatch.setattr(gpu_all_reduce.Ranks, "differ", lambda self, rank, wanted:
                        [*(self.spoil(rank) if rank == 1 else []), *differ(self, rank, wanted)])
    found = row(ROWS[0])
    assert found["status"] == "disagrees"
    assert found["wrong_words"] == [0, 2 * 299 * 2 * gpu_all_reduce.SETS]
