"""Command lines that argparse refuses, and a system that refuses us."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tinygrad_nv.cli import console


@pytest.mark.parametrize(("arguments", "found"), [
    ([], "the following arguments are required: COMMAND"),
    (["serve-coffee"], "argument COMMAND: invalid choice: 'serve-coffee' (choose from"),
    (["generate", "--no-such-option", "hello"], "unrecognized arguments: --no-such-option"),
    (["generate", "model", "--json", "hello", "--nosuch"], "unrecognized arguments: hello --nosuch"),
    (["generate", "hello", "--seed"], "argument --seed: expected one argument"),
    (["chat", "model", "surplus"], "unrecognized arguments: surplus"),
    (["doctor", "surplus"], "unrecognized arguments: surplus"),
])
def test_usage_errors_exit_with_2(command, arguments: list[str], found: str):
    command(*arguments).refused("usage: tinygrad-nv", found)


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["chat", "-h"], ["explain", "-h"]])
def test_help_is_no_error(command, arguments: list[str]):
    outcome = command(*arguments).succeeded()
    assert outcome.err == ""
    assert outcome.out.startswith("usage: tinygrad-nv")


def test_an_error_of_the_system_is_told_in_its_words(command, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_): raise OSError(28, "No space left on device")
    monkeypatch.setattr(console, "load", fail)
    command("generate", tiny, "hello").refused(
        "the system refused: [Errno 28] No space left on device", "expected: files that can be read",
        "to fix:   check permissions and free space")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", [["-m", "tinygrad_nv"], [str(Path(sys.executable).parent / "tinygrad-nv")]],
                         ids=["module", "script"])
def test_a_setting_that_is_none(how: list[str]):
    """Read when the package is imported, before there is a command line to catch anything."""
    command, settings = [sys.executable, *how, "doctor"], {**os.environ, "NV": "yes"}
    done = subprocess.run(command, capture_output=True, text=True, env=settings, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tinygrad-nv: NV=yes\n  expected: one of 0, 1")
