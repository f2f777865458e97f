"""Programs of tests run as several ranks, by the variables that launchers set, or by mpiexec."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support import SUPPORT, with_root

# by which limits of time are multiplied: C with sanitizers is slower
SLOWER = float(os.environ.get("TEST_TIME_FACTOR", "1"))


@dataclass(frozen=True)
class Ran:
    """What a rank came to."""
    code: int
    text: str


def run(program: str, ranks: int, *arguments: str, mpi: bool = False, timeout_s: float = 120) -> list[Ran]:
    """Runs a file of tests/support as so many ranks: what each came to; with MPI all as one."""
    import socket
    timeout_s *= SLOWER
    with socket.create_server(("127.0.0.1", 0)) as free: port = str(free.getsockname()[1])
    environment = with_root(NUM_CPU_THREADS="1")
    command = [sys.executable, str(SUPPORT / program), *arguments]
    if mpi:
        mpiexec = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        assert mpiexec is not None, "the wheel mpich has one"
        done = subprocess.run([mpiexec, "-n", str(ranks), *command], env=environment, timeout=timeout_s,
                              capture_output=True, text=True, check=False)
        return [Ran(done.returncode, done.stdout + done.stderr)]
    common = {**environment, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
               for rank in range(ranks)]
    end = time.monotonic() + timeout_s
    try:
        made = []
        for each in started:
            text = each.communicate(timeout=max(end - time.monotonic(), 0.1))[0]
            made.append(Ran(each.returncode, text))
        return made
    finally:
        for each in started: each.kill()
