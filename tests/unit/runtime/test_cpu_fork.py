"""A forked child has none of its parent's threads; its graphs must run all the same."""
from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, signal
from tinygrad_nv import Tensor, TinyJit
from tinygrad.engine.realize import get_graph_runtime
jit = TinyJit(lambda x: ((x @ x).contiguous() + 1).contiguous().realize())
x = Tensor.ones(512, 512, device="CPU").contiguous().realize()
for _ in range(4): jit(x)
assert get_graph_runtime(jit.captured.linear.src[0].src[0]).parallel
if (child := os.fork()) == 0:
    signal.alarm(20)
    os._exit(0 if jit(x).numpy()[3, 5] == 513 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), jit(x).numpy()[3, 5])
"""


def test_a_child_replays_with_threads_of_its_own():
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("0 513.0\n", "")
