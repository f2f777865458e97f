"""Sizes and timeouts that protect the server from a client.

Protocol: `RequestLimits` are set at startup. `read_body` reads a body, and raises 413 for one that is too
large (at once if Content-Length says so), and 408 for one that does not arrive in time. `Guarded` is
uvicorn's HTTP protocol with timeouts that uvicorn lacks: for headers, for an unread body, and for clients
that do not read. It counts headers before h11 parses them, and answers invalid HTTP with OpenAI-style errors.
"""
from __future__ import annotations

import asyncio
import json
import re
import resource
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from tinygrad_nv.engine.sampling import MAX_LOGPROBS
from tinygrad_nv.server.errors import APIError

MAX_HEADER_BYTES = 64 << 10     # limit: bytes of a request's line and headers
MAX_HEADERS = 500               # limit: headers of a request
MAX_CHUNKS = 2048               # limit: chunks of a body, where they have less than `LEAST_CHUNK` bytes each
LEAST_CHUNK = 64    # bytes: h11 takes 20 µs for a chunk
LINGER_S = 1.0      # how long a refused client may go on sending: closed at once, it would not see the answer
SPARE_FILES = 128   # that are left to the rest of the process by the limit of connections
HEAD_END = re.compile(rb"\n\r?\n")


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests. `output_tokens`: of an answer."""
    choices: int = 128              # limit: texts of one request, prompts × n
    logprobs: int = MAX_LOGPROBS    # limit: log probabilities of each token (--max-logprobs)
    images: int = 256               # limit: images of one request (--max-images)
    image_pixels: int = 1 << 27     # limit: pixels of the images of one request (--max-image-pixels)
    audio_s: float = 7200.0         # limit: seconds of a recording (--max-audio-seconds)
    audio_samples: int = 400_000_000    # limit: samples of a recording's channels, before they are resampled
    body_bytes: int = 4 << 20       # limit: bytes of a request's body (--max-body-bytes)
    schema_bytes: int = 64 << 10    # limit: bytes of a JSON schema in a request
    header_s: float = 10.0          # limit: seconds for headers to arrive (--header-timeout)
    body_s: float = 30.0            # limit: seconds for a body to arrive (--body-timeout)
    request_s: float = 600.0        # limit: seconds for an answer (--request-timeout)
    drain_s: float = 30.0           # limit: seconds for running requests at shutdown (--drain-timeout)
    connections: int = 4096         # limit: open connections (--max-connections)
    output_tokens: int | None = None


async def read_body(request: Request, limits: RequestLimits) -> bytes:
    """The body. Raises `APIError` 413 or 408, and starlette's `ClientDisconnect`."""
    too_large = APIError(413, f"the body has more than {limits.body_bytes} bytes; to fix: send less, or "
                         "raise --max-body-bytes", "body_too_large", None, {"Connection": "close"})
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limits.body_bytes: raise too_large
    body = bytearray()      # a list of parts of a byte each takes 40 times as much
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                body += part
                if len(body) > limits.body_bytes: raise too_large
    except TimeoutError as error:
        raise APIError(408, f"the body did not arrive within {limits.body_s:g} s", "body_timeout", None,
                       {"Connection": "close"}) from error
    return bytes(body)


async def disconnected(request: Request) -> None:
    """Returns when the client has disconnected."""
    try:
        while (await request.receive())["type"] != "http.disconnect": pass
    except ClientDisconnect: return


class CountedConnection(h11.Connection):
    """h11's connection, which parses no request beyond the limits. `refusal`: what the client is told."""
    chunks = received = 0
    refusal: APIError | None = None

    def next_event(self) -> Any:
        """The next event. Raises h11's `RemoteProtocolError`, with `refusal` set."""
        if self.their_state is h11.IDLE: self._count_head()
        try: event = super().next_event()
        except h11.RemoteProtocolError as error:
            raise self._refuse(error.error_status_hint, f"{str(error)[:200]}; expected: HTTP/1.1",
                               "invalid_http") from error
        if isinstance(event, h11.Request): self.chunks = self.received = 0
        elif isinstance(event, h11.Data):
            self.chunks += event.chunk_start
            self.received += len(event.data)
            if self.chunks > MAX_CHUNKS and self.received < self.chunks * LEAST_CHUNK:
                raise self._refuse(413, f"the body has {self.chunks} chunks of less than {LEAST_CHUNK} "
                                   "bytes; to fix: send larger ones", "chunks_too_small")
        return event

    def _count_head(self) -> None:
        waiting, _ = self.trailing_data
        found = HEAD_END.search(waiting, 0, MAX_HEADER_BYTES)
        end = len(waiting) if found is None else found.end()
        if end > MAX_HEADER_BYTES or (found is None and len(waiting) >= MAX_HEADER_BYTES):
            raise self._refuse(431, f"the request line and the headers have more than "
                               f"{MAX_HEADER_BYTES >> 10} KiB; to fix: send fewer or shorter ones",
                               "headers_too_large")
        if waiting.count(b"\n", 0, end) > MAX_HEADERS + 2:
            raise self._refuse(431, f"the request has more than {MAX_HEADERS} headers; to fix: send fewer",
                               "too_many_headers")

    def _refuse(self, status: int, message: str, code: str) -> h11.RemoteProtocolError:
        self.refusal = APIError(status, message, code)
        return h11.RemoteProtocolError(message, error_status_hint=status)


