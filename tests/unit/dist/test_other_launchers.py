"""Ranks that torchrun, mpiexec and srun start find each other, and end together; which rank a process is,
by the variables of each launcher; the cores of a host, shared by its ranks."""
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

from tests.support.dist.dist_case import (
  HEAD,
  SOON_S,
  close,
  ended,
  free_port,
  opened,
  program,
  ranks_of,
  together,
)
from tinygrad_nv.dist import cores
from tinygrad_nv.dist.cores import CoreShare, neighbours, share
from tinygrad_nv.dist.ranks import Ranks, first_host, slurm_tasks
from tinygrad_nv.errors import DistError

FIND = """
with Store.open(ranks, 200) as store:
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
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=200,
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
    assert time.monotonic() - began < SOON_S


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


TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
         "MASTER_ADDR": "gpu0", "MASTER_PORT": "29400"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
         "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "gpu[07-09,12]", "SLURM_JOB_ID": "42"}


def test_without_variables_a_process_is_alone():
    assert Ranks.from_environment({}) == Ranks(0, 1, 0, 1, 0, "127.0.0.1", 0, "alone")


@pytest.mark.parametrize(("more", "launcher"), [
    ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun"), ({}, "launch"), ({"NV_DIST_TOKEN": "x"}, "launch")])
def test_torchruns_variables(more: dict[str, str], launcher: str):
    assert Ranks.from_environment({**TORCH, **more}) == Ranks(3, 4, 1, 2, 1, "gpu0", 29400, launcher)


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH])
def test_variables_of_mpi(environ: dict[str, str]):
    assert Ranks.from_environment(environ) == Ranks(1, 2, 1, 2, 0, "127.0.0.1", 29500, "mpiexec")
    there = {**environ, "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    assert Ranks.from_environment(there) == Ranks(1, 2, 1, 2, 0, "a", 1234, "mpiexec")


def test_variables_of_slurm():
    found = Ranks.from_environment(SLURM)
    assert found == Ranks(5, 7, 1, 2, 2, "gpu07", found.master_port, "srun")
    assert 10000 <= found.master_port < 32768
    assert Ranks.from_environment({**SLURM, "SLURM_JOB_ID": "43"}).master_port != found.master_port
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "7", "SLURM_JOB_ID": "42"}
    assert Ranks.from_environment(script).launcher == "alone"


def test_variables_of_mpi_inside_slurm_are_mpis():
    assert Ranks.from_environment({**SLURM, **OPEN_MPI}).launcher == "mpiexec"
    assert Ranks.from_environment({**SLURM, **MPICH, **TORCH, "TORCHELASTIC_RUN_ID": "1"}).rank == 3


def test_slurms_lists():
    assert slurm_tasks("2(x3),1") == [2, 2, 2, 1]
    assert slurm_tasks("8") == [8]
    hosts = {"gpu[07-09,12]": "gpu07", "a,b": "a", "a": "a", "a,b[1-2]": "a", "r[1,3]n2,x": "r1n2"}
    assert {text: first_host(text) for text in hosts} == hosts


@pytest.mark.parametrize(("environ", "words"), [
    ({"RANK": "0"}, ("WORLD_SIZE is not set", "torchrun")),
    ({"WORLD_SIZE": "2"}, ("RANK is not set",)),
    ({**TORCH, "RANK": "4"}, ("RANK=4 with WORLD_SIZE=4", "0 to 3")),
    ({**TORCH, "WORLD_SIZE": "two"}, ("WORLD_SIZE=two", "an integer from 0 on")),
    ({**TORCH, "WORLD_SIZE": "-4"}, ("WORLD_SIZE=-4", "an integer from 0 on")),
    ({**TORCH, "WORLD_SIZE": "0"}, ("WORLD_SIZE=0", "1 to 65536")),
    ({**TORCH, "LOCAL_RANK": "2"}, ("LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2",)),
    ({**TORCH, "LOCAL_WORLD_SIZE": "8"}, ("RANK=3 of WORLD_SIZE=4", "LOCAL_RANK=1 of LOCAL_WORLD_SIZE=8")),
    ({**TORCH, "RANK": "0"}, ("RANK=0 of WORLD_SIZE=4", "LOCAL_RANK=1 of")),
    ({**TORCH, "MASTER_PORT": "70000"}, ("MASTER_PORT=70000", "1 to 65535")),
    ({**TORCH, "MASTER_ADDR": ""}, ("rank 3: MASTER_ADDR is not set",)),
    ({**TORCH, **MPICH}, ("RANK=3, but PMI_RANK=1", "unset RANK")),
    ({**TORCH, "RANK": "1", "LOCAL_RANK": "1", **OPEN_MPI}, ("WORLD_SIZE=4, but OMPI_COMM_WORLD_SIZE=2",)),
    ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("MPI_LOCALRANKID is not set", "mpiexec -n N")),
    ({**SLURM, "SLURM_NODEID": "4"}, ("SLURM_NODEID=4", "for 4 hosts"))])
def test_variables_that_are_wrong(environ: dict[str, str], words: tuple[str, ...]):
    with pytest.raises(DistError) as caught: Ranks.from_environment(environ)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert caught.value.expected
    assert caught.value.fix


@pytest.mark.parametrize(("count", "threads", "ranks", "shares"), [
    (8, 8, 2, [((0, 1, 2, 3), 4), ((4, 5, 6, 7), 4)]),
    (5, 5, 2, [((0, 1), 2), ((2, 3, 4), 3)]),
    (2, 2, 4, [((0,), 1), ((1,), 1), ((0,), 1), ((1,), 1)]),
    (8, 4, 2, [((0, 1, 2, 3), 2), ((4, 5, 6, 7), 2)]),      # a quota
    (8, 1, 2, [((0, 1, 2, 3), 1), ((4, 5, 6, 7), 1)]),
    (0, 6, 2, [((), 3), ((), 3)])])                         # no masks
def test_shares(count: int, threads: int, ranks: int, shares: list[tuple[tuple[int, ...], int]]):
    found = [share(range(count), threads, rank, ranks) for rank in range(ranks)]
    assert found == [CoreShare(*each) for each in shares]


def test_threads_of_one_core_stay_together(tmp_path: Path):
    """As Linux numbers 2 sockets of 2 cores with 2 threads each."""
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 4 // 2}\n")
        (folder / "core_id").write_text(f"{core % 2}\n")
    assert neighbours(range(8), tmp_path) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert neighbours([3, 1, 2], tmp_path / "none") == [1, 2, 3]


def test_variables_that_are_set_stay():
    assert CoreShare((0,), 3).environment({}) == {"NUM_CPU_THREADS": "3", "OMP_NUM_THREADS": "3"}
    assert CoreShare((0,), 3).environment({"NUM_CPU_THREADS": "8"}) == {"OMP_NUM_THREADS": "3"}


def test_a_mask_is_put_back():
    before = cores.mask()
    with cores.bind_cores(before[:1]): assert cores.mask() == before[:1]
    assert cores.mask() == before


@pytest.mark.skipif(len(cores.mask()) < 2, reason="needs two cores")
@pytest.mark.parametrize("bound", [False, True])
def test_ranks_of_another_launcher_take_their_shares(bound: bool, monkeypatch: pytest.MonkeyPatch):
    """Those that the launcher has bound to different cores keep these."""
    limits: list[int] = []
    monkeypatch.setattr(cores, "limit", limits.append)
    stores, every = opened(ranks_of(2)), cores.mask()

    def take(rank: int) -> tuple[CoreShare, tuple[int, ...]]:
        if bound: os.sched_setaffinity(0, every[rank:rank + 1])
        return cores.take(stores[rank]), cores.mask()

    found = together([lambda rank=rank: take(rank) for rank in range(2)])
    close(stores)
    assert [part.cores for part, _ in found] == [mask for _, mask in found]
    assert sorted(core for _, mask in found for core in mask) == sorted(every[:2] if bound else every)
    assert len(limits) == (0 if bound else 2)
    assert cores.mask() == every, "of this thread"
