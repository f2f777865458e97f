"""Sizes and timeouts that protect the server from a client.

Protocol: `RequestLimits` are set at startup. `read_body` reads a body, and raises 413 for one that is too
large (at once if Content-Length says so), and 408 for one that does not arrive in time. `Guarded` is
uvicorn's HTTP protocol with timeouts that uvicorn lacks: for headers, for an unread body, and for clients
that do not read. It counts headers before h11 parses them, and answers invalid HTTP with OpenAI-style errors.
It reads, and drops, what a refused client still sends before it closes the connection: one that is closed at
once is reset, and the client may not see the answer.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, cast

import h11
from h11._readers import ChunkedReader
from h11._writers import ChunkedWriter
from starlette.requests import ClientDisconnect, Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from tinygrad_nv.engine.sampling import MAX_LOGPROBS
from tinygrad_nv.server.errors import APIError

if TYPE_CHECKING:
    from h11._receivebuffer import ReceiveBuffer

MAX_HEADER_BYTES = 64 << 10     # limit: bytes of a request's line and headers
MAX_HEADERS = 500               # limit: headers of a request
MAX_CHUNKS = 2048               # limit: chunks of a body, where they have less than `LEAST_CHUNK` bytes each
LEAST_CHUNK = 64    # bytes: h11 takes 20 µs for a chunk
MAX_LINGER_BYTES = 64 << 20     # limit: bytes that are read, and dropped, of a client that was refused
MAX_LARGE_BODIES = 48   # limit: times --max-body-bytes, of all large requests that are answered at once
LARGE_BODY = 64 << 10   # bytes; smaller ones do not count
LINGER_S = 1.0      # how long a refused client may pause before its connection is closed
LEAST_AUDIO_BYTES = 25 << 20    # limit: bytes of a form with a recording, where --max-body-bytes is less
AUDIO_PATH = "/v1/audio/"
SPARE_FILES = 128   # that are left to the rest of the process by the limit of connections
HEAD_END = re.compile(rb"\n\r?\n")
CHUNK_HEAD = re.compile(rb"([0-9A-Fa-f]{1,20})[ \t]*(;[^\n]*)?\r?")     # or its beginning


@dataclass(frozen=True)
class RequestLimits:
    """Limits of requests. `output_tokens`: of an answer. `context`: tokens of prompt and answer."""
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
    context: int | None = None

    def without_context(self) -> RequestLimits:
        """The limits of protocols whose answers end where the context does, however long they may be."""
        return replace(self, context=None)


def limits_of(path: str, limits: RequestLimits) -> RequestLimits:
    """The limits of requests to a path: a recording may be larger than JSON."""
    if AUDIO_PATH not in path or limits.body_bytes >= LEAST_AUDIO_BYTES: return limits
    return replace(limits, body_bytes=LEAST_AUDIO_BYTES)


class BodyBudget:
    """Counts the bytes of all large requests: each takes some times as much memory when it is read."""
    held = 0

    @contextlib.contextmanager
    def hold(self, limits: RequestLimits) -> Iterator[Callable[[int], None]]:
        """Yields a function that counts a body of so many bytes, as it grows, until the end. It raises
        `APIError` 503."""
        mine, most = 0, MAX_LARGE_BODIES * max(limits.body_bytes, RequestLimits.body_bytes)

        def count(size: int) -> None:
            nonlocal mine
            if size <= LARGE_BODY: return
            if self.held + size - mine > most:
                raise APIError(503, f"large bodies of {self.held} bytes are being answered, the limit is "
                               f"{most}; to fix: send it again later, or raise --max-body-bytes, by which "
                               "this grows", "too_many_bodies", None,
                               {"Retry-After": "1", "Connection": "close"})
            self.held, mine = self.held + size - mine, size
        try: yield count
        finally: self.held -= mine


async def read_body(request: Request, limits: RequestLimits, count: Callable[[int], None]) -> bytes:
    """The body; `count` is told of its bytes as they arrive. Raises `APIError` 413 or 408, and starlette's
    `ClientDisconnect`."""
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limits.body_bytes: raise too_large(limits)
    body = bytearray()      # a list of parts of a byte each takes 40 times as much
    try:
        async with asyncio.timeout(limits.body_s):
            async for part in request.stream():
                body += part
                count(len(body))
                if len(body) > limits.body_bytes: raise too_large(limits)
    except TimeoutError as error:
        raise APIError(408, f"the body did not arrive within {limits.body_s:g} s", "body_timeout", None,
                       {"Connection": "close"}) from error
    return bytes(body)


async def wait_for_disconnect(request: Request) -> None:
    """Returns when the client has disconnected."""
    try:
        while (await request.receive())["type"] != "http.disconnect": pass
    except ClientDisconnect: return


def too_large(limits: RequestLimits) -> APIError:
    """413 for a body."""
    return APIError(413, f"the body has more than {limits.body_bytes} bytes; to fix: send less, or "
                    "raise --max-body-bytes", "body_too_large", None, {"Connection": "close"})


class CountedChunks(ChunkedReader):
    """h11's reader of chunks, which waits for nothing that would be refused: chunks that are too large, sizes
    that are none, trailers that are too long."""

    def __init__(self, connection: CountedConnection, limits: RequestLimits) -> None:
        super().__init__()
        self.connection, self.limits = connection, limits

    def __call__(self, buffer: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        """The next part of the body."""
        if self._reading_trailer: self.connection.count_head("trailers")
        event, owed = super().__call__(buffer), self._bytes_in_chunk
        if event is None and buffer and not (self._reading_trailer or owed or self._bytes_to_discard):
            if (begun := CHUNK_HEAD.fullmatch(head := bytes(buffer))) is None:
                raise h11.RemoteProtocolError(f"illegal chunk header: {head[:40]!r}", 400)
            owed = int(begun[1], 16)
        if self.connection.received + owed > self.limits.body_bytes:
            raise self.connection.refuse(too_large(self.limits))
        return event


class CountedConnection(h11.Connection):
    """h11's connection, which parses no request beyond the limits. `refusal`: what the client is told."""
    chunks = received = 0
    refusal: APIError | None = None

    def __init__(self, limits: RequestLimits) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.limits = limits

    def next_event(self) -> Any:
        """The next event. Raises h11's `RemoteProtocolError`, with `refusal` set."""
        if self.their_state is h11.IDLE: self.count_head("headers")
        try: event = super().next_event()
        except h11.RemoteProtocolError as error:
            if self.refusal is not None: raise
            found = str(error).replace("bytearray(b", "(b")[:200]
            raise self.refuse(APIError(error.error_status_hint, f"{found}; expected: HTTP/1.1",
                                       "invalid_http")) from error
        if isinstance(event, h11.Request):
            self.chunks = self.received = 0
            if isinstance(self._reader, ChunkedReader):
                self._reader = CountedChunks(self, limits_of(event.target.decode(), self.limits))
        elif isinstance(event, h11.Data):
            self.chunks += event.chunk_start
            self.received += len(event.data)
            if self.chunks > MAX_CHUNKS and self.received < self.chunks * LEAST_CHUNK:
                raise self.refuse(APIError(413, f"the body has {self.chunks} chunks of less than "
                                           f"{LEAST_CHUNK} bytes; to fix: send larger ones",
                                           "chunks_too_small"))
        return event

    def send(self, event: Any) -> Any:
        """The bytes of an event. A part of a body in chunks is written without h11's checks, which would take
        10 µs a token: between two parts nothing changes that they look at."""
        if type(event) is not h11.Data or type(self._writer) is not ChunkedWriter \
                or self.our_state is not h11.SEND_BODY: return super().send(event)
        return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""

    def count_head(self, what: str) -> None:
        """Raises for headers, or trailers, that are too many or too long."""
        waiting, _ = self.trailing_data
        found = HEAD_END.search(waiting, 0, MAX_HEADER_BYTES)
        end = len(waiting) if found is None else found.end()
        if end > MAX_HEADER_BYTES or (found is None and len(waiting) >= MAX_HEADER_BYTES):
            raise self.refuse(APIError(431, f"the request line and the {what} have more than "
                                       f"{MAX_HEADER_BYTES >> 10} KiB; to fix: send fewer or shorter ones",
                                       "headers_too_large"))
        if waiting.count(b"\n", 0, end) > MAX_HEADERS + 2:
            raise self.refuse(APIError(431, f"the request has more than {MAX_HEADERS} {what}; to fix: send "
                                       "fewer", "too_many_headers"))

    def refuse(self, refusal: APIError) -> h11.RemoteProtocolError:
        """The error that refuses the request."""
        self.refusal = refusal
        return h11.RemoteProtocolError(refusal.message, error_status_hint=refusal.status)


