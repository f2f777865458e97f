"""bench/gpu/run.py where there is no GPU: one line, exit code 2."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_one_line_says_what_is_missing():
    code = ("import sys; from bench.gpu import run; run.missing = lambda: 'no NVIDIA GPU'; "
            "sys.exit(run.main())")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert done.stdout == ""
    line, = done.stderr.splitlines()
    assert line.startswith("nothing to measure on: no NVIDIA GPU (needed: an NVIDIA GPU")
    assert "--emulate" in line
