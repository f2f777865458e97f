"""The processes of one host's ranks, which end together.

Protocol: `Processes(output, grace_s)`. `start(rank, argv, environ)` starts one rank; `supervise()` returns
when all have ended: None, or the `Failure` of the rank that failed first, which `watch` tells. Each process
leads a process group of its own. When a rank fails, the others get SIGTERM, sent to their process groups, and
SIGKILL after `grace_s`. `stop(signal)` sends a signal to all in the same way; a second call kills them at
once. Processes that a rank started and left in its group are killed when the rank has ended. If this process
is killed, a guard does the same: a small process in a session of its own, which notices that the pipe from
this process was closed.

A rank that exits with `ENDED` was ended because of another rank. The failure that is reported is that of the
other rank, if it comes within `CAUSE_S`.
"""
from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TextIO

from tinygrad_nv.errors import DistError

ENDED = 75          # exit status of a rank that ends because of another one (EX_TEMPFAIL)
GRACE_S = 10.0      # from SIGTERM to SIGKILL
CAUSE_S = 3.0       # in which the cause may end after those that it took along: on a busy machine 1 is short
LAST_LINES = 20     # of a rank that failed
LINE_BYTES = 1 << 16
OUTPUT_S = 2.0      # in which the output of a rank that has ended is read to its end
# of this text nothing is imported: the guard is there in 20 ms
GUARD = """
import os, signal, sys, time
for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin: (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
def send(number):
    for group in list(groups):
        try: os.killpg(group, number)
        except OSError: groups.discard(group)
send(15)
end = time.monotonic() + float(sys.argv[1])
while groups and time.monotonic() < end:
    time.sleep(0.05)
    send(0)
send(9)
"""


class Guard:
    """Ends process groups when this process has ended, however."""

    def __init__(self, grace_s: float) -> None:
        self.process = subprocess.Popen([sys.executable, "-I", "-S", "-c", GUARD, str(grace_s)], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL, start_new_session=True)
        _guards.add(self)

    def tell(self, sign: str, group: int) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):      # of a guard that was killed
            self.process.stdin.write(f"{sign}{group}\n")
            self.process.stdin.flush()

    def after_fork(self) -> None:
        """In a forked process: closes its copy of the pipe, which would hide the end of this one."""
        assert self.process.stdin is not None
        os.close(self.process.stdin.fileno())

    def close(self) -> None:
        """Ends the guard of a group that has ended."""
        _guards.discard(self)
        self.process.kill()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError): self.process.stdin.close()
        self.process.wait()


_guards: set[Guard] = set()


def _after_fork() -> None:
    for guard in _guards: guard.after_fork()


if hasattr(os, "register_at_fork"): os.register_at_fork(after_in_child=_after_fork)


@dataclass
class Output:
    """Destination of the lines of ranks: `out` and `err`, with the rank before each line; of `shown` ranks
    only (None: of all). `log_dir` gets a file of each rank, without prefixes. The rank `direct` has this
    process's own stdout and stderr instead, as progress bars need."""
    out: TextIO
    err: TextIO
    width: int
    shown: frozenset[int] | None = None
    log_dir: Path | None = None
    direct: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def line(self, rank: int, text: str, stream: TextIO) -> None:
        if self.shown is not None and rank not in self.shown: return
        coding = stream.encoding or "utf-8"
        with self.lock:
            stream.write(f"[rank {rank:{self.width}}] {text.encode(coding, 'replace').decode(coding)}\n")
            stream.flush()


@dataclass(eq=False)
class Member:
    """A rank's process."""
    rank: int
    process: subprocess.Popen[bytes]
    last: deque[str]
    readers: list[threading.Thread] = field(default_factory=list)
    status: int | None = None


@dataclass(frozen=True)
class Failure:
    """The rank that failed first: its exit status (negative: a signal's number), and its last lines."""
    rank: int
    pid: int
    status: int
    last: tuple[str, ...]

    @property
    def exit_code(self) -> int: return self.status if self.status > 0 else 128 - self.status

    @property
    def how(self) -> str:
        if self.status >= 0: return f"exited with status {self.status}"
        try: return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError: return f"was killed by signal {-self.status}"

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid}) {self.how}"


Event = tuple[Member | None, int]       # a member that ended; or None, and a signal to pass on


