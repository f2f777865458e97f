"""bench/interop/upstream_tests.py, on a folder of tests made up here: what it reports, and its exit code."""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "bench" / "interop" / "upstream_tests.py"
TESTS = '''
import os, time
from tinygrad_nv import enabled
from test.helpers import VALUE

def test_same(): assert VALUE == 1
def test_fails_anyway(): assert VALUE == 2
def test_differs(): assert not enabled(), "the hooks are on"
def test_hangs(): time.sleep(60 * enabled())
def test_ends_the_process(): enabled() and os._exit(7)
def test_after_it(): pass
'''
DIFFER = ("test_differs: failed: AssertionError: the hooks are on", "test_hangs: timeout: no end within 2 s",
          "test_ends_the_process: crashed: exit code 7")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which one file of tests has everything that can happen, and a tinygrad that must not be
    met."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "test" / "unit").mkdir(parents=True)
    for name in ("test", "test/unit"): (folder / name / "__init__.py").write_text("")
    (folder / "test" / "helpers.py").write_text("VALUE = 1\n")
    (folder / "test" / "unit" / "test_all.py").write_text(TESTS)
    (folder / "test" / "unit" / "test_good.py").write_text("def test_good(): pass\n")
    (folder / "tinygrad").mkdir()
    (folder / "tinygrad" / "__init__.py").write_text("raise RuntimeError('of the checkout')\n")
    return folder


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where calls note outcomes: later ones take what the first has run."""
    return tmp_path_factory.mktemp("logs")


def called(checkout: Path, logs: Path, *more: str, known: list[dict[str, Any]] | None = None
           ) -> subprocess.CompletedProcess[str]:
    """The script, as a user calls it."""
    listed = logs / "known.json"
    listed.write_text(json.dumps(known or []))
    command = [sys.executable, SCRIPT, checkout, "--logs", logs, "--known", listed, "--dry", *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def row(done: subprocess.CompletedProcess[str]) -> str:
    """The table's first row."""
    return " ".join(done.stdout.splitlines()[1].split())


@pytest.fixture(scope="module")
def first(checkout: Path, logs: Path) -> subprocess.CompletedProcess[str]:
    """The call that runs the tests."""
    return called(checkout, logs, "--only", "test_all", "--timeout", "2")


@pytest.mark.slow
def test_what_passes_plain_and_not_hooked_is_reported(first: subprocess.CompletedProcess[str]):
    done = first
    assert done.returncode == 1, done.stderr
    assert [word for word in DIFFER if word not in done.stdout] == [], done.stdout
    assert row(done) == "test/unit/test_all.py 2 of 6 5 of 6 0 3"
    assert "test_fails_anyway" not in done.stdout
    assert "1 files of the checkout's tinygrad" in done.stdout
    assert "hooked test/unit/test_all.py: 1 crashed, 2 failed, 2 passed, 1 timeout" in done.stderr


@pytest.mark.slow
def test_known_differences_are_no_failure_when_they_fail_in_the_known_words(
        first: subprocess.CompletedProcess[str], checkout: Path, logs: Path):
    tests = [f"test/unit/test_all.py::{name}"
             for name in ("test_differs", "test_hangs", "test_ends_the_process")]
    known = [{"reason": "known, since", "devices": ["CPU"], "says": "", "tests": tests}]
    done = called(checkout, logs, "--only", "test_all", "--resume", known=known)
    assert (done.returncode, done.stdout.splitlines()[2].split()[-2:]) == (0, ["3", "0"]), done.stderr
    assert "test_differs: failed: known, since" in done.stdout
    other = [{**known[0], "says": "exit code"}, {**known[0], "devices": ["EMU"]}]
    done = called(checkout, logs, "--only", "test_all", "--resume", known=other)
    assert (done.returncode, done.stdout.splitlines()[2].split()[-2:]) == (1, ["1", "2"]), done.stderr


@pytest.mark.slow
def test_quick_runs_plain_what_did_not_pass(checkout: Path, tmp_path: Path):
    done = called(checkout, tmp_path, "--only", "test_good", "--quick")
    assert done.returncode == 0, done.stderr
    assert row(done) == "test/unit/test_good.py 1 of 1 0 of 0 0 0"


@pytest.mark.slow
def test_where_nothing_passes_nothing_was_compared(checkout: Path, tmp_path: Path):
    (broken := checkout / "test" / "unit" / "test_broken.py").write_text("import no_such_module\n")
    try: done = called(checkout, tmp_path, "--only", "test_broken")
    finally: broken.unlink()
    assert done.returncode == 1
    assert "no test passes on either side" in done.stderr


def test_a_folder_without_tests(tmp_path: Path):
    done = called(tmp_path, tmp_path)
    assert done.returncode == 2
    assert "has no folder test; expected: a checkout of tinygrad 0.14.0" in done.stderr
    (tmp_path / "test").mkdir()
    done = called(tmp_path, tmp_path, "--only", "test_none")
    assert done.returncode == 2
    assert "no test file is called test_none" in done.stderr
