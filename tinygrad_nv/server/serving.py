"""uvicorn, with our limits and a graceful shutdown.

Protocol: `await serve(server, sockets, …)` serves until it is told to stop. The first SIGTERM or SIGINT
starts the drain: new requests get 503, running ones have `drain_s` seconds, the rest are aborted, and the
process exits with status 0. A second signal exits at once, with 128 + its number. `Server.drain()` does the
same as the first signal.
"""
from __future__ import annotations

import asyncio
import contextlib
import errno
import multiprocessing.util
import os
import signal
import socket
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import uvicorn

from tinygrad_nv.errors import DistError, RequestError
from tinygrad_nv.server.app import application
from tinygrad_nv.server.errors import APIError
from tinygrad_nv.server.limits import guard_protocol
from tinygrad_nv.server.log import LOG, line, periodic
from tinygrad_nv.server.service import Service
from tinygrad_nv.server.workers import end_all

SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_S = 0.02
RANKS_S = 0.5   # until a server whose ranks have parted ends
WORKERS_END_S = 0.5     # 0.02 s suffice unless a signal killed the compile worker that held the pool's lock


@dataclass(frozen=True)
class HTTPOptions:
    """Options of uvicorn: files of TLS in PEM, whether clients need certificates (the ssl module's CERT_…
    constants), and the path that a proxy in front takes off."""
    root_path: str = ""
    keyfile: str | None = None
    certfile: str | None = None
    ca_certs: str | None = None
    cert_reqs: int = ssl.CERT_NONE

    @property
    def scheme(self) -> str:
        """https with a certificate, as in uvicorn."""
        return "https" if self.keyfile or self.certfile else "http"

    def check(self) -> None:
        """Raises `RequestError` for files that TLS cannot use."""
        if self.scheme == "http":
            if self.ca_certs is None and not self.cert_reqs: return
            raise RequestError("certificates of clients are to be checked, and the server has none",
                               "a server that serves HTTPS", "add --ssl-certfile and --ssl-keyfile")
        try: self.config(_nothing).load()
        except (OSError, AssertionError) as error:      # ssl.SSLError is an OSError
            files = ", ".join(filter(None, (self.keyfile, self.certfile, self.ca_certs)))
            raise RequestError(f"TLS cannot use {files}: {error or 'the certificate is missing'}",
                               "a certificate and its private key, PEM files",
                               "change --ssl-certfile, --ssl-keyfile or --ssl-ca-certs") from error

    def config(self, app: Any, **more: Any) -> uvicorn.Config:
        """uvicorn's configuration."""
        return uvicorn.Config(app, root_path=self.root_path, ssl_keyfile=self.keyfile,
                              ssl_certfile=self.certfile, ssl_ca_certs=self.ca_certs,
                              ssl_cert_reqs=self.cert_reqs, ws="none", lifespan="off", log_config=None,
                              **more)


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    """An application to check options with."""


HTTP = HTTPOptions()


def bind(host: str, port: int) -> socket.socket:
    """Binds the address and returns the socket, not yet listening. Called before the model is loaded, so a
    port conflict is reported at once. Port 0 takes a free port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        raise RequestError(f"{host}:{port} cannot be served: {error}", "an address of this machine, and a "
                           "free port", "change --host or --port") from error
    return made


def bind_path(path: str) -> socket.socket:
    """Binds a Unix socket at a path, in place of one that nothing listens at any more."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.settimeout(1)
            left = stat.S_ISSOCK(os.stat(path).st_mode) and asking.connect_ex(path) == errno.ECONNREFUSED
        if left: os.unlink(path)
    except OSError: pass        # nothing is there, as it should be
    try:
        made.bind(path)
        made.listen()       # from now on: else a second server would take the place of one that still loads
    except OSError as error:
        made.close()
        raise RequestError(f"{path} cannot be served: {error}", "a path for a Unix socket that is not there",
                           "change --uds") from error
    return made


def url(taken: socket.socket, options: HTTPOptions = HTTP) -> str:
    """The address of a socket, for a browser; the path of a Unix socket."""
    if taken.family == socket.AF_UNIX: return f"unix:{taken.getsockname()}"
    host, port = taken.getsockname()[:2]
    return f"{options.scheme}://" + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


class Server(uvicorn.Server):
    """A server that drains before it exits."""

    def __init__(self, service: Service, options: HTTPOptions = HTTP) -> None:
        super().__init__(options.config(
            application(service), http=guard_protocol(service.limits), access_log=False, server_header=False,
            timeout_graceful_shutdown=2, timeout_keep_alive=30, backlog=2048))
        self.service = service
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs our signal handlers instead of uvicorn's; only in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for each in SIGNALS: loop.add_signal_handler(each, self._handle_signal, each)
        try: yield
        finally:
            for each in SIGNALS: loop.remove_signal_handler(each)

    def drain(self) -> None:
        """Refuses new requests, and exits when none is running, or after `drain_s`."""
        if self._draining is None:
            self.service.draining = True
            self._draining = asyncio.ensure_future(self._drain())

    def _handle_signal(self, number: signal.Signals) -> None:
        if self._draining is None: return self.drain()
        LOG.warning(line("killed", signal=number.name, active=self.service.active))
        # a kernel or a client may still block a normal exit
        leave(128 + number)

    async def _drain(self) -> None:
        started, ends = time.monotonic(), time.monotonic() + self.service.limits.drain_s
        LOG.info(line("draining", active=self.service.active, limit_s=self.service.limits.drain_s))
        while self.service.active and time.monotonic() < ends: await asyncio.sleep(POLL_S)
        left = self.service.active
        end_all(APIError(503, "the server stopped before the request was read", "aborted"))
        await self.service.engine.stop(0)
        # time to send the aborted requests their errors
        grace = time.monotonic() + 1
        while self.service.active and time.monotonic() < grace: await asyncio.sleep(POLL_S)
        LOG.info(line("drained", seconds=time.monotonic() - started, aborted=left))
        self.should_exit = True


async def serve(server: Server, sockets: list[socket.socket], log_every_s: float,
                ready: Callable[[], None]) -> None:
    """Serves until told to stop; `ready` is called when the server accepts requests."""
    ticker = asyncio.ensure_future(periodic(server.service, log_every_s))
    async def announce() -> None:
        while not server.started: await asyncio.sleep(POLL_S)
        ready()
    async def end_with_ranks() -> None:
        while not isinstance(server.service.engine.failure, DistError): await asyncio.sleep(RANKS_S)
        server.should_exit = True
    tasks = [ticker, *map(asyncio.ensure_future, (announce(), end_with_ranks()))]
    try: await server.serve(sockets)
    finally:
        for task in tasks: task.cancel()
    if isinstance(failure := server.service.engine.failure, DistError): raise failure


def leave(status: int) -> NoReturn:
    """Ends tinygrad's compile workers, and the process. Not sys.exit, which waits for them, for ever if the
    same signal killed one (an init system signals the whole group): the pool waits for the lock it held."""
    finalize = multiprocessing.util._run_finalizers  # type: ignore[attr-defined]
    ending = threading.Thread(target=finalize, args=(0,), daemon=True)
    ending.start()
    ending.join(WORKERS_END_S)
    for worker in multiprocessing.active_children(): worker.kill()
    finalize(0)  # of the semaphores, if the pool's waits
    os._exit(status)
