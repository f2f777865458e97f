"""Small values between ranks: a TCP store that a thread of rank 0 serves.

Protocol: `Store.open(ranks, timeout_s)` returns when all ranks are there. `set`, `get` (waits), `add`,
`barrier` and `all_gather` may be called from any thread. Each rank's connection stays open: when one breaks,
the store tells the others at once; their calls that wait fail with `DistError`, and functions given to
`watch` are called. `abort(reason)` tells the others why this rank is about to end. A call that takes too long
raises `DistTimeout`, which names the ranks that have not come. frames.py has the format of messages.

Where it listens: on 127.0.0.1 if all ranks are on one host, else on the address that MASTER_ADDR has on the
host of rank 0; at MASTER_PORT. Under torchrun that port is its agent's: the store takes the first free one of
eight that follow from it (`ports`), and the others try these in turn; a process of another group at one of
them is told from rank 0 by the token. The token is NV_DIST_TOKEN, else made of MASTER_ADDR, MASTER_PORT and
the number of the job: it keeps groups apart; only a secret NV_DIST_TOKEN keeps out a process that means harm.
"""
from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from weakref import WeakSet

from tinygrad_nv.dist.frames import (
    HELLO_BYTES,
    KEY_BYTES,
    NUMBER,
    SECONDS,
    VALUE_BYTES,
    BadFrame,
    Frame,
    Kind,
    first_loss,
    take,
    unpack_error,
    unpack_list,
)
from tinygrad_nv.dist.ranks import Ranks
from tinygrad_nv.dist.rendezvous import TRY_S, connect, listen, places_of, token_of
from tinygrad_nv.dist.store_server import Server
from tinygrad_nv.errors import DistError, DistTimeout

OPEN_S, WAIT_S = 300.0, 300.0       # as torch's stores wait
GRACE_S = 5.0       # beyond a timeout, until the store itself counts as hung
LINGER_S = 10.0     # that rank 0 waits in close() for the others
Watch = Callable[[int, str], None]
_stores: WeakSet[Store] = WeakSet()


def _after_fork() -> None:
    for store in list(_stores): store._after_fork()


if hasattr(os, "register_at_fork"): os.register_at_fork(after_in_child=_after_fork)


