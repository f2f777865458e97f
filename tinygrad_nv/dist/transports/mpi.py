"""Groups of ranks of MPI (csrc/mpi.c), by mpi4py.

Protocol: `connect(struct, members)` makes a communicator of its own for the group, and fills in the addresses
of MPI's functions and its handles: kernels call MPI without Python. mpi4py starts MPI when it is imported,
which needs a launcher of MPI (mpiexec, srun).
"""
from __future__ import annotations

import ctypes
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tinygrad import dtypes
from tinygrad.dtype import DType

from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.dist.transports.library import TYPES, GroupStruct, library
from tinygrad_nv.errors import DistError

FUNCTIONS = ("MPI_Allreduce", "MPI_Reduce_scatter_block", "MPI_Allgather", "MPI_Alltoall", "MPI_Bcast",
             "MPI_Send", "MPI_Recv")
MOST = (1 << 31) - 1    # that MPI counts
COMM, STATUS_IGNORE, BYTE, FIRST_TYPE, FIRST_OP = 7, 8, 9, 16, 32
# none for 16-bit floats, which csrc/mpi.c adds itself
NAMES = ("FLOAT", "DOUBLE", "BYTE", "BYTE", "INT8_T", "UINT8_T", "INT16_T", "UINT16_T", "INT32_T", "UINT32_T",
         "INT64_T", "UINT64_T")


def load() -> Any:
    """mpi4py's module of MPI. Raises `DistError` where it is not installed or does not start."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DistError(f"MPI cannot be used: {error}", "mpi4py and an MPI",
                        "pip install 'tinygrad-nv[dist]'; or start ranks of one machine with "
                        "tinygrad-nv launch") from error
    if MPI.Is_finalized():
        raise DistError("MPI has ended in this process", "one use of it, until close()",
                        "start the ranks again")
    return MPI


def finalize() -> None:
    """Ends MPI, in which all ranks have to come together. A process that ends otherwise counts as failed to
    MPI's launchers, which then end the others."""
    load().Finalize()


def with_master(ranks: Ranks) -> Ranks:
    """Ranks with the host of rank 0 and a free port of it, which MPI's launchers do not tell."""
    world = load().COMM_WORLD
    with socket.socket() as free:
        free.bind(("", 0))
        host = "127.0.0.1" if ranks.one_host else socket.gethostname()
        host, port = world.bcast((host, free.getsockname()[1]))
    return replace(ranks, master_addr=host, master_port=port)


def check_size(kind: str, count: int, dtype: DType) -> None:
    """Raises `DistError` for more than MPI's 31 bits count: elements where MPI adds, else bytes of a rank."""
    adds = kind in ("all_reduce", "reduce_scatter") and dtype not in (dtypes.bfloat16, dtypes.float16)
    if (size := count * (1 if adds else dtype.itemsize)) > MOST:
        raise DistError(f"{kind} of {count} {dtype.name} by MPI, which counts {size} in a call",
                        f"up to {MOST}", "send it in parts")


def connect(struct: GroupStruct, members: Sequence[int]) -> Any:
    """Makes the group's communicator, which has to be kept, and the structure use it."""
    mpi = load()
    world = mpi.COMM_WORLD
    made = world.Create_group(world.Get_group().Incl(list(members)))
    made.Set_errhandler(mpi.ERRORS_RETURN)
    for i, name in enumerate(FUNCTIONS): struct.mpi[i] = _address(name)
    struct.mpi[COMM], struct.mpi[BYTE] = mpi._handleof(made), mpi._handleof(mpi.BYTE)
    # MPICH's MPI_STATUS_IGNORE is 1, Open MPI's 0
    struct.mpi[STATUS_IGNORE] = 1 if "MPICH" in mpi.Get_library_version() else 0
    for i in range(len(TYPES)): struct.mpi[FIRST_TYPE + i] = mpi._handleof(getattr(mpi, NAMES[i]))
    for i, op in enumerate((mpi.SUM, mpi.MAX, mpi.MIN)): struct.mpi[FIRST_OP + i] = mpi._handleof(op)
    struct.run = library().address("mpi_run")
    return made


def _address(name: str) -> int:
    """Returns the address of a function of the MPI that mpi4py has loaded."""
    for path in _libraries():
        try: found = ctypes.cast(getattr(ctypes.CDLL(path), name), ctypes.c_void_p).value
        except (AttributeError, OSError): continue
        if found is not None: return found
    raise DistError(f"the MPI that mpi4py has loaded has no {name}", "MPICH or Open MPI",
                    "pip install 'tinygrad-nv[dist]'")


def _libraries() -> list[str]:
    with open("/proc/self/maps") as maps:
        found = dict.fromkeys(line.split()[-1] for line in maps if "/libmpi" in line)
    return list(found)
