"""The first answer on a machine compiles few kernels, and the next process none."""
from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

# tinygrad's four for its queues, one for the pool of threads, the rest for the bundled model: its prompt
# in a chunk of 16, its step, its sampler
MOST = 25


def compiled(database: Path) -> int:
    """How many kernels the compiler's cache holds."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        names = [name for name, in connection.execute("select name from sqlite_master where type='table'")]
        return sum(connection.execute(f"select count(*) from [{name}]").fetchone()[0]
                   for name in names if name.startswith("compile_"))


def test_the_first_answer_compiles_few_kernels_and_the_second_none(tmp_path: Path):
    database = tmp_path / "cache.db"
    own = {"CACHEDB": str(database), "NV_CACHE_DIR": str(tmp_path / "cache"), "DEV": "CPU",
           "NUM_CPU_THREADS": "2"}
    command = [sys.executable, "-m", "tinygrad_nv", "generate", "Once upon a time", "--max-tokens", "3",
               "--seed", "1", "--json"]
    found, answers = [], []
    for _ in range(2):
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=120,
                              check=False)
        assert done.returncode == 0, done.stderr
        found.append(compiled(database))
        answers.append(done.stdout.split('"ttft_s"')[0])
    assert 0 < found[0] <= MOST
    assert found[1] == found[0]
    assert answers[1] == answers[0]
