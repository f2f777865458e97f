"""SIGKILL at any moment of training and saving: what is resumed is whole, recent, and ends in equal bits."""
from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support import SUPPORT

PROGRAM = SUPPORT / "train" / "fault_program.py"


@pytest.fixture(scope="module", params=[(5, 5), pytest.param((20, 1), marks=pytest.mark.slow)],
                ids=["5 kills", "20 kills"])
def told(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the program says: of so many kills, and of each n-th operation."""
    kills, every = request.param
    made = subprocess.run([sys.executable, str(PROGRAM), str(kills), "7", str(every)], capture_output=True,
                          text=True, timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    found: dict[str, Any] = json.loads(made.stdout)
    assert len(found["SYNC"]["kills"]) == len(found["ASYNC"]["kills"]) == kills
    assert len(found["operations"]["kills"]) > 30 // every
    return found


@pytest.mark.parametrize("how", ["SYNC", "ASYNC"])
def test_a_killed_run_ends_in_the_bits_of_one_that_was_never_stopped(told: dict[str, Any], how: str):
    """Resumed from no earlier than an interval before the last save that was begun; without a thread, than an
    interval before the last step."""
    found = told[how]
    assert found["made"] == found["wanted"]
    for kill in found["kills"]:
        assert kill["resumed"] >= kill["begun"] - found["interval"], kill
        if how == "SYNC": assert kill["resumed"] >= kill["reached"] - found["interval"], kill
    both = told["SYNC"]["kills"] + told["ASYNC"]["kills"]   # on a busy machine few of one reach a save
    assert any(kill["saving"] for kill in both), "some were killed while they saved"
    assert any(kill["resumed"] for kill in both), "some resumed"


def test_no_operation_on_files_is_one_that_must_not_be_the_last(told: dict[str, Any]):
    """Writes, syncs, renames and removals of saving, rotating and replacing kill the process. Nothing of it
    is left after the next run."""
    found = told["operations"]
    for kill in found["kills"]:
        assert kill["made"] == found["wanted"]
        assert kill["resumed"] >= kill["reached"] - found["interval"], kill
        assert kill["left"] == [".checkpoints.lock", "checkpoint-20"]