class Store:
    """Connection of this rank to the store; of rank 0 also the store."""

    def __init__(self, connection: socket.socket, ranks: Ranks, server: Server | None,
                 received: bytearray) -> None:
        self.ranks, self.server = ranks, server
        self.lost: dict[int, str] = {}      # ranks and why, as they were lost
        self.left: set[int] = set()         # ranks that closed the store
        self._socket, self._received = connection, received
        self._closed = False
        self._watches: list[Watch] = []
        self._answers: dict[int, _Answer] = {}
        self._request = 0
        self._rounds: Counter[str] = Counter()
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._reader = threading.Thread(target=self._read, name="tinygrad_nv store reader", daemon=True)
        self._reader.start()
        atexit.register(self._exit)
        _stores.add(self)

    @staticmethod
    def open(ranks: Ranks, timeout_s: float = OPEN_S, watch_ranks: Callable[[Watch], None] | None = None
             ) -> Store:
        """Serves the store if this is rank 0, connects, and waits for all ranks. Raises `DistError` for a
        port that is taken, two processes of one rank or another world size, `DistTimeout` with the ranks that
        have not come. What started the ranks may know that one has ended before it came: `watch_ranks` is
        given a function that it calls with the rank and why."""
        end, token = time.monotonic() + timeout_s, token_of(ranks)
        server, places = None, places_of(ranks)
        if ranks.rank == 0:
            listener = listen(ranks)
            places = [listener.getsockname()[:2]]
            server = Server(listener, ranks.world_size, token).start()
            if watch_ranks is not None: watch_ranks(server.lose)
        try: connection, received = connect(places, ranks, token, end, timeout_s)
        except BaseException:
            if server is not None: server.close(TRY_S)
            raise
        store = Store(connection, ranks, server, received)
        try: store.barrier("rendezvous", max(0.01, end - time.monotonic()))
        except BaseException as error:
            store.abort(str(getattr(error, "found", error)))
            store.close(TRY_S)
            raise
        return store

    # **** values ****

    def set(self, key: str, value: bytes) -> None:
        self._ask(Kind.SET, key, value, WAIT_S)

    def get(self, key: str, timeout_s: float = WAIT_S) -> bytes:
        """The value of a key, once a rank has set it."""
        return self._ask(Kind.GET, key, SECONDS.pack(timeout_s), timeout_s)

    def add(self, key: str, n: int, timeout_s: float = WAIT_S) -> int:
        """Adds to a number, 0 at first; what it is then."""
        return int(NUMBER.unpack(self._ask(Kind.ADD, key, NUMBER.pack(n), timeout_s))[0])

    def barrier(self, name: str, timeout_s: float = WAIT_S) -> None:
        """Returns when all ranks have come to it."""
        self.all_gather(name, b"", timeout_s)

    def all_gather(self, name: str, value: bytes, timeout_s: float = WAIT_S) -> list[bytes]:
        """The values of all ranks, by rank. A name may be used again: the n-th time of every rank is one."""
        with self._lock:
            self._rounds[name] += 1
            key = f"{name} #{turn}" if (turn := self._rounds[name]) > 1 else name
        return unpack_list(self._ask(Kind.GATHER, key, SECONDS.pack(timeout_s) + value, timeout_s))

    def watch(self, fn: Watch) -> None:
        """Calls `fn(rank, reason)` for each rank that is lost, in a thread of its own."""
        with self._lock:
            self._watches.append(fn)
            lost = dict(self.lost)
        for rank, reason in lost.items(): _call(fn, rank, reason)

    def abort(self, reason: str) -> None:
        """Tells all other ranks why this one is about to end: to them it is lost."""
        with contextlib.suppress(DistError): self._ask(Kind.ABORT, "", reason.encode()[:HELLO_BYTES], TRY_S)

    def leave(self) -> None:
        """Tells the other ranks that this one ends in good order. Only `close` may follow."""
        with self._lock:
            if self._closed: return
            self._closed = True
        atexit.unregister(self._exit)
        with contextlib.suppress(OSError): self._send(Frame(Kind.BYE, 0, "", b""))

    def close(self, linger_s: float = LINGER_S) -> None:
        """Leaves the group. Rank 0 serves the others until they have left, too, for `linger_s` at most."""
        self.leave()
        if self._socket.fileno() < 0: return
        if self.server is not None: self.server.close(linger_s)
        with contextlib.suppress(OSError): self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader: self._reader.join()
        self._socket.close()

    def _after_fork(self) -> None:
        """In a forked process: closes its copies of the sockets, which would hide the end of this one."""
        self._closed, self._lock = True, threading.Lock()
        self._socket.close()
        if self.server is not None: self.server.after_fork()

    def _exit(self) -> None:
        """Ends the store as the interpreter ends: with an exception that no code caught, or in good order."""
        if (error := getattr(sys, "last_value", None)) is not None: self._end_with(error)
        self.close()

    def _end_with(self, error: BaseException) -> None:
        self.abort(f"it ended with {type(error).__name__}: {error}")

    def __enter__(self) -> Store: return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        if error is not None: self._end_with(error)
        self.close()

    # **** frames ****

    def _ask(self, kind: Kind, key: str, value: bytes, timeout_s: float) -> bytes:
        if len(key.encode()) > KEY_BYTES or len(value) > VALUE_BYTES:
            raise DistError(f"a key of {len(key.encode())} bytes with a value of {len(value)}",
                            f"at most {KEY_BYTES} and {VALUE_BYTES} bytes", "set large values in parts")
        with self._lock:
            if self._closed: raise DistError("the store is closed")
            if 0 in self.lost: raise first_loss(self.lost)
            self._request += 1
            number, answer = self._request, _Answer()
            self._answers[number] = answer
        try:
            self._send(Frame(kind, number, key, value))
            answered = answer.came.wait(timeout_s + GRACE_S)
        except OSError: answered = answer.came.wait(GRACE_S)    # the reader learns why
        finally: self._answers.pop(number, None)
        if not answered:
            self.lost.setdefault(0, "it does not answer")    # nothing more is asked of it
            raise DistTimeout(f"the store of rank 0 does not answer: {kind.name.lower()} {key!r} took "
                              f"{timeout_s + GRACE_S:g} s", "a process of rank 0 that runs",
                              "see whether rank 0 is stopped", (0,))
        if answer.error is not None: raise answer.error
        return answer.value

    def _send(self, frame: Frame) -> None:
        with self._sending: self._socket.sendall(frame.pack())

    def _read(self) -> None:
        why = "its process ended without closing the store"
        try:
            while True:
                while (frame := take(self._received)) is not None: self._came(frame)
                if not (data := self._socket.recv(1 << 18)): break
                self._received += data
        except BadFrame as error: why = f"it sent what is no frame of the store: {error}"
        except OSError as error: why = f"the connection broke: {error.strerror}"
        if self._closed or 0 in self.left: why = "it closed the store"
        else: self._lose(0, why)
        for answer in list(self._answers.values()):
            answer.fail(first_loss(self.lost or {0: why}))

    def _came(self, frame: Frame) -> None:
        if frame.kind is Kind.LOST: self._lose(int(frame.key), frame.value.decode())
        elif frame.kind is Kind.LEFT: self.left.add(int(frame.key))
        elif (answer := self._answers.get(frame.request)) is not None:
            if frame.kind is Kind.FAILED: answer.fail(unpack_error(frame.value))
            else: answer.give(frame.value)

    def _lose(self, rank: int, reason: str) -> None:
        with self._lock:
            if rank in self.lost: return
            self.lost[rank] = reason
            watches = list(self._watches)
        for fn in watches: _call(fn, rank, reason)


class _Answer:
    """Answer to a request."""

    def __init__(self) -> None:
        self.came, self.value = threading.Event(), b""
        self.error: DistError | None = None

    def give(self, value: bytes) -> None:
        self.value = value
        self.came.set()

    def fail(self, error: DistError) -> None:
        self.error = error
        self.came.set()


def _call(fn: Watch, rank: int, reason: str) -> None:
    threading.Thread(target=fn, args=(rank, reason), name="tinygrad_nv lost rank", daemon=True).start()
