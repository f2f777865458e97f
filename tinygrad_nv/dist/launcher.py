"""Starts the ranks of this host: for `tinygrad-nv launch`, and for commands that are rank 0 themselves.

Protocol: `launch(Launch(...))` runs a command once for each rank, with torchrun's environment variables, and
returns the exit status: 0, or that of the rank that failed first. `start_local(n, argv, environ)` starts
ranks 1 to n - 1 for a process that is rank 0 itself. processes.py supervises them: a rank that fails ends all
within `grace_s`, and a launcher that is killed leaves no process behind. With `max_restarts` all ranks are
started again after that, so many times, and go on from their last checkpoint. TORCHELASTIC_RESTART_COUNT says
how often they were, as torchrun's does.

On one host, ranks get a random NV_DIST_TOKEN, which is a secret. With several hosts all launchers need the
same one: that of the user, or else one made from MASTER_ADDR and MASTER_PORT, which is no secret.
"""
from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tinygrad_nv.dist import cores
from tinygrad_nv.dist.processes import GRACE_S, Failure, Output, Processes
from tinygrad_nv.dist.ranks import HERE, RESTARTS, Ranks
from tinygrad_nv.errors import DistError

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
TOKEN = "NV_DIST_TOKEN"
LINE = 200      # characters of a line in an error


@dataclass(frozen=True)
class Launch:
    """`command` as `ranks` processes on this host, which is `node_rank` of `nodes` hosts. With `quiet` only
    the output of rank 0 is shown, with `direct` as if it were this process's own. `name` is what begins
    messages. A rank that exits with a status of `final` is not started again."""
    command: tuple[str, ...]
    ranks: int
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    quiet: bool = False
    log_dir: Path | None = None
    grace_s: float = GRACE_S
    direct: bool = False
    name: str = "tinygrad-nv launch"
    max_restarts: int = 0
    final: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ended:
    """How ranks ended: the failure that there was, or the status."""
    failure: Failure | None
    status: int = 0


def launch(what: Launch) -> int:
    """Runs all ranks of this host to their end. Ctrl-C, SIGTERM and SIGHUP are passed on."""
    _check(what)
    ended = _run(what, 0)
    for restart in range(1, what.max_restarts + 1):
        if ended.failure is None or ended.failure.status in what.final: break
        _explain(what, ended.failure, f"all are started again ({restart} of {what.max_restarts})")
        ended = _run(what, restart)
    if ended.failure is None: return ended.status
    # what it says is shown already
    said = what.direct and ended.failure.rank == 0 and ended.failure.status in what.final
    if not said: _explain(what, ended.failure, "the other ranks were ended")
    return ended.failure.exit_code


def _run(what: Launch, restart: int) -> Ended:
    """Runs all ranks once."""
    port = what.master_port or free_port()
    if what.master_port and what.node_rank == 0: require_free(what.master_addr or HERE, port)
    address, world, first = what.master_addr or HERE, what.ranks * what.nodes, what.ranks * what.node_rank
    shown = frozenset((0, first)) if what.quiet else None
    if what.log_dir is not None: what.log_dir.mkdir(parents=True, exist_ok=True)
    output = Output(sys.stdout, sys.stderr, len(str(world - 1)), shown, what.log_dir,
                    first if what.direct else None)
    processes = Processes(output, what.grace_s)
    token = secrets.token_hex() if what.nodes == 1 else os.environ.get(TOKEN) or f"{address}:{port}"
    with _pass_signals(processes) as came:
        for local in range(what.ranks):
            ranks = Ranks(first + local, world, local, what.ranks, what.node_rank, address, port, "launch")
            _start(processes, ranks, program(what.command), os.environ, token, restart)
        failure = processes.supervise()
    ended = all(member.status == 0 for member in processes.members)     # as servers do that drain
    return Ended(failure, 128 + came[0] if came and not ended else 0)


def program(command: Sequence[str]) -> tuple[str, ...]:
    """A file of Python runs with this Python."""
    return (sys.executable, *command) if command[0].endswith(".py") else tuple(command)


def variables(ranks: Ranks, token: str) -> dict[str, str]:
    """Returns what torchrun sets for a rank, and the token."""
    return {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.world_size), "LOCAL_RANK": str(ranks.local_rank),
            "LOCAL_WORLD_SIZE": str(ranks.local_world_size), "GROUP_RANK": str(ranks.node_rank),
            "MASTER_ADDR": ranks.master_addr, "MASTER_PORT": str(ranks.master_port), TOKEN: token}


def _start(processes: Processes, ranks: Ranks, argv: Sequence[str], environ: Mapping[str, str], token: str,
           restart: int = 0) -> None:
    part = cores.of_host(ranks.local_rank, ranks.local_world_size)
    inherited = {name: value for name, value in environ.items() if not name.startswith("TORCHELASTIC_")}
    if restart: inherited[RESTARTS] = str(restart)
    with cores.bind_cores(part.cores):
        processes.start(ranks.rank, argv, {"PYTHONUNBUFFERED": "1", **inherited, **part.environment(environ),
                                           **variables(ranks, token)})


def _explain(what: Launch, failure: Failure, then: str) -> None:
    lines = [f"{what.name}: {failure}; {then}"]
    if failure.last: lines += ["  its last lines:", *(f"  | {line}" for line in failure.last)]
    print("\n".join(lines), file=sys.stderr, flush=True)