class Lingering:
    """uvicorn's transport, whose `close` closes at once only if the client sends no more."""

    def __init__(self, transport: asyncio.Transport, protocol: Guarded) -> None:
        self.transport, self.protocol = transport, protocol
        self.write = transport.write    # called for each part of an answer

    def __getattr__(self, name: str) -> Any: return getattr(self.transport, name)

    def is_closing(self) -> bool:
        """Whether it was closed."""
        return self.protocol.refused or self.transport.is_closing()

    def close(self) -> None:
        """Closes, after the client has sent the rest of its request."""
        if self.protocol.conn.their_state in (h11.SEND_BODY, h11.ERROR): self.protocol.linger()
        else: self.transport.close()


class Guarded(H11Protocol):
    """HTTP/1.1 whose headers must be complete within `header_s` seconds of the connection, or of the first
    byte of a further request. The same holds for the rest of the body of an answered request. A client that
    reads no pending output for `body_s` seconds is disconnected."""
    header_s: ClassVar[float] = RequestLimits.header_s
    body_s: ClassVar[float] = RequestLimits.body_s
    max_connections: ClassVar[int] = RequestLimits.connections
    limits: ClassVar[RequestLimits] = RequestLimits()
    refused = False     # what arrives is dropped
    dropped = 0         # bytes
    waiting: asyncio.TimerHandle | None = None
    writing: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = CountedConnection(self.limits)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the header timeout."""
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, Lingering(transport, self))
        # pause writing as soon as the socket is full: tokens generated meanwhile become one delta
        # (1, not 0: asyncio's TLS counts an empty buffer as full then, and stays paused)
        transport.set_write_buffer_limits(1, 0)
        if len(self.connections) <= self.max_connections: return self._wait()
        self._refuse(APIError(503, f"{self.max_connections} connections are open, which is the limit; to "
                              "fix: close some, or raise --max-connections", "too_many_connections"))
        transport.close()   # at once: others wait for its descriptor

    def data_received(self, data: bytes) -> None:
        """Stops the header timeout once headers are complete, and restarts it with the next request."""
        if self.refused:
            self.dropped += len(data)
            if self.dropped > MAX_LINGER_BYTES: self._closes()
            return
        super().data_received(data)
        if self.refused: return
        owed = self.conn.their_state is h11.IDLE or self._is_answered()
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

    def _is_answered(self) -> bool:
        """Whether the rest of an answered request's body is still arriving."""
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE

    def _look(self, before: int) -> None:
        if (left := self.transport.get_write_buffer_size()) >= before: return self.transport.abort()
        self.writing = self.loop.call_later(self.body_s, self._look, left)

    def _stop_looking(self) -> None:
        if self.writing is not None: self.writing.cancel()
        self.writing = None

    def _too_late(self) -> None:
        if self._is_answered(): self._closes()
        elif not self.transport.is_closing():
            self._refuse(APIError(408, f"the headers did not arrive within {self.header_s:g} s",
                                  "header_timeout"))

    def _refuse(self, error: APIError) -> None:
        # bypasses h11, which may be in an error state
        body = json.dumps(error.body()).encode()
        reason = HTTPStatus(error.status).phrase
        head = (f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n")
        # its task ends, and writes nothing
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.write(head.encode() + body)
        self.linger()

    def linger(self) -> None:
        """Closes the connection when the client has sent what it has to send, or a limit of it."""
        self._stop_waiting()
        self.refused = True
        with contextlib.suppress(OSError):      # the client is gone
            if self.transport.can_write_eof(): self.transport.write_eof()
        self.transport.resume_reading()
        self._linger(self.loop.time() + self.body_s, -1)

    def _linger(self, ends: float, before: int) -> None:
        if self.dropped == before or self.loop.time() > ends: self._closes()
        else: self.loop.call_later(LINGER_S, self._linger, ends, self.dropped)

    def _closes(self) -> None:
        cast(Lingering, self.transport).transport.close()


def guard_protocol(limits: RequestLimits) -> type[Any]:
    """Returns `Guarded` with these limits, for uvicorn's configuration."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = limits.connections if files == resource.RLIM_INFINITY else \
        min(limits.connections, max(files - SPARE_FILES, 1))
    return type("Guarded", (Guarded,), {"header_s": limits.header_s, "body_s": limits.body_s,
                                        "max_connections": most, "limits": limits})
