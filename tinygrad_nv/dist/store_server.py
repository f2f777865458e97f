"""The store itself: a thread of rank 0 that answers the frames of all ranks (frames.py).

Protocol: `Server(listener, world_size, token).start()`; `close(linger_s)` waits for the other ranks to leave.
One thread serves all connections, and blocks only in `select`. A request that waits (a GET without its value,
a GATHER with ranks missing) has a deadline, and fails at once when a rank is lost. Two processes of one rank,
or a rank that has another world size, end the group: every rank gets LOST.
"""
from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from tinygrad_nv.dist.frames import (
    HELLO_BYTES,
    KEY_BYTES,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    NUMBER,
    SECONDS,
    VALUE_BYTES,
    BadFrame,
    Frame,
    Kind,
    first_loss,
    mac,
    name_ranks,
    pack_error,
    pack_list,
    take,
)
from tinygrad_nv.errors import DistError, DistTimeout

HELLO_S = 10.0              # that a process has to show that it is of the group
STRANGERS = 64              # connections that have not shown it yet
TOTAL_BYTES = 1 << 30       # of all values
MALFORMED = (BadFrame, ValueError, KeyError, TypeError, struct.error)
ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))


def keep_alive(connection: socket.socket) -> None:
    """A host that is gone without a word closes the connection after 20 s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in ALIVE:
        if hasattr(socket, name): connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(eq=False)
class Peer:
    """A connection; `rank` is -1 until its HELLO."""
    socket: socket.socket
    nonce: bytes
    since: float
    rank: int = -1
    who: str = ""
    received: bytearray = field(default_factory=bytearray)
    sending: bytearray = field(default_factory=bytearray)
    ending: bool = False        # closes when all is sent


@dataclass(eq=False)
class Wait:
    """A request that is not answered yet."""
    peer: Peer
    frame: Frame
    deadline: float
    seconds: float


class Server:
    def __init__(self, listener: socket.socket, world_size: int, token: str) -> None:
        self.listener, self.world_size, self.token = listener, world_size, token
        self.peers: set[Peer] = set()
        self.of_rank: dict[int, Peer] = {}
        self.values: dict[str, bytes] = {}
        self.total = 0
        self.gathers: dict[str, dict[int, bytes]] = {}
        self.waits: list[Wait] = []
        self.lost: dict[int, str] = {}
        self.ended = SimpleQueue[tuple[int, str]]()     # what `lose` was told
        self.left: set[int] = set()
        self.closing = self.hurried = False
        self.selector = selectors.DefaultSelector()
        self.wake, self.woken = socket.socketpair()
        for each in (listener, self.woken):
            each.setblocking(False)
            self.selector.register(each, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._serve, name="tinygrad_nv store", daemon=True)
        self.requests: dict[Kind, Callable[[Peer, Frame], None]] = {
            Kind.SET: self._set, Kind.GET: self._get, Kind.ADD: self._add, Kind.GATHER: self._gather,
            Kind.ABORT: self._abort, Kind.BYE: self._bye}

    def start(self) -> Server:
        self.thread.start()
        return self

    def close(self, linger_s: float) -> None:
        """Ends the thread once all ranks have left or were lost, after `linger_s` at the latest."""
        self.closing = True
        self._wake()
        self.thread.join(linger_s)
        if self.thread.is_alive():
            self.hurried = True
            self._wake()
            self.thread.join()

    def lose(self, rank: int, why: str) -> None:
        """Says that a rank has ended: if it never connected, it is lost. Any thread may call this."""
        self.ended.put((rank, why))
        self._wake()

    def after_fork(self) -> None:
        """In a forked process, which does not serve."""
        sockets = [self.listener, self.wake, self.woken, *(peer.socket for peer in self.peers)]
        for each in sockets: each.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError): self.wake.send(b"x")

    # **** the thread ****

    def _serve(self) -> None:
        while not self._is_finished():
            for key, events in self.selector.select(self._patience()):
                if key.fileobj is self.listener: self._accept()
                elif key.fileobj is self.woken: self._take_ended()
                else: self._serve_peer(key.data, events)
            self._expire()
        for peer in list(self.peers): self._drop(peer)
        for each in (self.listener, self.wake, self.woken): each.close()
        self.selector.close()

    def _take_ended(self) -> None:
        self.woken.recv(64)
        while not self.ended.empty():
            rank, why = self.ended.get()
            if rank not in self.of_rank and rank not in self.left: self._lose(rank, why)

    def _is_finished(self) -> bool:
        if not self.closing: return False
        return self.hurried or not (self.of_rank or any(peer.sending for peer in self.peers))

    def _patience(self) -> float | None:
        ends = [wait.deadline for wait in self.waits]
        ends += [peer.since + HELLO_S for peer in self.peers if peer.rank < 0]
        return min(3600.0, max(0.0, min(ends) - time.monotonic())) if ends else None

    def _expire(self) -> None:
        now = time.monotonic()
        for wait in [wait for wait in self.waits if wait.deadline <= now]:
            self.waits.remove(wait)
            self._fail(wait.peer, wait.frame, self._late(wait))
        for peer in [peer for peer in self.peers if peer.rank < 0 and peer.since + HELLO_S <= now]:
            self._drop(peer)

    def _late(self, wait: Wait) -> DistTimeout:
        if wait.frame.kind is Kind.GATHER:
            there = self.gathers.get(wait.frame.key, {})
            missing = tuple(rank for rank in range(self.world_size) if rank not in there)
            away = tuple(rank for rank in missing if rank not in self.of_rank)
            words = f"{name_ranks(away)} never connected" if away else "all are connected"
            return DistTimeout(f"{name_ranks(missing)} of {self.world_size} did not come to "
                               f"{wait.frame.key!r} in {wait.seconds:.3g} s ({words})",
                               "all ranks, in that time",
                               "see what these ranks wrote last, or wait longer", missing)
        return DistTimeout(f"no rank set {wait.frame.key!r} in {wait.seconds:.3g} s",
                           "a value that some rank sets", "see what the other ranks wrote last")

    # **** connections ****

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self.listener.accept()
            strangers = sum(peer.rank < 0 for peer in self.peers)
            if strangers >= STRANGERS + self.world_size:
                connection.close()
                return
            connection.setblocking(False)
            keep_alive(connection)
            peer = Peer(connection, secrets.token_bytes(NONCE_BYTES), time.monotonic())
            self.peers.add(peer)
            self.selector.register(connection, selectors.EVENT_READ, peer)
            self._send(peer, Frame(Kind.GREETING, 0, "", MAGIC + peer.nonce))

    def _serve_peer(self, peer: Peer, events: int) -> None:
        if events & selectors.EVENT_WRITE: self._flush(peer)
        if not events & selectors.EVENT_READ or peer not in self.peers: return
        try: data = peer.socket.recv(1 << 18)
        except BlockingIOError: return
        except OSError as error: return self._lose_peer(peer, f"the connection broke: {error.strerror}")
        if not data: return self._lose_peer(peer, "its process ended without closing the store")
        peer.received += data
        try:
            while peer in self.peers and not peer.ending:
                frame = take(peer.received, VALUE_BYTES if peer.rank >= 0 else HELLO_BYTES)
                if frame is None: break
                self._handle(peer, frame)
        except MALFORMED as error: self._lose_peer(peer, f"it sent what is no frame of the store: {error}")

    def _handle(self, peer: Peer, frame: Frame) -> None:
        if peer.rank < 0: self._hello(peer, frame)
        elif (request := self.requests.get(frame.kind)) is not None: request(peer, frame)
        else: raise BadFrame(f"kind {frame.kind}")

    def _send(self, peer: Peer, frame: Frame) -> None:
        if peer not in self.peers: return
        peer.sending += frame.pack()
        self._flush(peer)

    def _flush(self, peer: Peer) -> None:
        try:
            if peer.sending: del peer.sending[:peer.socket.send(peer.sending)]
        except BlockingIOError: pass
        except OSError: peer.sending.clear()    # what comes next from it says why
        if not peer.sending and peer.ending: return self._drop(peer)
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.sending else 0)
        self.selector.modify(peer.socket, events, peer)

    def _drop(self, peer: Peer) -> None:
        if peer not in self.peers: return
        self.peers.discard(peer)
        self.waits = [wait for wait in self.waits if wait.peer is not peer]
        if self.of_rank.get(peer.rank) is peer: del self.of_rank[peer.rank]
        self.selector.unregister(peer.socket)
        peer.socket.close()

    def _lose_peer(self, peer: Peer, why: str) -> None:
        rank, who = peer.rank, peer.who
        self._drop(peer)
        if rank >= 0 and rank not in self.left: self._lose(rank, f"{why} ({who})")

    def _lose(self, rank: int, why: str) -> None:
        """Tells all others, and fails what waits."""
        if rank in self.lost: return
        self.lost[rank] = why
        for peer in list(self.of_rank.values()):
            if peer.rank != rank: self._tell_loss(peer, rank, why)
        waits, self.waits = self.waits, []
        for wait in waits: self._fail(wait.peer, wait.frame, self._loss())

    def _tell_loss(self, peer: Peer, rank: int, why: str) -> None:
        self._send(peer, Frame(Kind.LOST, 0, str(rank), why.encode()))

    def _loss(self) -> DistError: return first_loss(self.lost)

    # **** the handshake ****

    def _hello(self, peer: Peer, frame: Frame) -> None:
        facts = frame.key.encode()
        nonce, theirs = frame.value[:NONCE_BYTES], frame.value[NONCE_BYTES:]
        if (frame.kind is not Kind.HELLO or len(theirs) != MAC_BYTES
                or not hmac.compare_digest(theirs, mac(self.token, b"rank", peer.nonce, nonce, facts))):
            return self._refuse(peer, DistError("another group's store has this port"))
        said = json.loads(facts)
        rank, peer.who = int(said["rank"]), f"process {said['pid']} on {said['host']}"
        if (problem := self._problem(rank, int(said["world_size"]), peer.who)) is not None:
            self._refuse(peer, problem)
            # the process that has this number hears it, too: else only rank 0's end would tell it, of rank 0
            if (other := self.of_rank.get(rank)) is not None: self._tell_loss(other, rank, problem.found)
            return self._lose(rank, problem.found)
        peer.rank = rank
        self.of_rank[rank] = peer
        self._send(peer, Frame(Kind.WELCOME, 0, "", mac(self.token, b"store", nonce)))
        for lost, why in self.lost.items(): self._tell_loss(peer, lost, why)
        for left in self.left: self._send(peer, Frame(Kind.LEFT, 0, str(left), b""))

    def _problem(self, rank: int, world_size: int, who: str) -> DistError | None:
        fix = "start all ranks with one launcher, and each rank once"
        if world_size != self.world_size:
            return DistError(f"rank {rank} ({who}) has WORLD_SIZE={world_size}, rank 0 has "
                             f"{self.world_size}", "the same WORLD_SIZE in all ranks", fix, (rank,))
        if (other := self.of_rank.get(rank)) is not None:
            return DistError(f"two processes say that they are rank {rank}: {other.who}, and {who}",
                             "one process for each rank", fix, (rank,))
        if rank in self.left or rank in self.lost:
            return DistError(f"rank {rank} was here and has gone, and comes again: {who}",
                             "one process for each rank", fix, (rank,))
        return None

    def _refuse(self, peer: Peer, problem: DistError) -> None:
        peer.ending = True
        self._send(peer, Frame(Kind.REFUSED, 0, "", pack_error(problem)))

    # **** requests ****

    def _answer(self, peer: Peer, frame: Frame, value: bytes = b"") -> None:
        self._send(peer, Frame(Kind.VALUE, frame.request, "", value))

    def _fail(self, peer: Peer, frame: Frame, error: DistError) -> None:
        self._send(peer, Frame(Kind.FAILED, frame.request, "", pack_error(error)))

    def _keep(self, key: str, value: bytes) -> bool:
        total = self.total - len(self.values.get(key, b"")) + len(value)
        if total + len(self.values) * KEY_BYTES > TOTAL_BYTES: return False
        self.values[key], self.total = value, total
        waits = [wait for wait in self.waits if wait.frame.kind is Kind.GET and wait.frame.key == key]
        self.waits = [wait for wait in self.waits if wait not in waits]
        for wait in waits: self._answer(wait.peer, wait.frame, value)
        return True

    def _full(self, peer: Peer, frame: Frame) -> None:
        self._fail(peer, frame, DistError(f"the store is full: {self.total} bytes in {len(self.values)} keys",
                                          f"at most {TOTAL_BYTES} bytes", "set fewer keys"))

    def _set(self, peer: Peer, frame: Frame) -> None:
        if self._keep(frame.key, frame.value): self._answer(peer, frame)
        else: self._full(peer, frame)

    def _add(self, peer: Peer, frame: Frame) -> None:
        before = self.values.get(frame.key, NUMBER.pack(0))
        if len(before) != NUMBER.size or len(frame.value) != NUMBER.size:
            return self._fail(peer, frame, DistError(f"{frame.key!r} has {len(before)} bytes", "a number, "
                              "which add made", "use another key for what set wrote"))
        after = NUMBER.pack(NUMBER.unpack(before)[0] + NUMBER.unpack(frame.value)[0])
        if self._keep(frame.key, after): self._answer(peer, frame, after)
        else: self._full(peer, frame)

    def _get(self, peer: Peer, frame: Frame) -> None:
        if (value := self.values.get(frame.key)) is not None: self._answer(peer, frame, value)
        elif self.lost: self._fail(peer, frame, self._loss())
        else: self._wait(peer, frame)

    def _wait(self, peer: Peer, frame: Frame) -> None:
        if len(frame.value) < SECONDS.size: raise BadFrame("a request without its seconds")
        seconds, = SECONDS.unpack_from(frame.value)
        self.waits.append(Wait(peer, frame, time.monotonic() + seconds, seconds))

    def _gather(self, peer: Peer, frame: Frame) -> None:
        there = self.gathers.setdefault(frame.key, {})
        there[peer.rank] = frame.value[SECONDS.size:]
        self._wait(peer, frame)
        if len(there) == self.world_size: return self._answer_gather(frame.key, there)
        missing = self.left - there.keys()
        if self.lost or missing: self._drop_gather(frame.key, missing)

    def _answer_gather(self, key: str, there: dict[int, bytes]) -> None:
        data = pack_list([there[rank] for rank in range(self.world_size)])
        del self.gathers[key]
        for wait in self._of_gather(key):
            if len(data) <= VALUE_BYTES: self._answer(wait.peer, wait.frame, data)
            else: self._fail(wait.peer, wait.frame, DistError(
                f"{len(data)} bytes of all ranks in {key!r}", f"at most {VALUE_BYTES}", "gather less"))

    def _drop_gather(self, key: str, missing: set[int]) -> None:
        ranks = tuple(sorted(missing))
        error = self._loss() if self.lost else DistError(
            f"{name_ranks(ranks)} closed the store before {key!r}", "all ranks at it", ranks=ranks)
        for wait in self._of_gather(key): self._fail(wait.peer, wait.frame, error)

    def _of_gather(self, key: str) -> list[Wait]:
        waits = [wait for wait in self.waits if wait.frame.kind is Kind.GATHER and wait.frame.key == key]
        self.waits = [wait for wait in self.waits if wait not in waits]
        return waits

    def _abort(self, peer: Peer, frame: Frame) -> None:
        # the answer comes last: rank 0 exits when it has it, and this thread with it
        self._lose(peer.rank, f"{frame.value.decode(errors='replace')} ({peer.who})")
        self._answer(peer, frame)

    def _bye(self, peer: Peer, frame: Frame) -> None:
        rank = peer.rank
        self.left.add(rank)
        self._drop(peer)
        for other in list(self.of_rank.values()): self._send(other, Frame(Kind.LEFT, 0, str(rank), b""))
        for key, there in list(self.gathers.items()):
            if rank not in there: self._drop_gather(key, {rank})
