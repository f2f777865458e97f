"""Rank of this process, by the environment variables of what started it.

Protocol: `Ranks.from_environment()`. The first of these that is there counts:

* RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE: of `torchrun` (TORCHELASTIC_RUN_ID is there, too), of
  `tinygrad-nv launch`, or set by hand;
* OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE: of Open MPI's `mpiexec`;
* PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS: of MPICH's and Intel's `mpiexec`;
* SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_TASKS_PER_NODE: of `srun`. A batch script of
  Slurm has no SLURM_STEP_NUM_TASKS: it is alone, as a process without any of these is.

MASTER_ADDR is the host of rank 0; where it is not set, this host if all ranks are on it, or the first host of
Slurm's list. MASTER_PORT is a port of that host; where it is not set, it follows from the number of the job
(of MPICH on one host: of its process above the ranks), and is 29500 where there is none. Only the standard
library is imported, so that ranks start fast.

Source of the names: PyTorch, torchrun; Open MPI, mpirun(1); MPICH, Hydra; Slurm, srun(1).
"""
from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinygrad_nv.errors import DistError

HERE, PORT = "127.0.0.1", 29500
RESTARTS = "TORCHELASTIC_RESTART_COUNT"     # how often a launcher started the ranks again
MOST = 1 << 16          # ranks: beyond that a number is a mistake
# variables of a rank: its number, how many there are, both again among those of its host
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE")
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# what tells jobs of one host apart
JOBS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "SLURM_JOB_ID")


@dataclass(frozen=True)
class Ranks:
    """Rank `rank` of `world_size`, and `local_rank` of `local_world_size` on the host `node_rank`. (MPI does
    not number hosts: there `node_rank` is right where all have as many ranks, in blocks.)"""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    launcher: str

    @property
    def one_host(self) -> bool: return self.local_world_size == self.world_size

    @staticmethod
    def from_environment(environ: Mapping[str, str] = os.environ) -> Ranks:
        """Raises `DistError` for variables that are incomplete or contradict each other."""
        if any(name in environ for name in TORCH[:2]): return _torch(environ)
        if OPEN_MPI[0] in environ: return _mpi(environ, OPEN_MPI)
        if MPICH[0] in environ: return _mpi(environ, MPICH)
        if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ: return _slurm(environ)
        return Ranks(0, 1, 0, 1, 0, HERE, 0, "alone")


