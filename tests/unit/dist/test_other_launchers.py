"""Ranks that torchrun, mpiexec and srun start find each other, and end together."""
from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

from tests.support.dist.dist_case import HEAD, ended, free_port, program

FIND = """
with Store.open(ranks, 20) as store:
    if len(sys.argv) > 1 and ranks.rank == 1: os.kill(os.getpid(), 9)
    said = store.all_gather("x", bytes([ranks.rank + 65]))
    time.sleep(0.2)
    if ranks.rank == 0: print(b"".join(said).decode(), ranks.launcher, ranks.world_size, flush=True)
"""


def mpiexec() -> str:
    """That of the wheel mpich, or what PATH has."""
    try: files = metadata.files("mpich") or []
    except metadata.PackageNotFoundError: files = []
    found = next((str(file.locate().resolve()) for file in files if file.name == "mpiexec"), None)
    found = found or shutil.which("mpiexec")
    assert found is not None, "the extra test has the wheel mpich"
    return found


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60,
                          check=False)


def test_mpiexec(tmp_path: Path):
    done = run(mpiexec(), "-n", 3, sys.executable, program(tmp_path, FIND))
    assert (done.returncode, done.stdout) == (0, "ABC mpiexec 3\n"), done.stderr


def test_two_mpiexecs_at_once_without_ports(tmp_path: Path):
    """Each finds a port of its own."""
    path = program(tmp_path, FIND)
    both = [subprocess.Popen([mpiexec(), "-n", "2", "sh", "-c", f"{sys.executable} {path}"], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert [(status, out) for status, out, _ in ended(both)] == [(0, "AB mpiexec 2\n")] * 2


def test_a_rank_of_mpiexec_that_is_killed(tmp_path: Path):
    began = time.monotonic()
    done = run(mpiexec(), "-n", 2, sys.executable, program(tmp_path, FIND), "fail")
    assert done.returncode != 0
    assert time.monotonic() - began < 5


def test_srun(tmp_path: Path):
    """Two hosts of which each is this one."""
    same = "import dataclasses\nranks = dataclasses.replace(ranks, local_world_size=3)\n"
    path, port = program(tmp_path, same + FIND), free_port()
    shared = {**os.environ, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_TASKS_PER_NODE": "2,1",
              "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost,other", "MASTER_PORT": str(port)}
    processes = [subprocess.Popen(
        [sys.executable, str(path)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2),
             "SLURM_NODEID": str(rank // 2)})
        for rank in range(3)]
    found = ended(processes)
    assert [(status, out) for status, out, _ in found] == [(0, "ABC srun 3\n"), (0, ""), (0, "")], found


def own_address() -> str:
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try: route.connect(("203.0.113.1", 9))      # sends nothing
        except OSError: pytest.skip("needs a network")
        return str(route.getsockname()[0])


def test_two_hosts(tmp_path: Path):
    """Both are this one, by an address that other hosts can reach."""
    path, script, port = program(tmp_path, FIND), tmp_path / "launcher.py", free_port()
    script.write_text(f"""{HEAD}
from tinygrad_nv.dist.launcher import Launch, launch
host = int(sys.argv[1])
sys.exit(launch(Launch(({str(path)!r},), 2, 2, host, {own_address()!r}, {port})))
""")
    hosts = [subprocess.Popen([sys.executable, str(script), str(host)], text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE) for host in range(2)]
    found = ended(hosts)
    assert [(status, out) for status, out, _ in found] == [(0, "[rank 0] ABCD launch 4\n"), (0, "")], found


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_torchrun(fails: bool, tmp_path: Path):
    """Its agent has MASTER_PORT."""
    done = run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 3, program(tmp_path, FIND),
               *["fail"] * fails)
    if fails: assert done.returncode != 0
    else: assert (done.returncode, done.stdout) == (0, "ABC torchrun 3\n"), done.stderr


@pytest.mark.slow
def test_two_torchruns_at_once(tmp_path: Path):
    path = program(tmp_path, FIND)
    both = [subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--master-port", str(port),
                              "--nproc-per-node", "2", str(path)], text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE) for port in (29512, 29513)]
    assert [(status, out) for status, out, _ in ended(both, 60)] == [(0, "AB torchrun 2\n")] * 2