class Processes:
    def __init__(self, output: Output, grace_s: float = GRACE_S) -> None:
        self.output, self.grace_s = output, grace_s
        self.watches: list[Callable[[Failure], None]] = []
        self.lock = threading.Lock()
        self.members: list[Member] = []
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.failure: Failure | None = None
        self.ending = False             # groups were sent a signal, or are about to be
        self.deadline: float | None = None
        self.next_signal = signal.SIGTERM
        self.guard = Guard(grace_s)

    def start(self, rank: int, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        """Raises `DistError` for a program that cannot be started; ends those that were."""
        pipe = None if rank == self.output.direct else subprocess.PIPE
        try:
            process = subprocess.Popen(list(argv), env=dict(environ), stdin=subprocess.DEVNULL,
                                       stdout=pipe, stderr=pipe, process_group=0)
        except OSError as error:
            self.kill()
            raise DistError(f"{argv[0]!r} cannot be started: {error.strerror}",
                            "a program, by its path or in PATH",
                            "check COMMAND, as in: tinygrad-nv launch -n 2 python train.py") from None
        self.guard.tell("+", process.pid)
        member = Member(rank, process, deque(maxlen=LAST_LINES))
        self.members.append(member)
        if pipe is not None: self._read_all(member)
        threading.Thread(target=self._wait, args=(member,), daemon=True).start()

    def _read_all(self, member: Member) -> None:
        """Reads what a rank writes, in threads."""
        log, process = None, member.process
        if self.output.log_dir is not None:
            log = open(self.output.log_dir / f"rank-{member.rank}.log", "w", errors="replace")  # noqa: SIM115
        assert process.stdout is not None
        assert process.stderr is not None
        for pipe, stream in ((process.stdout, self.output.out), (process.stderr, self.output.err)):
            reader = threading.Thread(target=self._read, args=(member, pipe, stream, log), daemon=True)
            member.readers.append(reader)
            reader.start()

    def stop(self, number: int) -> None:
        """Passes a signal on; may be called by a signal's handler."""
        self.events.put((None, number))

    def watch(self, fn: Callable[[Failure], None]) -> None:
        """Calls `fn(failure)` when the first rank has failed, in a thread; now, if one has."""
        with self.lock:
            if self.failure is None: return self.watches.append(fn)
        fn(self.failure)

    def supervise(self) -> Failure | None:
        """Until all have ended; the failure that ended them."""
        while any(member.status is None for member in self.members):
            patience = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            try: member, number = self.events.get(timeout=patience)
            except queue.Empty: self._late()
            else:
                if member is None: self._pass_on(number)
                else: self._end_member(member)
        self.guard.close()
        return self.failure

    def kill(self) -> None:
        """Ends all now."""
        self.ending = True
        self._send(signal.SIGKILL)
        self.supervise()

    # **** what happens ****

    def _pass_on(self, number: int) -> None:
        if self.ending: self._send(signal.SIGKILL)
        else: self._end(signal.Signals(number))

    def _end(self, number: signal.Signals) -> None:
        self.ending, self.next_signal = True, signal.SIGKILL
        self.deadline = time.monotonic() + self.grace_s
        self._send(number)

    def _late(self) -> None:
        """The deadline is over: for the cause to end, or for all."""
        if self.next_signal is signal.SIGTERM: self._end(signal.SIGTERM)
        else:
            self._send(signal.SIGKILL)
            self.deadline = None

    def _end_member(self, member: Member) -> None:
        """The process is a zombie until `wait`: its group cannot be another one's yet."""
        self._kill_group(member, signal.SIGKILL)
        member.status = member.process.wait()
        self.guard.tell("-", member.process.pid)
        for reader in member.readers: reader.join(OUTPUT_S)
        if member.status == 0: return
        caused = member.status != ENDED and self.failure is not None and self.failure.status == ENDED
        if self.failure is None and not self.ending:
            self._fail(member)
            if member.status == ENDED: self.deadline = time.monotonic() + CAUSE_S
            else: self._end(signal.SIGTERM)
        elif caused and not self.ending:
            self._fail(member)
            self._end(signal.SIGTERM)

    def _fail(self, member: Member) -> None:
        assert member.status is not None
        with self.lock:
            self.failure = Failure(member.rank, member.process.pid, member.status, tuple(member.last))
            watches, self.watches = self.watches, []
        for fn in watches: threading.Thread(target=fn, args=(self.failure,), daemon=True).start()

    def _send(self, number: signal.Signals) -> None:
        for member in self.members:
            if member.status is None: self._kill_group(member, number)

    def _kill_group(self, member: Member, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError): os.killpg(member.process.pid, number)

    # **** threads ****

    def _wait(self, member: Member) -> None:
        if hasattr(os, "waitid"): os.waitid(os.P_PID, member.process.pid, os.WEXITED | os.WNOWAIT)
        else: member.process.wait()
        self.events.put((member, 0))

    def _read(self, member: Member, pipe: IO[bytes], stream: TextIO, log: TextIO | None) -> None:
        shown = True
        # to the end, also where lines cannot be written: else the rank would wait for room in its pipe
        while data := pipe.readline(LINE_BYTES):
            text = data.decode(errors="replace").rstrip("\n")
            member.last.append(text)
            if not shown: continue
            try:
                if log is not None: print(text, file=log, flush=True)
                self.output.line(member.rank, text, stream)
            except ValueError: shown = False    # a stream that is closed
            except OSError:     # what read our output has ended, or a disk is full
                shown = False
                self.stop(signal.SIGTERM)