class Guarded(H11Protocol):
    """HTTP/1.1 whose headers must be complete within `header_s` seconds of the connection, or of the first
    byte of a further request. The same holds for the rest of the body of an answered request. A client that
    reads no pending output for `body_s` seconds is disconnected."""
    header_s: ClassVar[float] = RequestLimits.header_s
    body_s: ClassVar[float] = RequestLimits.body_s
    max_connections: ClassVar[int] = RequestLimits.connections
    refused = False
    waiting: asyncio.TimerHandle | None = None
    writing: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = CountedConnection(h11.SERVER, MAX_HEADER_BYTES)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the header timeout."""
        super().connection_made(transport)
        # pause writing as soon as the socket is full: tokens generated meanwhile become one delta
        # (1, not 0: asyncio's TLS counts an empty buffer as full then, and stays paused)
        transport.set_write_buffer_limits(1, 0)
        if len(self.connections) <= self.max_connections: return self._wait()
        self._refuse(APIError(503, f"{self.max_connections} connections are open, which is the limit; to "
                              "fix: close some, or raise --max-connections", "too_many_connections"))
        transport.close()

    def data_received(self, data: bytes) -> None:
        """Stops the header timeout once headers are complete, and restarts it with the next request."""
        if self.refused: return
        super().data_received(data)
        if self.refused: return
        owed = self.conn.their_state is h11.IDLE or self._answered()
        if owed and not self.transport.is_closing(): self._wait()
        else: self._stop_waiting()

    def pause_writing(self) -> None:
        """Starts the timeout of the client's reading."""
        super().pause_writing()
        self._look(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        """Stops the timeout of the client's reading."""
        self._stop_looking()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timeouts."""
        self._stop_waiting()
        self._stop_looking()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Tells the client what the connection found."""
        assert isinstance(self.conn, CountedConnection)
        self._refuse(self.conn.refusal or APIError(400, msg, "invalid_http"))

    def _wait(self) -> None:
        if self.waiting is None: self.waiting = self.loop.call_later(self.header_s, self._too_late)

    def _stop_waiting(self) -> None:
        if self.waiting is not None: self.waiting.cancel()
        self.waiting = None

    def _answered(self) -> bool:
        """Whether the rest of an answered request's body is still arriving."""
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE

    def _look(self, before: int) -> None:
        if (left := self.transport.get_write_buffer_size()) >= before: return self.transport.abort()
        self.writing = self.loop.call_later(self.body_s, self._look, left)

    def _stop_looking(self) -> None:
        if self.writing is not None: self.writing.cancel()
        self.writing = None

    def _too_late(self) -> None:
        if self._answered(): self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(APIError(408, f"the headers did not arrive within {self.header_s:g} s",
                                  "header_timeout"))

    def _refuse(self, error: APIError) -> None:
        # bypasses h11, which may be in an error state
        body = json.dumps(error.body()).encode()
        reason = HTTPStatus(error.status).phrase
        head = (f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n")
        self._stop_waiting()
        self.refused = True
        # its task ends, and writes nothing
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(head.encode() + body)
        if not self.transport.can_write_eof(): return self.transport.close()
        self.transport.write_eof()
        self.transport.resume_reading()
        self.loop.call_later(LINGER_S, self.transport.close)


def guarded(limits: RequestLimits) -> type[Any]:
    """`Guarded` with these limits, for uvicorn's configuration."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limits.connections if files == resource.RLIM_INFINITY else \
        min(limits.connections, max(files - SPARE_FILES, 1))
    return type("Guarded", (Guarded,), {"header_s": limits.header_s, "body_s": limits.body_s,
                                        "max_connections": most})
