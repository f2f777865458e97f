"""How ranks are started, and find each other."""
from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from tinygrad_nv.engine.executor import connections
from tinygrad_nv.errors import DistError
connections.COMMAND = (sys.executable, "-c", "import sys; sys.exit('no such library')")
try: connections.open_ranks(2, 1)
except DistError as error: print(error.found.splitlines()[-1], error.ranks)
"""


def test_a_rank_that_ends_before_it_has_connected() -> None:
    """Opening the ranks ends with its words at once, and not when the store waits no longer."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=40,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "  | no such library (1,)\n"
