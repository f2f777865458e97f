"""Threads that each run programs, capture, train and serve, in fresh processes."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import SUPPORT

SCRIPT = SUPPORT / "hooks" / "threads_script.py"
ROOT = SCRIPT.parents[3]


def ran(*arguments: object, **env: object) -> None:
    """The script in a process of its own ends well, and says nothing."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **{name: str(value) for name, value in env.items()}}
    done = subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], env=environment, timeout=300,
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, ""), done.stderr[-4000:]


@pytest.mark.slow
def test_eight_programs_from_an_empty_cache_and_then_a_full_one(tmp_path):
    for _ in range(2): ran("programs", DEV="CPU", CACHEDB=tmp_path / "cache.db")


def test_programs_gradients_captures_and_an_engine_side_by_side(tiny, tmp_path):
    ran("mixed", tiny, DEV="CPU", CACHEDB=tmp_path / "cache.db")


@pytest.mark.slow
def test_programs_gradients_and_captures_side_by_side_on_the_emulator(tmp_path):
    ran("mixed", DEV="EMU", CACHEDB=tmp_path / "cache.db")
