"""How ranks find rank 0: where its store listens, and the handshake.

Protocol: `ports(ranks)` and `token_of(ranks)` follow from the environment alone, so all ranks get the same
without a connection. Rank 0 takes the first port that is free (`listen`); the others try them in turn until
the store of their group greets (`connect`), and pass over those of other programs and groups.
"""
from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time

from tinygrad_nv import config
from tinygrad_nv.dist.frames import (
    HELLO_BYTES,
    MAGIC,
    NONCE_BYTES,
    BadFrame,
    Frame,
    Kind,
    mac,
    take,
    unpack_error,
)
from tinygrad_nv.dist.ranks import HERE, JOBS, Ranks
from tinygrad_nv.dist.store_server import keep_alive
from tinygrad_nv.errors import DistError, DistTimeout

TRY_S = 1.0         # that a port may take to greet
RUNS = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", *JOBS)
FOREIGN = "the port is another program's"
Place = tuple[str, int]


def ports(ranks: Ranks) -> tuple[int, ...]:
    """Returns the ports at which the store may be: MASTER_PORT; under torchrun eight ports from 10000 to
    32767 instead."""
    if ranks.launcher != "torchrun": return (ranks.master_port,)
    return tuple(10000 + (ranks.master_port + 2749 * (n + 1)) % 22768 for n in range(8))


def places_of(ranks: Ranks) -> list[Place]:
    """Returns the places at which ranks other than 0 look for the store."""
    return [(_host(ranks), port) for port in ports(ranks)]


def token_of(ranks: Ranks) -> str:
    """Returns the secret that all ranks of a group know."""
    if token := str(config.get("NV_DIST_TOKEN")): return token
    runs = [f"{name}={os.environ[name]}" for name in RUNS if name in os.environ]
    return "\n".join([ranks.master_addr, str(ranks.master_port), *runs])


def listen(ranks: Ranks) -> socket.socket:
    """Rank 0's socket, at the first port that is free."""
    taken = []
    for port in ports(ranks) if ranks.world_size > 1 else (0,):
        for family, address in _addresses(ranks, port):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
                listener.listen(128)
                return listener
            except OSError as error:
                listener.close()
                if error.errno == errno.EADDRINUSE: taken.append(port)
                elif error.errno == errno.EADDRNOTAVAIL: continue
                else: raise _refusal(ranks, port, error) from None
    if taken:
        words = ", ".join(map(str, dict.fromkeys(taken)))
        raise DistError(f"rank 0: port {words} of {_host(ranks)} is taken",
                        "a free port for the store of rank 0", "set MASTER_PORT to another port, the same in "
                        "all ranks, or end the process that has it")
    raise DistError(f"rank 0: MASTER_ADDR={ranks.master_addr} is no address of this host",
                    "the host on which rank 0 runs", "set MASTER_ADDR to a name or address of it, the same "
                    "in all ranks")


def _refusal(ranks: Ranks, port: int, error: OSError) -> DistError:
    return DistError(f"rank 0: the system refused port {port} of {_host(ranks)}: {error.strerror}",
                     "a port that this user may open", "set MASTER_PORT to another port")


def _host(ranks: Ranks) -> str: return HERE if ranks.one_host else ranks.master_addr


def _addresses(ranks: Ranks, port: int) -> list[tuple[int, Place]]:
    """Returns the addresses at which rank 0 may listen. Hosts that reach rank 0 need an address that is not
    loopback."""
    try: found = socket.getaddrinfo(_host(ranks), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DistError(f"MASTER_ADDR={ranks.master_addr}: {error.strerror}", "the name or address of the "
                        "host of rank 0", "set MASTER_ADDR to one that this host can look up") from None
    out: list[tuple[int, Place]] = [(family, (str(address[0]), port)) for family, _, _, _, address in found]
    if not ranks.one_host: out = [each for each in out if not each[1][0].startswith(("127.", "::1"))]
    if out: return out
    raise DistError(f"MASTER_ADDR={ranks.master_addr} is {found[0][4][0]}, which other hosts cannot reach",
                    "an address of the network that all hosts share", "set MASTER_ADDR to such an address, "
                    "the same in all ranks")


def connect(places: list[Place], ranks: Ranks, token: str, end: float, timeout_s: float
             ) -> tuple[socket.socket, bytearray]:
    """The first place where the group's store greets; tries again until `end`."""
    why, pause = "", 0.01
    while True:
        for place in places:
            try: return _greet(place, ranks, token, end)
            except OSError as error: why = error.strerror or str(error) or "it does not greet"
            except BadFrame as error: why = str(error)
        if time.monotonic() + pause > end: break
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
    at = ", ".join(str(port) for _, port in places)
    raise DistTimeout(f"rank {ranks.rank} did not reach the store of rank 0 at {places[0][0]}, port {at}, in "
                      f"{timeout_s:.3g} s: {why}", "a process of rank 0 that listens there",
                      "see whether rank 0 was started, with the same MASTER_ADDR and MASTER_PORT", (0,))


def _greet(place: Place, ranks: Ranks, token: str, end: float) -> tuple[socket.socket, bytearray]:
    """Both sides show that they have the token. A `DistError` of the group's own store is final."""
    patience = max(0.01, min(TRY_S, end - time.monotonic()))
    connection = socket.create_connection(place, patience)
    try:
        connection.settimeout(patience)
        keep_alive(connection)
        received = bytearray()
        greeting = _next(connection, received)
        nonce, facts = secrets.token_bytes(NONCE_BYTES), json.dumps(
            {"rank": ranks.rank, "world_size": ranks.world_size, "pid": os.getpid(),
             "host": socket.gethostname()})
        if greeting.kind is not Kind.GREETING or not greeting.value.startswith(MAGIC): raise BadFrame(FOREIGN)
        proof = mac(token, b"rank", greeting.value[len(MAGIC):], nonce, facts.encode())
        connection.sendall(Frame(Kind.HELLO, 0, facts, nonce + proof).pack())
        answer = _next(connection, received)
        if answer.kind is Kind.REFUSED:
            error = unpack_error(answer.value)
            if not error.ranks: raise BadFrame(error.found)
            raise error
        if answer.kind is not Kind.WELCOME or answer.value != mac(token, b"store", nonce):
            raise BadFrame(FOREIGN)
        connection.settimeout(None)
        return connection, received
    except BaseException:
        connection.close()
        raise


def _next(connection: socket.socket, received: bytearray) -> Frame:
    try:
        while (frame := take(received, HELLO_BYTES)) is None:
            if not (data := connection.recv(1 << 16)): raise BadFrame(FOREIGN)
            received += data
    except BadFrame: raise BadFrame(FOREIGN) from None
    return frame
