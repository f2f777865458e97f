"""SIGKILL at any moment of training and saving: what is resumed is whole, recent, and ends in the same bits."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("fault_program.py")


def told(*arguments: object) -> dict[str, Any]:
    """What the program says."""
    made = subprocess.run([sys.executable, str(PROGRAM), *map(str, arguments)], capture_output=True, text=True,
                          timeout=300, check=False)
    assert made.returncode == 0, made.stderr
    assert made.stderr == ""
    found: dict[str, Any] = json.loads(made.stdout)
    return found


@pytest.mark.parametrize("how", ["SYNC", "ASYNC"])
@pytest.mark.parametrize("kills", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_run_ends_in_the_bits_of_one_that_was_never_stopped(kills: int, how: str):
    """Resumed from no earlier than an interval before the last save that was begun; without a thread, than an
    interval before the last step."""
    found = told("moments", kills, 7, how)
    assert found["made"] == found["wanted"]
    assert len(found["kills"]) == kills
    for kill in found["kills"]:
        assert kill["resumed"] >= kill["begun"] - found["interval"], kill
        if how == "SYNC": assert kill["resumed"] >= kill["reached"] - found["interval"], kill
    assert any(kill["saving"] for kill in found["kills"]), "some were killed while they saved"
    assert any(kill["resumed"] for kill in found["kills"]), "some resumed"


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_no_operation_on_files_is_one_that_must_not_be_the_last(every: int):
    """Each write, sync, rename and removal of saving, rotating and replacing kills the process. Nothing of it
    is left after the next run."""
    found = told("operations", every)
    assert len(found["kills"]) > 30 / every
    for kill in found["kills"]:
        assert kill["made"] == found["wanted"]
        assert kill["resumed"] >= kill["reached"] - found["interval"], kill
        assert kill["left"] == [".checkpoints.lock", "checkpoint-20"]