@contextlib.contextmanager
def _pass_signals(processes: Processes) -> Iterator[list[int]]:
    """Signals of this process go to the ranks; the numbers of those that came."""
    came: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        came.append(number)
        processes.stop(number)

    before = {number: signal.signal(number, handle) for number in SIGNALS
              if signal.getsignal(number) is not signal.SIG_IGN}
    try: yield came
    finally:
        for number, handler in before.items(): signal.signal(number, handler)


# **** ports ****

def free_port() -> int:
    """A port of this host that no program has now."""
    with socket.socket() as found:
        found.bind((HERE, 0))
        return int(found.getsockname()[1])


def require_free(address: str, port: int) -> None:
    """Raises `DistError` for a port that is taken. What else is wrong with an address, rank 0 will say."""
    with contextlib.suppress(socket.gaierror), socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try: attempt.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise DistError(f"port {port} of {address} is taken", "a free port for the store of rank 0",
                                "choose another --master-port, the same on all hosts; on one host leave it "
                                "out") from None
            if error.errno == errno.EACCES:
                raise DistError(f"port {port} may not be opened", "a port from 1024 on",
                                "choose another --master-port") from None


def _check(what: Launch) -> None:
    if not what.command: raise DistError("no COMMAND", "a program and its arguments",
                                         "tinygrad-nv launch -n 2 python train.py")
    if what.ranks < 1: raise DistError(f"-n {what.ranks}", "1 or more ranks", "such as -n 2")
    if not 0 <= what.node_rank < what.nodes:
        raise DistError(f"--node-rank {what.node_rank} of --nodes {what.nodes}",
                        f"0 to {what.nodes - 1}: the number of this host" if what.nodes > 0 else
                        "1 or more hosts", "start each host with its own --node-rank")
    if what.nodes > 1 and not (what.master_addr and what.master_port):
        raise DistError(f"--nodes {what.nodes} without --master-addr and --master-port",
                        "the host with --node-rank 0, and a free port of it, the same on all hosts",
                        "tinygrad-nv launch -n 8 --nodes 2 --node-rank 0 --master-addr gpu0 --master-port "
                        "29500 COMMAND")
    if what.max_restarts < 0 or (what.max_restarts and what.nodes > 1):
        raise DistError(f"--max-restarts {what.max_restarts} with --nodes {what.nodes}",
                        "0 or more; 0 with several hosts", "have torchrun or Slurm start several hosts again")
    if not 0 <= what.master_port <= 65535:
        raise DistError(f"--master-port {what.master_port}", "a port, 1 to 65535", "such as 29500")


# **** ranks of a process that is rank 0 itself ****

class LocalRanks:
    """Ranks 1 to n - 1 of this host; `ranks` is rank 0, the caller."""

    def __init__(self, ranks: Ranks, processes: Processes, environ: dict[str, str | None],
                 cores_before: tuple[int, ...]) -> None:
        self.ranks, self.processes, self._environ, self._cores = ranks, processes, environ, cores_before
        self._thread = threading.Thread(target=processes.supervise, name="tinygrad_nv ranks", daemon=True)
        self._thread.start()

    def poll(self) -> Failure | None:
        """The rank that failed, as soon as one has."""
        return self.processes.failure

    def watch(self, lost: Callable[[int, str], None]) -> None:
        """Calls `lost(rank, why)` when a rank has failed, or now if one has. (The store of rank 0 does not
        notice a rank that ends before it has connected.)"""
        def on_failure(failure: Failure) -> None:
            lines = "".join(f"\n  | {line[:LINE]}" for line in failure.last)
            ended = f"process {failure.pid} {failure.how}"
            lost(failure.rank, f"{ended}; its last lines:{lines}" if lines else ended)
        self.processes.watch(on_failure)

    def close(self, timeout_s: float = GRACE_S) -> Failure | None:
        """Waits for the ranks to end by themselves, then ends them. This process gets back what it had."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.processes.stop(signal.SIGTERM)
            self._thread.join()
        for name, value in self._environ.items():
            if value is None: os.environ.pop(name, None)
            else: os.environ[name] = value
        cores.give_back(self._cores)
        return self.poll()


def start_local(n: int, argv: Sequence[str], environ: Mapping[str, str] = os.environ,
                on_failure: Callable[[Failure], None] | None = None, grace_s: float = GRACE_S) -> LocalRanks:
    """Starts `argv` as ranks 1 to n - 1, and makes this process rank 0: `Ranks.from_environment()` says so,
    its thread and those that it starts from now on have their share of the cores. What the ranks write goes
    to stderr. `on_failure` is called, in a thread, when a rank has failed; the others are ended then."""
    port, token = free_port(), secrets.token_hex()
    every = [Ranks(rank, n, rank, n, 0, HERE, port, "launch") for rank in range(n)]
    processes = Processes(Output(sys.stderr, sys.stderr, len(str(n - 1))), grace_s)
    if on_failure is not None: processes.watch(on_failure)
    for ranks in every[1:]: _start(processes, ranks, program(argv), environ, token)
    own = variables(every[0], token)
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    part, cores_before = cores.of_host(0, n), cores.mask()
    if part.cores: os.sched_setaffinity(0, part.cores)
    cores.limit(part.threads)
    return LocalRanks(every[0], processes, before, cores_before)
