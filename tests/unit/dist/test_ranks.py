"""Which rank a process is, by the variables of each launcher."""
import pytest

from tinygrad_nv.dist.ranks import Ranks, first_host, slurm_tasks
from tinygrad_nv.errors import DistError

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