def _torch(environ: Mapping[str, str]) -> Ranks:
    by_hand = "TORCHELASTIC_RUN_ID" not in environ and "NV_DIST_TOKEN" not in environ
    numbers = _numbers(environ, TORCH, "run the program with torchrun or `tinygrad-nv launch`, which set all "
                                       "of them, or unset RANK and WORLD_SIZE")
    if by_hand: _require_same(environ, numbers[:2])
    rank, world, local, locals_ = numbers
    node = _node(environ, "GROUP_RANK", rank, local, locals_)
    return Ranks(*numbers, node, *_master(environ, rank, world == locals_),
                 "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "launch")


def _mpi(environ: Mapping[str, str], names: tuple[str, str, str, str]) -> Ranks:
    numbers = _numbers(environ, names, "start the program with `mpiexec -n N`, which sets all of them")
    rank, world, local, locals_ = numbers
    return Ranks(*numbers, (rank - local) // locals_, *_master(environ, rank, world == locals_), "mpiexec")


def _slurm(environ: Mapping[str, str]) -> Ranks:
    tasks = slurm_tasks(environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", "")))
    node = _number(environ, "SLURM_NODEID", "start the program with srun")
    if node >= len(tasks):
        raise DistError(f"SLURM_NODEID={node} with SLURM_STEP_TASKS_PER_NODE for {len(tasks)} hosts",
                        "variables as srun sets them", "start the program with srun")
    filled = {**environ, "SLURM_LOCAL_TASKS": str(tasks[node])}
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_LOCAL_TASKS")
    numbers = _numbers(filled, names, "start the program with srun")
    hosts = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    if "MASTER_ADDR" not in environ and hosts and numbers[1] != numbers[3]:
        filled["MASTER_ADDR"] = first_host(hosts)
    return Ranks(*numbers, node, *_master(filled, numbers[0], numbers[1] == numbers[3]), "srun")


def slurm_tasks(text: str) -> list[int]:
    """Tasks of each host: "2(x3),1" is 2, 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def first_host(hosts: str) -> str:
    """The first of Slurm's list: "gpu[07-09,12],cpu1" is gpu07."""
    head, opened, inside = hosts.partition("[")
    if not opened or "," in head: return head.split(",")[0]
    inner, _, rest = inside.partition("]")
    return head + re.split("[-,]", inner)[0] + rest.split(",")[0]


# **** numbers ****

def _numbers(environ: Mapping[str, str], names: tuple[str, str, str, str], fix: str
             ) -> tuple[int, int, int, int]:
    """Rank, world size, and both on this host. LOCAL_RANK and LOCAL_WORLD_SIZE fill what MPI leaves out."""
    rank, world = (_number(environ, name, fix) for name in names[:2])
    if world == 1: filled = {names[2]: "0", names[3]: "1", **environ}
    else: filled = {**{name: environ[torch] for name, torch in zip(names[2:], TORCH[2:], strict=True)
                       if torch in environ}, **environ}
    local, locals_ = (_number(filled, name, fix) for name in names[2:])
    for own, size, what in ((rank, world, names[:2]), (local, locals_, names[2:])):
        if not 1 <= size <= MOST:
            raise DistError(f"{what[1]}={size}", f"a number of ranks, 1 to {MOST}", fix)
        if own >= size:
            raise DistError(f"{what[0]}={own} with {what[1]}={size}",
                            f"a rank below the number of ranks: 0 to {size - 1}", fix)
    if locals_ > world or local > rank or world - rank < locals_ - local:
        raise DistError(f"{names[0]}={rank} of {names[1]}={world}, but {names[2]}={local} of "
                        f"{names[3]}={locals_}", "ranks of one host that are among all ranks, in the same "
                        "order", fix)
    return rank, world, local, locals_


def _number(environ: Mapping[str, str], name: str, fix: str) -> int:
    if name not in environ: raise DistError(f"{name} is not set", "the variables of a rank, all of them", fix)
    text = environ[name].strip()
    if not (text.isdecimal() and text.isascii()):
        raise DistError(f"{name}={environ[name]}", "an integer from 0 on", fix)
    return int(text)


def _node(environ: Mapping[str, str], name: str, rank: int, local: int, locals_: int) -> int:
    if name in environ: return _number(environ, name, f"unset {name}")
    return (rank - local) // locals_


def _require_same(environ: Mapping[str, str], found: tuple[int, int]) -> None:
    """RANK and WORLD_SIZE that were exported in the shell are those of every rank that mpiexec starts."""
    for names in (OPEN_MPI[:2], MPICH[:2]):
        for torch, name, value in zip(TORCH, names, found, strict=False):
            if name in environ and environ[name].strip() != str(value):
                raise DistError(f"{torch}={value}, but {name}={environ[name]}",
                                "variables of one launcher", f"unset {torch}, or start without mpiexec")


# **** where rank 0 is ****

def _master(environ: Mapping[str, str], rank: int, one_host: bool) -> tuple[str, int]:
    address = environ.get("MASTER_ADDR", "").strip()
    if not address and not one_host:
        raise DistError(f"rank {rank}: MASTER_ADDR is not set, and ranks are on several hosts",
                        "the host of rank 0, by its name or address",
                        "export MASTER_ADDR and MASTER_PORT to all ranks")
    text = environ.get("MASTER_PORT", "").strip()
    if not text: return address or HERE, job_port(environ)
    if not (text.isdecimal() and text.isascii() and 1 <= int(text) <= 65535):
        raise DistError(f"MASTER_PORT={text}", "a port, 1 to 65535", "set MASTER_PORT to a free port of the "
                        "host of rank 0")
    return address or HERE, int(text)


def job_port(environ: Mapping[str, str]) -> int:
    """The port of a job that was given none: 10000 to 32767 by its number, outside what Linux gives to
    connections; 29500 without a number."""
    job = next((environ[name] for name in JOBS if environ.get(name)), "") or _hydra(environ)
    return 10000 + zlib.crc32(job.encode()) % 22768 if job else PORT


def _hydra(environ: Mapping[str, str]) -> str:
    """MPICH gives its jobs no number. The process above all ranks of a host is the same one; "" elsewhere."""
    process = os.getpid() if "HYDI_CONTROL_FD" in environ else 1
    while process > 1:
        try: name, _, rest = Path(f"/proc/{process}/stat").read_text().partition("(")[2].rpartition(")")
        except OSError: return ""
        if name == "hydra_pmi_proxy": return f"hydra {process}"
        process = int(rest.split()[1])
    return ""
